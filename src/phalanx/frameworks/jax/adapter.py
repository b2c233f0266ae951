"""The jax framework: a tree of parameters with an optimizer's state, and the means to take both a step on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.definition.batches import cut
from phalanx.definition.data import Share
from phalanx.definition.digest import digest_of
from phalanx.definition.fields import Definition
from phalanx.definition.metrics import Metrics
from phalanx.errors import UsageError
from phalanx.frameworks.arithmetic import Gradient, settled
from phalanx.frameworks.arrays import LOSS_TAKES, ArrayFramework, Blocks, State, refuse
from phalanx.frameworks.jax import forward
from phalanx.frameworks.jax.environment import arithmetic_on, check_threads, compiling, devices_of, recorded
from phalanx.frameworks.jax.environment import available as available
from phalanx.frameworks.jax.forward import Forward
from phalanx.frameworks.jax.optimizer import Update
from phalanx.frameworks.jax.over_batch import OverBatch
from phalanx.frameworks.jax.sharing import Sharing
from phalanx.frameworks.jax.state import Trees, named, parted, placed, replaced
from phalanx.frameworks.jax.state import state_of as state_of
from phalanx.plan.shares import Parts
from phalanx.seams.records import Computed, Exported, Todo, Watch, Weights

REFUSED = {
    "phases": "but make_model returned a tree of jax arrays, and phases are for torch in this version; let one "
    "optimizer update all: optax.multi_transform, over the sum of losses with jax.lax.stop_gradient",
    "loss_takes": LOSS_TAKES,
    "precision": "which is torch's autocast; make jax parameters of that dtype in make_model, or convert them in "
    "forward_fn, and leave precision out",
    "scheduler": "but a jax recipe has its schedule in the optimizer: leave it out, as in "
    "optimizer=optax.adam(optax.cosine_decay_schedule(1e-3, decay_steps=1000))",
}


class Jax(ArrayFramework):
    """Implements ``seams.Framework`` for jax.

    Nothing is written in place: the next state replaces the last, so nothing has to be undone. (In a worker process the
    state lies in memory that is written between steps, see ``sharing``.)

    Parameters
    ----------
    definition : Definition
    devices : sequence of str
        Each computes a block of replicas, the first one updates. Empty: the device of ``make_model``'s parameters.
    model : pytree
        What ``make_model`` returned.
    """

    name = "jax"

    def __init__(self, definition: Definition, devices: Sequence[str], model: Any) -> None:
        refuse(definition, REFUSED)
        if definition.forward_fn is None:
            raise UsageError(
                "make_model returned a tree of jax arrays, so there is no model to call; pass forward_fn=lambda "
                "params, x: ..., which returns the output"
            )
        super().__init__(definition, forward.collate, compiling())
        with self.environment:
            resolved = devices_of(devices, definition.replicas)
            self._forward = Forward(definition)
            params, beside = parted(model, stateful=self._forward.stateful)
            params = placed(params, resolved[0] if resolved else None)
            leaves = jax.tree.leaves(params)
            (self._device,) = leaves[0].devices()
            self.arithmetic = arithmetic_on(self._device)
            self.recorded = recorded(self._device)
            if self._device.platform == "cpu":
                check_threads(definition.threads)
            self.checked = functools.partial(forward.checked, double=any(leaf.dtype == jnp.float64 for leaf in leaves))
            self._updates = Update(definition)
            self._state = Trees(params, jax.device_put(self._updates.begin(params), self._device), beside)
        if definition.over_batch(0):
            self._over = OverBatch(definition, self._forward, self.batch, self._begin_of, self.arithmetic.add)
        self._homes = resolved or [self._device]
        self._spread()
        self.lanes = Blocks(definition.replicas, len(resolved), self._moved) if len(resolved) > 1 else None
        self.lr = self._updates.lr
        self.sharing = Sharing(self._state, self._updates, self._device)

    def outputs(self, todo: Sequence[Todo]) -> Iterator[bytes]:
        for one in todo:
            yield self._over.said(one, keep=len(todo) == 1 and self.definition.micro_batches == 1)

    def over_batch(self, said: Sequence[bytes], key: int, phase: int) -> float:
        return float(self._over.compute(said))

    def gradients(self, todo: Sequence[Todo], watch: Watch | None = None) -> Iterator[Computed]:
        if not self.definition.over_batch(0):
            yield from super().gradients(todo, watch)
            return
        for one in todo:
            if watch is not None and not watch.parameters:
                self.tell(watch, 0, one.key, one.share)
            yield self._over.gradient(one)

    def _begin_of(self, replica: int) -> tuple[Any, Any]:
        """The parameters where a replica is computed, and the state at the step's start."""
        device = 0 if self.lanes is None else self.lanes.number_of[replica]
        return [self._state.params, *self._copies][device], self._state.buffers

    def begin(self, device: int, key: int, share: Share) -> Callable[[], Computed]:
        """Compute on a device with its copy of the parameters."""
        params = [self._state.params, *self._copies][device]
        if self.definition.micro_batches > 1:
            return self._begun_in_parts(params, key, share)
        batch = self.batch(key, share)
        if self.lanes is not None:  # the next batch is made while this one is in use, maybe in the same memory
            batch = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch)
        return self._forward.begun(params, batch, key, state=self._state.buffers)

    def _begun_in_parts(self, params: Any, key: int, share: Share) -> Callable[[], Computed]:
        """Compute a replica whose share is cut: the means of its micro-batches, added in order."""
        pieces = cut(share, self.definition.micro_batches)
        parts = Parts([len(piece.samples) for piece in pieces])
        total: Gradient = []
        state = self._state.buffers
        for number, piece in enumerate(pieces):
            part = self._forward.begun(params, self.batch(None if number else key, piece), key, number, state=state)()
            state = jax.tree.unflatten(jax.tree.structure(state), part.buffers)
            weight = parts.add(number, part.loss, part.weight)
            gradient = part.gradient if weight else None
            if gradient is not None:
                gradient = gradient if weight == 1 else self.arithmetic.scale(gradient, weight)
                total = self.arithmetic.add(total, gradient) if total else gradient
        if total and parts.weight != 1:
            total = self.arithmetic.divide(total, parts.weight)
        computed = Computed(parts.loss, parts.returned, total or None, jax.tree.leaves(state))
        return lambda: computed

    def tell(self, watch: Watch, device: int, key: int, share: Share) -> None:
        """Batch, output and equations, computed separately for this."""
        samples = self.batch(key, share)
        watch.report("batch", "", samples)
        samples = jax.device_put(samples, self._device)
        self._forward.tell(watch, self._state.params, samples, key, self._state.buffers)

    def update(self, step: int, gradient: Gradient, buffers: Sequence[tuple[int, list[Any]]] | None) -> None:
        """Settle the state beside the parameters by the rule of buffers, and call the optimizer."""
        starts = jax.tree.leaves(self._state.buffers)
        for start, value in zip(starts, settled(buffers or [], starts), strict=True):
            if value is not start:
                start[...] = value
        self._updates.step(self._state, gradient)
        self._spread()

    def see(self, metrics: Metrics, key: int, share: Share, weights: Weights | None) -> Any:
        """What the metrics say; they are not compiled."""
        samples = jax.device_put(self.batch(key, share), self._device)
        params = replaced(self._state.params, weights or {})
        if metrics.forward_fn is None:
            output = self._forward.output(params, samples, self._state.buffers)
        else:
            output = metrics.forward_fn(self._whole(params), self._forward.input(samples))
        target = self._forward.target(samples, metrics.target_fn) if metrics.targets else None
        return metrics.see(output, target, _home, functools.partial(self._forward.measured, output, target))

    def export(self, steps: int, *, copy: bool, digest: bool = True) -> Exported:
        """Containers are the caller's own, arrays cannot be written."""
        params = jax.tree.map(lambda leaf: leaf, self._state.params)
        hexdigest = digest_of(self.read().entries(), steps) if digest else ""
        return Exported(lambda: self._whole(params), named(params), hexdigest)

    def read(self) -> State:
        """Arrays are never written, so nothing is copied."""
        return self._state.read()

    def write(self, state: State) -> None:
        """On the first device; the others get copies of the parameters."""
        self._state.write(state)
        self._spread()

    def _whole(self, params: Any) -> Any:
        """What ``make_model`` returns, with these parameters."""
        return (params, jax.tree.map(jnp.array, self._state.buffers)) if self._forward.stateful else params

    def _spread(self) -> None:
        """Copy the parameters to the devices that update none."""
        self._copies = [jax.device_put(self._state.params, home) for home in self._homes[1:]]

    def _moved(self, vector: Gradient) -> Gradient:
        return [jax.device_put(entry, self._device) for entry in vector]


def _home(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf
