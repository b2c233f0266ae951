"""Schedulers give one rate to all workers, after deaths too; what each worker would see its own way is refused."""

import functools
import itertools
import math
import os
import random
import sys
import time

import cloudpickle
import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import phalanx
from tests.engines.deaths import Trapped, sprung
from tests.engines.moving import hurry, moves
from tests.families import ADAMW, FAMILIES, OPTIMIZERS, SCHEDULERS
from tests.hosts.worlds import world
from tests.sampling import sample

MLP = FAMILIES["mlp"]
MAKE = MLP.recipe(3).make_model
STEPS = 8
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Plain(LRScheduler):
    """Leaves the rate as it is; what it does beside that is in ``act``. Keeps the parameters that it is made with."""

    def __init__(self, optimizer):
        self.kept = [group["params"] for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch:
            self.act()
        return [group["lr"] for group in self.optimizer.param_groups]

    def act(self):
        pass

    @property
    def parameters(self):
        return [parameter for group in self.kept for parameter in group]


class Freezing(Plain):
    """Freezes the first two parameters after step 3, and thaws them after step 5."""

    def act(self):
        if self.last_epoch in (3, 5):
            for parameter in self.parameters[:2]:
                parameter.requires_grad = self.last_epoch == 5


class Stopping(Plain):
    """Freezes two parameters after step 2, for good."""

    def act(self):
        if self.last_epoch == 2:
            for parameter in self.parameters[1:3]:
                parameter.requires_grad_(False)


def drawn(step):
    """A factor out of three kinds of generators."""
    return 0.5 + random.random() + float(np.random.random()) + torch.rand(()).item()


class Drawing(Plain):
    """The rate follows a generator of its own and the last rate, the decay a global one, every second step."""

    def __init__(self, optimizer):
        self.generator = np.random.default_rng(3)
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch % 2:
            self.optimizer.param_groups[0]["weight_decay"] = random.random() / 10
            return [group["lr"] * (0.5 + self.generator.random()) for group in self.optimizer.param_groups]
        return [group["lr"] for group in self.optimizer.param_groups]


def drawing(optimizer):
    return LambdaLR(optimizer, drawn)


def give(scheduler, optimizer=ADAMW, make_model=MAKE, count=3, **changes):
    return MLP.recipe(
        count, make_model=make_model, **({"steps": STEPS, "scheduler": scheduler, "optimizer": optimizer} | changes)
    )


CASES = {
    "freeze": (Freezing, ADAMW),
    "freeze for good": (Stopping, SGD),
    "draw": (drawing, SGD),
    "draw, own generator": (Drawing, SGD),
}


@pytest.mark.parametrize(("name", "workers"), sample("schedules that act", itertools.product(CASES, [1, 2, 3]), 2))
def test_workers_change_nothing(name, workers):
    """A scheduler that freezes parameters, or draws random numbers, ends in the inline digest; a plain one does not."""
    recipe = give(*CASES[name])
    wanted = recipe.train(engine="inline")
    assert wanted.digest != give(Plain, CASES[name][1]).train(engine="inline").digest
    result = recipe.train(engine="processes", workers=workers)
    assert (result.digest, result.loss_history) == (wanted.digest, wanted.loss_history)
    flags = [[item.requires_grad for item in found.model.parameters()] for found in (result, wanted)]
    assert flags[0] == flags[1]


FALLS = [(0, 4, "COMPUTING"), (1, 6, "half updated"), (0, 5, "UPDATED")]


@pytest.mark.parametrize(
    ("name", "worker", "step", "place"),
    sample("deaths in schedules", [(name, *fall) for name in CASES for fall in FALLS], 1),
)
def test_deaths_change_nothing(tmp_path, name, worker, step, place):
    """Who replaces a worker comes to the same rates and frozen parameters, and so do all that go back to a snapshot."""
    scheduler, optimizer = CASES[name]
    wanted = give(scheduler, optimizer).train(engine="inline").digest
    trapped = Trapped(MAKE, tmp_path, worker, step, place)
    assert give(scheduler, optimizer, trapped).train(engine="processes", workers=2).digest == wanted
    assert sprung(tmp_path) == 1


class Replanted(Trapped):
    """Beside the trap, a fault: each worker has keys of its own for what a scheduler draws."""

    def set(self):
        from phalanx.frameworks.torch import schedules

        super().set()
        schedules.update_key = lambda seed, step: os.getpid()


@pytest.mark.parametrize("name", ["draw", "draw, own generator"])
def test_a_planted_fault_shows(tmp_path, name):
    """The tests above can fail: keys that follow from the process give other rates, which is refused, not hidden."""
    trapped = Replanted(MAKE, tmp_path, 1, STEPS, "COMPUTING")
    with pytest.raises(phalanx.UsageError, match="different options of the optimizer"):
        give(*CASES[name], trapped).train(engine="processes", workers=2)


def test_draws_are_keyed_by_the_step():
    """What a scheduler draws after a step is what ``plan.seeded_update`` has for that step, whatever ran before."""
    recipe = give(drawing, SGD)
    wanted = []
    for step in range(STEPS - 1):
        with recipe.plan.seeded_update(step):
            wanted.append(0.1 * drawn(step))
    random.seed()
    with recipe.start(engine="inline") as run:
        rates = [report.lr for report in run]
    assert rates[1:] == wanted
    assert len(set(wanted)) == STEPS - 1


def test_an_automatic_run_draws_on(monkeypatch):
    """A run that moves into workers after some steps draws there what one process would have drawn."""
    recipe = give(*CASES["draw, own generator"], steps=12)
    wanted = recipe.train(engine="inline").digest
    hurry(monkeypatch, recipe)
    counts, result = moves(recipe)
    assert {1, 2} <= set(counts)
    assert result.digest == wanted


@pytest.mark.long
@pytest.mark.parametrize(("name", "half"), sample("resumed schedules", itertools.product(CASES, [2, 4, 6]), 1))
def test_a_resumed_run_goes_on_alike(tmp_path, name, half):
    """A run that goes on from a snapshot has the groups, flags and rates that it had there."""
    wanted = give(*CASES[name]).train(engine="inline").digest
    give(*CASES[name], steps=half).train(engine="inline", run_dir=tmp_path)
    assert give(*CASES[name]).train(engine="processes", workers=2, run_dir=tmp_path).digest == wanted


def by_clock(optimizer):
    return LambdaLR(optimizer, lambda step: 1 + time.time_ns() % 10**9 / 1e9 if step else 1.0)


def by_process(optimizer):
    return LambdaLR(optimizer, lambda step: 1 / os.getpid() if step == 3 else 1.0)


class DecayByProcess(Plain):
    """Leaves the rate, and changes another option."""

    def act(self):
        self.optimizer.param_groups[-1]["weight_decay"] = 1 / os.getpid()


@pytest.mark.parametrize(("scheduler", "step"), [(by_clock, 1), (by_process, 3), (DecayByProcess, 1)])
def test_workers_that_differ_are_refused(scheduler, step):
    """Before weights change, with the rates of two workers; one process has nothing to compare."""
    recipe = give(scheduler, SGD)
    with recipe.start(engine="processes", workers=2) as run:
        for _ in range(step):
            run.step()
        with pytest.raises(
            phalanx.UsageError, match=r"lr is [\d.e-]+ for replica 0 and .*checksums of all options are .*clock"
        ) as caught:
            run.finish()
        assert run.steps == step
        result = run.result()
    assert result.digest == give(None, SGD, steps=step).train(engine="inline").digest or step == 1
    assert ("lr is 0.1 for replica 0 and 0.1" in str(caught.value)) == (scheduler is DecayByProcess)
    recipe.train(engine="inline")
    recipe.train(engine="processes", workers=1)


@pytest.mark.long
def test_hosts_that_differ_are_refused():
    """Two processes as two hosts, of one worker each: both refuse the step that their own would have passed."""
    code = """
from tests.engines.test_schedules import SGD, by_process, drawing, give
told.append(give(drawing, SGD, count=4).train(workers=2).digest)
tried(lambda: give(by_process, SGD, count=4).train(workers=2).digest)
"""
    told = world(code)
    assert {first for first, _ in told} == {give(drawing, SGD, count=4).train(engine="inline").digest}
    assert all("different options of the optimizer" in second for _, second in told)


class Norm(Plain):
    """The rate follows the norm of all weights, which it keeps from when it was made."""

    def get_lr(self):
        norm = math.sqrt(sum(parameter.detach().double().square().sum().item() for parameter in self.parameters))
        return [0.5 * group["lr"] + 0.005 * norm for group in self.optimizer.param_groups]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("workers", "place", "told"),
    [
        (2, "COMPUTING", "different options of the optimizer"),
        (2, "half updated", "scheduler, stepped again, came to other options"),
        (1, "half updated", "scheduler, stepped again, came to other options"),
    ],
)
def test_a_replaced_worker_that_differs_is_refused(tmp_path, workers, place, told):
    """What a scheduler took from weights cannot be done again: the run ends, and no other bits are trained with."""
    wanted = give(Norm, SGD).train(engine="inline").digest
    assert give(Norm, SGD).train(engine="processes", workers=workers).digest == wanted
    trapped = Trapped(MAKE, tmp_path, workers - 1, 6, place)
    with pytest.raises(phalanx.PhalanxError, match=told):
        give(Norm, SGD, trapped).train(engine="processes", workers=workers)
    assert sprung(tmp_path) == 1


class Looking(Plain):
    """Looks at the parameters of its optimizer."""

    def act(self):
        return [group["params"][0] for group in self.optimizer.param_groups]


class Adding(Plain):
    """Adds a group, which looks at all others."""

    def act(self):
        self.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


class Moving(Plain):
    """Gives a group other parameters, which it kept."""

    def act(self):
        self.optimizer.param_groups[0]["params"] = self.parameters[:1]


class Removing(Plain):
    """Drops a group."""

    def act(self):
        self.optimizer.param_groups.pop()


class Clamping(Plain):
    """Clamps weights, as torch sees."""

    def act(self):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.clamp_(-0.1, 0.1)


class Forgetting(Plain):
    """Clears the state of the optimizer."""

    def act(self):
        self.optimizer.state.clear()


class Renewing(Plain):
    """Replaces the state of the optimizer."""

    def act(self):
        self.optimizer.state = {}


class Mistaken(Plain):
    """Adds a number to a text."""

    def act(self):
        return 1 + "one"


WRITING = [
    (Clamping, "wrote parameter"),
    *((kind, "optimizer's state") for kind in (Looking, Adding, Moving, Removing, Forgetting, Renewing)),
]


@pytest.mark.parametrize(
    ("options", "scheduler", "told"),
    [
        *(({"engine": "inline"}, *case) for case in WRITING),
        *sample("writing schedules", [({"engine": "processes", "workers": 2}, *case) for case in WRITING], 2),
    ],
)
def test_what_is_withheld_is_refused(options, scheduler, told):
    """A scheduler that writes weights, or uses parameters or optimizer state in a step, is refused in every engine."""
    with pytest.raises(phalanx.UsageError, match=rf"(?s){told}.*register_step_post_hook"):
        give(scheduler).train(**options)


def test_what_a_scheduler_raises_is_told():
    """A mistake of its own is named as it is; the same scheduler without it trains."""
    with pytest.raises(phalanx.UsageError, match="scheduler raised TypeError: unsupported operand"):
        give(Mistaken).train(engine="inline")
    assert give(Plain).train(engine="inline").steps == STEPS


def clamped(named):
    """What the refusal recommends."""
    optimizer = torch.optim.SGD(named, lr=0.1, momentum=0.9)

    def clamp(optimizer, *_):
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    return optimizer


@pytest.mark.long
def test_the_way_out_is_exact():
    """Weights clamped in a hook of the optimizer end in one digest, within the bounds, for any number of workers."""
    wanted = give(None, clamped).train(engine="inline")
    assert wanted.digest != give(None, SGD).train(engine="inline").digest
    assert max(parameter.abs().max() for parameter in wanted.params.values()) <= 0.1
    for workers in (1, 2, 3):
        assert give(None, clamped).train(engine="processes", workers=workers).digest == wanted.digest


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["sgd_nesterov", "adam_tensor_lr"])
def test_ordinary_schedulers_are_refused_nothing(name, optimizer):
    """Torch's own schedulers need neither parameters nor state, and end in one digest."""
    changes = {} if name != "one_cycle" else {"optimizer": OPTIMIZERS["sgd_nesterov"]}
    recipe = MLP.recipe(2, scheduler=SCHEDULERS[name], **({"optimizer": OPTIMIZERS[optimizer]} | changes))
    assert recipe.train(engine="processes", workers=2).digest == recipe.train(engine="inline").digest
