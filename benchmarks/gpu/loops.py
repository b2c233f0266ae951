"""The loops of tests/by_hand.py on a device, and runs of the same recipes there, with workers that may share it."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import common
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

import phalanx
from phalanx.engines.devices import transport
from phalanx.frameworks.torch import accelerators
from tests import by_hand

FAULT = "CAMPAIGN_FAULT"  # of any value: gradients of all runs have another sign, so that a comparison must notice it
EVALUATE = by_hand.evaluate
Answer = tuple[str, list[float]]


class There:
    """A ``make_model`` whose model is on the device before an optimizer sees it."""

    def __init__(self, make_model: Any) -> None:
        self.make_model = make_model

    def __call__(self) -> torch.nn.Module:
        return self.make_model().to(common.DEVICE)


def evaluate(recipe: Any, model: torch.nn.Module, batch: Any) -> Any:
    """Loss and weight of a batch, which is moved to the device; autocast is the device's."""
    if isinstance(batch, list):
        batch = (recipe.collate_fn or default_collate)(batch)
    cast = torch.autocast(common.DEVICE.type, torch.bfloat16) if recipe.precision else contextlib.nullcontext()
    with cast:
        return EVALUATE(dataclasses.replace(recipe, precision=None), model, common.moved(batch))


@contextlib.contextmanager
def on_device(recipe: phalanx.Recipe) -> Iterator[phalanx.Recipe]:
    """Inside, the loops by hand compute this recipe on the device, with one thread and deterministic kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with common.deterministic(on=common.DEVICE.type != "cpu"), mock.patch.object(by_hand, "evaluate", evaluate):
            yield dataclasses.replace(recipe, make_model=There(recipe.make_model))
    finally:
        torch.set_num_threads(before)


def hand(recipe: phalanx.Recipe) -> Answer:
    """Digest and losses of the plain loop (R = 1), or of the folded one."""
    with on_device(recipe) as there:
        return by_hand.answer(there)


def averaged(recipe: phalanx.Recipe, decay: float) -> dict[str, torch.Tensor]:
    """What torch's ``AveragedModel`` has after the loop by hand, in host memory."""
    kept: list[AveragedModel] = []
    update = by_hand.update

    def updated(recipe: Any, model: torch.nn.Module, *facts: Any) -> None:
        update(recipe, model, *facts)
        kept[:] = kept or [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))]
        kept[0].update_parameters(model)

    with on_device(recipe) as there, mock.patch.object(by_hand, "update", updated):
        by_hand.answer(there)
    return {name: value.detach().cpu() for name, value in kept[0].module.named_parameters()}


class OverGloo:
    """A ``make_model`` whose processes exchange over Gloo from then on: NCCL wants a device for each of them."""

    def __init__(self, make_model: Any) -> None:
        self.make_model = make_model

    def __call__(self) -> Any:
        transport.BACKENDS.default_device_backend_map[common.DEVICE.type] = "gloo"  # planted
        return self.make_model()


class Asynchronous(OverGloo):
    """The same over ``cudaccl``, whose collectives hang as NCCL's do once a peer is gone."""

    def __call__(self) -> Any:
        import cudaccl

        cudaccl.register()  # planted
        return self.make_model()


class Negated:
    """A ``make_model`` whose gradients get another sign."""

    def __init__(self, make_model: Any) -> None:
        self.make_model = make_model

    def __call__(self) -> Any:
        model = self.make_model()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(torch.neg)
        return model


def options(workers: int = 1) -> dict[str, Any]:
    """Options of a run with so many workers, on as many devices as there are; 0: one in a process of its own."""
    if workers == 0:
        return {"devices": [str(common.DEVICE)], "engine": "processes"}
    if workers == 1:
        return {"devices": [str(common.DEVICE)], "engine": "inline"}
    return {"devices": [name for name, _ in zip(names(workers), range(workers), strict=False)]}


def names(workers: int) -> list[str]:
    """A device for each worker: its own, or the one that there is, several times."""
    if common.DEVICE.type == "cpu" or common.device_count() < workers:
        return [str(common.DEVICE)] * workers
    return [f"{common.DEVICE.type}:{number}" for number in range(workers)]


@contextlib.contextmanager
def sharing(recipe: phalanx.Recipe, workers: int, over: Any = OverGloo) -> Iterator[phalanx.Recipe]:
    """Inside, several workers may use one device, which phalanx refuses: they would only wait for each other."""
    if os.environ.get(FAULT):
        recipe = dataclasses.replace(recipe, make_model=Negated(recipe.make_model))
    if workers < 2 or common.DEVICE.type == "cpu" or common.device_count() >= workers:
        yield recipe
        return
    found = functools.partial(_found, accelerators.found)
    with mock.patch.object(accelerators, "found", found):  # planted
        yield dataclasses.replace(recipe, make_model=over(recipe.make_model))


def _found(original: Any, named: Any, replicas: int, home: torch.device, *, apart: bool) -> list[torch.device]:
    """The devices with these names, one of them several times if it is named so."""
    once = list(dict.fromkeys(named))
    found = original(once, replicas, home, apart=apart or len(named) > 1)
    return found * (len(named) if len(once) == 1 else 1)


def trained(recipe: phalanx.Recipe, workers: int = 1, **more: Any) -> phalanx.Result:
    """The recipe's result, computed by so many workers."""
    with sharing(recipe, workers) as shared:
        return shared.train(**options(workers), progress=False, **more)


def answer(recipe: phalanx.Recipe, workers: int = 1, **more: Any) -> Answer:
    """Digest and losses of a run."""
    result = trained(recipe, workers, **more)
    return result.digest, result.loss_history


def compared(wanted: Answer, came: Answer) -> common.Outcome:
    """Whether digest and losses are the same."""
    if repr(wanted) == repr(came):
        return common.SAME
    steps = [at for at, pair in enumerate(zip(wanted[1], came[1], strict=False)) if repr(pair[0]) != repr(pair[1])]
    losses = f"losses from step {steps[0]} on" if steps else "weights or state only"
    return common.Outcome("different", f"{losses}; digests {wanted[0][:10]} and {came[0][:10]}")
