"""Readers: the same bits for any number of them, whatever becomes of them, and nothing left behind."""

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
import types

import numpy as np
import psutil
import pytest
import torch

import phalanx
from phalanx.definition.data import Collated, OneByOne, Samples, Share
from phalanx.engines import readers as tending
from phalanx.engines import selection
from phalanx.engines.processes.driver import beside
from phalanx.engines.readers import ahead_here
from phalanx.engines.reading import Collate
from phalanx.shared import inputs as module
from phalanx.shared.inputs import AHEAD, Inputs, Ring
from phalanx.shared.memory import Memory
from tests.hosts.worlds import world
from tests.inputs.streaming import BATCH, InOrder, model, sample
from tests.state.runs import assert_same

LOSS = torch.nn.functional.cross_entropy


class Slow(InOrder):
    """The same samples, each a moment later."""

    def __getitem__(self, number):
        time.sleep(0.002)
        return sample(number)


class Killing(InOrder):
    """The process that first reads sample 5 as a reader ends there."""

    def __init__(self, folder, how):
        self.folder, self.how, self.home = str(folder), how, os.getpid()

    def __getitem__(self, number):
        marked = os.path.join(self.folder, "marked")
        if number == 5 and is_reader():
            with contextlib.suppress(FileExistsError):
                os.close(os.open(marked, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), self.how)
        return sample(number)


def is_reader():
    """Whether this is a reader's process, by what is on its stack."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "live" and code.co_filename.endswith(os.path.join("engines", "reading.py")):
            return True
        frame = frame.f_back
    return False


def over(data, **changes):
    """A recipe over a dataset, with a last short batch."""
    given = {"batch_size": BATCH, "replicas": 3, "epochs": 6, "loss_fn": LOSS}
    return phalanx.Recipe(model, data, **(given | changes))


@pytest.fixture(scope="module")
def expected():
    """What no reader comes to."""
    return over(InOrder()).train(engine="inline", readers=0)


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("readers", [1, 2, 4, "auto"])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_any_number_of_readers(workers, readers, expected):
    """Digest, losses and samples are the same for any number of readers, inline (0) and with any number of workers."""
    options = {"engine": "processes", "workers": workers} if workers else {"engine": "inline"}
    assert_same(over(Slow()).train(readers=readers, **options), expected)


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changes",
    [{"micro_batches": 2, "batch_size": 12}, {"batch_size": None}, {"batch_size": 2}, {"drop_last": True}],
    ids=str,
)
def test_any_shares(changes):
    """Shares that are cut in parts, single samples, shares that are empty, and dropped ends are the same, too."""
    results = [over(Slow(), **changes).train(engine="inline", readers=readers) for readers in (0, 2)]
    assert_same(*results)


def noisy(samples):
    """A batch whose inputs every global generator moves, and the generators' draws go on in dropout."""
    x, y = torch.utils.data.default_collate(samples)
    samples.clear()  # it may do that, too
    return x + torch.rand(()) + random.random() + np.random.rand(), y


@pytest.mark.long
def test_collating_that_draws(expected):
    """A collate_fn that draws random numbers, or changes the list that it is given, gets the replica's."""
    results = [over(Slow(), collate_fn=noisy).train(engine="inline", readers=readers) for readers in (0, 1, 3)]
    for result in results[1:]:
        assert_same(result, results[0])
    assert results[0].digest != expected.digest


def from_the_seed(samples):
    """A batch that a generator moves which is seeded as torch's is; that draws nothing."""
    x, y = torch.utils.data.default_collate(samples)
    return x + torch.randn(5, generator=torch.Generator().manual_seed(torch.initial_seed())), y


def put_back(samples):
    """A batch that torch's generator moves, which is put back."""
    x, y = torch.utils.data.default_collate(samples)
    with torch.random.fork_rng(devices=[]):
        return x + torch.randn(5), y


@pytest.mark.long
@pytest.mark.parametrize("collate_fn", [from_the_seed, put_back])
@pytest.mark.parametrize("phases", [None, [phalanx.Phase(LOSS, name="one"), phalanx.Phase(LOSS, name="other")]])
def test_collating_that_leaves_no_trace(collate_fn, phases, expected):
    """A collate_fn that looks at a seed, or draws and puts the generator back, has the replica's, in each phase."""
    made = over(Slow(), collate_fn=collate_fn, phases=phases, loss_fn=None if phases else LOSS)
    results = [made.train(engine="inline", readers=readers) for readers in (0, 1, 3)]
    for result in results[1:]:
        assert_same(result, results[0])
    assert results[0].digest != expected.digest


def test_readers_collate_where_nothing_is_drawn():
    """What is taken is a batch already; from the first batch for which something was drawn on, samples."""
    generator = np.random.default_rng(0)
    share = Share(np.arange(4), OneByOne(Samples(list(map(sample, range(4))), random=False), copies=True), "data")

    def owning(samples):
        generator.random()
        return torch.utils.data.default_collate(samples)

    batch = Collate(torch.utils.data.default_collate, {}).read(share, 0)
    assert isinstance(batch, Collated)
    assert batch.batch[0].shape == (4, 5)
    for collate in (noisy, owning):
        reading = Collate(collate, {"data.generator": generator.bit_generator})
        for _ in range(2):
            assert len(reading.read(share, 0)) == 4
    assert len(Collate(None, {}).read(share, 0)) == 4


def test_what_is_taken_lies_as_arrays_do(memory):
    """Memory that is taken begins where frameworks let theirs begin, as sums may depend on that."""
    ring = Ring(memory, 0, range(4))
    for step in range(8):
        assert ring.claim(step, 0)
        ring.put(step, 0, ring.place(100), [bytes(100)])
        assert np.frombuffer(memory.take(step, 0), np.uint8).ctypes.data % 64 == 0


@pytest.mark.long
def test_readers_read(monkeypatch):
    """What readers have read is taken, and not read again by those who compute."""
    opened, read, made = [], [], over(Slow(), epochs=20)

    def kept(*arguments):
        opened.append(ahead_here(*arguments))
        return opened[-1]

    def wait(report):
        """Wait until the next share is there."""
        inputs, end = opened[0].inputs, time.monotonic() + 60
        tags = [inputs.entry(report.step + 1, replica) + module.TAG for replica in range(made.replicas)]
        while report.step < 40 and not any(inputs.words[tag] for tag in tags) and time.monotonic() < end:
            time.sleep(0.001)

    monkeypatch.setattr(selection, "ahead_here", kept)
    take = Inputs.take
    monkeypatch.setattr(Inputs, "take", lambda *address: read.append(take(*address)) or read[-1])
    made.train(engine="inline", readers=2, callbacks=[wait])
    assert sum(content is not None for content in read) > 30


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:nothing was read ahead in the end")  # where they are killed faster than replaced
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_ends_or_hangs(how, expected, tmp_path, monkeypatch):
    """Whoever waits for what a reader had begun reads it, in the same bits; another takes the reader's place."""
    monkeypatch.setattr(module, "HANGING_SECONDS", 2.0)
    result = over(Killing(tmp_path, how)).train(engine="inline", readers=2)
    assert_same(result, expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:nothing was read ahead in the end")  # where they are killed faster than replaced
def test_readers_and_workers_that_are_killed():
    """Readers and workers that are killed all the time leave no trace in the answer."""
    made = over(Slow(), epochs=40)
    calm = made.train(engine="inline", readers=0)
    with made.start(engine="processes", workers=2, readers=3) as run:
        for report in run:
            if report.step % 9 == 4:
                ends = [child for child in psutil.Process().children(recursive=True) if forked(child)]
                with contextlib.suppress(psutil.Error):
                    ends[report.step % len(ends)].kill()
        assert_same(run.result(), calm)


def forked(process):
    """Whether it is a worker or a reader: a child of the process that forks them."""
    with contextlib.suppress(psutil.Error):
        return process.ppid() != os.getpid()
    return False


@pytest.mark.long
def test_resumes_with_readers(expected, tmp_path):
    """A run that is interrupted after any of 20 steps ends in the same bits with other readers."""
    for step in range(1, 21):
        over(InOrder(), epochs=None, steps=step).train(engine="inline", run_dir=tmp_path / str(step), readers=2)
        assert_same(over(InOrder()).train(engine="inline", run_dir=tmp_path / str(step), readers=3), expected)


@pytest.mark.long
def test_hosts_with_readers(expected):
    """Each of two hosts has readers for its own replicas."""
    code = "from tests.inputs.test_readers import *\ntried(lambda: over(Slow()).train(workers=2, readers=2).digest)"
    assert world(code) == [[expected.digest]] * 2


class Raising(InOrder):
    """Sample 13 cannot be read."""

    def __getitem__(self, number):
        if number == 13:
            raise OSError("gone")
        return sample(number)


def test_errors_are_those_without_readers():
    """What a sample raises is raised in its step, with its replica and samples, as without readers."""
    told = []
    for readers in (0, 2):
        with pytest.raises(phalanx.WorkerError) as caught:
            over(Raising()).train(engine="inline", readers=readers)
        assert isinstance(caught.value.__cause__, OSError)
        told.append((str(caught.value), caught.value.step, caught.value.replica, caught.value.samples))
    assert told[0] == told[1]


def test_what_needs_no_readers():
    """Arrays and lists have none, whatever is asked for; a number that is none is refused."""
    x = torch.randn(20, 5)
    for data in ((x, torch.zeros(20, dtype=torch.int64)), [sample(number) for number in range(20)]):
        results = [over(data, epochs=1).train(engine="inline", readers=readers) for readers in (0, 2)]
        assert_same(*results)
    for readers in (-1, 65, "many", 1.5):
        with pytest.raises(phalanx.UsageError, match="readers is"):
            over(InOrder()).train(readers=readers)


@pytest.mark.long
def test_nothing_is_left():
    """When a run ends, so do its readers, and no descriptor and thread stays."""
    for _ in range(2):  # what is kept warm
        over(InOrder()).train(engine="processes", workers=2, readers=1)
    before = state()
    over(InOrder()).train(engine="inline", readers=3)
    over(InOrder()).train(engine="processes", workers=2, readers=3)
    with contextlib.suppress(phalanx.WorkerError):
        over(Raising()).train(engine="inline", readers=3)
    assert state() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "phalanx-readers"]


def state():
    """How many descriptors and child processes there are, without what errors of runs that are over still hold."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True))


@pytest.fixture
def memory(monkeypatch):
    """Memory of a run with 4 replicas and one reader."""
    monkeypatch.setattr(module, "RINGS_BYTES", 1 << 20)
    made = Memory(0)
    seen = Inputs(made, 4)
    seen.readers = 1
    yield seen
    made.close()


def test_what_was_put_is_taken(memory):
    """A share that is ready is taken as it was put; one that nobody began, or was left, is not."""
    ring = Ring(memory, 0, range(4))
    assert ring.claim(1, 2)
    ring.put(1, 2, ring.place(3), [b"ab", b"c"])
    assert memory.take(1, 2) == bytearray(b"abc")
    assert memory.take(0, 2) is None
    assert ring.claim(3, 1)
    ring.give_up(3, 1)
    assert memory.take(3, 1) is None
    assert not ring.claim(3, 1)


def test_readers_that_are_given_up_while_one_is_waited_for(memory, monkeypatch):
    """Whoever waits for a share reads it by itself when readers are given up meanwhile."""
    assert Ring(memory, 0, range(4)).claim(0, 3)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0)
    monkeypatch.setattr(module.time, "sleep", lambda _: setattr(memory, "readers", 0))
    assert memory.take(0, 3) is None


def test_a_ring_is_never_overwritten_while_it_is_needed(memory):
    """In a million bytes' worth of turns, what is taken is what was put, and a reader waits where there is no room."""
    ring, size = Ring(memory, 0, range(4)), module.RINGS_BYTES // 5
    generator = np.random.default_rng(0)
    put, waited, step = 0, 0, 0
    for step in range(40):
        for replica in range(4):
            start = ring.place(size)
            if start is None:
                waited += 1
                continue
            assert ring.claim(step, replica)
            ring.put(step, replica, start, [bytes([step]) * 10, bytes(int(generator.integers(size - 10)))])
            put += 1
        for replica in range(4):
            found = memory.take(step, replica)
            assert found is None or found[:10] == bytes([step]) * 10
    assert put > 40
    assert waited


def test_a_ring_uses_again_what_it_has_used(memory):
    """Who keeps up with a reader needs no more memory than a few shares take, however long the run is."""
    ring = Ring(memory, 0, range(4))
    starts = []
    for step in range(1000):
        assert ring.claim(step, 0)
        starts.append(ring.place(4096))
        ring.put(step, 0, starts[-1], [bytes(4096)])
        assert memory.take(step, 0) is not None
    assert max(starts) <= 4 * 4096


def test_a_share_that_is_too_long_never_finds_room(memory):
    """A share of more than the whole ring is given up; one of just that finds room."""
    ring = Ring(memory, 0, range(4))
    assert ring.place(module.RINGS_BYTES) == 0
    assert not ring.hopeless(0, 0, module.RINGS_BYTES)
    assert ring.place(module.RINGS_BYTES + 1) is None
    assert ring.hopeless(0, 0, module.RINGS_BYTES + 1)


def test_readers_that_have_read_everything(monkeypatch):
    """They end by themselves and are not replaced; one that cannot begin is, until it is given up."""
    given = over(InOrder(), epochs=1), types.SimpleNamespace(name="torch"), 2
    readers = ahead_here(*given)
    try:
        end = time.monotonic() + 60
        while (readers._done != {0, 1} or readers._alive) and time.monotonic() < end:  # planted
            time.sleep(0.01)
        assert (readers._done, readers._alive, readers._failed) == ({0, 1}, {}, 0)  # planted
    finally:
        readers.close()
    pack = tending.pack_recipe
    monkeypatch.setattr(tending, "pack_recipe", lambda *facts: pack(*facts[:-1], {"placement": None}))
    listen = tending.Readers._listen
    monkeypatch.setattr(tending.Readers, "_listen", lambda readers: time.sleep(0.3) or listen(readers))  # both at once
    readers = ahead_here(*given)
    readers._thread.join(60)  # planted
    assert isinstance(readers.error, AttributeError)
    with pytest.warns(UserWarning, match="nothing was read ahead in the end"):
        readers.close()


def test_the_next_reader_begins_anew(memory):
    """A reader that takes another's place forgets what that had claimed, so that nobody waits for it."""
    first = Ring(memory, 0, range(4))
    assert first.claim(AHEAD, 3)
    Ring(memory, 0, range(4))
    assert memory.take(AHEAD, 3) is None


def test_auto_takes_cores_that_are_left():
    """Where no number is given there is a reader for each worker, as far as cores are left beside the workers."""
    counts = [beside(None, workers, 8) for workers in (2, 4, 6, 8, 9)]
    assert counts == [2, 4, 2, 0, 0]
    assert (beside(3, 8, 8), beside(None, 100, 256)) == (3, 64)
