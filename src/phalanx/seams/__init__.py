"""Protocols between rooms: a step, what computes it, where workers live, and its observers. A few methods each.

A framework (torch, jax, tinygrad) computes a replica's gradient and applies the mean; a step sees only ``Framework``.
A gradient is a vector: a list with one entry per parameter, None where the parameter got none, or where it is another
worker's.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, Protocol

import numpy as np

from phalanx.definition.data import Share, Source
from phalanx.definition.metrics import Metrics
from phalanx.errors import PhalanxError
from phalanx.plan.fold import Placement
from phalanx.seams.records import (
    Captured,
    Computed,
    Exported,
    Incident,
    Measurement,
    Part,
    Progress,
    RunOptions,
    Seen,
    StepReport,
    Todo,
    Training,
    Vector,
    Watch,
    Weights,
)

Places = Mapping[int, tuple[mmap.mmap, int]]
Order = Callable[[tuple[int, ...]], Sequence[tuple[int, int]]]
NEVER: Final = sys.maxsize  # a horizon: this observer can do without the state until the run ends


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
    """How workers exchange what a step needs of the others. All of them call the same methods in the same order.

    Attributes
    ----------
    hosted : sequence of int
        The replicas computed here, in order.
    """

    hosted: Sequence[int]

    def begin(self, step: int, shares: Sequence[Share]) -> None:
        """Forget what an earlier step left; from here on replicas are computed."""

    def share(self, said: Iterable[bytes]) -> list[bytes]:
        """Take what each hosted replica says, as it comes; get what those of all R say, in order."""
        ...

    def push(self, replica: int, samples: int, gradient: Vector | None, buffers: list[Any]) -> None:
        """Take what a hosted replica computed: a gradient to fold (None: nothing), and buffers if it had samples."""

    def all_gather(self, parts: Sequence[Part]) -> list[Part]:
        """Give the parts of the hosted replicas, get those of all R in order."""
        ...

    def mean(self, weight: float) -> Vector:
        """The folded gradient over the sum of weights; None also for what another worker owns."""
        ...

    def norm(self, gradient: Vector, parts: list[Part]) -> tuple[float, list[Part]]:
        """2-norm of all that ``mean`` returned anywhere, and parts with numbers for losses; a step waits only here."""
        ...

    def all_true(self, opinion: bool) -> bool:
        """Whether this is true in all workers."""
        ...

    def commit(self, step: int, gradient: Vector | None) -> None:
        """Update what this worker owns (None: leave the state as it is); returns when all have."""


class Framework(Protocol):
    """What an engine needs of a model with its optimizer: steps, and a view of the state between them.

    Attributes
    ----------
    name : str
        "torch", "jax", "tinygrad" or another that is registered.
    lanes : Lanes or None
        Its devices, if it has several in one process.
    arithmetic : Arithmetic
        How gradients are added, scaled and divided.
    sharing : Sharing
        How this state is shared with other processes.
    opened : callable
        ``opened(source)`` as this framework reads it: columns become its arrays, sharing memory where they can.
    environment : context manager
        Inside, generators, threads and modes are the run's; outside, the caller's. Entered once at a time.
    written : sequence of str
        The buffers that the optimizer wrote itself in the last update here, for messages.
    following : callable or None
        Says what the next step will compute, which may be read while this one is waited for.
    held : dict of str to object
        What may keep something from call to call beside the recipe's functions: the model, if it is an object.
    has_modes : bool
        Whether an optimizer has two modes: the model is trained at one point, and evaluated at another.
    eval_point : callable
        Returns where such an optimizer wants the model evaluated, in memory of its own; None if none has two modes.
    """

    name: str
    lanes: Lanes | None
    arithmetic: Arithmetic
    sharing: Sharing
    opened: Callable[[Source], Source]
    environment: AbstractContextManager[None]
    written: Sequence[str]
    following: Callable[[], Sequence[Todo]] | None
    held: Any
    has_modes: bool
    eval_point: Any

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        ...

    @property
    def options_checksum(self) -> tuple[float, float]:
        """A checksum of the optimizers' options, and a learning rate: workers compare them before an update."""
        ...

    def gradients(self, todo: Sequence[Todo], watch: Watch | None = None) -> Iterator[Computed]:
        """Compute some replicas in turn, from the state at the step's start; runs user code.

        Each is computed when it is asked for; others may have begun by then. Watching changes no bit.
        """
        ...

    def outputs(self, todo: Sequence[Todo]) -> Iterator[bytes]:
        """For a loss over the whole batch: what each of these replicas says to all; runs user code."""
        ...

    def over_batch(self, said: Sequence[bytes], key: int, phase: int) -> float:
        """Compute that loss from what all R said; ``gradients`` goes back from there until the next ``outputs``.

        Returns a checksum of the outcome, which is the same in all workers; runs user code.
        """
        ...

    def norm(
        self, gradient: Vector, losses: Sequence[Any], buffers: Sequence[tuple[int, list[Any]]] | None = None
    ) -> Callable[..., list[float]]:
        """Begin the 2-norm of ``gradient``, as the framework's own clipping computes it.

        What it returns waits for the device, once, and gives the norm and then the ``losses`` as numbers. On devices it
        may be called with a function that waits, given another that says whether they are there. ``buffers``: what
        ``update`` will be given, so that it may be begun.
        """
        ...

    def update(self, step: int, gradient: Vector, buffers: Sequence[tuple[int, list[Any]]] | None) -> None:
        """Clip, do the optimizer's ``step``, settle the (samples, buffers) of replicas that ran; None: others do."""

    def rewind(self) -> None:
        """Undo what computing gradients left behind: buffers as at the step's start, no gradients."""

    def schedule(self, value: float | Training, epoch: int | None = None) -> None:
        """Tell the scheduler the mean loss of a step, done or skipped; or a metric after an ``epoch``, if new.

        Or freeze and thaw parameters, which may be repeated.
        """

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


class Lanes(Protocol):
    """Several devices of this process, each with a copy of the model, that compute replicas at the same time.

    Attributes
    ----------
    placement : Placement
        Which device computes which replicas.
    moved : callable
        ``moved(vector)``: each entry on the device that updates the parameter that it belongs to.
    """

    placement: Placement
    moved: Callable[[Vector], Vector]


class Arrays(Protocol):
    """How a framework's arrays lie over memory; see ``shared.layout.Spec`` for what they look like.

    ``target[...] = source`` copies an array into another of the same shape and dtype.
    """

    def view(self, memory: mmap.mmap, offset: int, spec: Any) -> Any:
        """An array over memory."""
        ...

    def add_into(self, left: Vector, right: Vector, homes: Vector) -> Vector:
        """``left + right``, written into ``left``, which lies in ``homes``; what only ``right`` has moves there."""
        ...

    def add_up(self, parts: Sequence[Any], additions: Sequence[tuple[int, int]], first: int, divisor: float) -> Any:
        """Do the additions (into, from) between ``parts``, then divide part ``first``, and return it."""
        ...


class SharedState(Protocol):
    """A framework's state as one process has it: a worker, where it lies in an arena, or the caller, who copies it.

    Attributes
    ----------
    direct : bool
        Whether each gradient is written where ``aim`` says as soon as it is computed.
    """

    direct: bool

    @property
    def starts(self) -> Sequence[Any]:
        """The buffers at the step's start; of a worker, they lie in the arena."""
        ...

    def made(self, absent: Sequence[int]) -> Mapping[int, Any]:
        """Those of the ``absent`` pieces of optimizer state that exist now, by their number in the layout."""
        ...

    def adopt(self, pieces: Mapping[int, Any], *, more: bool = False) -> None:
        """Use these arrays as the pieces of optimizer state, and forget all others, or use these ``more``."""

    def rest(self) -> tuple[Any, Any]:
        """Optimizer state without a place, as far as it is this process's, and options of optimizers and schedules.

        Both can be pickled.
        """
        ...

    def take(self, foreign: Any, options: Any) -> None:
        """Continue from what ``rest`` returned."""

    def weights(self, numbers: Sequence[int] | None = None) -> Sequence[np.ndarray]:
        """The caller's: the bytes of each storage, in the layout's order; or of those with these ``numbers``."""
        ...

    def take_arrays(self, weights: Sequence[np.ndarray | None], buffers: Sequence[Any]) -> None:
        """The caller takes the bytes of storages, where there are any, and buffers; what is passed may change later."""

    def aim(self, homes: Vector | None) -> None:
        """Put the next replica's gradient there, if gradients are ``direct``; None: anywhere."""

    def norm(self, gradient: Vector, meet: Callable[[], None], there: Sequence[int] | None) -> float:
        """Write the norms of what this worker owns, ``meet`` the others, and return the global norm out of all.

        ``there``: which parameters have a gradient, None for all.
        """
        ...


class Sharing(Protocol):
    """How a framework shares its state with other processes.

    Attributes
    ----------
    arrays : Arrays
    moving_seconds : float
        About how long it takes until worker processes are ready, with the framework imported.
    portable : bool
        Whether the whole state is known, so that a run can move to other processes in the middle.
    devices : sequence of str
        Devices that were asked for, if each is a worker's.
    listen : callable
        ``listen(f)``: ``f(index, gradient)`` is called as soon as a backward pass has a parameter's gradient, until
        ``listen(None)``.
    averages : Averages or None
        An average of the weights that is kept beside the state: ``step(update)`` adds the weights once all phases of a
        step are done, ``named()`` returns it by names of parameters.
    keep_average : callable
        ``keep_average(rounds, decay, start=None)`` begins it, from an earlier one if that is given.
    """

    arrays: Arrays
    moving_seconds: float
    portable: bool
    devices: Sequence[str]
    averages: Any
    keep_average: Any
    listen: Any

    def lay_out(self, placement: Placement, take: Callable[[int], int], known: Any = None) -> Any:
        """Give everything its place in an arena.

        ``known``: what another process, which may be further on, has found the state to consist of.
        """
        ...

    def open(self, layout: Any, arena: mmap.mmap, worker: int | None) -> SharedState:
        """The state in this process: a worker's lies in the arena from here on; None: in the caller's."""
        ...

    def move(self, layout: Any, places: Places, *, stay: bool = False) -> None:
        """Move storages of this process's weights, by their number, to an offset into a memory.

        ``stay``: the same bytes are there already, so those whose memory somebody else has, too, may stay.
        """

    def look(self, layout: Any, arena: mmap.mmap, resting: Sequence[int], looks: dict[Any, Any]) -> Any:
        """What lies in the arena as ``Exported``, without a digest; shares memory where arrays are written.

        ``resting``: storages that the caller's state has as they are. ``looks``: for what is to be the same object the
        next time; it goes with the arena.
        """
        ...


class Engine(Protocol):
    """Where workers live. Takes a state from step to step, and shows it between two.

    Attributes
    ----------
    options, progress, seen : RunOptions, Progress, Seen
        What is noted about the run.
    workers : int
    environment : context manager
        Entered around many steps if nobody looks at the state between them.
    framework : str
    reading : context manager
        Entered around reading a stream in this process: generators and threads are the run's. Re-entrant.
    eval_point : callable
        Returns that of the framework, as of the last finished step.
    averaged : callable or None
        Returns the average of the weights by names of parameters, None before the first step; None unless workers keep
        one.
    """

    options: RunOptions
    progress: Progress
    seen: Seen
    workers: int
    framework: str
    environment: AbstractContextManager[None]
    reading: AbstractContextManager[Any]
    eval_point: Any
    averaged: Any

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
        """Begin no step that was not asked for; returns whether no worker is ahead of the last report any more."""
        ...

    def evaluate(self, metrics: Metrics, data: Any, batch_size: int, weights: Weights | None = None) -> list[Any]:
        """Readings of all chunks of ``data``, in order; ``weights`` stand in for the state's own."""
        ...

    def schedule(self, value: float | Training, epoch: int) -> None:
        """Step the schedulers with the value of a metric after an epoch; or freeze and thaw parameters."""

    def export(self, *, copy: bool, digest: bool = True) -> Exported:
        """The state as of the last finished step. With neither copy nor digest it is to be looked at until the next."""
        ...

    def peek(self) -> dict[str, Any] | None:
        """What the first replica of the next step computes, without doing the step; None if that cannot be told."""
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


class Observer:
    """What a run tells its observers. Each method does nothing here; an observer defines those that it needs.

    A run without observers pays nothing for them. With several, each step is told to all of them in one order, and
    ``end`` in the reverse: the first to begin ends last. What an observer raises reaches the caller; the later ones are
    told of that step before anything else is done. An observer must not change the state. None hears of single
    replicas yet: engines fold gradients piece by piece, so there is no whole one to show.

    Attributes
    ----------
    runs_user_code : bool
        Whether ``step`` calls the caller's own functions. They find generators, threads and modes as the caller has
        them, so the run leaves its environment for every step.
    """

    runs_user_code: ClassVar[bool] = False

    def begin(self, engine: Engine, run: Any = None) -> None:
        """Look on from here: ``engine`` has the state, ``engine.progress`` what was done so far, ``run`` shows it."""

    def horizon(self, steps: int) -> int:
        """How many finished steps the run may have before this must see the state again; ``steps`` are finished.

        Asked before every step after which the caller does not look at the run. Workers run no further ahead than the
        nearest horizon of all observers.
        """
        return NEVER

    def happened(self, incident: Incident) -> None:
        """Hear of something that happened to a worker, before the report of the step that was done next."""

    def brought(self, batch: Any) -> None:
        """Hear of the batch that the caller brought for the step that was done next, before its report."""

    def failed(self, error: PhalanxError) -> None:
        """Hear that a step failed; the state is the one before it."""

    def advanced(self, report: StepReport) -> None:
        """Hear of a finished step before anything is evaluated after it."""

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Hear what was evaluated after a step that was due, by name, before ``step``."""

    def retrained(self, change: Training) -> None:
        """Hear what was frozen or thawed, after the steps that are done."""

    def scheduled(self, value: float | None) -> None:
        """Hear with which value the schedule was stepped after an epoch, before ``step``; None: it was not."""

    def step(self, report: StepReport) -> None:
        """See a finished step, with the value of its evaluation where one was due."""

    def left(self) -> dict[str, Any]:
        """What this adds to a result: "averaged", parameters by name that are evaluated in place of the state's."""
        return {}

    def end(self) -> None:
        """Stop looking on, and give back what was opened in ``begin``; the engine still has the state."""
