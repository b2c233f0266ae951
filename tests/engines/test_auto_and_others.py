"""The engine that measures, and what a review of the workers found: each of these once went wrong."""

import functools
import itertools
import threading
import time

import pytest
import torch
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import phalanx
from phalanx.engines import selection
from phalanx.shared import memory as ordering
from phalanx.shared.counters import Barrier, Counters, float_count, word_count
from tests.engines.moving import hurry, moves
from tests.families import FAMILIES, FEATURES, Elsewhere, mlp


def both(recipe):
    """The results of one worker here and of two processes."""
    return recipe.train(engine="inline"), recipe.train(engine="processes", workers=2)


def assert_same(one, other):
    assert (one.digest, one.loss_history) == (other.digest, other.loss_history)


@pytest.fixture
def eager(monkeypatch):
    """An engine that moves as soon as it can."""
    hurry(monkeypatch, FAMILIES["mlp"].recipe(1))


def test_workers_are_judged_by_all_that_a_step_costs(eager, monkeypatch):
    """Steps that are quick in themselves, with long waits between them, are slow: the run moves back."""
    here, advance, begun = selection.Inline.advance, selection.Processes.advance, []

    def timed(self, batch, horizon):
        begun.append(time.perf_counter())
        return here(self, batch, horizon)

    def slow(self, batch, horizon):
        time.sleep(2 * max(later - earlier for earlier, later in itertools.pairwise(begun[:4])))  # steps of one process
        return advance(self, batch, horizon)._replace(seconds=0.0)

    monkeypatch.setattr(selection.Inline, "advance", timed)
    monkeypatch.setattr(selection.Processes, "advance", slow)
    counts, _ = moves(FAMILIES["mlp"].recipe(3, steps=20))
    assert [count for count, _ in itertools.groupby(counts)] == [1, 2, 1]


@pytest.mark.parametrize("ordered", [True, False])
def test_meetings_hold_with_and_without_the_kernel(monkeypatch, ordered):
    """Processors that reorder memory take another way; what was written before a meeting is seen after it."""
    monkeypatch.setattr(ordering, "ORDERED", ordered)
    workers, rounds = 3, 50
    words = memoryview(bytearray(8 * word_count(workers))).cast("q")
    floats = memoryview(bytearray(8 * float_count(workers, workers))).cast("d")
    counters = Counters(words, floats, workers, workers)
    seen = [[] for _ in range(workers)]

    def work(worker):
        barrier = Barrier(counters, worker)
        for number in range(rounds):
            counters.parts.write(worker, [(number, 0, 0, 0, 0, 0)], (0, 0))
            barrier.wait()
            seen[worker].append([row[0] for row in counters.parts.read()])
            barrier.wait()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [[[number] * workers for number in range(rounds)]] * workers


def test_an_optimizer_from_elsewhere_does_not_move(eager):
    """What it keeps in attributes would be lost on the way, so such a run stays where it is."""
    recipe = FAMILIES["mlp"].recipe(3, steps=8, optimizer=Elsewhere)
    counts, result = moves(recipe)
    assert set(counts) == {1}
    assert_same(result, recipe.train(engine="inline"))


def test_a_recipe_that_cannot_travel_stays(eager):
    """A generator in the loss's closure cannot be sent: the run goes on here, and says why."""
    stream = (number for number in range(100))

    def loss(output, target):
        next(stream)
        return F.cross_entropy(output, target)

    with pytest.warns(UserWarning, match="cannot move to workers: loss_fn .its variable stream. .* cannot be sent"):
        counts, _ = moves(FAMILIES["mlp"].recipe(3, steps=8, loss_fn=loss))
    assert set(counts) == {1}


def hooked(named):
    """An optimizer whose hook normalises all gradients together."""
    optimizer = torch.optim.SGD(named, lr=0.1)

    def together(optimizer, args, kwargs):
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.01)

    optimizer.register_step_pre_hook(together)
    return optimizer


class Stacking(torch.optim.SGD):
    """Looks at all its parameters at once, and expects some."""

    def step(self, closure=None):
        grads = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        self.state["total"] = {"norm": torch.stack(grads).sum()}
        return super().step(closure)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [hooked, functools.partial(Stacking, lr=0.1), Elsewhere])
def test_optimizers_that_see_everything_run_whole(optimizer):
    """Hooks, empty groups, state beside the parameters: one worker has all of it, also where gradients are clipped."""
    for more in ({}, {"max_norm": 0.05}):
        assert_same(*both(FAMILIES["mlp"].recipe(3, optimizer=optimizer, **more)))


def test_hooks_for_all_optimizers_are_refused():
    """They are registered in this process, so workers do not have them."""
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(phalanx.UsageError, match=r"hooks for all optimizers.*engine='inline'"):
            FAMILIES["mlp"].recipe(3).train(engine="processes", workers=2)
    finally:
        handle.remove()


class Scaled(torch.nn.Module):
    """The first parameter has no axis, as CLIP's logit scale."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.body = mlp()

    def forward(self, x):
        return self.body(x) * self.scale


def test_a_first_parameter_without_axes():
    """Norms of numbers are norms too."""
    assert_same(*both(phalanx.Recipe(Scaled, FEATURES, F.cross_entropy, replicas=3, batch_size=8, steps=3)))


class Sliced(torch.nn.Module):
    """A weight that is every other column of a bigger tensor, transposed."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 10)[:, ::2].t())
        self.head = torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(x @ self.weight))


def test_a_weight_that_is_not_dense():
    """Its gradient is laid out row by row, wherever it is kept."""
    recipe = phalanx.Recipe(Sliced, FEATURES, F.cross_entropy, replicas=4, batch_size=8, steps=3, max_norm=0.1)
    assert_same(*both(recipe))


def test_a_brought_batch_has_no_epoch():
    """Also where the recipe has data: reports are the same in every engine."""
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": 2}):
        seen = []
        with FAMILIES["mlp"].recipe(2).start(callbacks=[seen.append], **options) as run:
            run.step((FEATURES[0][:4], FEATURES[1][:4]))
            run.step()
        assert [report.epoch for report in seen] == [None, 0], options


@pytest.mark.long
def test_a_run_is_watched_again_after_a_finish_that_failed():
    """Holding a report after that means what it always means."""
    calls = iter(range(1000))  # Python 3.14 pickles no itertools.count

    def loss(output, target):
        if phalanx.current_step() == 2 and next(calls) == 0:
            raise ValueError("once")
        return F.cross_entropy(output, target)

    with FAMILIES["mlp"].recipe(2, loss_fn=loss, steps=12).start(engine="processes", workers=2) as run:
        with pytest.raises(phalanx.WorkerError):
            run.finish()
        report = next(run)
        assert run.result().steps == report.step + 1
