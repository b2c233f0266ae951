"""What a loss is a mean of: its weight, where the model's own loss tells it, and a warning where nobody does.

Models of Hugging Face take a dict with ``labels``, leave out those that are -100, and return an output with ``loss``
and ``logits``. Which labels count (all, or all but the first, where each position predicts the next) is not said
anywhere, so it is found out: the gradient of the loss is zero at the positions that do not. Other losses over something
else than samples are warned of if they return no weight: their replicas' mean is another number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from phalanx.definition import checks
from phalanx.definition.fields import Definition

IGNORED = -100
TOLERANCE = 0.05  # relative: beside the mean there may be a small loss of another kind
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

Form = Callable[[torch.Tensor], torch.Tensor]


class TokenMean:
    """Recognises such models, and tells the weight of a share: the labels that its loss is the mean of."""

    def __init__(self) -> None:
        self._form: Form | None = None

    def weight(self, output: Any, loss: Any, batch: Any) -> torch.Tensor | None:
        """How many labels the loss is the mean of; None where that is not recognised."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        if not isinstance(labels, torch.Tensor) or not isinstance(logits, torch.Tensor) or not torch.is_tensor(loss):
            return None
        if labels.is_floating_point() or labels.dtype == torch.bool or logits.shape[:-1] != labels.shape:
            return None
        if self._form is None:
            if not (loss.requires_grad and logits.requires_grad):
                return None
            if bool(torch.isnan(loss)) and not bool(following(labels).any()):
                return torch.zeros(())  # a mean of nothing
            forms = _forms(logits, labels, loss)
            if len(forms) != 1:  # if several, the same labels count by each
                return forms[0](labels).sum() if forms else None
            self._form = forms[0]
        return self._form(labels).sum()


def same(labels: torch.Tensor) -> torch.Tensor:
    """Which positions count, if each predicts its own label."""
    return labels != IGNORED


def following(labels: torch.Tensor) -> torch.Tensor:
    """Which positions count, if each predicts the next one's label."""
    return torch.nn.functional.pad(labels[..., 1:] != IGNORED, (0, 1))


def _forms(logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> list[Form]:
    """The ways of counting that agree with where the loss has a gradient, and with its value."""
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)
    if gradient is None:
        return []
    counted = (gradient != 0).any(-1)
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        forms = [form for form in (same, following) if torch.equal(form(labels), counted)]
        return [form for form in forms if _is_mean(form, logits, labels, loss)]


def _is_mean(form: Form, logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> bool:
    counted = form(labels)
    wanted = torch.where(counted, labels if form is same else labels.roll(-1, -1), IGNORED)
    mean = cross_entropy(logits.float().flatten(0, -2), wanted.flatten(), ignore_index=IGNORED)
    return bool(torch.isclose(mean, loss.detach().float(), rtol=TOLERANCE, atol=0.0, equal_nan=True))


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
