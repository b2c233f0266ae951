"""Records that cross the seams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.definition.data import Share
from phalanx.plan.keys import Audit
from phalanx.plan.lifecycle import MOST
from phalanx.plan.shares import Rounds
from phalanx.seams.events import Evaluated, Incident, StepReport
from phalanx.seams.sharing import Vector

Measurement = Callable[[], list[Any]]  # waits for metrics over a chunk of samples: what each read
Weights = Mapping[str, Any]  # values of parameters by name


class Todo(NamedTuple):
    """A replica's part in a step: its number, the key of its random generators, its samples and what they weigh.

    The weight counts where the loss tells none. The phase is that of the step, where it has several.
    """

    replica: int
    key: int
    share: Share
    weight: float
    phase: int = 0


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told what is computed on the way of a replica-step, and how much of it.

    ``told(kind, name, value)``: kind is "batch", "module" (its output; the name is its path), "output", "buffer" (as it
    was left), or, with ``operations``, "operation" and, within the backward pass, "backward" (its
    name; the value is all outputs and, where user code is not being run, file and line of each frame in
    which it was written, from the innermost outwards). What is told may be written to later. A framework tells what it
    can. With ``parameters`` it tells neither modules nor operations, but "model" (what is trained), "written" (a
    parameter that user code wrote or moved, and how) and "early" (one that had a gradient before the backward pass).
    """

    told: Callable[[str, str, Any], None]
    operations: bool = False
    parameters: bool = False


@dataclass(slots=True)
class Computed:
    """What one replica computed in one step.

    Attributes
    ----------
    loss : float
        Or what ``Arithmetic.read`` makes one of: a device is not waited for before all of them have work.
    weight : float or None
        The weight that the loss returned, if it did.
    gradient : Vector or None
        None where the weight is 0: such a gradient is not looked at. Where replicas are folded or gradients
        clipped, no entry shares memory with another, so that each may be written. An entry that was added to the left
        neighbour's already (see ``plan.fold``) is that very entry of the left neighbour.
    buffers : list
        The model's buffers as this replica left them.
    """

    loss: Any
    weight: float | None
    gradient: Vector | None
    buffers: list[Any]


class Part(NamedTuple):
    """What every worker gets to know of one replica in a step.

    Attributes
    ----------
    loss : float
        As computed; where nobody else has to read it, also what ``Arithmetic.read`` makes one of.
    weight : float
        0 where nothing is to be added.
    returned : bool
        Whether the loss told its weight.
    samples : float
        0 where the replica did not run.
    options, lr : float
        A checksum of all options of the optimizers where it ran, if workers have to compare them; a learning rate.
    """

    loss: Any
    weight: float
    returned: bool
    samples: float
    options: float = 0.0
    lr: float = 0.0


@dataclass(frozen=True, slots=True)
class Exported:
    """A state as the caller gets it.

    Attributes
    ----------
    make : callable
        Gives the model, which may have to be copied first.
    params : dict
        Its parameters by name.
    digest : str
        Of all of the state, if asked for.
    check : callable
        Of what is for looking: refuses what somebody changed in it.
    """

    make: Callable[[], Any]
    params: dict[str, Any]
    digest: str
    check: Callable[[], object] = object

    @property
    def model(self) -> Any:
        """The model."""
        return self.make()


@dataclass(slots=True)
class RunState:
    """What a run has done so far.

    Attributes
    ----------
    loss_history : list of float
        One mean loss per update; its length is the number of updates, and of finished steps where those have no phases.
    samples : int
        Samples seen in all of them.
    span : (float, float) or None
        Start of the first step and end of the last, on the clock of ``time.perf_counter``.
    incidents : list of Incident
        What happened to workers.
    resumed_from : int or None
        How many steps an earlier run had done, if this one goes on from its snapshot.
    evaluated : list of Evaluated
        Every evaluation so far, those of that earlier run first.
    chain : str or None
        The newest link of the run's chain, if one is kept.
    callbacks : dict
        What callbacks of that earlier run left, by their names, until they are asked.
    states : callable
        What callbacks would leave now.
    rounds : Rounds
        Which update belongs to which step.
    stream : callable
        Where the stream is now, if the data is one, by its name among those states.
    stopped_by : str or None
        Who said that no further planned step is to be done.
    audit : Audit or None
        Which updates are audited, if some are.
    audited : int
        How many were.
    allow : bool or None
        Whether replicas that are computed twice may differ; None: none is.
    max_failures : int
        Deaths by SIGKILL or SIGTERM, in a row at one place, that end the run.
    told : int
        How many updates observers were told of, with all that completes a step.
    unseen : deque of StepReport
        Updates that turned out to be done when nobody waited for them.
    """

    loss_history: list[float] = field(default_factory=list[float])
    samples: int = 0
    span: tuple[float, float] | None = None
    incidents: list[Incident] = field(default_factory=list[Incident])
    resumed_from: int | None = None
    evaluated: list[Evaluated] = field(default_factory=list[Evaluated])
    chain: str | None = None
    callbacks: dict[str, Any] = field(default_factory=dict[str, Any])
    states: Callable[[], dict[str, Any]] = dict[str, Any]
    stream: Callable[[], dict[str, Any]] = dict[str, Any]
    rounds: Rounds = field(default_factory=Rounds)
    stopped_by: str | None = None
    audit: Audit | None = None
    audited: int = 0
    allow: bool | None = False
    max_failures: int = MOST
    told: int = 0
    unseen: deque[StepReport] = field(default_factory=deque[StepReport])

    @property
    def complete(self) -> bool:
        """Whether nothing of a step that was begun is left to be done."""
        return self.told == len(self.loss_history)

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return self.rounds.at(len(self.loss_history)).step

    @property
    def between_phases(self) -> bool:
        """Whether a step was begun and is not done."""
        return not self.rounds.at(len(self.loss_history)).first

    def add(self, loss: float, samples: int) -> None:
        """Count an update; samples of a step with phases count once."""
        self.samples += 0 if self.between_phases else samples
        self.audited += self.audit is not None and self.audit.due(len(self.loss_history))
        self.loss_history.append(loss)

    def time(self, started: float, ended: float) -> None:
        """Note when the latest step started and ended."""
        self.span = (started if self.span is None else self.span[0], ended)
