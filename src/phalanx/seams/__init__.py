"""The seams between the step and what computes it: a handful of methods each, and nothing else.

A framework (torch, jax, tinygrad) computes a replica's gradient and applies the mean; a step sees only ``Framework``.
A gradient is a vector: a list with one entry per parameter, None where the parameter got none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from phalanx.definition.data import Share, Source
from phalanx.definition.evaluation import Metrics
from phalanx.plan.fold import Placement
from phalanx.seams.events import StepReport
from phalanx.seams.records import Computed as Computed
from phalanx.seams.records import Exported as Exported
from phalanx.seams.records import Measurement as Measurement
from phalanx.seams.records import Part as Part
from phalanx.seams.records import RunState as RunState
from phalanx.seams.records import Todo as Todo
from phalanx.seams.records import Watch as Watch
from phalanx.seams.records import Weights as Weights
from phalanx.seams.sharing import Sharing, Vector
from phalanx.seams.snapshots import Captured


class Arithmetic(Protocol):
    """Elementwise arithmetic over vectors; None entries are absent. The fold's order is decided elsewhere."""

    def add(self, left: Vector, right: Vector) -> Vector:
        """``left + right``; may write into ``left``."""
        ...

    def scale(self, vector: Vector, factor: float) -> Vector:
        """``vector * factor``; may write into ``vector``."""
        ...

    def divide(self, vector: Vector, divisor: float) -> Vector:
        """``vector / divisor``; may write into ``vector``."""
        ...

    def finite(self, vector: Vector) -> bool:
        """Whether every element is finite."""
        ...

    def checksum(self, vector: Sequence[Any]) -> int:
        """Of the bytes of all entries; waits for the devices that compute them."""
        ...

    def read(self, scalars: list[Any]) -> list[float]:
        """Losses as numbers; waits for the devices that compute them."""
        ...


class Link(Protocol):
    """How a worker reaches the others: what of a step is not computed alone. All of them call the same in turn.

    Attributes
    ----------
    hosted : sequence of int
        The replicas computed here, in order.
    """

    hosted: Sequence[int]

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        """Forget what an earlier step left; from here on replicas are computed."""
        ...

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        """Take what a hosted replica left: a gradient to be folded (None: nothing), and buffers if it had samples."""
        ...

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        """Give the parts of the hosted replicas, get those of all R in order."""
        ...

    def mean(self, weight: float) -> Vector:
        """The folded gradient over the sum of weights; None also for what another worker owns."""
        ...

    def norm(self, gradient: Vector) -> float:
        """2-norm over everything that ``mean`` returned anywhere."""
        ...

    def all_true(self, opinion: bool) -> bool:
        """Whether all workers are of this opinion."""
        ...

    def commit(self, step: int, gradient: Vector | None) -> None:
        """Update what this worker owns (None: leave the state as it is); returns when all have."""
        ...


class Framework(Protocol):
    """What an engine needs of a model with its optimizer: steps, and a view of the state between them.

    Attributes
    ----------
    name : str
        "torch", "jax" or "tinygrad".
    lanes : Lanes or None
        Its devices, if they are several, or one that computes by itself.
    arithmetic : Arithmetic
        How gradients are added, scaled and divided.
    sharing : Sharing
        How this state is shared with other processes.
    opened : callable
        ``opened(source)`` as this framework reads it: columns become its arrays, sharing memory where they can.
    environment : context manager
        Inside, generators, threads and modes are the run's; outside, the caller's. Entered once at a time.
    """

    name: str
    lanes: Lanes | None
    arithmetic: Arithmetic
    sharing: Sharing
    opened: Callable[[Source], Source]
    environment: AbstractContextManager[None]

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        ...

    @property
    def told(self) -> tuple[float, float]:
        """A checksum of the optimizers' options, and a learning rate: workers compare them before an update."""
        ...

    def gradients(self, todo: Sequence[Todo], watch: Watch | None = None) -> Iterator[Computed]:
        """Compute some replicas in turn, from the state at the step's start; runs user code.

        One is computed when it is asked for; others may have been begun by then. Who watches changes no bit.
        """
        ...

    def norm(self, gradient: Vector) -> float:
        """2-norm of ``gradient``, as the framework's own clipping computes it."""
        ...

    def update(self, step: int, gradient: Vector, buffers: Sequence[tuple[int, list[Any]]] | None) -> None:
        """Clip, do the optimizer's ``step``, settle the (samples, buffers) of replicas that ran; None: others do."""
        ...

    def rewind(self) -> None:
        """Undo what computing gradients left behind: buffers as at the step's start, no gradients."""
        ...

    def schedule(self, value: float, epoch: int | None = None) -> None:
        """Tell the scheduler the mean loss of a step, done or skipped; or a metric after an ``epoch``, if new."""
        ...

    def measure(self, metrics: Metrics, key: int, share: Share, weights: Weights | None) -> Measurement:
        """Begin metrics over one chunk of samples, in evaluation mode; changes nothing.

        What it returns waits for the devices, and gives a reading of each. ``weights`` stand in for parameters.
        """
        ...

    def export(self, steps: int, *, copy: bool, digest: bool = True) -> Exported:
        """The state after ``steps`` steps; ``copy`` makes it independent of the run."""
        ...

    def capture(self, *, copy: bool) -> Captured:
        """The state for a snapshot; ``copy``: it is to stay as it is while the run goes on."""
        ...

    def adopt(self, state: Captured) -> None:
        """Take over such a state; without facts, its parameters and buffers only."""
        ...


class Lanes(Protocol):
    """Several devices of this process, each with a copy of the model, that compute replicas at a time.

    Attributes
    ----------
    placement : Placement
        Which device computes which replicas.
    following : callable or None
        Says what the next step will compute, which may be read while this one is waited for.
    """

    placement: Placement
    following: Callable[[], Sequence[Todo]] | None

    def moved(self, vector: Vector) -> Vector:
        """A vector with each entry on the device that updates the parameter that it belongs to."""
        ...


class Engine(Protocol):
    """Where workers live. Takes a state from step to step, and shows it between two.

    Attributes
    ----------
    run_state : RunState
    workers : int
        W.
    environment : context manager
        Entered around many steps if nobody looks at the state between them.
    reading : context manager
        Entered around reading a stream in this process: generators and threads are the run's. Re-entrant.
    """

    run_state: RunState
    workers: int
    environment: AbstractContextManager[None]
    reading: AbstractContextManager[Any]

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Processes that compute, apart from this one."""
        ...

    def advance(self, batch: Any, horizon: int) -> StepReport:
        """Do a step: on ``batch``, which the caller or a stream brought, or the next planned one.

        Of planned ones it may run ahead up to ``horizon`` finished steps.
        """
        ...

    def pause(self) -> bool:
        """Begin no step that was not asked for; whether nothing is ahead of the last report any more."""
        ...

    def evaluate(self, metrics: Metrics, data: Any, batch_size: int, weights: Weights | None = None) -> list[Any]:
        """Readings of all chunks of ``data``, in order; ``weights`` stand in for the state's own."""
        ...

    def schedule(self, value: float, epoch: int) -> None:
        """Step the schedulers with the value of a metric after an epoch."""
        ...

    def export(self, *, copy: bool, digest: bool = True) -> Exported:
        """The state as of the last finished step. With neither copy nor digest it is to be looked at until the next."""
        ...

    def peek(self) -> dict[str, Any] | None:
        """What the first replica of the next step comes to, which is not done; None where that cannot be told."""
        ...

    def capture(self) -> Captured:
        """The state as of the last finished step, for a snapshot; it stays as it is while the run goes on."""
        ...

    def check_able(self) -> None:
        """Refuse, by a RunError that says why, to go on with a run that has ended."""
        ...

    def close(self) -> None:
        """End what the engine holds; ``export`` still works. The framework of the caller has the state again.

        If it could not be had, ``check_able`` says so.
        """
        ...
