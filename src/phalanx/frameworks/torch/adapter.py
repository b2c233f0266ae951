"""The torch framework: one model with its optimizers at a step boundary, and the means to take it to the next."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from phalanx.definition import generators
from phalanx.definition.data import Columns, Samples, Share, Source
from phalanx.definition.evaluation import measured
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.torch import arithmetic
from phalanx.frameworks.torch.arithmetic import Gradient
from phalanx.frameworks.torch.buffers import Buffers, Left
from phalanx.frameworks.torch.environment import Environment, StaticShapes, check_sizes, compiled, explain
from phalanx.frameworks.torch.forward import AmbiguousMean, Forward
from phalanx.frameworks.torch.gradient import Collector, drop
from phalanx.frameworks.torch.model import checked, named_device, warn_of_eval_mode
from phalanx.frameworks.torch.optimizer import Update
from phalanx.frameworks.torch.sharing.state import Sharing
from phalanx.frameworks.torch.snapshot import Snapshots, digest, entries
from phalanx.seams import Computed, Exported
from phalanx.surroundings import interrupts
from phalanx.surroundings.turns import Reentrant


class Torch:
    """Implements ``seams.Framework`` for PyTorch.

    Parameters
    ----------
    definition : Definition
    devices : sequence of str
        The first is used; empty: where ``make_model`` puts the model.
    model : Any
        What ``make_model`` made, inside ``building``.

    Attributes
    ----------
    name : str
        "torch".
    """

    name = "torch"

    def __init__(self, definition: Definition, devices: Sequence[str], model: Any) -> None:
        self.arithmetic = arithmetic
        self._shapes = StaticShapes()
        self.environment = Reentrant(Environment(definition.threads, definition.generators), self._shapes)
        named = named_device(devices[0] if devices else None)
        with self.environment, interrupts.breakable(at_once=True):
            self._build(definition, named, checked(model))

    def _build(self, definition: Definition, device: torch.device | None, model: torch.nn.Module) -> None:
        self._model = model
        self._device = next(self._model.parameters()).device if device is None else device
        self._model.to(self._device)
        self._named = list(self._model.named_parameters())
        self._parameters = [parameter for _, parameter in self._named]
        self._forward = Forward(definition, self._model, self._device)
        self._buffers = Buffers(self._model)
        self._ambiguous = AmbiguousMean(definition)
        self._updates = Update(definition, self._named)
        self._shared = definition.replicas > 1
        written = self._shared or math.isfinite(definition.max_norm)
        self._collector = Collector(self._named, written=written)
        self._owned = definition.generators
        self._models = generators.find({"model": self._model})
        found = compiled({"make_model": self._model, **definition.holders})
        check_sizes(found, definition)
        self._shapes.known = bool(found)
        self._collate = definition.collate_fn or default_collate
        self._describable = False
        self._unseen = True

    @property
    def lr(self) -> float:
        """Learning rate of the next step, of the first parameter group."""
        return self._updates.lr

    @property
    def snapshots(self) -> Snapshots:
        """How this state becomes a snapshot, and is made again out of one."""
        self.rewind()
        return Snapshots(self._model, self._updates, self._buffers)

    @property
    def sharing(self) -> Sharing:
        """What it takes to share this state with other processes."""
        return Sharing(self._parameters, self._buffers, self._updates, self._collector, self.environment)

    def gradients(self, todo: Sequence[tuple[int, Share]]) -> Iterator[Computed]:
        """See ``seams.Steppable.gradients``."""
        return itertools.starmap(self._gradient, todo)

    def _gradient(self, key: int, share: Share) -> Computed:
        self._buffers.begin()
        batch = self._batch(key, share)
        versions = self._versions() if self._shared else []
        try:
            loss, weight = self._forward.loss(batch, share.origin)
        except ValueError as error:
            _explain(error, len(share.samples))
            raise
        except Exception as error:
            explain(error)
            raise
        self._ambiguous.warn(weight, batch)
        if self._unseen:
            self._unseen = False
            warn_of_eval_mode(self._model)
        taken = None if weight == 0 else self._collector.backward(loss)
        if self._shared:
            self._check_unwritten(versions, "in forward, loss_fn or a hook")
        return Computed(loss.item(), weight, taken, self._buffers.left())

    def norm(self, gradient: Gradient) -> float:
        """See ``seams.Steppable.norm``."""
        return self._updates.norm(gradient)

    def update(self, step: int, gradient: Gradient, buffers: Sequence[tuple[int, Left]] | None) -> None:
        """See ``seams.Steppable.update``."""
        self._updates.apply(step, gradient)
        if buffers is None:
            self._buffers.expect()
        else:
            self._buffers.settle(buffers)
        if not self._describable:  # better refused after the first step than when the run is over
            for _ in entries(self._model, self._updates.optimizers):
                pass
            self._describable = True

    def schedule(self, loss: float) -> None:
        """See ``seams.Framework.schedule``."""
        self._updates.schedule(loss)

    def rewind(self) -> None:
        """See ``seams.Steppable.rewind``."""
        drop(self._parameters)
        self._buffers.restore()

    def measure(self, metric_fn: Callable[..., Any], key: int, share: Share) -> tuple[float, float]:
        """See ``seams.Framework.measure``."""
        versions = self._versions()
        with evaluating(self._model), torch.no_grad():
            self._buffers.begin()
            try:
                with interrupts.breakable():
                    value = self._forward.evaluated(metric_fn, self._batch(key, share), share.origin)
            finally:
                self._buffers.restore()
        self._check_unwritten(versions, "in an evaluation")
        return measured(value, len(share.samples))

    def opened(self, source: Source) -> Source:
        """See ``seams.Framework.opened``."""
        if isinstance(source, Samples):
            return source
        return Columns(tuple(map(_column, source.arrays)), source.rebuild, torch.from_numpy)

    def export(self, steps: int, *, copy: bool) -> Exported:
        """See ``seams.Framework.export``."""
        self.rewind()
        self._collector.forget()
        model = copied(self._model) if copy else self._model
        params = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return Exported(model, params, digest(self._model, self._updates.optimizers, steps))

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def _check_unwritten(self, versions: list[int], where: str) -> None:
        """Parameters written by user code would leak from replica to replica; a lone replica may do so in a step."""
        for (name, parameter), version in zip(self._named, versions, strict=True):
            if parameter._version != version:
                raise UsageError(
                    f"parameter {name!r} was written in place {where}, so what follows would start from other weights; "
                    "use a buffer for what forward updates, or replicas=1"
                )

    def _batch(self, key: int, share: Share) -> Any:
        self._shapes.settle()
        samples = share.read(share.samples)
        generators.seed(key, self._owned)
        if self._models:
            generators.reseed(self._models, key)
        return self._forward.to_device(samples if share.collated else self._collate(samples))


@contextlib.contextmanager
def building(threads: int) -> Iterator[None]:
    """Inside, a model may be made and opened, one at a time: generators, threads and modes are the run's."""
    with Environment(threads):
        yield


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """An independent copy of the run's model, for the caller."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise UsageError(
            f"the model ({type(model).__name__}) cannot be copied in the middle of a run ({error}); do not keep "
            "tensors with a gradient in its attributes, or take result() after the run"
        ) from error


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; every module's own mode after it.

    The attribute is set, ``eval()`` is not called: modules that do more there (merge adapters, say) would stay changed.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def _explain(error: ValueError, samples: int) -> None:
    """Add the way out where torch's error comes from how the batch was dealt."""
    if "more than 1 value per channel" in str(error):
        raise UsageError(
            f"BatchNorm cannot normalise a share of {samples} sample ({error}); raise batch_size or lower replicas so "
            "that every share has at least 2 samples; drop_last=True drops a short last batch"
        ) from error


def _column(array: Any) -> torch.Tensor:
    """A column as a tensor over the same memory, read-only arrays and memory maps too: columns are never written.

    torch has no negative or odd strides, as reversed views and fields of records have: those are copied.
    """
    if isinstance(array, torch.Tensor):
        return array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            return torch.from_numpy(np.asarray(array))
        except ValueError:
            return torch.from_numpy(np.array(array))
