"""Samples drawn by weights, and batches of a batch_sampler: what the plan has, and the same bits everywhere."""

import bisect
import collections
import functools
import io
import itertools
import os
import signal
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

import phalanx
from phalanx.definition import sampling
from phalanx.plan import keys
from tests.by_hand import answer
from tests.hosts.worlds import world
from tests.inputs.streaming import COUNT, InOrder, model
from tests.state.runs import assert_same, engine_of

LOSS = torch.nn.functional.cross_entropy
WEIGHTS = [number % 5 / 7 for number in range(COUNT)]  # some are 0


def uneven(epoch, generator, least=5):
    """Each epoch in batches of another size; some are smaller than the number of replicas."""
    order = generator.permutation(COUNT)
    return [order[start : start + least + epoch].tolist() for start in range(0, COUNT, least + epoch)]


def over(data=None, **changes):
    """A recipe over a dataset that draws random numbers as it is read, or over other data."""
    given = {"replicas": 3, "loss_fn": LOSS}
    given |= {} if "steps" in changes else {"epochs": 3}
    return phalanx.Recipe(model, InOrder() if data is None else data, **(given | changes))


KINDS = {
    "weights": {"weights": WEIGHTS, "batch_size": 8},
    "batch_sampler": {"batch_sampler": uneven},
    "steps of a batch_sampler": {"batch_sampler": uneven, "steps": 15},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@functools.cache
def expected(name):
    """What the inline engine comes to."""
    return over(**KINDS[name]).train(engine="inline")


def named(kind):
    return next(name for name, value in KINDS.items() if value is kind)


def draw_by_hand(weights, seed, epoch, draw):
    """One draw, in exact fractions."""
    start = keys.key(seed, keys.DRAW_STREAM, epoch)
    chance = Fraction(keys.splitmix64((start + draw * keys.GOLDEN) % 2**64), 2**64)
    sums = np.cumsum(np.array([Fraction(weight) for weight in weights], dtype=object))
    return bisect.bisect_right(sums.tolist(), chance * sums[-1])


@pytest.mark.parametrize(
    "weights",
    [
        [0.1, 0.2, 0.3, 0.4],
        [0.0, 5e-324, 0.0, 1e-323, 0.0],
        [1e308, 1e308, 0.0],
        [1e-300, 1e300],
        [3, 0, 1],
        np.array([1, 2], dtype=np.float32) / 3,
        torch.tensor([0.25, 0.1], dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_draws_are_those_of_exact_fractions(weights):
    """Sums of weights are exact: each draw is the one that fractions give, for weights of any size."""
    length = len(weights)
    plan = over([(torch.zeros(5), 0)] * length, weights=weights, batch_size=length, seed=7).plan
    for epoch in range(30):
        by_hand = [draw_by_hand([float(weight) for weight in weights], 7, epoch, draw) for draw in range(length)]
        assert plan.indices(epoch).tolist() == by_hand


def test_each_sample_comes_in_proportion_to_its_weight():
    """Counts of many epochs follow the weights, a weight of 0 never comes, and even draws would be noticed."""
    plan = over(**KINDS["weights"]).plan
    drawn = np.concatenate([plan.indices(step) for step in range(4000)])
    counts, wanted = np.bincount(drawn, minlength=COUNT), np.array(WEIGHTS) / sum(WEIGHTS) * len(drawn)
    some = wanted > 0
    even = np.full(some.sum(), len(drawn) / some.sum())
    assert not counts[~some].any()
    assert ((counts - wanted)[some] ** 2 / wanted[some]).sum() < 60
    assert ((counts[some] - even) ** 2 / even).sum() > 60


def test_draws_are_pinned():
    """The draws are those of the first release; another seed draws others."""
    drawn = [over(**KINDS["weights"], seed=seed).plan.indices(3).tolist() for seed in (0, 1)]
    assert drawn == [[3, 4, 6, 4, 18], [22, 12, 9, 13, 18]]


def test_a_batch_sampler_decides_the_batches():
    """The plan has what it returned for (epoch, generator), epochs of any length, from any step on."""
    plan = over(batch_sampler=uneven, steps=99).plan
    generators = [np.random.default_rng(keys.key(0, keys.SAMPLER_STREAM, epoch)) for epoch in range(6)]
    batches = [(epoch, batch) for epoch in range(6) for batch in uneven(epoch, generators[epoch])]
    limited = over(batch_sampler=lambda epoch, generator: uneven([0, 1, 2][epoch], generator), epochs=3).plan
    assert limited.steps == limited.start(9) == sum(epoch < 3 for epoch, _ in batches)
    with pytest.raises(IndexError, match="3 epochs have 16 steps"):
        limited.indices(limited.steps)
    for step in (20, 3, *range(len(batches))):
        assert (plan.epoch(step), plan.indices(step).tolist()) == batches[step]
    assert [plan.epoch(plan.start(epoch)) for epoch in range(6)] == list(range(6))
    with pytest.raises(phalanx.UsageError, match=r"plan.start\(epoch\)"):
        plan.steps_per_epoch  # noqa: B018


@pytest.mark.cases(1)
@kinds
def test_the_loop_by_hand(kind):
    """A run ends in the digest and losses of a loop by hand over ``recipe.plan``, and not in those of other draws."""
    recipe = over(**kind)
    assert (expected(named(kind)).digest, expected(named(kind)).loss_history) == answer(recipe)
    assert answer(over(**kind, seed=1))[0] != answer(recipe)[0]


@pytest.mark.long
@pytest.mark.cases(2)
@kinds
@pytest.mark.parametrize("place", [{"workers": 2}, {"engine": "inline", "readers": 2}], ids=str)
def test_same_bits_in_workers_and_with_readers(kind, place):
    """Workers and readers come to the bits of the inline engine."""
    assert_same(over(**kind).train(**{"readers": 0, **place}), expected(named(kind)))


@pytest.mark.long
@kinds
def test_a_worker_that_is_killed(kind):
    """A worker that is killed in the second epoch changes nothing."""
    with over(**kind).start(workers=2, readers=2) as run:
        for report in run:
            if report.step == 7:
                os.kill(run.worker_pids[1], signal.SIGKILL)
        assert_same(run.result(), expected(named(kind)))


@pytest.mark.long
@kinds
def test_resume_and_replay(kind, tmp_path):
    """A run that goes on in the middle of an epoch ends in the same bits; steps can be replayed and verified."""
    recipe = over(**kind)
    with recipe.start(engine="inline", run_dir=tmp_path, snapshot_every=3) as run:
        for report in run:
            if report.step == 6:
                break
    result = recipe.train(workers=2, run_dir=tmp_path)
    assert_same(result, expected(named(kind)))
    share = recipe.plan.shares(8)[1]
    replayed = phalanx.replay(recipe, tmp_path, step=8, replica=1)
    with recipe.plan.seeded_sample(8, share[0]):
        assert torch.equal(replayed.batch[0][0], InOrder()[share[0]][0])
    assert phalanx.proof.verify.verify(recipe, tmp_path, progress=False).status == 0


@pytest.mark.long
def test_hosts():
    """Two processes of a world come to the same digest, and refuse samplers that differ between them."""
    code = """
from tests.inputs.test_drawn import KINDS, over
import numpy
for kind in KINDS.values():
    tried(lambda: over(**kind).train(engine="distributed").digest)
    tried(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
tried(lambda: over(batch_sampler=lambda epoch, generator: [[rank], [2]]).train(engine="distributed").digest)
"""
    for told in world(code):
        assert told[:6:2] == [expected(name).digest for name in KINDS]
        assert "batch_sampler's epoch 0" in told[6]


def test_a_sample_that_comes_again_is_read_anew():
    """Augmentation draws other numbers in each step of an epoch: drawn samples would be copies otherwise."""
    plan = over(weights=[1.0] * COUNT, batch_size=1).plan
    assert len({plan.sample_key(step, 3) for step in range(COUNT)}) == COUNT
    even = over(batch_size=1).plan
    assert len({even.sample_key(step, 3) for step in range(COUNT)}) == 1


class Noted(torch.optim.lr_scheduler.LRScheduler):
    """Halves the rate at each epoch."""

    def get_lr(self):
        return [base / 2**self.last_epoch for base in self.base_lrs]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_epochs_that_differ(workers):
    """Evaluations and schedules by epochs come where an epoch ends, however long it is."""
    evaluation = phalanx.Evaluation(lambda output, target: 0.0, InOrder())
    every_other = phalanx.Evaluation(lambda output, target: 0.0, InOrder(), every_epochs=2, name="other")
    rates = []
    result = over(batch_sampler=uneven, epochs=4, scheduler=Noted, schedule_every="epoch", lr=1.0).train(
        evaluation=[evaluation, every_other],
        callbacks=[lambda report: rates.append((report.epoch, report.lr))],
        **engine_of(workers),
    )
    ends = np.cumsum([-(-COUNT // (5 + epoch)) for epoch in range(4)]).tolist()
    measured = collections.Counter(item.steps for item in result.metric_history)
    assert measured == {ends[0]: 1, ends[1]: 2, ends[2]: 1, ends[3]: 2}
    epochs = [bisect.bisect_right(ends, step) for step in range(ends[3])]
    assert rates == [(epoch, 0.5**epoch) for epoch in epochs]
    assert result.steps_per_epoch is None


def test_a_sampler_is_not_called_for_epochs_that_no_step_has():
    """A sampler may know as many epochs as the steps need; evaluations and ``Thaw`` count no others."""
    evaluation = phalanx.Evaluation(lambda output, target: 0.0, InOrder(), every_epochs=5)
    batches = [[[0, 1], [2]], [[3], [4, 5]]]
    recipe = over(batch_sampler=lambda epoch, generator: batches[epoch], steps=4)
    name = next(name for name, _ in recipe.make_model().named_parameters())
    with pytest.warns(UserWarning, match="the last epoch of this run is 1"):
        result = recipe.train(engine="inline", evaluation=evaluation, callbacks=[phalanx.callbacks.Thaw(name, epoch=2)])
    assert (result.steps, [item.steps for item in result.metric_history]) == (4, [4])


def test_lines_come_after_epochs_that_differ(monkeypatch):
    """Without a terminal there is a line after each epoch of a sampler, too."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    over(batch_sampler=uneven, epochs=3).train(engine="inline", progress=True)
    lines = sys.stderr.getvalue().splitlines()
    assert [line.split(", ")[0] for line in lines] == [f"phalanx: epoch {number}/3" for number in (1, 2, 3)]


def test_schedules_get_the_mean_loss_of_their_epoch():
    """ReduceLROnPlateau gets the mean over as many steps as the epoch has."""
    told = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            told.append(metrics)
            super().step(metrics)

    losses = over(batch_sampler=uneven, scheduler=Plateau, schedule_every="epoch").train(engine="inline").loss_history
    ends = np.cumsum([0, 6, 5, 5]).tolist()
    assert told == [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]


@pytest.mark.long
def test_generators_of_all_kinds_are_keyed():
    """A sampler may draw from torch, from the global generators, or from one that it holds; the caller's stay."""
    own = np.random.default_rng(5)

    def drawn(epoch, generator):
        return [torch.randperm(COUNT)[:6], np.random.permutation(4), own.permutation(3)]

    before = own.bit_generator.state, torch.get_rng_state()
    recipe = over(batch_sampler=drawn, epochs=2)
    result = recipe.train(engine="inline")
    assert result.digest == recipe.train(workers=2).digest
    assert own.bit_generator.state == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


class Counting:
    """Keeps state: each call returns other batches."""

    def __init__(self):
        self.calls = 0

    def __call__(self, epoch, generator):
        self.calls += 1
        return [[self.calls % COUNT], [1, 2]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sampler_that_keeps_state_is_refused(workers):
    """It would give each process other batches, so both engines refuse it before a step is done."""
    with pytest.raises(phalanx.UsageError, match="other batches for epoch 0 when it was called again") as caught:
        over(batch_sampler=Counting()).train(**engine_of(workers))
    assert caught.value.result.steps == 0


def late(epoch, generator):
    return [[1, 2]] * 3 if epoch < 1 else [[0], [COUNT]]


SAMPLERS = [
    (lambda epoch, generator: 3, "batch_sampler.epoch=0. raised TypeError"),
    (lambda epoch, generator: [], "returned no batches"),
    (lambda epoch, generator: [[1], []], r"batch 1 of batch_sampler.epoch=0. is \[\], which is no list"),
    (lambda epoch, generator: [1, 2], "batch 0 of batch_sampler.epoch=0. is 1, which is no list"),
    (lambda epoch, generator: [[0.5]], r"is \[0.5\], which"),
    (lambda epoch, generator: [[True]], r"is \[True\], which"),
    (lambda epoch, generator: [[0, [1]]], r"is \[0, \[1\]\], which"),
    (lambda epoch, generator: [[1], [-1]], "batch 1 of batch_sampler.epoch=0. has sample -1, but data has 29"),
    (late, "batch 1 of batch_sampler.epoch=1. has sample 29, but data has 29"),
    (lambda epoch, generator: 1 / 0, "raised ZeroDivisionError: division by zero"),
]


@pytest.mark.parametrize(("sampler", "words"), SAMPLERS, ids=[words for _, words in SAMPLERS])
def test_batches_that_are_none_are_refused(sampler, words):
    """The message names the batch and the epoch; nothing is trained."""
    with pytest.raises(phalanx.UsageError, match=words):
        over(batch_sampler=sampler).train(engine="inline")


def test_an_epoch_without_an_end_is_refused(monkeypatch):
    """A generator that goes on for ever is stopped, and the message says so."""
    monkeypatch.setattr(sampling, "MOST_BATCHES", 10)
    with pytest.raises(phalanx.UsageError, match=r"goes on after 39 batches, and data has 29 samples; end the epoch"):
        over(batch_sampler=lambda epoch, generator: itertools.repeat([1, 2])).train(engine="inline")
    over(batch_sampler=lambda epoch, generator: [[1, 2]] * 39, epochs=1).train(engine="inline")


def test_an_error_in_a_later_epoch_leaves_the_state_before_it():
    """With steps, epochs are asked for when they come; the error of one leaves the state of the last step."""
    for options in (engine_of(1), engine_of(2)):
        with pytest.raises(phalanx.UsageError, match=r"batch_sampler\(epoch=1\)") as caught:
            over(batch_sampler=late, steps=9).train(**options)
        assert caught.value.result.steps == 3


ONES = [1.0] * COUNT
ARGUMENTS = [
    ({"weights": ONES[1:]}, "weights has 28 numbers; it must have one number per sample, and data has 29"),
    ({"weights": [0.0] * COUNT}, "all weights are 0"),
    ({"weights": [*ONES[1:], -1.0]}, r"weights\[28\] is -1.0"),
    ({"weights": [*ONES[1:], float("nan")]}, r"weights\[28\] is nan"),
    ({"weights": [*ONES[1:], float("inf")]}, r"weights\[28\] is inf"),
    ({"weights": "balanced"}, "weights is 'balanced'"),
    ({"weights": torch.utils.data.WeightedRandomSampler(ONES, COUNT)}, r"weights=sampler.weights"),
    ({"weights": ONES, "shuffle": False}, "shuffle is False, but weights decides which samples"),
    ({"weights": ONES, "batch_sampler": uneven}, "weights is .*, but batch_sampler decides all batches"),
    ({"batch_sampler": uneven, "batch_size": 8}, "batch_size is 8, but batch_sampler decides"),
    ({"batch_sampler": uneven, "batch_size": None}, "batch_size is None, but batch_sampler decides"),
    ({"batch_sampler": uneven, "shuffle": False}, "shuffle is False, but batch_sampler decides"),
    ({"batch_sampler": uneven, "drop_last": True}, "drop_last is True, but batch_sampler decides"),
    ({"batch_sampler": [[0]]}, "batch_sampler is .* must be callable"),
    ({"weights": ONES, "data": phalanx.Stream(list)}, "weights is given, but data is a Stream"),
]


@pytest.mark.parametrize(("changes", "words"), ARGUMENTS, ids=[words for _, words in ARGUMENTS])
def test_arguments_that_are_refused(changes, words):
    """Wrong weights, and arguments that decide the same thing twice, are refused by name."""
    with pytest.raises(phalanx.UsageError, match=words):
        over(**changes)


def test_samplers_of_torch_are_answered():
    """A loader that draws by weights is told of ``weights=``; batches that the caller brings have no weights."""
    sampler = torch.utils.data.WeightedRandomSampler(ONES, COUNT)
    with pytest.raises(phalanx.UsageError, match=r"weights=loader.sampler.weights"):
        over(torch.utils.data.DataLoader(InOrder(), sampler=sampler))
    with pytest.raises(phalanx.UsageError, match="weights is given, but data is None"):
        phalanx.Recipe(model, None, LOSS, weights=ONES)


def test_the_sum_of_weights_in_floats_would_be_noticed():
    """Negative twin: 1e16 + 1 - 1 loses a weight in float64, and exact sums keep it."""
    weights = np.array([1e16, 1.0, 1e16])
    bounds = sampling.bounds_of(weights)
    assert bounds[0] < bounds[1]
    assert np.cumsum(weights)[0] == np.cumsum(weights)[1]
