"""Buffers that an optimizer or its step hook writes are kept, as in the plain loop. What hooks keep is looked for."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import phalanx
from tests.engines.deaths import Trapped

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
STEPS = 8
WAYS = {
    "inline": {"engine": "inline"},
    "two": {"workers": 2},
    "three": {"workers": 3},
    "auto": {"workers": "auto"},
    "devices": {"devices": ["cpu", "cpu"]},
}


class Centred(nn.Module):
    """Subtracts a centre, which nobody but the optimizer writes; forward writes statistics."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("teacher", torch.zeros(4))

    def forward(self, x):
        return self.head(self.body(x)) - self.centre + self.teacher.mean()


def write(model, seen=None):
    """Averages of a weight and of statistics that forward has just left; one is assigned, the other written."""
    with torch.no_grad():
        model.centre = 0.9 * model.centre + 0.1 * model.head.bias
        model.teacher.lerp_(model.body[1].running_mean, 0.25)
        if seen is not None:
            seen.append(len(seen))
            model.teacher.add_(len(seen) / 100)


def hooked(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer.register_step_post_hook(lambda *_: write(model))
    return optimizer


def before(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: write(model))
    return optimizer


def patched(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step = optimizer.step

    def both(closure=None):
        step(closure)
        write(model)

    optimizer.step = both
    return optimizer


class Writing(torch.optim.SGD):
    """An optimizer of one's own, which writes buffers itself."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.model = model

    def step(self, closure=None):
        super().step(closure)
        write(self.model)


def counting(model):
    """A hook that counts its calls in a list: nobody else has that count."""
    seen = []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer.register_step_post_hook(lambda *_: write(model, seen))
    return optimizer


def averaging(model):
    """A hook that begins an average of its own in the fifth step, between two looks at what the model holds."""
    optimizer, kept = torch.optim.Adam(model.parameters(), lr=0.05), {}

    def after(optimizer, *_):
        bias = model.head.bias
        if optimizer.state[bias]["step"] >= 5:
            average = kept.setdefault("average", bias.detach().clone())
            bias.data.copy_(average.lerp_(bias.detach(), 0.1))

    optimizer.register_step_post_hook(after)
    return optimizer


def slowing(model):
    """A hook that lowers the rate in the fifth step: the schedule does not know of it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def after(optimizer, *_):
        if optimizer.state[model.head.bias]["step"] == 5:
            optimizer.param_groups[0]["lr"] = 0.001

    optimizer.register_step_post_hook(after)
    return optimizer


def resetting(model):
    """A hook that begins with new moments in the fourth step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def after(optimizer, *_):
        if optimizer.state[model.head.bias]["step"] == 4:
            optimizer.state.clear()

    optimizer.register_step_post_hook(after)
    return optimizer


def adding(model):
    """A hook that keeps slow weights in the optimizer's state, as Lookahead does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def after(optimizer, *_):
        with torch.no_grad():
            for parameter in model.parameters():
                state = optimizer.state[parameter]
                slow = state.setdefault("slow", parameter.detach().clone())
                parameter.copy_(slow.lerp_(parameter, 0.5))

    optimizer.register_step_post_hook(after)
    return optimizer


KEPT = {"hooked": hooked, "before": before, "patched": patched, "own class": Writing}
APART = {"counting": counting, "slowing": slowing, "resetting": resetting, "adding": adding, "averaging": averaging}


def recipe(replicas, optimizer, make_model=Centred, **more):
    facts = {"batch_size": 16, "steps": STEPS, **more}
    return phalanx.Recipe(
        make_model, (X, Y), nn.functional.cross_entropy, replicas=replicas, optimizer=optimizer, **facts
    )


def seen(result):
    """All that a user sees of the state."""
    tensors = {**result.params, **dict(result.model.named_buffers())}
    return result.digest, {name: tensor.tolist() for name, tensor in tensors.items()}, result.loss_history


def quiet(recipe, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return seen(recipe.train(progress=False, **options))


@pytest.mark.cases(3)
@pytest.mark.parametrize("make", [*KEPT.values(), *APART.values()], ids=[*KEPT, *APART])
def test_a_lone_replica_is_the_plain_loop(make):
    """R = 1 has the digest of the loop that anyone would write, with all that hooks wrote."""
    plan = recipe(1, make).plan
    torch.manual_seed(0)
    model = Centred()
    optimizer = make(model)
    for step in range(plan.steps):
        with plan.seeded(step, 0):
            rows = plan.indices(step)
            nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = recipe(1, make).train(engine="inline")
    assert result.digest == phalanx.digest(model, optimizer, STEPS)
    unwritten = recipe(1, lambda named: torch.optim.Adam(named, lr=0.05)).train(engine="inline")
    assert unwritten.digest != result.digest


@pytest.mark.long
@pytest.mark.parametrize("make", [*KEPT.values(), *APART.values()], ids=[*KEPT, *APART])
def test_any_engine(make):
    """Four replicas end in the same state in every engine, with all buffers, without a warning."""
    wanted = quiet(recipe(4, make), **WAYS["inline"])
    for name, options in WAYS.items():
        assert quiet(recipe(4, make), **options) == wanted, name
    assert wanted[1]["teacher"] != [0.0] * 4 or make not in KEPT.values()


@pytest.mark.longest
@pytest.mark.parametrize("place", ["COMPUTING", "half updated", "UPDATED"])
@pytest.mark.parametrize("make", [hooked, before, patched], ids=["hooked", "before", "patched"])
def test_the_first_worker_may_die(tmp_path, make, place):
    """The state of a hooked optimizer of torch's is known, so a replacement of worker 0 goes on from it."""
    wanted = quiet(recipe(4, make), **WAYS["inline"])
    deadly = recipe(4, make, Trapped(Centred, tmp_path, 0, 5, place))
    result = deadly.train(workers=2, progress=False)
    assert next(incident.kind for incident in result.incidents) == "death"
    assert seen(result) == wanted


@pytest.mark.longest
@pytest.mark.parametrize("make", APART.values(), ids=APART)
def test_what_hooks_keep_apart_is_lost_aloud(tmp_path, make):
    """A hook that keeps or changes something of its own ends the run with worker 0, as nobody else has that."""
    with pytest.raises(phalanx.RunError, match="a step hook keeps or changes something"):
        recipe(4, make, Trapped(Centred, tmp_path, 0, 6, "COMPUTING")).train(workers=2, progress=False)


@pytest.mark.long
def test_a_resume_goes_on(tmp_path):
    """A run that is resumed with another number of workers has the same buffers."""
    wanted = quiet(recipe(4, hooked), **WAYS["inline"])
    with recipe(4, hooked).start(workers=2, run_dir=tmp_path, snapshot_every=1, progress=False) as run:
        for report in run:
            if report.step == 3:
                break
    with pytest.warns(UserWarning, match="step hooks"):
        assert seen(recipe(4, hooked).train(workers=3, run_dir=tmp_path, progress=False)) == wanted


class Keeping(Centred):
    """Keeps its last output with its graph, as code that looks at activations does."""

    def forward(self, x):
        self.last = super().forward(x)
        KEPT_OUTPUTS.append(weakref.ref(self.last))
        return self.last


KEPT_OUTPUTS = []


@pytest.mark.long
@pytest.mark.parametrize("make", [hooked, lambda model: torch.optim.Adam(model.parameters())], ids=["hooked", "plain"])
def test_old_activations_are_freed(make):
    """What a model kept of an earlier step, with its graph, is gone when the model lets go of it, with hooks, too."""
    KEPT_OUTPUTS.clear()
    with recipe(2, make, Keeping).start(engine="inline", progress=False) as run:
        for _ in run:
            gc.collect()
            assert sum(each() is not None for each in KEPT_OUTPUTS) == 1


def by_process(model):
    """A hook that writes what only its process knows."""
    import os

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: model.teacher.fill_(os.getpid() % 1000))
    return optimizer


@pytest.mark.long
def test_what_differs_is_refused():
    """Where each worker does the update and they come to other values, the buffer is named in the next step."""
    with pytest.raises(phalanx.UsageError, match=r"wrote buffers \(teacher\)"):
        recipe(4, by_process).train(**WAYS["devices"], progress=False)


def resizing(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: setattr(model, "teacher", torch.zeros(5)))
    return optimizer


@pytest.mark.parametrize("way", ["inline", pytest.param("two", marks=pytest.mark.long)])
def test_another_shape_is_refused(way):
    """A hook that gives a buffer another shape is refused by the buffer's name."""
    with pytest.raises(phalanx.UsageError, match=r"'teacher' went from .* in the optimizer or its step hook"):
        recipe(2, resizing).train(**WAYS[way], progress=False)


class Moving(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that writes a buffer."""

    def __init__(self, optimizer, model):
        self.model = model
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch:
            self.model.teacher.add_(1)
        return self.base_lrs


@pytest.mark.parametrize("way", ["inline", pytest.param("two", marks=pytest.mark.long)])
def test_schedulers_write_no_buffers(way):
    """A scheduler is stepped by every worker at its own pace, so it may not write a buffer."""

    def optimizer(model):
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        made.of = model
        return made

    with pytest.raises(phalanx.UsageError, match="scheduler wrote parameter or buffer 'teacher'"):
        recipe(2, optimizer, scheduler=lambda made: Moving(made, made.of)).train(**WAYS[way], progress=False)
