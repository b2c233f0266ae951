"""The tinygrad framework: a model's tensors on one device or several, with an optimizer's state on the first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tinygrad.helpers import Context
from tinygrad.nn.state import get_state_dict
from tinygrad.tensor import Tensor

from phalanx.definition import generators
from phalanx.definition.data import Share, map_tree
from phalanx.definition.digest import digest_of
from phalanx.definition.fields import Definition
from phalanx.definition.metrics import Metrics
from phalanx.errors import UsageError
from phalanx.frameworks.arithmetic import Gradient, settled
from phalanx.frameworks.arrays import LOSS_TAKES, ArrayFramework, Blocks, State, refuse
from phalanx.frameworks.record import Unshared
from phalanx.frameworks.tinygrad.devices import available as available
from phalanx.frameworks.tinygrad.devices import devices_of, recorded, settings
from phalanx.frameworks.tinygrad.lane import Batch, Forward, Lane, collate
from phalanx.frameworks.tinygrad.model import Update, numbers_of, opened, plain, write
from phalanx.frameworks.tinygrad.model import state_of as state_of
from phalanx.seams.records import Computed, Exported, Weights
from phalanx.surroundings.turns import Anew

ELSEWHERE = "which is not for recipes of tinygrad in this version; leave it out, or write the model in torch"
REFUSED = {
    "phases": ELSEWHERE,
    "micro_batches": f"{ELSEWHERE} or jax",
    "scheduler": "but in a recipe with tinygrad the optimizer has its schedule: leave it out, and assign to self.lr in "
    "schedule_step of a subclass",
    "loss_takes": LOSS_TAKES,
    "precision": "but tinygrad has no autocast: leave it out, and cast in forward",
}


class Tinygrad(ArrayFramework):
    """Implements ``seams.Framework`` for tinygrad.

    Every device has a copy of the weights and computes a block of replicas. Gradients are read, and added in host
    memory; the first device has the optimizer, and its weights are copied to the others after an update. Buffers at the
    step's start are kept in host memory, and written to a device before each replica.

    Parameters
    ----------
    definition : Definition
    devices : sequence of str
        Empty: the device of ``make_model``'s parameters.
    whole : Any
        What ``make_model`` returned.
    """

    name = "tinygrad"
    sharing = Unshared(
        "the model is tinygrad's, which computes in one process: workers share weights in host memory, which its "
        "devices would copy in every step; leave workers out, and name several devices instead: devices=['CL:0', "
        "'CL:1'] (same answer)"
    )

    def __init__(self, definition: Definition, devices: Sequence[str], whole: Any) -> None:
        refuse(definition, REFUSED)
        super().__init__(definition, collate, Anew(functools.partial(settings, definition.threads)))
        with self.environment:
            named = devices_of(devices, definition.replicas)
            self._model = model = opened(whole)
            homes = named or [model.home]
            functions = Forward(definition)
            self._lanes = [Lane(device, model, functions) for device in homes]
            first = self._lanes[0]
            own = {id(tensor): mine for tensor, mine in zip(model.tensors, first.tensors, strict=True)}
            self._updates = Update(definition, [own[id(tensor)] for tensor in model.listed], first.params)
            self._starts = [plain(tensor) for tensor in first.buffers]
            self.recorded = recorded(first.device)
        double = any(plain(tensor).dtype == np.float64 for tensor in model.params.values())
        self.checked = functools.partial(Batch, double=double)
        self.lanes = Blocks(definition.replicas, len(homes), list) if len(homes) > 1 else None
        self.lr = self._updates.lr

    def begin(self, device: int, key: int, share: Share) -> Callable[[], Computed]:
        """On a device's own copy of the weights."""
        return self._lanes[device].begin(self.batch(key, share), key, self._starts)

    def update(self, step: int, gradient: Gradient, buffers: Sequence[tuple[int, list[Any]]] | None) -> None:
        """On the first device; the others get copies of its weights."""
        self._updates.step(self.clipped(gradient))
        self._starts = settled(buffers or [], self._starts)
        self._spread()

    def see(self, metrics: Metrics, key: int, share: Share, weights: Weights | None) -> Any:
        """What the metrics say, with TRAINING off."""
        if weights is not None or metrics.forward_fn is not None:
            raise UsageError(
                "averaged weights (callbacks.EMA), and forward_fn in predict() and evaluations, are for torch and jax: "
                "programs of tinygrad are captured with the recipe's own; leave them out"
            )
        with Context(TRAINING=0):
            batch = self.batch(key, share)
            output, target = self._lanes[0].output(batch, key, self._starts, metrics.target_fn)
            generators.seed(key, self.definition.generators)  # a trace may have drawn
            loss = functools.partial(self._lanes[0].measured, output, target)
            return map_tree(_home, metrics.see(output, target if metrics.targets else None, _home, loss))

    def export(self, steps: int, *, copy: bool, digest: bool = True) -> Exported:
        """Always a copy, on the first device."""
        state = self.read()
        whole = self._model.copied({**state.params, **state.buffers}, self._lanes[0].device)
        named = get_state_dict(whole)
        params = {name: named[name] for name in self._model.params}
        return Exported(lambda: whole, params, digest_of(state.entries(), steps) if digest else "")

    def read(self) -> State:
        """What is read from a device is a copy."""
        params = {name: plain(tensor) for name, tensor in zip(self._model.params, self._lanes[0].params, strict=True)}
        buffers = {name: array.copy() for name, array in zip(self._model.buffers, self._starts, strict=True)}
        return State(params, buffers, numbers_of(self._updates.state))

    def write(self, state: State) -> None:
        """To all devices."""
        self._starts = list(state.buffers.values())
        self._lanes[0].take(list(state.params.values()))
        for name, tensor in self._updates.state.items():
            write(tensor, state.optimizer[name])
        self._spread()

    def _spread(self) -> None:
        """Copy the first device's weights to the others, and read the learning rate of the next step."""
        self.lr = self._updates.lr
        if len(self._lanes) > 1:
            params = [plain(tensor) for tensor in self._lanes[0].params]
            for lane in self._lanes[1:]:
                lane.take(params)


def _home(leaf: Any) -> Any:
    return plain(leaf).copy() if isinstance(leaf, Tensor) else leaf
