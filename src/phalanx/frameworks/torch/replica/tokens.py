"""Models that return their own mean loss over labels: over how many labels that is.

Models of Hugging Face take a dict with ``labels``, leave out those that are -100, and return an output with ``loss``
and ``logits``. Which labels count (all, or all but the first, where each position predicts the next) is not said
anywhere, so it is found out: the mean of one of both is the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy

IGNORED = -100
TOLERANCE = 1e-3  # relative; low precision rounds, and sums are made in another order

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
            if not bool((labels != IGNORED).any()):
                return torch.zeros(())  # nothing counts, however it is counted
            with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
                self._form = next((form for form in (following, same) if _is_mean(form, logits, labels, loss)), None)
        return None if self._form is None else (self._form(labels) != IGNORED).sum()


def same(labels: torch.Tensor) -> torch.Tensor:
    """Each position predicts its own label."""
    return labels


def following(labels: torch.Tensor) -> torch.Tensor:
    """Each position but the last predicts the next one's label."""
    return labels[..., 1:]


def _is_mean(form: Form, logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> bool:
    if labels.dim() < 2 and form is following:
        return False
    wanted = form(labels)
    shown = logits[..., : logits.shape[-2] - 1, :] if form is following else logits
    mean = cross_entropy(shown.float().flatten(0, -2), wanted.flatten(), ignore_index=IGNORED)
    return bool(torch.isclose(mean, loss.detach().float(), rtol=TOLERANCE, atol=0.0, equal_nan=True))
