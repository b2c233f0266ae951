"""The jax framework: a tree of parameters with an optimizer's state, and the means to take both a step on."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import seams
from phalanx.definition import generators
from phalanx.definition.batches import as_batch
from phalanx.definition.data import Columns, Samples, Share, Source
from phalanx.definition.digest import digest_of
from phalanx.definition.evaluation import Metrics
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.arithmetic import Gradient, settled
from phalanx.frameworks.jax import devices as place
from phalanx.frameworks.jax import forward as batch
from phalanx.frameworks.jax.devices import Blocks
from phalanx.frameworks.jax.devices import available as available
from phalanx.frameworks.jax.environment import Environment, check_threads
from phalanx.frameworks.jax.forward import Forward
from phalanx.frameworks.jax.optimizer import Update
from phalanx.frameworks.jax.owners import Owners
from phalanx.frameworks.jax.sharing import Sharing
from phalanx.frameworks.jax.snapshot import State, adopt, captured, entries
from phalanx.frameworks.jax.tree import named, parted, placed, replaced
from phalanx.plan.shares import Parts
from phalanx.seams import Computed, Exported, Lanes, Measurement, Todo, Watch, Weights
from phalanx.seams.snapshots import Captured
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import Reentrant


class Jax:
    """Implements ``seams.Framework`` for jax.

    Nothing is written in place: a state is replaced by the next, so what went before needs no undoing. (In a worker
    process it lies in memory that is written between steps, see ``sharing``.)

    Attributes
    ----------
    name : str
        "jax".

    Parameters
    ----------
    definition : Definition
    devices : sequence of str
        Each computes a block of replicas, and has the optimizer's state for the parameters that it owns, see
        ``owners``; empty: one, where ``make_model`` puts the parameters.
    params : pytree
        What ``make_model`` returned.
    """

    name = "jax"
    lanes: Lanes | None = None
    told = (0.0, 0.0)

    def __init__(self, definition: Definition, devices: Sequence[str], params: Any) -> None:
        _check(definition)
        self.environment: AbstractContextManager[None] = Reentrant(Environment(definition.generators))
        with self.environment:
            found = place.found(devices, definition.replicas)
            self._forward = Forward(definition)
            params, beside = parted(params, stateful=self._forward.stateful)
            params = placed(params, found[0] if found else None)
            if len(found) > 1 and jax.tree.leaves(beside):
                raise UsageError(
                    f"devices is {list(devices)}, but a model with a state beside its parameters computes on one "
                    "device in this version; name one"
                )
            leaves = jax.tree.leaves(params)
            (self._device,) = leaves[0].devices()
            self.arithmetic = place.arithmetic_on(self._device)
            if self._device.platform == "cpu":
                check_threads(definition.threads)
            self._double = any(leaf.dtype == jnp.float64 for leaf in leaves)
            self._updates = Update(definition)
            self._state = State(params, jax.device_put(self._updates.begin(params), self._device), beside)
            self._deal(definition.replicas, found)
        self._parts = definition.micro_batches
        self._owned = definition.generators
        self.opened: Callable[[Source], Source] = _opened
        self.sharing: seams.Sharing = Sharing(self._state, self._updates, self._device)
        self._collate = definition.collate_fn or batch.collate

    def _deal(self, replicas: int, devices: Sequence[Any]) -> None:
        """With several devices, each computes a block of replicas and owns some of the parameters."""
        self._homes = devices or [self._device]
        self._copied: tuple[Any, dict[Any, Any]] = None, {}
        self._owners: Owners | None = None
        self._blocks: Blocks | None = None
        if len(devices) > 1:
            self._owners = Owners(self._updates, self._state.params, self._state.optimizer, devices)
            self._blocks = self.lanes = Blocks(replicas, devices, self._owners.owners)

    @property
    def lr(self) -> float:
        """Learning rate of the default optimizer; NaN for others, which keep theirs to themselves."""
        return self._updates.lr

    def gradients(self, todo: Sequence[Todo], watch: Watch | None = None) -> Iterator[Computed]:
        """See ``seams.Framework.gradients``: while one is waited for, the other devices compute the next."""
        begun: deque[Callable[[], Computed]] = deque()
        for replica, key, share, *_ in todo:
            params = self._params_on(self._device if self._blocks is None else self._blocks.device_of(replica))
            if watch is not None and not watch.parameters:
                self._tell(watch, params, key, share)
            begun.append(self._begun(params, key, share))
            if len(begun) >= len(self._homes):
                yield begun.popleft()()
        while begun:
            yield begun.popleft()()

    def norm(self, gradient: Gradient) -> float:
        """2-norm of ``gradient`` over all parameters."""
        return self.arithmetic.norm(gradient)

    def update(self, step: int, gradient: Gradient, buffers: Sequence[tuple[int, list[Any]]] | None) -> None:
        """See ``seams.Framework.update``; the state beside the parameters is settled as buffers are."""
        starts = jax.tree.leaves(self._state.buffers)
        for start, value in zip(starts, settled(buffers or [], starts), strict=True):
            if value is not start:
                start[...] = value
        if self._owners is None:
            self._updates.step(self._state, gradient)
        else:
            self._owners.step(self._state, gradient)

    def schedule(self, value: float, epoch: int | None = None) -> None:
        """Schedules are the optimizer's own."""

    def rewind(self) -> None:
        """Computing gradients leaves nothing behind."""

    def measure(self, metrics: Metrics, key: int, share: Share, weights: Weights | None) -> Measurement:
        """See ``seams.Framework.measure``."""
        with interrupts.held(), interrupts.user_code():
            samples = jax.device_put(self._batch(key, share), self._device)
            params = replaced(self._params_on(self._device), weights or {})
            if metrics.forward_fn is None:
                output = self._forward.output(params, samples, self._state.buffers)
            else:
                output = metrics.forward_fn(self._whole(params), samples)
            values = metrics.see(output, self._forward.target(samples) if metrics.targets else None, _home)
            return functools.partial(metrics.read, values, len(share.samples))

    def export(self, steps: int, *, copy: bool, digest: bool = True) -> Exported:
        """See ``seams.Framework.export``; containers are the caller's own, arrays cannot be written."""
        params = jax.tree.map(lambda leaf: leaf, self._params_on(self._device))
        told = digest_of(entries(params, self._state.optimizer, self._state.buffers), steps) if digest else ""
        return Exported(lambda: self._whole(params), named(params), told)

    def capture(self, *, copy: bool) -> Captured:
        """See ``seams.Framework.capture``: arrays are never written, so nothing is copied."""
        return captured(self._state, self._device)

    def adopt(self, state: Captured) -> None:
        """See ``seams.Framework.adopt``."""
        adopt(self._state, self._device, state)

    def _whole(self, params: Any) -> Any:
        """What ``make_model`` returns, with these parameters."""
        return (params, jax.tree.map(jnp.array, self._state.buffers)) if self._forward.stateful else params

    def _params_on(self, device: Any) -> Any:
        """All parameters on a device: with several, a copy per step of what others own."""
        if self._blocks is None:
            return self._state.params
        if self._copied[0] is not self._state.params:
            self._copied = self._state.params, {}
        copies = self._copied[1]
        if device not in copies:
            copies[device] = jax.device_put(self._state.params, device)
        return copies[device]

    def _begun(self, params: Any, key: int, share: Share) -> Callable[[], Computed]:
        """Begin to compute a gradient where ``params`` are; what is returned waits for it, or raises."""
        try:
            if self._parts > 1:
                return self._begun_in_parts(params, key, share)
            batch = self._batch(key, share)
            if self._blocks is not None:  # the next is made while this one is in use, maybe in the same memory
                batch = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch)
            return self._forward.begun(params, batch, key, state=self._state.buffers)
        except Exception as error:
            return functools.partial(_failed, error)

    def _begun_in_parts(self, params: Any, key: int, share: Share) -> Callable[[], Computed]:
        """Compute a replica whose share is cut: the means of its micro-batches, added in order."""
        pieces = share.cut(self._parts)
        parts = Parts([len(piece.samples) for piece in pieces])
        total: Gradient = []
        state = self._state.buffers
        for number, piece in enumerate(pieces):
            part = self._forward.begun(params, self._batch(None if number else key, piece), key, number, state=state)()
            state = jax.tree.unflatten(jax.tree.structure(state), part.buffers)
            weight = parts.add(number, part.loss, part.weight)
            gradient = part.gradient if weight else None
            if gradient is not None:
                gradient = gradient if weight == 1 else self.arithmetic.scale(gradient, weight)
                total = self.arithmetic.add(total, gradient) if total else gradient
        if total and parts.weight != 1:
            total = self.arithmetic.divide(total, parts.weight)
        left = jax.tree.leaves(state)
        computed = Computed(parts.loss, parts.returned, total or None, left)
        return lambda: computed

    def _tell(self, watch: Watch, params: Any, key: int, share: Share) -> None:
        """Batch, output and equations, computed for this by themselves: into a compiled program nobody can look."""
        samples = self._batch(key, share)
        watch.told("batch", "", samples)
        self._forward.tell(watch, params, jax.device_put(samples, self._device), key, self._state.buffers)

    def _batch(self, key: int | None, share: Share) -> Any:
        samples = share.read(share.samples)
        if key is not None:
            generators.seed(key, self._owned)
        whole = as_batch(samples, share, self._collate)
        return batch.checked(whole, share.origin, double=self._double)


def _opened(source: Source) -> Source:
    """See ``seams.Framework``: shares are taken from numpy arrays, over the same memory."""
    return source if isinstance(source, Samples) else Columns(tuple(map(batch.column, source.arrays)), source.rebuild)


def _home(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _failed(error: Exception) -> NoReturn:
    raise error


def _check(definition: Definition) -> None:
    """Refuse what means something for torch only."""
    if definition.phases is not None:
        raise UsageError(
            "phases is given, but make_model returned a tree of jax arrays, and phases are for torch in this version; "
            "let one optimizer update all: optax.multi_transform, over the sum of losses with jax.lax.stop_gradient"
        )
    if definition.forward_fn is None:
        raise UsageError(
            "make_model returned a tree of jax arrays, so there is no model to call; pass forward_fn=lambda params, "
            "x: ..., which returns the output"
        )
    if definition.precision is not None:
        raise UsageError(
            f"precision is {definition.precision!r}, which is torch's autocast; make jax parameters of that dtype in "
            "make_model, or convert them in forward_fn, and leave precision out"
        )
