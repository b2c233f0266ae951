"""Schedulers that look at parameters change no bit, whoever steps them, after deaths too; writing is refused."""

import functools
import itertools
import sys

import cloudpickle
import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

import phalanx
from phalanx.engines.processes.worker import Worker
from phalanx.frameworks.torch.optimizer import Update
from tests.engines.deaths import Trapped, sprung
from tests.families import ADAMW, FAMILIES, OPTIMIZERS, SCHEDULERS
from tests.sampling import sample

MLP = FAMILIES["mlp"]
MAKE = MLP.recipe(3).make_model
STEPS = 8
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Plain(LRScheduler):
    """Leaves the rate as it is; what it does beside that is in ``act``."""

    def __init__(self, optimizer):
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch:
            self.act()
        return [group["lr"] for group in self.optimizer.param_groups]

    def act(self):
        pass

    @property
    def parameters(self):
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


class Freezing(Plain):
    """Freezes the first two parameters after step 3, and thaws them after step 5."""

    def act(self):
        if self.last_epoch in (3, 5):
            for parameter in self.parameters[:2]:
                parameter.requires_grad = self.last_epoch == 5


class Keeping(Plain):
    """Freezes what it found when it was made, and keeps that in its state."""

    def __init__(self, optimizer):
        self.frozen = [parameter for group in optimizer.param_groups for parameter in group["params"]][1:3]
        super().__init__(optimizer)

    def act(self):
        for parameter in self.frozen:
            parameter.requires_grad = self.last_epoch not in (3, 4)


class Norm(Plain):
    """The rate follows the norm of all weights so far."""

    def get_lr(self):
        norm = sum(parameter.detach().square().sum() for parameter in self.parameters).sqrt().item()
        return [0.5 * group["lr"] + 0.005 * norm for group in self.optimizer.param_groups]


def first_layer_later(named):
    """An optimizer of all parameters but the first two."""
    return torch.optim.AdamW([parameter for _, parameter in named[2:]], lr=0.01)


class Adding:
    """Makes a model, and schedulers that add its first two parameters to the optimizer after step 3."""

    def __call__(self):
        self.model = MAKE()
        return self.model

    def scheduler(self, optimizer):
        return AddingSchedule(optimizer, list(self.model.parameters())[:2])

    def __reduce__(self):
        return Adding, ()


class AddingSchedule(Plain):
    """Adds ``later`` to the optimizer after step 3."""

    def __init__(self, optimizer, later):
        self.later = later
        super().__init__(optimizer)

    def act(self):
        if self.last_epoch == 3:
            self.optimizer.add_param_group({"params": self.later, "lr": 0.02, "initial_lr": 0.02})
            self.base_lrs.append(0.02)


class Moving(Plain):
    """Moves a parameter from one group to another after step 3."""

    def act(self):
        if self.last_epoch == 3:
            first, second = self.optimizer.param_groups
            second["params"].append(first["params"].pop())


def two_groups(named):
    named = list(named)
    return torch.optim.AdamW([{"params": named[:2], "lr": 0.001}, {"params": named[2:], "lr": 0.02}])


def give(scheduler, optimizer=ADAMW, make_model=MAKE, **changes):
    return MLP.recipe(
        3, make_model=make_model, **({"steps": STEPS, "scheduler": scheduler, "optimizer": optimizer} | changes)
    )


CASES = {
    "freeze": (Freezing, ADAMW),
    "freeze, kept": (Keeping, SGD),
    "norm": (Norm, SGD),
    "move": (Moving, two_groups),
}


@pytest.mark.parametrize(("name", "workers"), sample("schedules that look", itertools.product(CASES, [1, 2, 3]), 2))
def test_workers_change_nothing(name, workers):
    """A scheduler that looks at parameters ends in the inline digest, which is not that of a plain one."""
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
    """A worker that ends after the scheduler looked at parameters is replaced; nothing is done again with others."""
    scheduler, optimizer = CASES[name]
    wanted = give(scheduler, optimizer).train(engine="inline").digest
    trapped = Trapped(MAKE, tmp_path, worker, step, place)
    assert give(scheduler, optimizer, trapped).train(engine="processes", workers=2).digest == wanted
    assert sprung(tmp_path) == 1


class Untold(Trapped):
    """Worker 0 keeps to itself what its scheduler came to, so that replacements do it again, with later weights."""

    def set(self):
        super().set()
        Worker._tell_scheduled = lambda worker, step: None


def test_a_planted_fault_shows(tmp_path):
    """The tests of deaths can fail: a rate that is found again from later weights is another one."""
    wanted = give(*CASES["norm"]).train(engine="inline").digest
    trapped = Untold(MAKE, tmp_path, 1, 6, "COMPUTING")
    assert give(*CASES["norm"], trapped).train(engine="processes", workers=2).digest != wanted
    assert sprung(tmp_path) == 1


@pytest.mark.parametrize(("name", "half"), sample("resumed schedules", itertools.product(CASES, [2, 4, 6]), 1))
def test_a_resumed_run_goes_on_alike(tmp_path, name, half):
    """A run that goes on from a snapshot has the groups, flags and rates that it had there."""
    wanted = give(*CASES[name]).train(engine="inline").digest
    give(*CASES[name], steps=half).train(engine="inline", run_dir=tmp_path)
    assert give(*CASES[name]).train(engine="processes", workers=2, run_dir=tmp_path).digest == wanted


@pytest.mark.long
def test_a_group_added_later(tmp_path):
    """Parameters that a scheduler gives to the optimizer after some steps are updated from there on, by any engine."""

    def recipe(steps=STEPS):
        adding = Adding()
        return give(adding.scheduler, first_layer_later, adding, steps=steps)

    wanted = recipe().train(engine="inline").digest
    assert wanted != give(Plain, first_layer_later).train(engine="inline").digest
    for workers in (1, 2, 3):
        assert recipe().train(engine="processes", workers=workers).digest == wanted
    recipe(5).train(engine="processes", workers=2, run_dir=tmp_path)
    assert recipe().train(engine="inline", run_dir=tmp_path).digest == wanted


class Clamping(Plain):
    """Clamps weights, as torch sees."""

    def act(self):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.clamp_(-0.1, 0.1)


class ClampingData(Plain):
    """Clamps weights past torch's version counters."""

    def act(self):
        for parameter in self.parameters:
            parameter.data.clamp_(-0.1, 0.1)


class Replacing(Plain):
    """Gives weights other memory."""

    def act(self):
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()


class Forgetting(Plain):
    """Clears the state of the optimizer."""

    def act(self):
        self.optimizer.state.clear()


class Renewing(Plain):
    """Replaces the state of the optimizer."""

    def act(self):
        self.optimizer.state = {}


WRITING = [
    (Clamping, "wrote parameter"),
    (ClampingData, "wrote parameter"),
    (Replacing, "wrote parameter"),
    (Forgetting, "optimizer's state"),
    (Renewing, "optimizer's state"),
]


@pytest.mark.parametrize(
    ("options", "scheduler", "told"),
    [
        *(({"engine": "inline"}, *case) for case in WRITING),
        *sample("writing schedules", [({"engine": "processes", "workers": 2}, *case) for case in WRITING], 2),
    ],
)
def test_writing_is_refused(options, scheduler, told):
    """A scheduler that writes weights or looks at optimizer state is refused in every engine, with a way out."""
    with pytest.raises(phalanx.UsageError, match=rf"(?s){told}.*register_step_post_hook"):
        give(scheduler).train(**options)


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


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["sgd_nesterov", "adam_tensor_lr"])
def test_ordinary_schedulers_look_at_nothing(name, optimizer):
    """Torch's own schedulers are not taken for such as look at parameters: nothing is told or copied for them."""
    changes = {} if name != "one_cycle" else {"optimizer": OPTIMIZERS["sgd_nesterov"]}
    recipe = MLP.recipe(1, scheduler=SCHEDULERS[name], **({"optimizer": OPTIMIZERS[optimizer]} | changes))
    with recipe.start(engine="inline") as run:
        next(run)
        update: Update = run._engine._framework._updates
        assert not update.touched
        assert len(update.options()) == 3
