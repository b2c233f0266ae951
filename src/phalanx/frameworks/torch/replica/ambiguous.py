"""Losses that are means over something else than samples, and do not say so: their replicas' mean is another number."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.frameworks.torch.replica.tokens import IGNORED

LOOKS = 64
WRAPPED = "Wrap it: phalanx.weighted(loss_fn, count)"
RETURNED = (
    "Return the weight, too: forward_fn=lambda model, batch: (model(**batch).loss, (batch['labels'] != -100).sum()), "
    "or what else it is the mean of. A loss that was divided by num_items_in_batch: leave that out, and the labels are "
    "counted here"
)
WHOLE = (
    "Return the model's whole output instead of its loss, forward_fn=lambda model, batch: model(**batch), without "
    "num_items_in_batch, and its labels are counted here; or the loss and its weight: (loss, what it is the mean of)"
)


class AmbiguousMean:
    """Warns once if the loss looks like a mean over something else than samples, and returned no weight.

    Parameters
    ----------
    definition : Definition
    looks : int
        At how many replica-steps it looks.
    """

    def __init__(self, definition: Definition, looks: int = LOOKS) -> None:
        self._loss_fn = definition.loss_fn
        self._own = definition.forward_fn is None
        self._looks = looks if definition.replicas > 1 and definition.phases is None else 0

    def warn(self, weight: float | None, batch: Any) -> None:
        """Look at the first replica-steps of a run; a first share may be one without padding.

        A device is waited for in the very first only.
        """
        if not self._looks:
            return
        waits = self._looks == LOOKS
        self._looks = 0 if weight is not None else self._looks - 1
        reason = None if weight is not None else _class_weights(self._loss_fn) or self._ignored_targets(batch, waits)
        if reason is not None:
            self._looks = 0
            who, way = ("the model's own loss", RETURNED) if self._own else ("the loss of forward_fn", WHOLE)
            who, way = (who, way) if self._loss_fn is None else ("loss_fn", WRAPPED)
            checks.warn(
                f"{who} {reason}, so its mean is not over samples, and it returns no weight: the replicas' mean "
                f"differs from the whole batch's. {way}"
            )

    def _ignored_targets(self, batch: Any, waits: bool) -> str | None:
        ignored = _option(self._loss_fn, "ignore_index", IGNORED)
        for leaf in _tensors(batch):
            if not waits and leaf.device.type != "cpu":
                continue
            if not leaf.is_floating_point() and not leaf.is_complex() and bool((leaf == ignored).any()):
                return f"seems to ignore targets of {ignored}, which the data has"
        return None


def _class_weights(loss_fn: Any) -> str | None:
    return "has class weights" if _option(loss_fn, "weight", None) is not None else None


def _option(loss_fn: Any, name: str, default: Any) -> Any:
    """An option of a loss module, or of a partial over a loss function; only torch's own losses are understood."""
    if isinstance(loss_fn, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)):
        return getattr(loss_fn, name)
    if isinstance(loss_fn, functools.partial):
        return loss_fn.keywords.get(name, default)
    return default


def _tensors(batch: Any) -> list[torch.Tensor]:
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else [batch]
    return [value for value in values if isinstance(value, torch.Tensor)]
