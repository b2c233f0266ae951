"""A base for frameworks whose arrays numpy can read, and which compute in one process.

Such a framework says how a loss and its gradient are computed from a batch, how parameters are updated by a gradient,
and what the state is, as numpy arrays by name. Turns, batches, digests and snapshots are here. docs/frameworks.md
shows a whole framework.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import numpy as np

from phalanx.definition import checks, generators
from phalanx.definition.data import Columns, Samples, Share, Source, is_pair, target_of
from phalanx.definition.digest import Entry
from phalanx.definition.fields import WEIGHED, Definition
from phalanx.definition.metrics import Metrics
from phalanx.definition.plain import check_specs
from phalanx.errors import SnapshotError, UsageError
from phalanx.frameworks import arithmetic
from phalanx.frameworks.arithmetic import Gradient
from phalanx.frameworks.record import Unshared, array_of
from phalanx.plan.fold import place
from phalanx.seams.records import (
    CODES,
    STATE_DICT,
    Captured,
    Computed,
    Measurement,
    Tensor,
    Todo,
    Training,
    Watch,
    Weights,
)
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import Reentrant

LOSS_TAKES = "which is for torch; leave it out, and let forward_fn return the loss itself, with loss_fn=None"
OPTIMIZER = "optimizer."  # before the names of its arrays in a snapshot
FRAMEWORK, ENVIRONMENT = "framework", "environment"
NUMBERLESS = "OSUmM"  # numpy's kinds of objects, bytes, text and dates
MARGIN = 1e-6  # added to the norm where a gradient is clipped
Named = Mapping[str, np.ndarray]


@dataclass
class State:
    """What changes from step to step, as numpy arrays by name.

    Attributes
    ----------
    params, buffers, optimizer : dict of str to numpy.ndarray
    beside : str
        A prefix for the names of buffers in a snapshot, where they could equal names of parameters.
    """

    params: Named
    buffers: Named = field(default_factory=dict[str, np.ndarray])
    optimizer: Named = field(default_factory=dict[str, np.ndarray])
    beside: str = ""

    def entries(self) -> Iterator[Entry]:
        """The whole state, in a digest's order: parameters, buffers, then the optimizer's."""
        for kind, part in (("parameter", self.params), ("buffer", self.buffers), ("optimizer", self.optimizer)):
            for name, array in part.items():
                yield Entry(kind, name, array.dtype.name, array.shape, _bytes(array))

    def captured(self, framework: str, environment: Mapping[str, str]) -> Captured:
        """The state as a snapshot holds it. ``environment``: what changes bits and is not in a recipe."""
        weights = {**self.params, **_prefixed(self.beside, self.buffers)}
        facts = {FRAMEWORK: framework, ENVIRONMENT: environment, STATE_DICT: []}
        return Captured(_stored(weights), _stored(_prefixed(OPTIMIZER, self.optimizer)), facts)

    def taking_over(self, captured: Captured, framework: str) -> State:
        """The state with a snapshot's values; a snapshot without facts gives parameters and buffers only.

        Raises
        ------
        SnapshotError
            The snapshot is of another framework, or of other arrays; names the first.
        """
        optimizer = self.optimizer
        if captured.facts:
            if captured.facts.get(FRAMEWORK) != framework:
                raise SnapshotError(f"the snapshot is not of a {framework} recipe")
            stored = {name: item for name, item in captured.training.items() if name.startswith(OPTIMIZER)}
            optimizer = _fitted(self.optimizer, OPTIMIZER, stored)
        fitted = _fitted({**self.params, **_prefixed(self.beside, self.buffers)}, "", captured.weights)
        params = {name: fitted[name] for name in self.params}
        buffers = {name: fitted[self.beside + name] for name in self.buffers}
        return State(params, buffers, optimizer, self.beside)


class ArrayFramework:
    """Most of ``seams.Framework``. A framework defines ``update``, ``export``, and what raises NotImplementedError.

    Parameters
    ----------
    definition : Definition
    collate : callable
        Makes a batch of a list of samples, in a recipe without ``collate_fn``.
    *contexts : context manager
        Entered around steps, together with what restores random generators. Each is entered many times.

    Attributes
    ----------
    lr : float
        The learning rate of the next step; NaN where the optimizer does not show it.
    environment : context manager
    recorded : dict of str to str
        The part of the environment that a snapshot records.
    checked : callable or None
        ``checked(batch, origin)``: a batch as ``begin`` takes it; ``origin`` is the caller's name for it.
    """

    name: ClassVar[str]
    lr: float = math.nan
    lanes: Blocks | None = None
    following: Callable[[], Sequence[Todo]] | None = None  # nothing is read ahead
    held: Mapping[str, Any] = MappingProxyType({})  # programs are traced once
    checked: Callable[[Any, str], Any] | None = None
    options_checksum = (0.0, 0.0)
    written: Sequence[str] = ()
    has_modes = False
    arithmetic: Any = arithmetic
    sharing: Any = Unshared("make_model returned what computes in one process; leave workers out (same answer)")

    def __init__(
        self, definition: Definition, collate: Callable[[Any], Any], *contexts: AbstractContextManager[Any]
    ) -> None:
        refuse(definition, {"buffers": "which is for torch; leave it out: buffers that differ become the mean"})
        if definition.over_batch(0) and not hasattr(self, "outputs"):
            refuse(definition, {"loss_over": "which is for torch and jax; leave it out, or use replicas=1"})
        self.definition = definition
        self.environment: AbstractContextManager[None] = Reentrant(generators.kept(definition.generators), *contexts)
        self.collate = definition.collate_fn or collate
        self.recorded: dict[str, str] = {}

    def begin(self, device: int, key: int, share: Share) -> Callable[[], Computed]:
        """Begin to compute loss and gradient of ``batch(key, share)`` on a device; the returned function waits."""
        raise NotImplementedError

    def read(self) -> State:
        """The state. Arrays may be views, which are valid until the next update."""
        raise NotImplementedError

    def write(self, state: State) -> None:
        """Go on from this state."""
        raise NotImplementedError

    def see(self, metrics: Metrics, key: int, share: Share, weights: Weights | None) -> Any:
        """What ``metrics.see`` says of a chunk of samples, in evaluation mode."""
        raise NotImplementedError

    def tell(self, watch: Watch, device: int, key: int, share: Share) -> None:
        """Tell what is computed on the way to a gradient. The base tells nothing: captured programs show nothing."""

    def opened(self, source: Source) -> Source:
        """Columns as numpy arrays over the same memory, from which shares are taken."""
        return source if isinstance(source, Samples) else Columns(tuple(map(_column, source.arrays)), source.rebuild)

    def gradients(self, todo: Sequence[Todo], watch: Watch | None = None) -> Iterator[Computed]:
        """While one replica is waited for, the other devices compute the next ones."""
        begun: deque[Callable[[], Computed]] = deque()
        for replica, key, share, *_ in todo:
            device = 0 if self.lanes is None else self.lanes.number_of[replica]
            if watch is not None and not watch.parameters:
                self.tell(watch, device, key, share)
            begun.append(self._begun(device, key, share))
            if self.lanes is None or len(begun) >= len(self.lanes.placement.blocks):
                yield begun.popleft()()
        while begun:
            yield begun.popleft()()

    def batch(self, key: int | None, share: Share) -> Any:
        """The batch of a share. Generators are seeded with the key once it is read, before it is collated."""
        samples = share.read()
        if key is not None:
            generators.seed(key, self.definition.generators)
        whole = share.batch(samples, self.collate)
        return whole if self.checked is None else self.checked(whole, share.origin)

    def measure(self, metrics: Metrics, key: int, share: Share, weights: Weights | None) -> Measurement:
        """Metrics over a chunk."""
        with interrupts.held(), interrupts.user_code():
            return functools.partial(metrics.read, self.see(metrics, key, share, weights), len(share.samples))

    def eval_point(self) -> None:
        """None is needed."""

    def norm(self, gradient: Gradient, losses: Sequence[Any], buffers: Any = None) -> Callable[..., list[float]]:
        """2-norm of ``gradient`` over all parameters, and losses."""
        return lambda: [self.arithmetic.norm(gradient), *self.arithmetic.read(list(losses))]

    def clipped(self, gradient: Gradient) -> Gradient:
        """``gradient`` with a norm of at most ``max_norm``, as torch does it."""
        if not math.isfinite(self.definition.max_norm):
            return gradient
        norm = self.arithmetic.norm(gradient)
        return self.arithmetic.scale(gradient, min(1.0, self.definition.max_norm / (norm + MARGIN)))

    def schedule(self, value: float | Training, epoch: int | None = None) -> None:
        """Schedules are the optimizer's own, and so is what it freezes."""
        if isinstance(value, Training):
            raise UsageError(
                f"freeze and thaw are for models of torch; in {self.name} the optimizer decides what is updated: give "
                "it those parameters alone, as optax.masked does"
            )

    def rewind(self) -> None:
        """Does nothing: computing gradients leaves nothing behind."""

    def capture(self, *, copy: bool) -> Captured:
        """The state for a snapshot; ``read`` gives views of what is never written, or copies."""
        return self.read().captured(self.name, self.recorded)

    def adopt(self, state: Captured) -> None:
        """Go on from a snapshot."""
        self.write(self.read().taking_over(state, self.name))

    def _begun(self, device: int, key: int, share: Share) -> Callable[[], Computed]:
        """``begin``, but an error is raised only when it is this replica's turn."""
        try:
            return self.begin(device, key, share)
        except Exception as error:
            return functools.partial(_failed, error)


class Blocks:
    """Implements ``seams.Lanes``: each device computes a block of replicas, and the first updates.

    Parameters
    ----------
    replicas : int
    devices : int
    moved : callable
        Moves a vector to the first device.
    """

    def __init__(self, replicas: int, devices: int, moved: Callable[[Gradient], Gradient]) -> None:
        self.placement = place(replicas, devices)
        self.moved = moved
        self.number_of = {replica: number for number, block in enumerate(self.placement.blocks) for replica in block}


class Functions:
    """The recipe's functions, and what they may return.

    Parameters
    ----------
    definition : Definition

    Attributes
    ----------
    teller : str
        Which of them returns the loss.
    """

    kind: ClassVar[type]  # of arrays
    called: ClassVar[str]  # such an array, in words
    is_float: ClassVar[Callable[[Any], bool]]  # whether an array of this dtype can be a loss

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.teller = "forward_fn" if definition.loss_fn is None else "loss_fn"

    def seed(self) -> None:
        """Seed generators before a trace, so that every process that compiles draws the same numbers."""
        generators.seed(self.definition.seed, self.definition.generators)

    def input(self, batch: Any) -> Any:
        """What ``forward_fn`` gets of a batch."""
        return batch[0] if is_pair(batch) and self.definition.loss_fn is not None else batch

    def target(self, batch: Any, target_fn: Callable[..., Any] | None = None) -> Any:
        """The target for a batch; ``target_fn``: in place of the recipe's."""
        return (target_fn or self.definition.target_fn or target_of)(batch)

    def loss(self, output: Any, batch: Any) -> tuple[Any, Any]:
        """The loss, and the weight returned with it, or None.

        Raises
        ------
        UsageError
            The loss is no real scalar.
        """
        return self.loss_of(output, None if self.definition.loss_fn is None else self.target(batch))

    def loss_of(self, output: Any, target: Any) -> tuple[Any, Any]:
        """The same, given the target."""
        loss_fn = self.definition.loss_fn
        if loss_fn is None:
            return self._checked(getattr(output, "loss", output))
        with checks.noting(output, target):
            return self._checked(loss_fn(output, target))

    def _checked(self, value: Any) -> tuple[Any, Any]:
        pair: tuple[Any, Any] = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        loss, weight = pair
        if weight is not None and self.definition.loss_over == "batch":
            raise UsageError(WEIGHED)
        if isinstance(loss, dict):
            raise UsageError(
                f"{self.teller} returned {checks.outline(loss)}; named losses are for torch alone: return the mean "
                "loss, or (that, weight), and evaluate the others (phalanx.Evaluation)"
            )
        if not isinstance(loss, self.kind):
            self._refuse(f"a {type(loss).__name__}", f"{self.called}: the mean loss over the share")
        if loss.shape != () or not type(self).is_float(loss.dtype):
            self._refuse(
                f"an array of shape {loss.shape} and {loss.dtype}", "a real scalar: average it, as in loss.mean()"
            )
        return loss, weight

    def measured(self, output: Any, target: Any) -> Any:
        """The loss of a chunk that is evaluated, or (loss, weight)."""
        loss, weight = self.loss_of(output, target)
        return loss if weight is None else (loss, weight)

    def weight(self, returned: Any) -> float | None:
        """A returned weight as a number; None if there was none."""
        return None if returned is None else checks.weight(self.teller, returned)

    def _refuse(self, got: str, wanted: str) -> NoReturn:
        raise UsageError(f"{self.teller} returned {got}; it must return {wanted}, or (that, weight)")


def refuse(definition: Definition, ways: Mapping[str, str]) -> None:
    """Refuse arguments that a recipe of this framework cannot have; ``ways``: by name, why not and what to do.

    Raises
    ------
    UsageError
        One is given.
    """
    for name, way in ways.items():
        value = getattr(definition, name)
        if value not in (None, 1, "output", "share"):
            raise UsageError(f"{name} is {repr(value) if isinstance(value, (int, str)) else 'given'}, {way}")


def check_leaf(name: str, leaf: Any, array: np.ndarray, *, double: bool, refused: str = NUMBERLESS) -> None:
    """Refuse a leaf of a batch that has no numbers, or 64 bits unless a parameter has them, too (``double``).

    ``refused``: numpy's kinds of dtypes that the framework cannot take.

    Raises
    ------
    UsageError
        It is refused; names it.
    """
    if array.dtype.kind in refused:
        raise UsageError(
            f"{name} is a {type(leaf).__name__} of {array.dtype}, which no array of the model's can hold; convert it "
            "to numbers"
        )
    if array.dtype in (np.float64, np.complex128) and not double:
        raise UsageError(
            f"{name} is {array.dtype}, but the model's parameters are not; dtypes are never changed behind your back: "
            "convert it with .astype(numpy.float32)"
        )


def _column(array: Any) -> np.ndarray:
    try:
        return np.asarray(array)
    except (TypeError, RuntimeError) as error:
        raise UsageError(
            f"a column of {array.dtype} cannot be read as a numpy array ({error}); pass a numpy array"
        ) from error


def _failed(error: Exception) -> NoReturn:
    raise error


def _stored(part: Named) -> dict[str, Tensor]:
    for name, array in part.items():
        if array.dtype.name not in CODES:
            raise UsageError(f"{name} is {array.dtype}, which no snapshot can hold; train without run_dir")
    return {name: Tensor(array.dtype.name, array.shape, _bytes(array)) for name, array in part.items()}


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _prefixed(prefix: str, part: Named) -> Named:
    return {prefix + name: array for name, array in part.items()}


def _fitted(part: Named, prefix: str, stored: Mapping[str, Tensor]) -> Named:
    """The stored arrays, if their specs are those of ``part``."""
    check_specs(_prefixed(prefix, part), stored)
    return {name: array_of(stored[prefix + name]) for name in part}
