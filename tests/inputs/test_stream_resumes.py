"""Runs over streams that go on where an earlier one was: the same bits from any step, and whoever cannot says so."""

import contextlib
import functools

import pytest
import torch

import phalanx
from tests.inputs.streaming import (
    BATCH,
    COUNT,
    Forgets,
    Knows,
    KnowsShard,
    Walker,
    generate,
    recipe,
    sample,
    sharded,
    shuffled,
    yielded,
)
from tests.state.runs import assert_same

STEPS = 11  # beyond two epochs
KINDS = {
    "generator": {"make_iterable": generate},
    "shuffled, with a buffer": {"make_iterable": shuffled, "buffer": 5},
    "one that knows its place": {"make_iterable": Knows},
    "the same, with a buffer": {"make_iterable": Knows, "buffer": 6},
    "an iterator that knows its place": {"make_iterable": Walker, "drop_last": True},
}


def interrupted(kind, step, folder, **options):
    """A run of so many steps, then one that goes on."""
    recipe(**kind, steps=step).train(engine="inline", run_dir=folder)
    return recipe(**kind, steps=STEPS).train(engine="inline", run_dir=folder, **options)


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
def test_any_step(kind, tmp_path):
    """A run that was interrupted after any step ends in the same bits, chain included."""
    expected = recipe(**KINDS[kind], steps=STEPS).train(engine="inline", run_dir=tmp_path / "whole")
    for step in range(STEPS) if kind == "the same, with a buffer" else (1, 3, 4, 6):
        result = interrupted(KINDS[kind], step, tmp_path / str(step))
        assert_same(result, expected)
        assert result.chain == expected.chain


@pytest.mark.long
def test_other_workers_go_on(tmp_path):
    """What one engine and number of workers began, another goes on with."""
    kind = KINDS["the same, with a buffer"]
    expected = recipe(**kind, steps=20).train(engine="inline")
    for step in range(20):
        first = {"engine": "processes", "workers": 1 + step % 3}
        recipe(**kind, steps=step).train(run_dir=tmp_path / str(step), **first)
        result = recipe(**kind, steps=20).train(run_dir=tmp_path / str(step), engine="processes", workers=2)
        assert_same(result, expected)


def test_epochs_can_be_added(tmp_path):
    """A run that is finished is finished; with more epochs it goes on, with fewer it is refused."""
    expected = recipe(epochs=3).train(engine="inline")
    recipe(epochs=2).train(engine="inline", run_dir=tmp_path)
    assert recipe(epochs=2).train(engine="inline", run_dir=tmp_path).steps == 8
    assert_same(recipe(epochs=3).train(engine="inline", run_dir=tmp_path), expected)
    with pytest.raises(phalanx.UsageError, match="epochs is 2, but the run that is resumed has done 3"):
        recipe(epochs=2).train(engine="inline", run_dir=tmp_path)


@pytest.mark.parametrize(("iterable", "read"), [(Knows, 2 * BATCH), (Walker, 2 * BATCH)])
def test_a_place_that_is_known_is_not_read_up_to(iterable, read, tmp_path):
    """With a state of its own, an iterable yields little more than what is still to come."""
    recipe(iterable, steps=3).train(engine="inline", run_dir=tmp_path)
    yielded(0)
    recipe(iterable, steps=4).train(engine="inline", run_dir=tmp_path)
    assert yielded() <= COUNT - 3 * BATCH + read < COUNT


@pytest.mark.parametrize(("made", "iterable"), [(recipe, Knows), (sharded, KnowsShard)])
def test_a_finished_run_is_opened_without_a_sample(made, iterable, tmp_path):
    """One that ended in the middle of an epoch is not read again, and goes on from its place once it is longer."""
    job = functools.partial(made, iterable, buffer=5)
    first = job(steps=5).train(engine="inline", run_dir=tmp_path)
    yielded(0)
    again = job(steps=5).train(engine="inline", run_dir=tmp_path)
    assert (again.digest, yielded()) == (first.digest, 0)
    assert_same(job(steps=STEPS).train(engine="inline", run_dir=tmp_path), job(steps=STEPS).train(engine="inline"))


def test_a_state_that_leads_elsewhere(tmp_path):
    """A state that leaves out a buffer is noticed; the epoch is read from its beginning instead, and that is said."""
    expected = recipe(Forgets, steps=STEPS).train(engine="inline")
    with pytest.warns(UserWarning, match="led to other samples"):
        result = interrupted({"make_iterable": Forgets}, 3, tmp_path)
    assert_same(result, expected)


class Odd(Knows):
    """Its state is an object."""

    def state_dict(self):
        return {"place": object()}


def test_a_state_that_cannot_be_kept(tmp_path):
    """A state of objects is told once, and the run resumes by reading again."""
    expected = recipe(Knows, steps=STEPS).train(engine="inline")
    with pytest.warns(UserWarning, match="state cannot be kept.*object"):
        assert_same(interrupted({"make_iterable": Odd}, 3, tmp_path), expected)


@pytest.mark.parametrize("content", ["labels of others", "fewer"])
def test_a_stream_that_is_another(content, tmp_path):
    """Samples that are not those of the earlier run are noticed; "anyway" warns and goes on."""
    file = tmp_path / "labels"

    def lines():
        for number, label in enumerate(file.read_text().split()):
            yield sample(number, label=int(label))

    def run(steps, **options):
        return recipe(lines, steps=steps).train(engine="inline", run_dir=tmp_path / "run", **options)

    file.write_text("0 1 2 " * 10)
    run(2)
    file.write_text("0 1 2 1 1 " * 6 if content == "labels of others" else "0 1 2 " * 4)
    with pytest.raises(phalanx.UsageError, match="first 17 samples of epoch 0 are not those"):
        run(4)
    with pytest.warns(UserWarning, match="are not those.*going on all the same"):
        assert run(4, resume="anyway").steps == 4


def test_batches_that_are_brought_between(tmp_path):
    """A run with batches of the caller's has more steps than its epochs, and goes on from each, those, too."""
    made = recipe(size=16, epochs=2)
    batch = tuple(torch.stack(column) for column in zip(*map(sample, range(8)), strict=True))

    def driven(upto, **options):
        with made.start(engine="inline", **options) as run:
            while run.steps < upto:
                _ = run.step(batch) if run.steps in (1, 2) else next(run)
            return run.result()

    expected = driven(6)
    assert made.plan.steps == 4
    for step in range(1, 7):
        driven(step, run_dir=tmp_path / str(step))
        assert_same(driven(6, run_dir=tmp_path / str(step)), expected)


def test_readers_of_a_stream_are_warned_of():
    """A stream is read by the caller, so a number of readers has no effect, and that is said."""
    made = recipe(size=16, epochs=2)
    with pytest.warns(UserWarning, match="readers is 2, but a stream without shards is read in the caller's process"):
        result = made.train(engine="inline", readers=2)
    assert_same(made.train(engine="inline", readers="auto"), result)


def test_a_snapshot_without_a_place(tmp_path):
    """A snapshot that says nothing sensible of the stream is a SnapshotError."""
    from phalanx.definition.passes import Readings
    from phalanx.definition.streams import Supply, Whole

    made = recipe()
    supply = Supply(Whole(made, Readings(made).opened), contextlib.nullcontext())
    for state in ({}, {"epoch": 0, "before": 0, "given": 0, "read": 3}, {"epoch": None}, {"epoch": 0, "before": []}):
        with pytest.raises(phalanx.SnapshotError, match="the place in the stream in the snapshot does not fit"):
            supply.go_on(state, anyway=False, shown=lambda numbers, _: numbers)


def test_streams_are_verified_and_replayed(tmp_path):
    """A run over a stream is computed again, also from a snapshot in an epoch; replay has a step's own samples."""
    made = recipe(shuffled, buffer=5, steps=6)
    result = made.train(engine="inline", run_dir=tmp_path, snapshot_every=2)
    told = phalanx.verify(made, tmp_path, steps=(5, 6))
    assert (told.status, told.steps) == (0, 1)
    assert phalanx.verify(recipe(shuffled, buffer=4, steps=6), tmp_path).status == 2
    replayed = [phalanx.replay(made, tmp_path, step=5, replica=replica) for replica in range(3)]
    assert sum(len(item.samples) for item in replayed) == BATCH
    samples = sum(len(item.samples) * item.loss for item in replayed) / BATCH
    assert samples == pytest.approx(result.loss_history[5])
