"""What the caller has set or changes around a run: one rule for all engines."""

import contextlib
import functools
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENGINES = [{"engine": "inline"}, {"engine": "processes", "workers": 2}]
NAMES = ["inline", "2"]


def linear():
    return nn.Linear(4, 1)


def columns():
    x = torch.linspace(-1, 1, 48).reshape(12, 4).sin()
    return x, x.sum(1, keepdim=True)


def recipe(make_model=linear, data=None, **changes):
    given = {"replicas": 2, "batch_size": 4, "epochs": 2, "loss_fn": F.mse_loss} | changes
    return phalanx.Recipe(make_model, columns() if data is None else data, **given)


class Doubling(TorchDispatchMode):
    """Doubles gradients of ``mse_loss``."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is torch.ops.aten.mse_loss_backward.default else found


class DoublingFunctions(TorchFunctionMode):
    """Doubles what ``mse_loss`` gives."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is F.mse_loss else found


def halving():
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor / 2, lambda tensor: tensor)


MODES = {
    "dispatch": Doubling,
    "function": DoublingFunctions,
    "saved tensors": halving,
    "hooks refused": lambda: torch.autograd.graph.disable_saved_tensors_hooks("no"),
    "device and function": lambda: nested(torch.device("cpu"), DoublingFunctions()),
}
HARMLESS = {
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "device": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@contextlib.contextmanager
def nested(*contexts):
    with contextlib.ExitStack() as exits:
        for context in contexts:
            exits.enter_context(context)
        yield


@pytest.mark.parametrize("options", ENGINES, ids=NAMES)
@pytest.mark.parametrize("name", MODES)
def test_modes_around_a_run_are_refused(name, options):
    """Torch's modes and hooks around a run are refused by name before anything is computed, and stay as they are."""
    with MODES[name](), contextlib.nullcontext(around()) as before:
        with pytest.raises(
            phalanx.UsageError, match=r"inside .*(Doubling|saved_tensors_hooks) of torch|Functions of torch"
        ):
            recipe().train(**options)
        assert around() == before


@pytest.mark.parametrize("name", MODES)
def test_modes_around_a_step_are_refused(name):
    """So is one that is entered while a run is open; without it the run goes on to the bits of any other."""
    wanted = recipe().train(engine="inline").digest
    with recipe().start(engine="inline") as run:
        next(run)
        with MODES[name](), pytest.raises(phalanx.UsageError, match="leave the with block before"):
            next(run)
        run.finish()
        assert run.result().digest == wanted


@pytest.mark.long
@pytest.mark.parametrize("options", ENGINES, ids=NAMES)
@pytest.mark.parametrize("name", HARMLESS)
def test_settings_around_a_run_are_shut_out(name, options):
    """What workers have too, or what a run sets for itself, changes nothing in it, and is after it as before."""
    wanted = recipe(max_norm=0.5).train(engine="inline").digest
    with HARMLESS[name](), recipe(max_norm=0.5).start(**options) as run:
        before = around()
        next(run)
        assert around() == before
        run.finish()
        run.evaluate(F.mse_loss, columns())
        assert around() == before
        assert run.result().digest == wanted


def around():
    """What is active: modes by identity, and what they make of a loss and its gradient."""
    x = torch.ones(3, requires_grad=True)
    loss = F.mse_loss(x * x, torch.zeros(3))
    stack = torch.overrides._get_current_function_mode_stack()
    with contextlib.suppress(RuntimeError):
        loss.backward()
    return list(map(id, stack)), loss.item(), None if x.grad is None else x.grad.tolist()


@pytest.mark.parametrize("name", ["dispatch", "function", "saved tensors"])
def test_modes_have_an_effect(name):
    """The modes of the test above change what is computed where they are active."""
    plain = around()[1:]
    with MODES[name]():
        assert around()[1:] != plain


class Inside(nn.Module):
    """Enters a mode in forward, where it is everybody's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        with halving():
            return self.linear(x).tanh()


def test_modes_in_user_code_are_everybodys():
    """A mode that forward enters itself acts in all engines."""
    inline, workers = (recipe(Inside).train(**options).digest for options in ENGINES)
    assert inline == workers != recipe(lambda: nn.Sequential(nn.Linear(4, 1), nn.Tanh())).train(engine="inline").digest


def test_a_default_device_stays():
    """A default device reaches forward in all engines."""
    seen = []

    def forward(model, batch):
        seen.append(torch.get_default_device().type)
        return model(batch[0])

    given = recipe(lambda: nn.Linear(4, 1, device="cpu"), forward_fn=forward, epochs=1)
    with torch.device("meta"), given.start(engine="inline") as run:
        next(run)
    assert set(seen) == {"meta"}


@pytest.mark.parametrize("register", [modules.register_module_forward_hook, modules.register_module_forward_pre_hook])
def test_hooks_for_all_modules_are_refused_by_workers(register):
    """A hook for all modules of this process, which workers do not have, is refused by them and obeyed inline."""
    handle = register(lambda *_: None)
    try:
        with pytest.raises(phalanx.UsageError, match=r"hooks for all modules.*inline"):
            recipe().train(engine="processes", workers=2)
        recipe().train(engine="inline")
    finally:
        handle.remove()


def test_hooks_for_all_modules_are_refused_while_they_are_there():
    """Without such hooks workers take the recipe."""
    recipe().train(engine="processes", workers=2)


@pytest.mark.parametrize("options", ENGINES, ids=NAMES)
@pytest.mark.parametrize("column", [0, 1])
def test_a_tensor_that_is_changed_in_mid_run(column, options):
    """A column that the caller writes between two steps ends the run before the next; the state before is there."""
    data = columns()
    with recipe(data=data).start(**options) as run:
        next(run)
        data[column].mul_(2)
        with pytest.raises(phalanx.UsageError, match=rf"data was changed.*column {column} of 2") as caught:
            next(run)
    assert caught.value.result.digest == recipe(epochs=None, steps=1).train(engine="inline").digest


@pytest.mark.parametrize("options", ENGINES, ids=NAMES)
@pytest.mark.parametrize("rows", [12, 70_000])
def test_an_array_that_is_changed_in_mid_run(rows, options):
    """A numpy column that the caller writes is noticed at the end of the epoch, a small one by any row."""
    x = np.linspace(-1, 1, 4 * rows, dtype=np.float32).reshape(rows, 4)
    give = functools.partial(recipe, data=(x, x.sum(1, keepdims=True)), batch_size=-(-rows // 3))
    with give().start(**options) as run:
        next(run)
        x[slice(None) if rows > 12 else 5] += 1
        next(run)
        with pytest.raises(phalanx.UsageError, match="data was changed"):
            next(run)


@pytest.mark.long
@pytest.mark.parametrize("options", ENGINES, ids=NAMES)
def test_data_that_is_left_alone(options):
    """Columns of any kind that nobody writes are not complained of, nor are those that change between runs."""
    x, y = columns()
    with torch.inference_mode():
        inferred = x.clone()
    for data in ((x, y), (x.numpy(), y), (inferred, y), (x.bfloat16(), y.bfloat16())):
        recipe(data=data, forward_fn=lambda model, batch: model(batch[0].float())).train(**options)
    y.add_(1)
    recipe(data=(x, y)).train(**options)


class Frozen(nn.Module):
    """Is in train mode, though its only part is not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1).eval()

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("options", ENGINES, ids=NAMES)
def test_a_model_in_eval_mode_is_refused(options):
    """A model in eval mode is refused, with the way out, or trained so where that is said; parts are fine."""
    with pytest.raises(phalanx.UsageError, match=r"a Linear in eval mode.*model\.train\(\).*modes='as_made'"):
        recipe(lambda: nn.Linear(4, 1).eval()).train(**options)
    recipe(lambda: nn.Linear(4, 1).eval(), modes="as_made").train(**options)
    recipe(Frozen).train(**options)
    recipe(linear, forward_fn=lambda model, batch: model.train()(batch[0])).train(**options)
