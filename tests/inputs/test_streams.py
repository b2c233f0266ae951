"""Streams: one order and one answer for any workers, hosts and deaths; read once; every mistake is told."""

import contextlib
import itertools
import os
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import phalanx
from tests.by_hand import answer
from tests.hosts.worlds import world
from tests.inputs.streaming import (
    BATCH,
    COUNT,
    InOrder,
    Walker,
    endless,
    generate,
    model,
    recipe,
    sample,
    shuffled,
    yielded,
)
from tests.state.runs import assert_same

LOSS = torch.nn.functional.cross_entropy


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_stream_is_the_loop_by_hand(replicas):
    """A stream ends in the bits of a loop over the same samples in order, drawn numbers included; a buffer does not."""
    by_index = phalanx.Recipe(model, InOrder(), LOSS, batch_size=BATCH, replicas=replicas, epochs=3, shuffle=False)
    result = recipe(replicas=replicas).train(engine="inline")
    assert (result.digest, result.loss_history) == answer(by_index)
    assert recipe(replicas=replicas, buffer=4).train(engine="inline").digest != result.digest


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("changes", [{}, {"buffer": 10}, {"make_iterable": shuffled, "drop_last": True}])
def test_any_number_of_workers(changes):
    """Digest, losses and samples are the same for one worker, two and three, inline and in processes."""
    expected = recipe(**changes).train(engine="inline")
    for workers in (1, 2, 3):
        assert_same(recipe(**changes).train(engine="processes", workers=workers), expected)


@pytest.mark.long
def test_workers_that_are_killed():
    """Workers that are killed in the middle of steps leave no trace in the answer, and no sample is read again."""
    expected = recipe(Walker, buffer=5, epochs=8).train(engine="inline")
    yielded(0)
    with recipe(Walker, buffer=5, epochs=8).start(engine="processes", workers=2) as run:
        for report in run:
            if report.step % 4 == 1 and run.worker_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(run.worker_pids[report.step % len(run.worker_pids)], signal.SIGKILL)
        result = run.result()
    assert_same(result, expected)
    assert {incident.kind for incident in result.incidents} >= {"death", "replaced"}
    assert yielded() == 8 * COUNT


@pytest.mark.long
def test_hosts():
    """Two hosts, each reading the stream, end in the bits of one process; one that reads others is told."""
    expected = recipe(shuffled, buffer=6).train(engine="inline").digest
    code = (
        "from tests.inputs.streaming import *\n"
        "tried(lambda: recipe(shuffled, buffer=6).train(workers={workers}).digest)\n"
        "tried(lambda: recipe(lambda: map(sample, range(rank, rank + 20))).train().digest)"
    )
    told = world(code.format(workers=2))
    assert [digest for digest, _ in told] == [expected] * 2
    assert "the batch of step 0 is another in process 1 than in process 0" in told[0][1]


@pytest.mark.usefixtures("computed_once")
def test_the_buffer_shuffles():
    """Each epoch has each sample once, each in another order; an order as far as the buffer reaches, by keys."""
    seen = epochs_of(buffer=6)
    assert [sorted(epoch) for epoch in seen] == [list(range(COUNT))] * 3
    assert len({tuple(epoch) for epoch in seen}) == 3
    assert all(number <= place + 5 for epoch in seen for place, number in enumerate(epoch))
    assert epochs_of(buffer=1) == epochs_of(buffer=0) == [list(range(COUNT))] * 3
    assert epochs_of(buffer=COUNT, seed=1) != epochs_of(buffer=COUNT, seed=2)


def epochs_of(*, buffer, **changes):
    """The numbers of the samples in the order in which each epoch's replica gets them."""
    seen = []

    def forward(net, batch):
        seen.extend(batch.tolist())
        return net(torch.zeros(1, 5)).mean()

    changes |= {"loss_fn": None, "forward_fn": forward, "replicas": 1}
    recipe(lambda: iter(range(COUNT)), buffer=buffer, **changes).train(engine="inline")
    return [seen[place : place + COUNT] for place in range(0, 3 * COUNT, COUNT)]


def test_epochs_of_any_length(capsys):
    """An epoch ends where its iterable does; evaluations, reports, callbacks and lines of progress go by that."""
    lengths = itertools.cycle([9, 20, 8])
    made = recipe(lambda: map(sample, range(next(lengths))), epochs=3)
    reports = []
    result = made.train(
        engine="inline", callbacks=[reports.append], evaluation=phalanx.Evaluation(LOSS, InOrder()), progress=True
    )
    assert [report.epoch for report in reports] == [0, 0, 1, 1, 1, 2]
    assert [report.samples for report in reports] == [8, 1, 8, 8, 4, 8]
    assert [item.steps for item in result.metric_history] == [2, 5, 6]
    lines = [line.split(",") for line in capsys.readouterr().err.splitlines()]
    assert [line[0] for line in lines] == [f"phalanx: epoch {number}/3" for number in (1, 2, 3)]
    assert [line[1] for line in lines] == [f" step {item.steps}" for item in result.metric_history]
    assert all(" cross_entropy " in line[3] for line in lines)
    assert result.steps_per_epoch is None


def test_endless_streams():
    """An endless stream has epochs of epoch_size, each read anew; steps alone need none."""
    with recipe(endless, size=20, epochs=2, schedule_every="epoch", scheduler=_halving).start(engine="inline") as run:
        reports = list(run)
    assert [(report.epoch, report.samples) for report in reports] == [(0, 8), (0, 8), (0, 4), (1, 8), (1, 8), (1, 4)]
    assert reports[3].lr == reports[2].lr / 2
    assert recipe(endless, steps=5).train(engine="inline").samples == 5 * BATCH
    assert recipe(endless, size=20, drop_last=True, epochs=2).train(engine="inline").steps == 4


def test_a_batch_that_is_brought_is_of_no_epoch():
    """So it is refused where the schedule goes by epochs, and the run goes on without it."""
    with recipe(endless, size=20, epochs=2, schedule_every="epoch", scheduler=_halving).start(engine="inline") as run:
        next(run)
        with pytest.raises(phalanx.UsageError, match="schedule_every is 'epoch' and data is a stream"):
            run.step((torch.ones(2, 5), torch.tensor([0, 1])))
        assert [report.samples for report in run] == [8, 4, 8, 8, 4]


def _halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_generators_and_threads_are_the_runs():
    """Reading draws from keyed generators, in the recipe's threads; the caller's generators are as they were."""
    threads = set()

    def watched():
        threads.add(torch.get_num_threads())
        yield from generate()

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    results = [recipe(watched, threads=2, epochs=1).train(engine=engine) for engine in ("inline", "processes")]
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert threads == {2}
    assert_same(*results)


def test_what_a_failed_step_had_is_not_lost():
    """A step that failed has the same samples when it is done again, and a batch of the caller's comes between."""
    failing = [2]

    def loss(output, target):
        if failing and phalanx.current_step() == failing[0]:
            failing.clear()
            raise ValueError("once")
        return LOSS(output, target)

    seen = []
    expected = recipe(replicas=1).train(engine="inline")
    with recipe(replicas=1, loss_fn=loss).start(engine="inline") as run:
        for report in run:
            seen.append(report)
            if len(seen) == 2:
                with pytest.raises(phalanx.WorkerError, match="once"):
                    run.step()
        assert_same(run.result(), expected)
    failing.append(2)
    with recipe(replicas=1, loss_fn=loss, epochs=1).start(engine="inline") as run:
        run.step()
        run.step()
        with pytest.raises(phalanx.WorkerError, match="once"):
            run.step()
        run.step((torch.ones(2, 5), torch.tensor([0, 1])))
        assert sum(report.samples for report in run) == COUNT - 2 * BATCH
        with pytest.raises(phalanx.UsageError, match="all 5 planned steps are done"):
            run.step()


def broken(after):
    """A function whose iterable raises after so many samples."""

    def yielding():
        yield from itertools.islice(generate(), after)
        raise OSError("the disk is gone")

    return yielding


@pytest.mark.parametrize("options", [{"engine": "inline"}, {"engine": "processes", "workers": 2}])
def test_an_iterable_that_raises(options):
    """It is a WorkerError with step and sample, carries the last good state, and is not taken for the end."""
    with recipe(broken(17)).start(**options) as run:
        with pytest.raises(phalanx.WorkerError, match="sample 17 of epoch 0 was read") as caught:
            run.finish()
        assert (caught.value.step, caught.value.samples, caught.value.result.steps) == (2, (17,), 2)
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(phalanx.RunError, match="cannot be read on"):
            run.step()


def test_samples_of_unlike_shapes():
    """Samples that cannot be collated are told by their numbers."""
    rows = [(torch.zeros(5 + (number == 10)), torch.tensor(0)) for number in range(COUNT)]
    with pytest.raises(phalanx.WorkerError, match=r"step 1, replica 0, samples \[8, 9, 10\]"):
        recipe(lambda: rows).train(engine="inline")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: phalanx.Stream(generate()), r"phalanx.Stream\(generate\), not phalanx.Stream\(generate\(\)\)"),
        (lambda: phalanx.Stream([1, 2]), r"phalanx.Stream\(lambda: iterable\)"),
        (lambda: phalanx.Stream(generate, shuffle_buffer=-1), "shuffle_buffer is -1"),
        (lambda: phalanx.Stream(generate, epoch_size=0), "epoch_size is 0"),
        (lambda: recipe(epochs=None), "give exactly one"),
        (lambda: recipe(buffer=3, shuffle=False), "shuffle is False"),
        (lambda: recipe(size=4, drop_last=True), "every batch would be dropped"),
        (lambda: recipe(schedule_every="epoch", scheduler=_halving), "give it an epoch_size"),
        (lambda: phalanx.Recipe(model, generate(), LOSS, epochs=1), r"phalanx.Stream\(make_iterable\)"),
        (lambda: phalanx.Recipe(model, generate, LOSS, epochs=1), r"phalanx.Stream\(make_iterable\)"),
        (lambda: recipe(list).train(), "no samples in epoch 0"),
        (lambda: recipe(size=COUNT + 1).train(), f"ended after {COUNT} samples"),
        (lambda: recipe(lambda: map(sample, range(3)), drop_last=True).train(), "epoch 0 of the stream has 3"),
        (lambda: recipe(iter([generate()] * 2).__next__).train(), "returned the same generator again for epoch 1"),
        (lambda: recipe(lambda: DataLoader(list(generate()), batch_size=5)).train(), "DataLoader of batches.*=None"),
        (lambda: recipe().plan.indices(0), "data is a Stream"),
    ],
)
def test_mistakes_are_told(make, told):
    """What cannot work is a UsageError that says how it can."""
    with pytest.raises(phalanx.UsageError, match=told):
        make()


def test_a_generator_is_closed():
    """What a generator holds open is closed when its epoch is over before its end, and with the run."""
    closed = []

    def holding():
        try:
            yield from endless()
        finally:
            closed.append(True)

    with recipe(holding, size=16, epochs=2).start(engine="inline") as run:
        next(run), next(run), next(run)
        assert closed == [True]
    assert closed == [True, True]
