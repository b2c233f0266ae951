"""A stream that a process of its own reads ahead: the same bits, places and errors, whatever becomes of that."""

import collections
import contextlib
import os
import signal
import threading
import time
import warnings

import pytest
import torch

import phalanx
from phalanx.definition.streams import Supply
from phalanx.engines import readers as module
from phalanx.engines import reading
from phalanx.shared import inputs
from phalanx.shared.inputs import ready
from phalanx.shared.memory import Memory
from tests.inputs.streaming import BATCH, COUNT, Knows, Walker, endless, generate, recipe, sample, shuffled
from tests.inputs.test_readers import state
from tests.sampling import cover
from tests.state.runs import assert_same

KINDS = {
    "generator": {"make_iterable": generate},
    "shuffled, with a buffer": {"make_iterable": shuffled, "buffer": 5},
    "one that knows its place": {"make_iterable": Knows, "buffer": 6},
    "an iterator that knows its place": {"make_iterable": Walker, "drop_last": True},
    "endless": {"make_iterable": endless, "size": 21},
    "by steps": {"make_iterable": generate, "steps": 9},
}
PLACES = [{"engine": "inline"}, {"engine": "processes", "workers": 2}]


def reader_of(run):
    """The process that reads; it may still be starting."""
    readers = run._loop._supply.source._readers  # planted
    end = time.monotonic() + 60
    while not readers.pids and time.monotonic() < end:
        time.sleep(0.001)
    return readers.pids[0]


@pytest.mark.parametrize(("kind", "place"), cover("streams read ahead", KINDS, PLACES), ids=str)
def test_the_same_bits(kind, place):
    """With readers=1 a run ends in the bits of a run that reads for itself; more readers are one, too."""
    expected = recipe(**KINDS[kind]).train(engine="inline")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing fell back
        for readers in (1, 3):
            assert_same(recipe(**KINDS[kind]).train(readers=readers, **place), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_place_after_each_step(kind):
    """What a snapshot would hold of the stream is the same after each step, and so are epochs."""
    made = recipe(**KINDS[kind])
    with made.start(engine="inline") as alone, made.start(engine="inline", readers=1) as ahead:
        for one, other in zip(alone, ahead, strict=True):
            assert (one.epoch, one.samples, one.loss) == (other.epoch, other.samples, other.loss)
            places = [run._engine.run_state.stream() for run in (alone, ahead)]  # planted
            for place in places:
                mark = place["data.stream"].pop("mark", [0, "", None])
                assert mark[0] <= place["data.stream"]["read"]
            assert places[0] == places[1]


@pytest.mark.long
def test_resumes(tmp_path):
    """A run that was interrupted after any of 20 steps goes on to the same bits, whoever read before and reads now."""
    kind = {"make_iterable": Knows, "buffer": 6}
    expected = recipe(**kind, steps=21).train(engine="inline")
    for step in range(1, 21):
        folder, first = tmp_path / str(step), step % 2
        recipe(**kind, steps=step).train(engine="inline", run_dir=folder, readers=first)
        assert_same(recipe(**kind, steps=21).train(engine="inline", run_dir=folder, readers=1), expected)


@pytest.mark.cases(3)
@pytest.mark.parametrize("make_iterable", [generate, Knows, shuffled], ids=lambda made: made.__name__)
@pytest.mark.parametrize("when", [0, 3, 10])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_is_killed_or_stopped(make_iterable, when, how, monkeypatch):
    """From where it fell, maybe in the middle of a message, the caller's process reads, says so, and has the bits."""
    monkeypatch.setattr(module, "STOPPED_SECONDS", 0.1)
    made = recipe(make_iterable, buffer=4, epochs=60)  # more than is read ahead
    expected = made.train(engine="inline")
    with made.start(engine="inline", readers=1) as run:
        for _ in range(when):
            next(run)
        os.kill(reader_of(run), how)
        with pytest.warns(UserWarning, match="read in this process from here on"):
            for _ in run:
                pass
        assert_same(run.result(), expected)


def test_brought_batches_between():
    """Batches that the caller brings put off what was read ahead; none of it is lost."""
    batch = tuple(torch.stack(column) for column in zip(*map(sample, range(8)), strict=True))
    results = []
    for readers in (0, 1):
        with recipe(steps=12).start(engine="inline", readers=readers) as run:
            for step in range(12):
                _ = run.step(batch) if step % 3 == 1 else next(run)
            results.append(run.result())
    assert_same(*results)


def raising():
    """Sample 13 cannot be read."""
    for number in range(COUNT):
        if number == 13:
            warnings.warn("soon", UserWarning, stacklevel=1)
            raise OSError("gone")
        yield sample(number)


def test_errors_and_warnings_are_those_without_readers():
    """What a stream raises is raised in its step, from its own exception, and what it warns of is warned of."""
    told = []
    for readers in (0, 1):
        with pytest.warns(UserWarning, match="soon"), pytest.raises(phalanx.WorkerError) as caught:
            recipe(raising).train(engine="inline", readers=readers)
        assert isinstance(caught.value.__cause__, OSError)
        told.append((str(caught.value), caught.value.step, caught.value.samples, caught.value.result.digest))
    assert told[0] == told[1]


def test_a_stream_that_cannot_be_sent():
    """It is refused before the first step, with the way out."""
    lock = threading.Lock()

    def locked():
        with lock:
            yield from generate()

    with pytest.raises(phalanx.UsageError, match="without readers=, a stream is read in this process"):
        recipe(locked).train(engine="inline", readers=1)


def slow():
    """Samples that each take a moment."""
    for number in range(COUNT):
        time.sleep(0.004)
        yield sample(number)


def there(run, number):
    """Wait until a batch can be taken."""
    seen, end = run._loop._supply.source._readers.inputs, time.monotonic() + 60  # planted
    while seen.words[seen.entry(number, 0)] != ready(number) and time.monotonic() < end:
        time.sleep(0.001)
    return time.monotonic() < end


def test_it_reads_while_steps_are_computed():
    """While the caller's process does something else, the next step's samples are read: they are there when it asks."""
    with recipe(slow).start(engine="inline", readers=1) as run:
        for taken in range(6):
            next(run)
            assert there(run, taken + 1)


@pytest.mark.parametrize("size", [1 << 10, 1 << 18])
def test_a_batch_that_is_too_large(size, monkeypatch):
    """A batch of more than all memory for reading ahead is refused in words; a smaller one is put there."""
    monkeypatch.setattr(inputs, "RINGS_BYTES", 1 << 20)
    memory = Memory(0)
    seen = inputs.Inputs(memory, 1, reading.STREAM_STEPS)
    seen.readers = 1
    made = recipe(lambda: (torch.zeros(size, dtype=torch.uint8) for _ in range(BATCH + 1)), steps=1)
    supply = Supply(made, contextlib.nullcontext())
    facts = None, inputs.Ring(seen, 0, [0]), supply, (1, None), collections.deque()
    if size * BATCH > 1 << 20:
        with pytest.raises(phalanx.RunError, match="more memory than there is for reading ahead"):
            reading._read_stream(*facts)  # planted
    else:
        reading._read_stream(*facts)  # planted
        assert seen.take(0, 0, wait=True) is not None
    memory.close()


def closing(path):
    """Notes that it was closed."""
    try:
        yield from endless()
    finally:
        with open(path, "w") as file:
            file.write("closed")


@pytest.mark.long
def test_nothing_is_left(tmp_path, monkeypatch):
    """When a run ends, in whatever way, its reader has ended, with the iterable closed; no descriptor stays."""
    monkeypatch.setattr(module, "FAREWELL_MILLISECONDS", 60_000)
    path = tmp_path / "closed"
    recipe().train(engine="inline", readers=1)
    before = state()
    recipe().train(engine="inline", readers=1)
    with recipe(lambda: closing(path), size=100).start(engine="inline", readers=1) as run:
        next(run)
    assert path.read_text() == "closed"
    with pytest.warns(UserWarning, match="soon"), pytest.raises(phalanx.WorkerError):
        recipe(raising).train(engine="inline", readers=1)
    run = recipe().start(engine="inline", readers=1)
    del run
    assert state() == before
