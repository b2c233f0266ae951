"""A model on one device, and what computes replicas with it: batches, forward, backward, buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

from phalanx.definition import generators
from phalanx.definition.data import Share
from phalanx.definition.evaluation import measured
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.torch.buffers import Buffers
from phalanx.frameworks.torch.environment import StaticShapes, explain
from phalanx.frameworks.torch.forward import AmbiguousMean, Forward
from phalanx.frameworks.torch.gradient import Collector, drop
from phalanx.frameworks.torch.model import warn_of_eval_mode
from phalanx.seams import Computed, Todo
from phalanx.surroundings import interrupts


class Lane:
    """Computes replicas one after another, each from the state at the step's start.

    Parameters
    ----------
    definition : Definition
    model : torch.nn.Module
        On its device already.
    shapes : StaticShapes
    ambiguous : AmbiguousMean
        Warns of the recipe's loss, once.
    written : bool
        Whether gradients will be written, and so may share no memory.

    Attributes
    ----------
    model : torch.nn.Module
    device : torch.device
    named : list of (str, torch.nn.Parameter)
    parameters : list of torch.nn.Parameter
    buffers : Buffers
    collector : Collector
    """

    def __init__(
        self,
        definition: Definition,
        model: torch.nn.Module,
        shapes: StaticShapes,
        ambiguous: AmbiguousMean,
        *,
        written: bool,
    ) -> None:
        self.model = model
        self.named = list(model.named_parameters())
        self.parameters = [parameter for _, parameter in self.named]
        self.device = self.parameters[0].device
        self.buffers = Buffers(model)
        self.collector = Collector(self.named, written=written)
        self._forward = Forward(definition, model, self.device)
        self._shapes = shapes
        self._ambiguous = ambiguous
        self._shared = definition.replicas > 1
        self._owned = definition.generators
        self._models = generators.find({"model": model})
        self._collate = definition.collate_fn or default_collate
        self._unseen = True

    def gradient(self, todo: Todo) -> Computed:
        """Compute one replica; runs user code."""
        share = todo.share
        self.buffers.begin()
        batch = self.batch(todo.key, share)
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
            warn_of_eval_mode(self.model)
        taken = None if weight == 0 else self.collector.backward(loss)
        if self._shared:
            self._check_unwritten(versions, "in forward, loss_fn or a hook")
        return Computed(self.loss(loss), weight, taken, self.buffers.left())

    def loss(self, loss: torch.Tensor) -> Any:
        """What is known of a loss, now that it is being computed."""
        return loss.item()

    def rewind(self) -> None:
        """Undo what computing gradients left behind."""
        drop(self.parameters)
        self.buffers.restore()

    def measure(self, metric_fn: Callable[..., Any], key: int, share: Share) -> tuple[float, float]:
        """See ``seams.Framework.measure``."""
        versions = self._versions()
        with evaluating(self.model), torch.no_grad():
            self.buffers.begin()
            try:
                with interrupts.breakable():
                    value = self._forward.evaluated(metric_fn, self.batch(key, share), share.origin)
            finally:
                self.buffers.restore()
        self._check_unwritten(versions, "in an evaluation")
        return measured(value, len(share.samples))

    def batch(self, key: int, share: Share) -> Any:
        """A share's samples on the device, with all generators seeded for what follows."""
        self._shapes.settle()
        samples = share.read(share.samples)
        self.seed(key)
        return self._forward.to_device(samples if share.collated else self._collate(samples))

    def seed(self, key: int) -> None:
        """Seed every generator that user code may draw from."""
        generators.seed(key, self._owned)
        if self._models:
            generators.reseed(self._models, key)

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def _check_unwritten(self, versions: list[int], where: str) -> None:
        """Parameters written by user code would leak from replica to replica; a lone replica may do so in a step."""
        for (name, parameter), version in zip(self.named, versions, strict=True):
            if parameter._version != version:
                raise UsageError(
                    f"parameter {name!r} was written in place {where}, so what follows would start from other weights; "
                    "use a buffer for what forward updates, or replicas=1"
                )


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
