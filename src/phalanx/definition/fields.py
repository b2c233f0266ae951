"""Everything that defines the answer, checked once. ``Recipe`` adds the two verbs, ``train`` and ``start``."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.definition import checks, generators
from phalanx.definition.data import Columns, Samples, open_data
from phalanx.errors import UsageError
from phalanx.plan import Plan, steps_per_epoch

DEFAULT_LR = 1e-3


@dataclass(frozen=True, eq=False)
class Definition:
    """The fields of a recipe. See ``phalanx.Recipe`` for what each means."""

    make_model: Any
    data: Any = field(default=None, repr=False)
    loss_fn: Callable[..., Any] | None = None
    forward_fn: Callable[..., Any] | None = None
    target_fn: Callable[..., Any] | None = None
    replicas: int = 4
    batch_size: int | None = 32
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
    precision: str | None = None
    threads: int = 1
    on_nonfinite: str = "stop"
    schedule_every: str | None = None
    schedule_on: str | None = None
    modes: str = "train"

    def __post_init__(self) -> None:
        self._check_functions()
        self._check_numbers()
        if self.data is None:
            if self.steps is not None or self.epochs is not None:
                raise UsageError(
                    f"steps={self.steps} and epochs={self.epochs} without data: when the caller brings the batches "
                    "(data=None), the run lasts as long as they do; leave both out, or pass data"
                )
        else:
            self._check_length()

    @functools.cached_property
    def source(self) -> Columns | Samples | None:
        """The data as samples by index; None where the caller brings batches."""
        return None if self.data is None else open_data(self.data)

    @functools.cached_property
    def plan(self) -> Plan:
        """Sample order, shares and random keys, as a hand-written loop needs them."""
        if self.source is None:
            raise UsageError("this recipe has no plan: data is None, so the caller brings the batches; pass data")
        samples, batch_size = len(self.source), self.global_batch
        per_epoch = steps_per_epoch(samples, batch_size, drop_last=self.drop_last)
        return Plan(
            samples=samples,
            replicas=self.replicas,
            batch_size=batch_size,
            steps=self.steps if self.epochs is None else self.epochs * per_epoch,  # type: ignore[arg-type]
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            seeder=functools.partial(generators.seeded, owned=self.generators),
        )

    @functools.cached_property
    def generators(self) -> generators.Owned:
        """Random generators that the data and the functions own, as far as they are found; more may be found later."""
        return generators.find(self.holders)

    @property
    def holders(self) -> dict[str, Any]:
        """User code that runs in a replica-step, by name: the dataset, if reading it runs some, and functions."""
        random = isinstance(self.source, Samples) and self.source.random
        functions = {name: getattr(self, name) for name in ("collate_fn", "forward_fn", "target_fn", "loss_fn")}
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
        if isinstance(self.loss_fn, type):
            name = self.loss_fn.__name__
            raise UsageError(f"loss_fn is the class {name}; pass an instance: loss_fn={name}()")
        if self.replicas != 1 and _option(self.loss_fn, "reduction") == "sum":
            raise UsageError(
                "loss_fn sums over the share (reduction='sum'), but replicas average means: the answer would be that "
                "sum divided by the number of replicas; use reduction='mean'"
            )
        checks.function("forward_fn", self.forward_fn, "forward_fn=lambda model, batch: model(batch)")
        checks.function("target_fn", self.target_fn, "target_fn=lambda batch: batch['label']")
        checks.function("collate_fn", self.collate_fn, "collate_fn=torch.utils.data.default_collate")
        checks.function("scheduler", self.scheduler, "scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 30)")
        if not _is_transformation(self.optimizer):
            checks.function("optimizer", self.optimizer, "optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)")

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
        self._check_schedule()

    def _check_schedule(self) -> None:
        checks.choice("schedule_every", self.schedule_every, (None, "step", "epoch"))
        if self.schedule_every is not None and self.scheduler is None:
            raise UsageError(
                f"schedule_every is {self.schedule_every!r}, but there is no scheduler; pass one, or leave it"
            )
        if self.schedule_every == "epoch" and self.data is None:
            raise UsageError(
                "schedule_every is 'epoch', but data is None, so there are no epochs; use 'step', or pass data"
            )
        if self.schedule_on is not None:
            if not isinstance(self.schedule_on, str) or not self.schedule_on:
                raise UsageError(f"schedule_on is {checks.shown(self.schedule_on)}; it must be the name of a metric")
            if self.schedule_every != "epoch":
                raise UsageError(
                    f"schedule_on is {self.schedule_on!r}, but metrics are evaluated after epochs; add "
                    "schedule_every='epoch'"
                )

    def _check_length(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise UsageError(
                f"steps is {self.steps} and epochs is {self.epochs}; give exactly one of them: steps counts optimizer "
                "steps, epochs counts passes over the data"
            )
        name = "steps" if self.epochs is None else "epochs"
        object.__setattr__(self, name, checks.integer(name, getattr(self, name), least=0))
        source = self.source
        assert source is not None
        if self.drop_last and self.global_batch > len(source):
            raise UsageError(
                f"drop_last is True and a batch has {self.global_batch} samples, but data has {len(source)}: every "
                "batch would be dropped; lower batch_size, or set drop_last=False"
            )


def _is_transformation(optimizer: Any) -> bool:
    """Whether it is an optimizer of optax: a pair of functions."""
    return isinstance(optimizer, tuple) and all(map(callable, optimizer)) and len(optimizer) == 2


def _option(loss_fn: Any, name: str) -> Any:
    """An option of a loss object, or of a partial over a loss function."""
    if isinstance(loss_fn, functools.partial):
        return loss_fn.keywords.get(name)
    return getattr(loss_fn, name, None)
