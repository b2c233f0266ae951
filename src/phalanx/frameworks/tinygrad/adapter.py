"""The tinygrad framework: a model's tensors on one device or several, with an optimizer's state on the first."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import numpy as np
from tinygrad.helpers import Context
from tinygrad.nn.state import get_state_dict
from tinygrad.tensor import Tensor

from phalanx.definition import generators
from phalanx.definition.batches import as_batch
from phalanx.definition.data import Columns, Samples, Share, Source
from phalanx.definition.digest import digest_of
from phalanx.definition.evaluation import Metrics
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks import arithmetic
from phalanx.frameworks.arithmetic import Gradient, settled
from phalanx.frameworks.record import Unshared
from phalanx.frameworks.tinygrad import devices as place
from phalanx.frameworks.tinygrad import forward as batch
from phalanx.frameworks.tinygrad.devices import Blocks
from phalanx.frameworks.tinygrad.environment import Environment, recorded
from phalanx.frameworks.tinygrad.forward import Batch, Forward, plain
from phalanx.frameworks.tinygrad.lane import Lane
from phalanx.frameworks.tinygrad.listing import available as available
from phalanx.frameworks.tinygrad.model import opened, write
from phalanx.frameworks.tinygrad.optimizer import Update
from phalanx.frameworks.tinygrad.snapshot import State, adopted, captured, entries
from phalanx.frameworks.tinygrad.snapshot import array_of as array_of
from phalanx.seams import Computed, Exported, Lanes, Measurement, Todo, Watch, Weights
from phalanx.seams.snapshots import Captured
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import Reentrant


class Tinygrad:
    """Implements ``seams.Framework`` for tinygrad.

    Every device has a copy of the weights and computes a block of replicas. Gradients are read, and added in host
    memory; the first device has the optimizer, and its weights are copied to the others after an update. Buffers at the
    step's start are kept in host memory, and written to a device before each replica.

    Parameters
    ----------
    definition : Definition
    devices : sequence of str
        Empty: one, where ``make_model`` puts the parameters.
    whole : Any
        What ``make_model`` returned.
    """

    name = "tinygrad"
    arithmetic = arithmetic
    told = (0.0, 0.0)
    sharing: Any = Unshared(
        "the model is tinygrad's, which computes in one process: workers share weights in host memory, which its "
        "devices would copy in every step; leave workers out, and name several devices instead: devices=['CL:0', "
        "'CL:1'] (same answer)"
    )

    def __init__(self, definition: Definition, devices: Sequence[str], whole: Any) -> None:
        _check(definition)
        self.environment: AbstractContextManager[None] = Reentrant(
            Environment(definition.threads, definition.generators)
        )
        with self.environment:
            named = place.found(devices, definition.replicas)
            self._model = model = opened(whole)
            self._forward = Forward(definition)
            homes = named or [place.home_of(model)]
            self._lanes = [Lane(device, model, self._forward) for device in homes]
            first = self._lanes[0]
            own = {id(tensor): mine for tensor, mine in zip(model.tensors, first.tensors, strict=True)}
            self._updates = Update(definition, [own[id(tensor)] for tensor in model.listed], first.params)
            self._starts = [plain(tensor) for tensor in first.buffers]
            self._environment = recorded(first.device)
        shapes = [plain(tensor) for tensor in model.params.values()]
        self._double = any(array.dtype == np.float64 for array in shapes)
        self._blocks = Blocks(definition.replicas, homes) if len(homes) > 1 else None
        self.lanes: Lanes | None = self._blocks
        self._owned = definition.generators
        self.opened: Callable[[Source], Source] = _opened
        self._collate = definition.collate_fn or batch.collate

    @property
    def lr(self) -> float:
        """The optimizer's ``lr``; NaN where it has none."""
        return self._updates.lr

    def gradients(self, todo: Sequence[Todo], watch: Watch | None = None) -> Iterator[Computed]:
        """See ``seams.Framework.gradients``: while one is waited for, the other devices compute the next.

        Nobody can look into a captured program, so nothing is told.
        """
        begun: deque[Callable[[], Computed]] = deque()
        for replica, key, share, *_ in todo:
            lane = self._lanes[0 if self._blocks is None else self._blocks.number_of[replica]]
            begun.append(self._begun(lane, key, share))
            if len(begun) >= len(self._lanes):
                yield begun.popleft()()
        while begun:
            yield begun.popleft()()

    def norm(self, gradient: Gradient) -> float:
        """2-norm of ``gradient`` over all parameters."""
        return arithmetic.norm(gradient)

    def update(self, step: int, gradient: Gradient, buffers: Sequence[tuple[int, list[Any]]] | None) -> None:
        """See ``seams.Framework.update``."""
        self._updates.step(gradient)
        self._starts = settled(buffers or [], self._starts)
        self._spread()

    def schedule(self, value: float, epoch: int | None = None) -> None:
        """Schedules are the optimizer's own."""

    def rewind(self) -> None:
        """What replicas leave in buffers is written over before the next one."""

    def measure(self, metrics: Metrics, key: int, share: Share, weights: Weights | None) -> Measurement:
        """See ``seams.Framework.measure``."""
        if weights is not None or metrics.forward_fn is not None:
            raise UsageError(
                "averaged weights (callbacks.EMA) and forward_fn in predict() are for torch and jax: programs of "
                "tinygrad are captured with the recipe's own; leave them out"
            )
        with interrupts.held(), interrupts.user_code(), Context(TRAINING=0):
            output, target = self._lanes[0].output(self._batch(key, share), key, self._starts)
            generators.seed(key, self._owned)  # a trace may have drawn
            values = batch.numbers(metrics.see(output, target if metrics.targets else None, _home))
            return functools.partial(metrics.read, values, len(share.samples))

    def export(self, steps: int, *, copy: bool, digest: bool = True) -> Exported:
        """See ``seams.Framework.export``: always a copy, on the first device."""
        state = self._read()
        whole = self._model.copied({**state.params, **state.buffers}, self._lanes[0].device)
        named = get_state_dict(whole)
        params = {name: named[name] for name in self._model.params}
        return Exported(lambda: whole, params, digest_of(entries(state), steps) if digest else "")

    def capture(self, *, copy: bool) -> Captured:
        """See ``seams.Framework.capture``: what is read is a copy."""
        return captured(self._read(), self._environment)

    def adopt(self, state: Captured) -> None:
        """See ``seams.Framework.adopt``."""
        self._write(adopted(self._read(), self._environment, state))

    def _read(self) -> State:
        params = {name: plain(tensor) for name, tensor in zip(self._model.params, self._lanes[0].params, strict=True)}
        buffers = {name: array.copy() for name, array in zip(self._model.buffers, self._starts, strict=True)}
        return State(params, buffers, {name: plain(tensor) for name, tensor in self._updates.state.items()})

    def _write(self, state: State) -> None:
        self._starts = list(state.buffers.values())
        self._lanes[0].take(list(state.params.values()))
        for name, tensor in self._updates.state.items():
            write(tensor, state.optimizer[name])
        self._updates.look()
        self._spread()

    def _spread(self) -> None:
        """Copy the weights of the first device to the others."""
        if self._blocks is not None:
            params = [plain(tensor) for tensor in self._lanes[0].params]
            for lane in self._lanes[1:]:
                lane.take(params)

    def _begun(self, lane: Lane, key: int, share: Share) -> Callable[[], Computed]:
        """Begin to compute a gradient on a device; what is returned waits for it, or raises."""
        try:
            return lane.begin(self._batch(key, share), key, self._starts)
        except Exception as error:
            return functools.partial(_failed, error)

    def _batch(self, key: int, share: Share) -> Batch:
        samples = share.read(share.samples)
        generators.seed(key, self._owned)
        whole = as_batch(samples, share, self._collate)
        return Batch(whole, share.origin, double=self._double)


def _check(definition: Definition) -> None:
    """Refuse what recipes of tinygrad do not have."""
    several = definition.phases is not None, definition.micro_batches > 1
    for name, given in zip(("phases", "micro_batches"), several, strict=True):
        if given:
            way = "write the model in torch or jax" if name == "micro_batches" else "write the model in torch"
            raise UsageError(
                f"{name} is given, which is not for recipes of tinygrad in this version; leave it out, or {way}"
            )


def _opened(source: Source) -> Source:
    """See ``seams.Framework``: shares are taken from numpy arrays."""
    return source if isinstance(source, Samples) else Columns(tuple(map(np.asarray, source.arrays)), source.rebuild)


def _home(leaf: Any) -> Any:
    return plain(leaf).copy() if isinstance(leaf, Tensor) else leaf


def _failed(error: Exception) -> NoReturn:
    raise error
