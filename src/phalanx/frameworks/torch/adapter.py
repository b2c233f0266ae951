"""The torch framework: one model with its optimizers at a step boundary, and the means to take it to the next."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from phalanx.definition.data import Share, Source
from phalanx.definition.fields import Definition
from phalanx.definition.metrics import Metrics
from phalanx.frameworks.torch import arithmetic
from phalanx.frameworks.torch.arithmetic import Gradient
from phalanx.frameworks.torch.environment import StaticShapes, check_static, compiled, surrounded
from phalanx.frameworks.torch.model import checked
from phalanx.frameworks.torch.optimizer import eval_point, has_modes, retrain, updates_of
from phalanx.frameworks.torch.replica.buffers import Buffers, Left
from phalanx.frameworks.torch.replica.feed import Feed, opened
from phalanx.frameworks.torch.replica.forward import NoMean
from phalanx.frameworks.torch.replica.lane import Lane
from phalanx.frameworks.torch.results import exported
from phalanx.frameworks.torch.sharing import Sharing
from phalanx.frameworks.torch.snapshot import adopt, captured, entries
from phalanx.seams import Arithmetic, Lanes
from phalanx.seams.records import Captured, Computed, Exported, Measurement, Todo, Training, Watch, Weights
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import Anew, Reentrant


class Torch:
    """Implements ``seams.Framework`` for PyTorch on the CPU, the reference; ``device`` is for accelerators.

    Parameters
    ----------
    definition : Definition
    model : Any
        What ``make_model`` made, inside its record's ``building``.
    devices : sequence of str
        Of workers, where each has its own.

    Attributes
    ----------
    name : str
        "torch".
    """

    name = "torch"
    lanes: Lanes | None = None
    written: Sequence[str] = ()
    following: Callable[[], Sequence[Todo]] | None = None

    def __init__(self, definition: Definition, model: Any, devices: Sequence[str] = ()) -> None:
        self.arithmetic: Arithmetic = arithmetic
        self._of_workers = devices
        with self._surrounded(definition):
            self._build(definition, checked(model))

    @contextlib.contextmanager
    def _surrounded(self, definition: Definition, *more: AbstractContextManager[Any]) -> Iterator[None]:
        """Make the environment; inside, it is entered, and user code may run."""
        self.opened: Callable[[Source], Source] = opened
        self._describable = False
        self._shapes = StaticShapes()
        within = Anew(functools.partial(surrounded, definition.threads, definition.generators))
        self.environment: AbstractContextManager[None] = Reentrant(within, self._shapes, *more)
        with self.environment, interrupts.user_code():
            yield

    def _lane_on(self, definition: Definition, model: torch.nn.Module) -> Lane:
        """What computes replicas, with the model where it is to be."""
        model.to("cpu")
        feed = Feed(definition, model, self._shapes)
        buffers, no_mean = Buffers(model, definition.buffers), NoMean(definition.replicas)
        return Lane(definition, model, feed.batch, buffers, no_mean, host=feed)

    def _build(self, definition: Definition, model: torch.nn.Module, *, movable: bool = True) -> None:
        self._lane, self._rounds = self._lane_on(definition, model), definition.rounds
        self.held = {"model": self._lane.model}
        self._updates = updates_of(definition, self._lane.named, model)
        self.has_modes = any(map(has_modes, self._updates.optimizers))
        contexts = compiled({"make_model": model, **definition.holders})
        check_static(contexts)
        self._shapes.known = bool(contexts)
        facts = self._lane.model, self._lane.buffers, self._updates, self._lane.collector, self.environment
        self.sharing: Any = Sharing(*facts, self._of_workers, movable=movable)

    def eval_point(self) -> Weights | None:
        return eval_point(self._updates) if self.has_modes else None

    @property
    def lr(self) -> float:
        """Learning rate of the next step, of the first parameter group."""
        return self._updates.lr

    @property
    def options_checksum(self) -> tuple[float, float]:
        options, lr = self._updates.options_checksum
        return options, lr if options else self._lane.buffers.told

    def gradients(self, todo: Sequence[Todo], watch: Watch | None = None) -> Iterator[Computed]:
        return self._lane.gradients(todo, watch)

    def outputs(self, todo: Sequence[Todo]) -> Iterator[bytes]:
        return self._lane.outputs(todo)

    def over_batch(self, said: Sequence[bytes], key: int, phase: int) -> float:
        return float(self._lane.over_batch(said, key, phase))

    def norm(self, gradient: Gradient, losses: Sequence[Any], buffers: Any = None) -> Callable[..., list[float]]:
        return lambda: [self._updates.norm(gradient), *self.arithmetic.read(list(losses))]

    def update(self, step: int, gradient: Gradient, buffers: Sequence[tuple[int, Left]] | None) -> None:
        if buffers is None:
            self._lane.buffers.expect()
        else:
            moment = self._rounds.at(step)
            count = moment.step // self._rounds.every[moment.phase]
            self._lane.buffers.settle(buffers, count, later=not self._updates.custom)  # hooks look at the model's
        self._updates.apply(step, gradient)
        if buffers is not None and self._updates.custom:
            self.written = self._lane.buffers.keep()
        if not self._describable:  # that it has no digest is better told after the first step than at the run's end
            self._describable = all(entries(self._lane.model, self._updates.optimizers))

    def schedule(self, value: float | Training, epoch: int | None = None) -> None:
        if isinstance(value, Training):
            retrain(self._updates, value)
        else:
            self._updates.schedule(value, epoch)

    def rewind(self) -> None:
        self._lane.rewind()

    def measure(self, metrics: Metrics, key: int, share: Share, weights: Weights | None) -> Measurement:
        return self._lane.measure(metrics, key, share, weights)

    def export(self, steps: int, *, copy: bool, digest: bool = True) -> Exported:
        self.rewind()
        return exported(self._lane.shown, self._updates, steps, apart=copy, digest=digest)

    def capture(self, *, copy: bool) -> Captured:
        self.rewind()
        state = captured(self._lane.model, self._updates, copy=copy)
        if self._of_workers:  # they computed elsewhere
            state.facts["device"] = self._of_workers[0].partition(":")[0]
        return state

    def adopt(self, state: Captured) -> None:
        self.rewind()
        adopt(self._lane.model, self._updates, state)
        self._lane.buffers.begin_here()
