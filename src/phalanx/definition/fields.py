"""Everything that defines the answer, checked once: the fields of a recipe, and of the phases of its steps.

``Recipe`` adds the two verbs, ``train`` and ``start``.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from phalanx.definition import checks, generators
from phalanx.definition.checks import VERBS, answering
from phalanx.definition.data import Columns, Samples, open_data, unframed
from phalanx.definition.sampling import Batches, BatchPlan, WeightedPlan, bounds_of, checked_weights
from phalanx.definition.stream import Stream
from phalanx.errors import UsageError
from phalanx.plan.orders import Plan, steps_per_epoch
from phalanx.plan.rounds import Rounds

WEIGHED = (
    "loss_fn returned (loss, weight), but with loss_over='batch' it sees the whole batch, and there is nothing to "
    "weigh it against; return the loss alone"
)
EXAMPLE = "phalanx.Phase(loss_fn, parameters='generator', optimizer=make_optimizer)"
DEFAULT_LR = 1e-3
DEFAULT_BATCH = 32
SAMPLING = ("weights", "batch_sampler")


@answering(
    params="it is called parameters: a name of a module, or several",
    loss="it is called loss_fn",
    opt="it is called optimizer",
    frequency="it is called every",
)
@dataclass(frozen=True, eq=False)
class Phase:
    """One of several updates that make a step, for GANs, actor-critic and other alternating updates.

    Parameters
    ----------
    loss_fn : callable
        As the recipe's: returns the mean loss over the share, or (mean loss, weight).
    parameters : str or sequence of str, optional
        Names of modules or parameters of the model, or patterns, as of ``run.freeze``: those that this phase updates.
        By default all. Others get no gradient in it.
    optimizer : callable, optional
        As the recipe's, called with the named parameters of this phase.
    every : int, default 1
        The phase is done in steps 0, ``every``, 2 ``every`` and so on.
    scheduler : callable, optional
        As the recipe's, for this phase's optimizer; stepped once an update.
    name : str, optional
        In reports; by default ``parameters``, where that is one name, else "phase 0" and so on.
    loss_takes : "output" or "model"
        "output": ``loss_fn(output, target)``, after one forward pass; "model": ``loss_fn(model, batch)``.
    loss_over : "share" or "batch"
        As the recipe's: "batch" gives the loss the outputs of all replicas.
    """

    loss_fn: Callable[..., Any]
    parameters: str | Sequence[str] | None = None
    optimizer: Any = None
    every: int = 1
    scheduler: Callable[..., Any] | None = None
    name: str = ""
    loss_takes: Literal["output", "model"] = "output"
    loss_over: Literal["share", "batch"] = "share"

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise UsageError(
                f"loss_fn of a phase is {checks.shown(self.loss_fn)}; it must be callable, as in {EXAMPLE}"
            )
        check_takes(self.loss_fn, self.loss_takes)
        checks.choice("loss_over", self.loss_over, ("share", "batch"))
        checks.optimizer("optimizer of a phase", self.optimizer, "optimizer=make_optimizer")
        checks.function("scheduler of a phase", self.scheduler, "scheduler=lambda opt: ...")
        object.__setattr__(self, "every", checks.integer("every of a phase", self.every, least=1))
        names = self.chosen
        if names is not None and (not names or not all(isinstance(name, str) and name for name in names)):
            raise UsageError(
                f"parameters of a phase is {checks.shown(self.parameters)}; it must be a name of a module or "
                f"parameter, or several, as in {EXAMPLE}"
            )

    @property
    def chosen(self) -> list[str] | None:
        """The names in ``parameters``; None: all parameters."""
        if self.parameters is None:
            return None
        return [self.parameters] if isinstance(self.parameters, str) else list(self.parameters)

    def covers(self, parameter: str) -> bool:
        """Whether it updates the parameter of this name."""
        names = self.chosen
        return names is None or any(matches(name, parameter) for name in names)


def matches(name: str, parameter: str) -> bool:
    """Whether a name means a parameter: its own, that of a module which has it, or a pattern as of ``fnmatch``."""
    return fnmatch.fnmatchcase(parameter, name) or parameter.startswith(f"{name}.")


def check_takes(loss_fn: Any, loss_takes: Any) -> None:
    """Refuse a ``loss_takes`` that is not known, or that is not how the loss names its parameters."""
    checks.choice("loss_takes", loss_takes, ("output", "model"))
    if loss_takes == "output" and checks.takes(loss_fn, "model", required=True):
        raise UsageError(
            "loss_fn has a parameter called model, but loss_takes is 'output', which calls loss_fn(output, target); "
            "pass loss_takes='model' for loss_fn(model, batch), else rename the parameter"
        )


def checked_phases(phases: Any, instead: dict[str, Any]) -> tuple[Phase, ...]:
    """The phases of a recipe; ``instead``: arguments of the recipe that each phase has itself.

    Raises
    ------
    UsageError
        They are no phases, some steps would have no update, or the recipe has an argument that phases have.
    """
    listed = tuple(phases) if isinstance(phases, (list, tuple)) else ()
    if not listed or not all(isinstance(phase, Phase) for phase in listed):
        raise UsageError(f"phases is {checks.shown(phases)}; it must be a list of phases, as in [{EXAMPLE}, ...]")
    if all(phase.every != 1 for phase in listed):
        periods = ", ".join(str(phase.every) for phase in listed)
        raise UsageError(f"phases have every={periods}, so that some steps would do nothing; give one of them every=1")
    for name, value in instead.items():
        if value is not None:
            raise UsageError(
                f"{name} is given, and so are phases, each of which has its own; leave {name} out, as in {EXAMPLE}"
            )
    names = names_of(listed)
    if len(set(names)) < len(names):
        raise UsageError(f"phases are called {', '.join(names)}; tell them apart: phalanx.Phase(..., name='critic')")
    return listed


def names_of(phases: Sequence[Phase]) -> tuple[str, ...]:
    """The name of each."""
    given = [phase.name or (phase.parameters if isinstance(phase.parameters, str) else "") for phase in phases]
    return tuple(name or f"phase {number}" for number, name in enumerate(given))


def weighted(loss_fn: Callable[[Any, Any], Any], count: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss that returns its weight, so that shares with more to average over weigh more.

    Parameters
    ----------
    loss_fn : callable
        ``loss_fn(output, target) -> mean loss``.
    count : callable
        ``count(output, target) -> number of things averaged over``; 0 takes the share out.

    Returns
    -------
    callable
        ``(output, target) -> (mean loss, weight)``.

    Examples
    --------
    >>> tokens = phalanx.weighted(
    ...     lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100),
    ...     lambda output, target: (target != -100).sum(),
    ... )
    """
    return functools.partial(_weighted, loss_fn, count)


def _weighted(loss_fn: Callable[[Any, Any], Any], count: Callable[[Any, Any], Any], output: Any, target: Any) -> Any:
    return loss_fn(output, target), count(output, target)


@dataclass(frozen=True, eq=False)
class Definition:
    """The fields of a recipe. See ``phalanx.Recipe`` for what each means."""

    make_model: Any
    data: Any = field(default=None, repr=False)
    loss_fn: Callable[..., Any] | None = None
    forward_fn: Callable[..., Any] | None = None
    target_fn: Callable[..., Any] | None = None
    replicas: int = 4
    batch_size: int | None = DEFAULT_BATCH
    steps: int | None = None
    epochs: int | None = None
    optimizer: Any = None
    lr: float = DEFAULT_LR
    scheduler: Callable[..., Any] | None = None
    max_norm: float = math.inf
    shuffle: bool = True
    drop_last: bool = False
    collate_fn: Callable[..., Any] | None = None
    seed: int = 0
    precision: Literal["bfloat16"] | None = None
    threads: int = 1
    on_nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    schedule_every: Literal["step", "epoch"] | None = None
    schedule_on: str | None = None
    modes: Literal["train", "as_made"] = "train"
    micro_batches: int = 1
    phases: Sequence[Phase] | None = None
    loss_takes: Literal["output", "model"] = "output"
    weights: Any = field(default=None, repr=False)
    batch_sampler: Callable[..., Any] | None = None
    buffers: Mapping[str, Literal["mean", "first", "refuse"]] | None = None
    loss_over: Literal["share", "batch"] = "share"

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", unframed(self.data))
        self._check_functions()
        self._check_numbers()
        if self.phases is not None:
            names = ("loss_fn", "optimizer", "scheduler", "schedule_every")
            instead = {name: getattr(self, name) for name in names}
            instead["loss_takes"] = None if self.loss_takes == "output" else self.loss_takes
            instead["loss_over"] = None if self.loss_over == "share" else self.loss_over
            phases = checked_phases(self.phases, instead)
            object.__setattr__(self, "phases", phases)
        if self.data is None and (self.steps is not None or self.epochs is not None):
            raise UsageError(
                f"steps={self.steps} and epochs={self.epochs} without data: when the caller brings the batches "
                "(data=None), the run lasts as long as they do; leave both out, or pass data"
            )
        self._check_sampling()
        if self.data is not None:
            self._check_length()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in VERBS:
                raise AttributeError(f"a recipe has no {name}; {VERBS[name]}")
            return object.__getattribute__(self, name)  # once more, for its own error

    @functools.cached_property
    def source(self) -> Columns | Samples | None:
        """The data as samples by index; None where the caller brings batches, and for a stream."""
        return None if self.data is None or isinstance(self.data, Stream) else open_data(self.data)

    @property
    def stream(self) -> Stream | None:
        """The data, where it is read in its own order only."""
        return self.data if isinstance(self.data, Stream) else None

    @property
    def samples(self) -> int | None:
        """Samples of an epoch, where that is known before it is over."""
        if self.stream is not None:
            return self.stream.epoch_size
        return None if self.source is None else len(self.source)

    @property
    def per_epoch(self) -> int | None:
        """Steps of an epoch, where all have the same number and that is known before it is over."""
        samples = self.samples if self.batch_sampler is None else None
        return None if samples is None else steps_per_epoch(samples, self.global_batch, drop_last=self.drop_last)

    @property
    def total(self) -> int | None:
        """Steps of the whole run, where that is known before it is over."""
        if self.epochs is None:
            return self.steps
        if self.batches is not None:
            return self.batches.start(self.epochs)
        return None if self.per_epoch is None else self.epochs * self.per_epoch

    @functools.cached_property
    def plan(self) -> Plan:
        """Sample order, shares and random keys, as a hand-written loop needs them."""
        if self.data is None:
            raise UsageError("this recipe has no plan: data is None, so the caller brings the batches; pass data")
        facts: dict[str, Any] = {
            "samples": 0 if self.source is None else len(self.source),
            "replicas": self.replicas,
            "batch_size": self.global_batch,
            "steps": self.total or 0,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "seeder": functools.partial(generators.seeded, owned=self.generators),
        }
        if self.batches is not None:
            return BatchPlan(**facts, batches=self.batches)
        return Plan(**facts) if self.weights is None else WeightedPlan(**facts, bounds=bounds_of(self.weights))

    @functools.cached_property
    def batches(self) -> Batches | None:
        """What ``batch_sampler`` returns, epoch by epoch."""
        if self.batch_sampler is None or self.source is None:
            return None
        seeder = functools.partial(generators.seeded, owned=self.generators)
        return Batches(self.batch_sampler, len(self.source), self.seed, self.steps, self.epochs, seeder)

    def epoch_ended(self, steps: int) -> int:
        """How many steps the epoch has that ends after so many planned steps; 0 if none ends there."""
        if (per_epoch := self.per_epoch) is not None:
            return 0 if steps % per_epoch else per_epoch
        plan, last = self.plan, self.plan.epoch(steps - 1)
        return steps - plan.start(last) if steps == plan.start(last + 1) else 0

    @functools.cached_property
    def rounds(self) -> Rounds:
        """Which update belongs to which step, where steps have phases."""
        if self.phases is None:
            return Rounds()
        return Rounds(tuple(phase.every for phase in self.phases), names_of(self.phases))

    @property
    def updates(self) -> int | None:
        """How many updates all steps have: as many as there are steps, unless those have phases."""
        return None if self.total is None else self.rounds.updates(self.total)

    def over_batch(self, phase: int) -> bool:
        """Whether the loss of this phase needs what other replicas, or other parts of this one, have computed."""
        owner = self.phases[phase] if self.phases else self
        return owner.loss_over == "batch" and (self.replicas > 1 or self.micro_batches > 1)

    def epoch_of(self, update: int) -> int | None:
        """The pass over the data that an update belongs to; None where the caller or a stream brings batches."""
        return None if self.source is None else self.plan.epoch(self.rounds.at(update).step)

    @functools.cached_property
    def generators(self) -> generators.Owned:
        """Random generators that the data and the functions own, as far as they are found; more may be found later."""
        return generators.find(self.holders)

    @property
    def holders(self) -> dict[str, Any]:
        """User code that runs in a replica-step, by name: the dataset, if reading it runs some, and functions."""
        random = self.stream is not None or (isinstance(self.source, Samples) and self.source.random)
        names = ("collate_fn", "forward_fn", "target_fn", "loss_fn", "batch_sampler")
        functions = {name: getattr(self, name) for name in names}
        functions |= {f"phases[{number}].loss_fn": phase.loss_fn for number, phase in enumerate(self.phases or ())}
        return {"data": self.data, **functions} if random else functions

    @property
    def global_batch(self) -> int:
        """Samples a step over all replicas; ``batch_size=None`` means one per replica."""
        return self.replicas if self.batch_size is None else self.batch_size

    def _check_functions(self) -> None:
        if not callable(self.make_model):
            raise UsageError(
                f"make_model is {checks.shown(self.make_model)} ({type(self.make_model).__name__}); it must be a "
                "function without arguments that returns the model, as in make_model=lambda: torch.nn.Linear(4, 3), or "
                "a model"
            )
        checks.function("loss_fn", self.loss_fn, "loss_fn=torch.nn.functional.cross_entropy")
        check_takes(self.loss_fn, self.loss_takes)
        if self.loss_takes == "model" and self.loss_fn is None and self.phases is None:
            raise UsageError("loss_takes is 'model', but there is no loss_fn; pass loss_fn=lambda model, batch: ...")
        checks.choice("loss_over", self.loss_over, ("share", "batch"))
        if self.loss_over == "batch" and self.loss_fn is None and self.phases is None:
            raise UsageError(
                "loss_over is 'batch', but there is no loss_fn, and forward_fn or the model itself sees one share; let "
                "it return outputs, with a row for each sample, and pass loss_fn=lambda output, target: ..."
            )
        if isinstance(self.loss_fn, type):
            name = self.loss_fn.__name__
            raise UsageError(f"loss_fn is the class {name}; pass an instance: loss_fn={name}()")
        over_share = self.replicas != 1 and self.loss_over == "share"
        if over_share and _option(self.loss_fn, "reduction") == "sum":
            raise UsageError(
                "loss_fn sums over the share (reduction='sum'), but replicas average means: the answer would be that "
                "sum divided by the number of replicas; use reduction='mean', or loss_over='batch'"
            )
        checks.function("forward_fn", self.forward_fn, "forward_fn=lambda model, batch: model(batch)")
        checks.function("target_fn", self.target_fn, "target_fn=lambda batch: batch['label']")
        checks.function("collate_fn", self.collate_fn, "collate_fn=torch.utils.data.default_collate")
        checks.function("scheduler", self.scheduler, "scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 30)")
        example = "functools.partial(torch.optim.AdamW, lr=1e-3), or optax.MultiSteps(...).gradient_transformation()"
        checks.optimizer("optimizer", self.optimizer, example)

    def _check_numbers(self) -> None:
        settle = functools.partial(object.__setattr__, self)
        settle("replicas", checks.integer("replicas", self.replicas, least=1))
        settle("threads", checks.integer("threads", self.threads, least=1))
        settle("seed", checks.integer("seed", self.seed, least=0, most=2**64 - 1))
        if self.batch_size is not None:
            hint = "None means one sample per replica, handed over as it is"
            settle("batch_size", checks.integer("batch_size", self.batch_size, least=1, hint=hint))
        elif self.collate_fn is not None:
            raise UsageError(
                "collate_fn is given but batch_size is None, which hands samples over as they are; drop one"
            )
        settle("lr", checks.positive("lr", self.lr, most=sys.float_info.max))
        if self.optimizer is not None and self.lr != DEFAULT_LR:
            raise UsageError(
                f"lr is {self.lr} and optimizer is given, but lr is only for the default optimizer; give the rate to "
                f"yours: optimizer=functools.partial(torch.optim.AdamW, lr={self.lr})"
            )
        settle("max_norm", checks.positive("max_norm", self.max_norm, hint="math.inf means no clipping"))
        checks.choice("shuffle", self.shuffle, (True, False))
        checks.choice("drop_last", self.drop_last, (True, False))
        checks.choice("precision", self.precision, (None, "bfloat16"))
        checks.choice("on_nonfinite", self.on_nonfinite, ("stop", "skip", "ignore"))
        checks.choice("modes", self.modes, ("train", "as_made"))
        rules = self.buffers or {}
        if not isinstance(rules, Mapping) or not all(isinstance(name, str) for name in rules):
            raise UsageError(
                f"buffers is {checks.shown(rules)}; it must be a dict of names, as in {{'queue': 'first'}}"
            )
        settle("buffers", dict(rules) or None)
        for name, rule in rules.items():
            checks.choice(f"buffers[{name!r}]", rule, ("mean", "first", "refuse"))
        settle("micro_batches", checks.integer("micro_batches", self.micro_batches, least=1))
        if self.micro_batches > 1 and self.batch_size is None:
            raise UsageError(
                f"micro_batches is {self.micro_batches} and batch_size is None, which hands a replica one sample, and "
                "that cannot be cut; give a batch_size, or leave micro_batches out"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        checks.choice("schedule_every", self.schedule_every, (None, "step", "epoch"))
        if self.schedule_every is not None and self.scheduler is None:
            if self.schedule_every == "epoch":
                raise UsageError("schedule_every is 'epoch', but there is no scheduler; pass one, or leave it")
            object.__setattr__(self, "schedule_every", None)  # the default
        if self.schedule_every == "epoch" and self.data is None:
            raise UsageError(
                "schedule_every is 'epoch', but data is None, so there are no epochs; use 'step', or pass data"
            )
        if self.schedule_every == "epoch" and self.stream is not None and self.stream.epoch_size is None:
            raise UsageError(
                "schedule_every is 'epoch', but data is a Stream whose epochs are as long as they turn out to be; give "
                "it an epoch_size"
            )
        if self.schedule_on is not None:
            if not isinstance(self.schedule_on, str) or not self.schedule_on:
                raise UsageError(f"schedule_on is {checks.shown(self.schedule_on)}; it must be the name of a metric")
            if self.schedule_every != "epoch":
                raise UsageError(
                    f"schedule_on is {self.schedule_on!r}, but metrics are evaluated after epochs; add "
                    "schedule_every='epoch'"
                )

    def _check_sampling(self) -> None:
        """Refuse ``weights`` and ``batch_sampler`` without data that is read by index, or beside what they replace."""
        checks.function("batch_sampler", self.batch_sampler, "batch_sampler=lambda epoch, generator: [[0, 1], [2, 3]]")
        given = [name for name in SAMPLING if getattr(self, name) is not None]
        if given and self.source is None:
            why = "None, so the caller brings batches" if self.data is None else "a Stream, read in its own order"
            raise UsageError(f"{given[0]} is given, but data is {why}; leave it out, or pass data that has an index")
        replaced: dict[str, Any] = {"shuffle": True} if given else {}  # what sampling decides, with its default
        decides = "weights decides which samples come, and when"
        if self.batch_sampler is not None:
            replaced = {"batch_size": DEFAULT_BATCH, "drop_last": False, **replaced, "weights": None}
            decides = "batch_sampler decides all batches"
        for name, usual in replaced.items():
            if (value := checks.described(getattr(self, name))) != checks.described(usual):
                raise UsageError(f"{name} is {value}, but {decides}; leave one of them out")
        if self.weights is not None:
            object.__setattr__(self, "weights", checked_weights(self.weights, self.samples or 0))

    def _check_length(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise UsageError(
                f"steps is {self.steps} and epochs is {self.epochs}; give exactly one of them: steps counts optimizer "
                "steps, epochs counts passes over the data"
            )
        name = "steps" if self.epochs is None else "epochs"
        object.__setattr__(self, name, checks.integer(name, getattr(self, name), least=0))
        if self.stream is not None and self.stream.shuffle_buffer > 1 and not self.shuffle:
            raise UsageError(
                f"shuffle is False, but the stream has shuffle_buffer={self.stream.shuffle_buffer}; leave one of them "
                "out: without a buffer a stream is never shuffled"
            )
        if self.stream is not None:
            self.stream.check(self.replicas, self.global_batch)
        samples = self.samples
        if self.drop_last and samples is not None and self.global_batch > samples:
            raise UsageError(
                f"drop_last is True and a batch has {self.global_batch} samples, but data has {samples}: every "
                "batch would be dropped; lower batch_size, or set drop_last=False"
            )


def _option(loss_fn: Any, name: str) -> Any:
    """An option of a loss object, or of a partial over a loss function."""
    if isinstance(loss_fn, functools.partial):
        return loss_fn.keywords.get(name)
    return getattr(loss_fn, name, None)


def unpacked(setup: Mapping[str, Any]) -> Definition:
    """The recipe that another process was given, with what the caller knows of its epochs."""
    definition = Definition(**setup["fields"])
    if definition.batches is not None:
        definition.batches.known = list(setup["epochs"])
    return definition
