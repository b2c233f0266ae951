"""Records that cross the seams: tasks of replicas and what they computed, what a run has done, states of snapshots."""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from phalanx.definition.data import Share
from phalanx.plan.audit import Audit
from phalanx.plan.lifecycle import MOST, Tally
from phalanx.plan.rounds import Rounds

MOST_KEPT = 1024  # as many steps as workers may be ahead of a process
Vector = list[Any]
Measurement = Callable[[], list[Any]]  # waits for metrics over a chunk of samples: what each read
Weights = Mapping[str, Any]  # values of parameters by name
Named = Mapping[str, tuple[Any, float | None]]  # named losses: the mean, and what it is the mean of, if it was returned


class Todo(NamedTuple):
    """A replica's part in a step: its number, the key of its random generators, its samples and what they weigh.

    The weight counts if the loss returns none. The phase is that of the step, where it has several.
    """

    replica: int
    key: int
    share: Share
    weight: float
    phase: int = 0


@dataclass(frozen=True, slots=True)
class Watch:
    """A callback to which is reported what is computed within a replica-step, and how much of that.

    ``report(kind, name, value)``: kind is "batch", "module" (its output; the name is its path), "output", "buffer" (as
    it was left), or, with ``operations``, "operation" and, within the backward pass, "backward" (its
    name; the value is all outputs and, where user code is not being run, file and line of each frame in
    which it was written, from the innermost outwards). The value may be written to later. A framework reports what it
    can. With ``parameters`` it reports neither modules nor operations, but "written" (a
    parameter that user code wrote or moved, and how) and "early" (one that had a gradient before the backward pass).
    """

    report: Callable[[str, str, Any], None]
    operations: bool = False
    parameters: bool = False


@dataclass(slots=True)
class Computed:
    """What one replica computed in one step.

    Attributes
    ----------
    loss : float
        Or what ``Arithmetic.read`` turns into one, so that no device is waited for before all of them have work.
    weight : float or None
        The weight that the loss returned, if it did.
    gradient : Vector or None
        None where the weight is 0: such a gradient is ignored. Where replicas are folded or gradients
        clipped, no entry shares memory with another, so that each may be written. An entry that was added to the left
        neighbour's already (see ``plan.fold``) is that very entry of the left neighbour.
    buffers : list
        The model's buffers as this replica left them.
    named : Named or None
        What the loss returned beside itself; numbers, or tensors as the loss.
    """

    loss: Any
    weight: float | None
    gradient: Vector | None
    buffers: list[Any]
    named: Named | None = None


class Part(NamedTuple):
    """What every worker gets to know of one replica in a step.

    Attributes
    ----------
    loss : float
        As computed; if no other process reads it, also what ``Arithmetic.read`` turns into one.
    weight : float
        0 if nothing is to be added.
    returned : bool
        Whether the loss returned its weight.
    samples : float
        0 where the replica did not run.
    wrote : float
        A checksum of what a loss over the whole batch came to: all workers compute the same.
    named : Named or float
        Its named losses; 0 where there are none. Among numbers: how long their text is.
    options, lr : float
        A checksum of all options of the optimizers where it ran, if workers have to compare them; a learning rate.
    """

    loss: Any
    weight: float
    returned: bool
    samples: float
    wrote: float = 0.0
    named: Any = 0.0
    options: float = 0.0
    lr: float = 0.0


def losses_of(parts: Sequence[Part]) -> list[Any]:
    """All losses of some replicas: each one's own, then its named ones in the order of their names."""
    return [loss for part in parts for loss in (part.loss, *(part.named[name][0] for name in sorted(part.named or ())))]


def with_losses(parts: Sequence[Part], losses: Iterable[Any]) -> list[Part]:
    """The same parts with other losses, in the order of ``losses_of``."""
    following = iter(losses)
    return [
        part._replace(
            loss=next(following),
            named=part.named and {name: (next(following), part.named[name][1]) for name in sorted(part.named)},
        )
        for part in parts
    ]


def packed(named: Named) -> bytes:
    """Named losses as text, which gives the same bits when it is read."""
    return json.dumps({name: (float(value), weight) for name, (value, weight) in named.items()}).encode()


@dataclass(frozen=True, slots=True)
class Exported:
    """A state as the caller gets it.

    Attributes
    ----------
    model : callable
        Gives the model, which may have to be copied first.
    params : dict
        Its parameters by name.
    digest : str
        Of all of the state, if asked for.
    looked_at : object or None
        For a state that is only for looking: its ``check()`` raises if somebody changed it.
    """

    model: Callable[[], Any]
    params: dict[str, Any]
    digest: str
    looked_at: Any = None


CODES = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "uint16": ("U16", 2), "int16": ("I16", 2),
    "uint32": ("U32", 4), "int32": ("I32", 4), "uint64": ("U64", 8), "int64": ("I64", 8), "float16": ("F16", 2),
    "bfloat16": ("BF16", 2), "float32": ("F32", 4), "float64": ("F64", 8), "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1), "complex64": ("C64", 8),
}  # fmt: skip  # what a snapshot can hold: dtype to its name in safetensors, and bytes


STATE_DICT = "state_dict"  # among a state's facts: how names that its framework loads differ from those of weights


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as bytes: dtype as torch and numpy name it, shape, content in C order."""

    dtype: str
    shape: tuple[int, ...]
    content: Any


@dataclass(frozen=True, slots=True)
class Captured:
    """A state as snapshots hold it, as of a step boundary.

    Attributes
    ----------
    weights, training : dict of str to Tensor
        Parameters and buffers by name; the tensors of optimizers and schedules.
    facts : dict
        All else, as JSON values.
    release : callable
        To be called when the tensors have been read: their memory may be written from then on.
    """

    weights: dict[str, Tensor]
    training: dict[str, Tensor]
    facts: dict[str, Any]
    release: Callable[[], None] = lambda: None


class PhaseReport(NamedTuple):
    """What one phase of a step was: loss, norm of its gradient before clipping, learning rate, its named losses."""

    loss: float
    grad_norm: float
    lr: float
    losses: Mapping[str, float] = MappingProxyType({})


class StepReport(NamedTuple):
    """What one finished step was.

    Attributes
    ----------
    step : int
        The step that just ended, counted from 0.
    epoch : int or None
        The pass over the data that it belongs to, counted from 0; None for batches that the caller brought.
    loss : float
        Weighted mean of the replicas' losses.
    grad_norm : float
        2-norm of the mean gradient over all parameters, before clipping.
    lr : float
        Learning rate of the first parameter group in this step; NaN where the optimizer keeps it to itself.
    samples : int
        Samples in this step, over all replicas.
    seconds : float
        Wall time of this step.
    metric : float or None
        Value of the first metric of the evaluation that followed this step, where one was due.
    metrics : mapping of str to float
        Values of all metrics of all evaluations that followed this step, by name.
    parts : tuple of float
        Loss and weight of each replica, in turn: two numbers each; of one phase after the other.
    phases : mapping of str to PhaseReport
        Of a step with phases, those that were done in it, by name; ``loss``, ``grad_norm``, ``lr`` and ``losses`` are
        those of the first phase that is done in every step.
    losses : mapping of str to float
        What the loss returned beside "loss", as means over the replicas; empty where it returned nothing else.
    gradients : mapping of str to array
        Mean gradients of the parameters that a callback asked for, before clipping, by name.
    """

    step: int
    epoch: int | None
    loss: float
    grad_norm: float
    lr: float
    samples: int
    seconds: float
    metric: float | None = None
    metrics: Mapping[str, float] = MappingProxyType({})
    parts: tuple[float, ...] = ()
    phases: Mapping[str, PhaseReport] = MappingProxyType({})
    losses: Mapping[str, float] = MappingProxyType({})
    gradients: Mapping[str, Any] = MappingProxyType({})

    @property
    def columns(self) -> dict[str, float]:
        """Named losses as a log names them: "loss/kl"; of a step with phases "loss/critic/kl"."""
        groups = {f"{name}/": phase.losses for name, phase in self.phases.items()} or {"": self.losses}
        return {f"loss/{group}{name}": value for group, losses in groups.items() for name, value in losses.items()}


class StepLoss(float):
    """The mean loss of a step, as a float. What else its report has comes along, without what takes memory.

    A copy, and what is pickled, is a plain float.

    Attributes
    ----------
    step, lr, samples, seconds, losses, phases
        As in ``StepReport``.
    norm : float
        Its ``grad_norm``.
    """

    __slots__ = ("losses", "lr", "norm", "phases", "samples", "seconds", "step")

    def __new__(cls, report: StepReport) -> StepLoss:
        own = super().__new__(cls, report.loss)
        own.step, own.losses, own.norm, own.lr = report.step, report.losses, report.grad_norm, report.lr
        own.samples, own.seconds, own.phases = report.samples, report.seconds, report.phases
        return own

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)

    __copy__ = float.__float__

    def __deepcopy__(self, memo: object) -> float:
        return float(self)


class Incident(NamedTuple):
    """Something that happened to a worker.

    Attributes
    ----------
    seconds : float
        When, on the clock of ``time.perf_counter``.
    kind : str
        "death", "replaced", or "rollback" for all of them. Over several hosts also "lost" and "joined", of a process,
        and "again" where the same processes connected anew, and "dropped" for messages from outside that did not fit:
        ``why`` says how many there were since the run began.
    worker, step : int
        Which worker or process, in which step; for a rollback the step whose update broke off; -1 where nobody can
        tell who.
    why : str
        What ended it, or was found.
    """

    seconds: float
    kind: str
    worker: int
    step: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation: after how many finished steps, its value, and the metric function's name."""

    steps: int
    value: float
    name: str


class Training(NamedTuple):
    """Parameters that are frozen or thawed between two steps, by name."""

    names: tuple[str, ...]
    trained: bool


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the caller of a run chose, and its callbacks asked for, as far as engines have to know it.

    Attributes
    ----------
    audit : Audit or None
        Which updates are audited, if some are.
    allow : bool or None
        Whether accelerators may use operations without a deterministic kernel, and replicas that are computed twice may
        differ. None: neither is allowed, and no replica is computed twice.
    max_failures : int
        Deaths by SIGKILL or SIGTERM, in a row at one place, that end the run.
    averaging : (float, str) or None
        Decay of an average of the weights that workers with devices may keep, and whose state has it in snapshots.
    gradients : tuple of str
        Names or patterns of parameters whose mean gradients callbacks asked for.
    """

    audit: Audit | None = None
    allow: bool | None = False
    max_failures: int = MOST
    averaging: tuple[float, str] | None = None
    gradients: tuple[str, ...] = ()


@dataclass(slots=True)
class Progress:
    """What a run has done so far. The engine alone writes it; who reports an unseen update takes that out.

    Attributes
    ----------
    loss_history : list of float
        One mean loss per update; its length is the number of updates, and of finished steps where those have no phases.
    samples : int
        Samples seen in all of them.
    rounds : Rounds
        Which update belongs to which step.
    resumed_from : int or None
        How many steps an earlier run had done, if this one goes on from its snapshot.
    made : Any
        What model and optimizers were made, as snapshots describe it; None without a directory.
    span : (float, float) or None
        Start of the first step and end of the last, on the clock of ``time.perf_counter``.
    incidents : list of Incident
        What happened to workers.
    audited : int
        How many updates were audited.
    unseen : deque of StepReport
        Updates that were done while nobody waited for them.
    leads : bool
        Whether this process reports and saves; false in all but one of several.
    """

    loss_history: list[float] = field(default_factory=list[float])
    samples: int = 0
    rounds: Rounds = field(default_factory=Rounds)
    resumed_from: int | None = None
    made: Any = None
    span: tuple[float, float] | None = None
    incidents: list[Incident] = field(default_factory=list[Incident])
    audited: int = 0
    unseen: deque[StepReport] = field(default_factory=deque[StepReport])
    leads: bool = True

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return self.rounds.at(len(self.loss_history)).step

    @property
    def between_phases(self) -> bool:
        """Whether a step was begun and is not done."""
        return not self.rounds.at(len(self.loss_history)).first

    def add(self, loss: float, samples: int, audit: Audit | None = None) -> None:
        """Count an update; samples of a step with phases count once."""
        self.samples += 0 if self.between_phases else samples
        self.audited += audit is not None and audit.due(len(self.loss_history))
        self.loss_history.append(loss)

    def time(self, started: float, ended: float) -> None:
        """Note when the latest step started and ended."""
        self.span = (started if self.span is None else self.span[0], ended)

    def take(self, losses: Sequence[float], samples: int, resumed_from: int | None, made: Any) -> None:
        """Note what another process has done."""
        self.loss_history += losses
        self.samples, self.resumed_from, self.made = samples, resumed_from, made

    def go_back(self, updates: int) -> None:
        """Only so many updates are done."""
        del self.loss_history[updates:]


@dataclass(slots=True)
class Seen:
    """How far a run's loop and observers have come with its progress. The room of the run alone assigns its fields.

    Others keep and take states of callbacks, and put in what an earlier run, or another process, had evaluated.

    Attributes
    ----------
    progress : Progress
    evaluated : list of Evaluated
        Every evaluation so far, those of an earlier run first.
    waiting : dict
        States of that earlier run's callbacks, by name, until callbacks take them.
    observed : int
        How many updates observers have seen completed; all updates of a step at once.
    kept : deque of (StepReport, str)
        The newest steps, with a hash of their batch if it was brought or is a stream's, where this process may have to
        report them in place of another.
    stopped_by : str or None
        Who stopped the run: no further planned step is done.
    leaving : str
        Why this process leaves a run that others go on with; "" if it does not.
    """

    progress: Progress
    evaluated: list[Evaluated] = field(default_factory=list[Evaluated])
    waiting: dict[str, Any] = field(default_factory=dict[str, Any])
    observed: int = 0
    kept: deque[tuple[StepReport, str]] = field(default_factory=lambda: deque[tuple[StepReport, str]](maxlen=MOST_KEPT))
    stopped_by: str | None = None
    leaving: str = ""
    _states: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def complete(self) -> bool:
        """Whether every step that was begun is complete."""
        return self.observed == len(self.progress.loss_history)

    def take(self, name: str) -> Any:
        """The state that waits for the callback of this name, for it alone; None if there is none."""
        return self.waiting.pop(name, None)

    def keep(self, name: str, state: Callable[[], Any]) -> None:
        """Have ``state()`` in snapshots, under this name."""
        self._states[name] = state

    def states(self) -> dict[str, Any]:
        """The states of callbacks now, and the position of a stream."""
        return {name: state() for name, state in self._states.items()}


@dataclass(frozen=True)
class Records:
    """What is noted about a run. Nobody changes the first, engines write the second, and the run the third."""

    options: RunOptions
    progress: Progress
    seen: Seen

    @functools.cached_property
    def tally(self) -> Tally:
        """Counts deaths of workers, over all engines and incarnations of the run."""
        return Tally(self.options.max_failures)
