"""Workers change no bit: worker processes answer what the inline engine answers, for any W and any placement."""

import contextlib
import dataclasses
import functools
import itertools
import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.nn import functional as F

import phalanx
from phalanx.definition.metrics import Metrics
from phalanx.engines.processes.driver import Processes
from phalanx.engines.recovery.failures import Deadline
from phalanx.frameworks.registry import open_framework
from phalanx.plan.fold import Placement
from phalanx.seams.records import Progress, Records, RunOptions, Seen
from phalanx.shared.counters import RING
from tests.engines.alike import CHUNK, EVERY, FEW, MLP, answer, course, feed, few, held_out, metric, same, two_or_three
from tests.engines.faulty import Planted
from tests.families import (
    DATA,
    FAMILIES,
    FEATURES,
    OPTIMIZERS,
    SAMPLES,
    SCHEDULERS,
    Circumstances,
    muon_and_adamw,
    normal,
    terms,
    whole,
)  # fmt: skip
from tests.sampling import cover, sample

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest
ALL_WORKERS = ("mlp", "counting", "partly_unused")  # the families that are tried with every number of workers


def evaluation_of(recipe):
    return phalanx.Evaluation(metric, held_out(recipe.data), batch_size=CHUNK)


# Whole recipes.


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "workers"), cover("families", [name for name in FAMILIES if name not in ALL_WORKERS], FEW)
)
def test_families_with_some_workers(name, workers):
    """Every family, with five replicas, ends in the same state, losses and evaluation on 2, 3 and 5 workers."""
    same(FAMILIES[name].recipe(5), workers)


@pytest.mark.long
@pytest.mark.parametrize(("name", "workers"), cover("any number of workers", ALL_WORKERS, EVERY))
def test_families_with_any_number_of_workers(name, workers):
    """Eight replicas of uneven shares, and a last batch with empty ones: the same on 1 to 8 workers."""
    recipe = FAMILIES[name].recipe(8, batch_size=13, steps=5)
    assert {len(share) for step in range(2) for share in recipe.plan.shares(step)} == {0, 1, 2}
    same(recipe, workers)


@pytest.mark.long
@two_or_three("optimizers")
@pytest.mark.parametrize("name", sample("optimizers", [*OPTIMIZERS, "muon_and_adamw"], 4))
def test_optimizers(name, workers):
    """Every optimizer, restricted to the tensors that a worker owns, gives the bits of one over all of them."""
    same(MLP.recipe(3, steps=5, optimizer=OPTIMIZERS.get(name, muon_and_adamw)), workers)


@pytest.mark.parametrize("name", sample("one replica", ["sgd_nesterov", "adamw", "adafactor"], 1))
def test_one_replica(name):
    """One worker for the one replica there is: the bits of the plain loop."""
    same(MLP.recipe(1, optimizer=OPTIMIZERS[name]), 1)


@two_or_three("schedulers")
@pytest.mark.parametrize(
    "name", [*sample("schedulers", [name for name in SCHEDULERS if name != "plateau"], 2), "plateau"]
)
def test_schedulers(name, workers):
    """Every scheduler runs in every worker as it does inline; ReduceLROnPlateau sees the same mean loss."""
    same(MLP.recipe(3, steps=6, optimizer=OPTIMIZERS["sgd_nesterov"], scheduler=SCHEDULERS[name]), workers)


@pytest.mark.long
@pytest.mark.parametrize("name", sample("data", DATA, 3))
def test_data(name):
    """Every kind of data reaches workers as it is, and is evaluated there after each epoch too."""
    recipe = MLP.recipe(3, steps=6, **DATA[name])
    assert len(same(recipe, 2, evaluation_of(recipe))[2]) >= 2


@pytest.mark.long
@few("evaluation between epochs")
@pytest.mark.parametrize("name", sample("evaluation between epochs", ["mlp", "conv_norm", "transformer"], 1))
def test_evaluation_between_epochs(name, workers):
    """Values in the middle of a run are the same, and taking them changes nothing that follows."""
    recipe = FAMILIES[name].recipe(5, epochs=3)
    plain, watched = same(recipe, workers), same(recipe, workers, evaluation_of(recipe))
    assert watched[:2] == plain[:2]
    assert len(watched[2]) == 4


@pytest.mark.parametrize(
    "samples",
    [(1, 4, SAMPLES), pytest.param((2, 3, 7, 12), marks=pytest.mark.campaign)],
)
@few("evaluations of any length")
def test_evaluations_of_any_length(samples, workers):
    """Fewer chunks than workers, as many, and more: the same value."""
    values = set()
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": workers}):
        with MLP.recipe(5).start(**options) as run:
            for count, batch_size in itertools.product(samples, (1, 3, 256)):
                data = tuple(column[:count] for column in FEATURES)
                values.add((count, batch_size, run.evaluate(metric, data, batch_size).hex()))
    assert len(values) == 3 * len(samples)


@few("weighted metric")
def test_a_weighted_metric(workers):
    """A metric that brings its own weight, some of them 0, is averaged in the order of chunks."""
    metric = lambda output, target: (output.mean(), float(target[0]))  # noqa: E731
    values = set()
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": workers}):
        with MLP.recipe(5).start(**options) as run:
            run.step()
            values.add(run.evaluate(metric, FEATURES, 2).hex())
    assert len(values) == 1


CLIPPED = ["mlp", "partly_unused", "mixed_dtypes", "tied", "odd_tensors", "shared_grad"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "max_norm", "workers"), sample("clipping", itertools.product(CLIPPED, (0.05, 1e6), (2, 3)), 3)
)
def test_clipping(name, max_norm, workers):
    """The norm is that of all gradients, wherever they are owned; what is absent is not in it."""
    same(FAMILIES[name].recipe(5, max_norm=max_norm), workers)


@pytest.mark.long
@pytest.mark.parametrize(("seed", "workers"), cover("seeds", [1, 2**64 - 1], (2, 3)))
def test_seeds(seed, workers):
    """Dropout, sample order and the model's own numbers follow from the seed, in any worker."""
    same(FAMILIES["transformer"].recipe(5, seed=seed), workers)


@pytest.mark.long
@two_or_three("threads")
def test_threads(workers):
    """Workers compute with the recipe's threads, and user code finds so many there."""
    same(FAMILIES["wide_sum"].recipe(3, threads=2), workers)
    answers = [same(MLP.recipe(3, make_model=lambda: Circumstances(5, 3), threads=n), workers) for n in (1, 2)]
    assert answers[0] != answers[1]


@two_or_three("unshuffled")
def test_unshuffled(workers):
    """The order of the data, as it is."""
    same(MLP.recipe(5, shuffle=False, epochs=2), workers)


# Runs that are held.


@pytest.mark.long
@few("held reports")
@pytest.mark.parametrize("name", sample("held reports", ["counting", "transformer", "two_groups"], 1))
def test_the_state_while_you_hold_a_report(name, workers):
    """After each step the digest is exactly that step's, whatever is evaluated in between."""
    recipe = FAMILIES[name].recipe(5, epochs=2)
    expected = list(held(recipe, engine="inline"))
    assert len({digest for digest, *_ in expected}) == recipe.plan.steps + 1
    assert list(held(recipe, engine="processes", workers=workers)) == expected


def held(recipe, **options):
    """Digest, report and evaluation before the first step and after each."""
    with recipe.start(**options) as run:
        yield run.result().digest, None, run.evaluate(metric, held_out(recipe.data), CHUNK).hex()
        for report in run:
            assert run.steps == report.step + 1
            before = run.result()
            value = run.evaluate(metric, held_out(recipe.data), CHUNK)
            assert run.result().digest == before.digest
            assert phalanx.digest(before.model) == phalanx.digest(run.result().model)
            yield before.digest, tuple(report[:6]), value.hex()


@pytest.mark.long
@pytest.mark.parametrize("looks", sample("looks", [{0}, {1}, {4}, {0, 5}, {1, 2, 5}, set(range(6))], 2))
def test_looking_at_any_steps(looks):
    """Taking results and evaluating after some steps and not after others gives the same states, and the same end."""
    recipe = FAMILIES["counting"].recipe(5, steps=6)
    assert look(recipe, looks, engine="processes", workers=3) == look(recipe, looks, engine="inline")


def look(recipe, looks, **options):
    seen = []
    with recipe.start(**options) as run:
        for report in run:
            if report.step in looks:
                seen.append((run.result().digest, run.evaluate(metric, held_out(recipe.data), CHUNK)))
    return seen, run.result().digest, run.result().loss_history


@pytest.mark.parametrize(("steps", "workers"), cover("left early", [0, 1, 3], [2, 5]))
def test_a_run_that_is_left_early(steps, workers):
    """What is taken home is the state after the last step that was asked for."""
    digests = set()
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": workers}):
        with FAMILIES["counting"].recipe(5, steps=6).start(**options) as run:
            for _ in range(steps):
                run.step()
        digests.add((run.result().digest, tuple(run.result().loss_history)))
    assert len(digests) == 1


@pytest.mark.long
def test_more_steps_than_reports_have_room():
    """A run that is longer than the ring of reports loses none of them."""
    same(MLP.recipe(2, steps=RING + 76, batch_size=2), 2)


SIZES = [7, 1, 5, 20, 2, 13]


def cut(rows):
    """Batches of uneven sizes, one of them smaller than R, made of rows of the features."""
    starts = itertools.accumulate([0, *SIZES])
    return [rows(torch.arange(start, start + size) % SAMPLES) for start, size in zip(starts, SIZES, strict=False)]


BATCHES = {
    "tensors": lambda rows: (FEATURES[0][rows], FEATURES[1][rows]),
    "list_of_tensors": lambda rows: [FEATURES[0][rows], FEATURES[1][rows]],
    "numpy": lambda rows: (FEATURES[0][rows].numpy(), FEATURES[1][rows].numpy()),
    "reversed_numpy": lambda rows: (FEATURES[0][rows].numpy()[::-1], FEATURES[1][rows].numpy()[::-1]),
    "turned": lambda rows: (FEATURES[0][rows].t().contiguous().t(), FEATURES[1][rows]),
    "samples": lambda rows: [(FEATURES[0][row], FEATURES[1][row]) for row in rows],
    "numpy_samples": lambda rows: [(FEATURES[0][row].numpy(), int(FEATURES[1][row])) for row in rows],
}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "workers"), sample("brought batches", itertools.product(BATCHES, FEW), 3))
def test_brought_batches(kind, workers):
    """Batches of any form and any size, growing and shrinking, are dealt to workers as inline."""
    feed(MLP.recipe(5, data=None, steps=None), cut(BATCHES[kind]), workers)


@few("brought columns")
@pytest.mark.parametrize("kind", sample("brought columns", ["tensors", "numpy"], 1))
def test_brought_columns_by_name(kind, workers):
    """A batch may be a dict of columns."""
    recipe = MLP.recipe(5, data=None, steps=None, **{k: v for k, v in DATA["dict"].items() if k != "data"})
    feed(recipe, [dict(zip("xy", batch, strict=True)) for batch in cut(BATCHES[kind])], workers)


@two_or_three("mailbox")
def test_a_batch_that_grows_beyond_the_mailbox(workers):
    """From some bytes to some megabytes and back: the shared memory that brings batches grows with them."""
    recipe = phalanx.Recipe(lambda: nn.Linear(3, 1), None, F.mse_loss, replicas=5)
    sizes = (4, 70_000, 6, 300_000, 5)
    feed(recipe, [(normal(size, 3, seed=size), normal(size, 1, seed=size + 1)) for size in sizes], workers)


def test_a_batch_that_is_changed_after_its_step():
    """The caller may write into a batch as soon as the step is done."""
    recipe = MLP.recipe(5, data=None, steps=None)
    answers = set()
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": 3}):
        x, y = normal(11, 5), whole(3, 11)
        with recipe.start(**options) as run:
            for _ in range(4):
                run.step((x, y))
                x.mul_(1.5).add_(0.1)
        answers.add(run.result().digest)
    assert len(answers) == 1


@few("mixed steps")
def test_planned_and_brought_steps_mixed(workers):
    """Steps of both kinds, with looks between, in one run."""
    recipe, batches = MLP.recipe(5, steps=8), cut(BATCHES["tensors"])

    def mixed(**options):
        with recipe.start(**options) as run:
            seen = [run.step(), run.step(batches[0]), run.step(batches[3]), run.result().digest, run.step()]
            seen += [run.evaluate(metric, held_out(recipe.data), CHUNK), run.step(batches[1]), *(r.loss for r in run)]
        return seen, run.result().digest

    assert mixed(engine="processes", workers=workers) == mixed(engine="inline")


class Late(nn.Module):
    """Changes its gradients when they have been computed: by hooks that the first forward adds, or as a pass ends."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.layers = nn.Sequential(nn.Linear(8, 200), nn.Linear(200, 200), nn.Linear(200, 3))  # small and big ones
        self.watched = False

    def forward(self, x):
        if self.way == "hooks" and not self.watched:
            self.watched = True
            for number, parameter in enumerate(self.parameters()):
                parameter.register_post_accumulate_grad_hook(self.replace if number % 2 else self.halve)
        output = self.layers(x)
        if self.way == "end" and output.requires_grad:
            output.register_hook(lambda _: Variable._execution_engine.queue_callback(self.end))
        return output

    def halve(self, parameter):
        parameter.grad.mul_(0.5)

    def replace(self, parameter):
        parameter.grad = parameter.grad * 0.25

    def end(self):
        for number, parameter in enumerate(self.parameters()):
            (self.replace if number % 2 else self.halve)(parameter)


@pytest.mark.long
@pytest.mark.parametrize("way", ["hooks", "end"])
def test_gradients_that_are_changed_late(way):
    """What user code does to gradients after they have been computed is done before workers exchange them."""
    x, y = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
    recipe = phalanx.Recipe(functools.partial(Late, way), (x, y), F.cross_entropy, replicas=2, batch_size=8, steps=3)
    same(recipe, 2)
    plain = dataclasses.replace(recipe, make_model=functools.partial(Late, "never"))
    assert course(recipe, engine="inline")[0] != course(plain, engine="inline")[0]


# Placements that are not the usual one.


PLACEMENTS = {
    "permuted": [(5, 8), (0, 2), (2, 5)],
    "backwards": [(6, 8), (4, 6), (2, 4), (0, 2)],
    "uneven": [(0, 1), (1, 7), (7, 8)],
    "uneven_and_permuted": [(1, 7), (7, 8), (0, 1)],
    "across_subtrees": [(3, 6), (6, 8), (0, 3)],
    "singles_shuffled": [(3, 4), (7, 8), (0, 1), (5, 6), (2, 3), (6, 7), (1, 2), (4, 5)],
    "alone": [(0, 8)],
}


def placed(recipe, blocks):
    """A run on workers that host just these blocks."""
    placement = Placement(recipe.replicas, tuple(range(start, end) for start, end in blocks))
    records = Records(RunOptions(), progress := Progress(), Seen(progress))
    engine = Processes(recipe, open_framework(recipe), placement, records, Deadline())
    try:
        for _ in range(recipe.plan.steps):
            engine.advance(None, recipe.plan.steps)
        metrics = Metrics(metric)
        value = metrics.fold(engine.evaluate(metrics, held_out(recipe.data), CHUNK), recipe.seed)["metric"]
        digest = engine.export(copy=True).digest
    finally:
        engine.close()
    return answer(digest, engine.progress.loss_history, [(recipe.plan.steps, value, "metric")])


@pytest.mark.long
@pytest.mark.parametrize("placement", sample("placements", PLACEMENTS, 2))
@pytest.mark.parametrize("name", sample("placements", ["mlp", "counting", "partly_unused", "masked_tokens"], 1))
def test_any_placement(name, placement):
    """Who hosts which replicas, how many, and in which order among the workers, moves no bit."""
    recipe = FAMILIES[name].recipe(8, max_norm=0.3, batch_size=13, steps=5)
    assert placed(recipe, PLACEMENTS[placement]) == course(recipe, engine="inline")


# What would go wrong is noticed: each fault below is planted in the workers and ends in other bits.


def nothing():
    """No fault: the control."""


def arrival_order():
    """What is left is added from left to right, as it lies, instead of pairwise."""
    from phalanx.engines.processes import arena

    def straight(replicas, nodes, present):
        first, *others = sorted(present)
        return [(first, other) for other in others]

    assert arena.added.__name__ == "added"
    arena.added = straight


def buffers_left_out():
    """The buffers that replica 2 left are never published."""
    from phalanx.shared.state import Shard

    leave = Shard.leave
    Shard.leave = lambda self, replica, left: None if replica == 2 else leave(self, replica, left)


def stale_gradients():
    """A peer's gradient is what it was when it was first looked at."""
    from phalanx.engines.processes.arena import Buckets

    peer = Buckets.peer
    Buckets.peer = lambda self, *place: [None if grad is None else grad.clone() for grad in peer(self, *place)]


def absent_as_zero():
    """What a worker did not publish is read all the same, as the zeros of fresh memory or what an earlier step left."""
    from phalanx.engines.processes.board import Publications

    publish = Publications.publish
    Publications.publish = lambda self, position, number, there: publish(
        self, position, number, bytes([1]) * len(there)
    )


def norm_of_the_own():
    """Each worker clips by the norm of what it owns."""
    from phalanx.frameworks.torch.sharing import WorkerState

    norm = WorkerState.norm
    WorkerState.norm = lambda self, gradient, meet, there: norm(self, gradient, meet, self._owned)


def seeded_by_worker():
    """Random numbers follow the place among a worker's replicas, not the replica."""
    from phalanx.engines.link import Link

    hosted = {}
    made = Link.__init__

    def remember(self, mine, *parts):
        made(self, mine, *parts)
        hosted["start"] = mine.start

    Link.__init__ = remember
    from phalanx import step as module

    key = module.replica_key
    module.replica_key = lambda seed, t, replica, *more: key(seed, t, replica - hosted["start"], *more)


FAULTS = [
    *sample(
        "faults of buffers",
        [(buffers_left_out, "conv_norm", 5, 2, {}), (buffers_left_out, "counting", 8, 8, {})],
        1,
    ),
    *sample(
        "faults of stale gradients",
        [(stale_gradients, "mlp", 5, 2, {}), (stale_gradients, "unused", 2, 2, {})],
        1,
    ),
    (absent_as_zero, "partly_unused", 5, 5, {"steps": 8}),
    (norm_of_the_own, "mlp", 5, 2, {"max_norm": 0.05}),
    (seeded_by_worker, "transformer", 5, 2, {}),
]


@pytest.mark.long
@pytest.mark.parametrize(("fault", "name", "replicas", "workers", "changes"), FAULTS)
def test_faults_in_the_workers(fault, name, replicas, workers, changes):
    """Each named mistake ends in another digest, and the same run without it does not."""
    notice(FAMILIES[name].recipe(replicas, **changes), fault, workers)


def notice(recipe, fault, workers):
    """A run ends in another digest with the fault than without it, or in a replica that two workers compute unlike."""
    expected = course(recipe, engine="inline")[0]
    assert course(planted(recipe, nothing), engine="processes", workers=workers)[0] == expected
    with contextlib.suppress(phalanx.StateError):
        assert course(planted(recipe, fault), engine="processes", workers=workers)[0] != expected


def planted(recipe, plant):
    return dataclasses.replace(recipe, make_model=Planted(recipe.make_model, plant))


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "workers"), sample("arrival order", [(5, 5), (8, 8), (8, 3)], 1))
def test_arrival_order_is_noticed(replicas, workers):
    """Additions from left to right end in another digest."""
    notice(terms(replicas), arrival_order, workers)


@pytest.mark.long
def test_arrival_order_goes_unnoticed_where_there_is_no_other():
    """The planted order is the right one for two workers with half of the replicas each: it is the only fault."""
    recipe = planted(terms(8), arrival_order)
    assert course(recipe, engine="processes", workers=2) == course(terms(8), engine="inline")
    with pytest.raises(AssertionError, match="8 workers"):
        same(recipe, 8)


def test_evaluations_out_of_order_are_seen(monkeypatch):
    """Chunks averaged in the order of arrival, here backwards, give another value."""
    x = torch.tensor([1e16, 1.0, -1e16, 3.0, -1.0, 0.3, 5.0], dtype=torch.float64)[:, None]
    recipe = phalanx.Recipe(lambda: nn.Linear(1, 1).double(), (x, x), F.mse_loss, steps=1, replicas=5)
    metric = lambda output, target: target.mean()  # noqa: E731
    with recipe.start(engine="inline") as inline, recipe.start(engine="processes", workers=5) as run:
        assert run.evaluate(metric, (x, x), 1) == inline.evaluate(metric, (x, x), 1)
        ask = Processes.ask
        monkeypatch.setattr(Processes, "ask", lambda self, *task: ask(self, *task)[::-1])
        assert run.evaluate(metric, (x, x), 1) != inline.evaluate(metric, (x, x), 1)
