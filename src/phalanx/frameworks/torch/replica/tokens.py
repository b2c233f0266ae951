"""Of how many labels the loss of a model of Hugging Face is the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy

IGNORED = -100
TOLERANCE = 0.05  # relative

Form = Callable[[torch.Tensor], torch.Tensor]


class TokenMean:
    """Recognises models of Hugging Face. A share's weight is the number of labels that its loss is the mean of."""

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
    """Whether a loss is the mean over what counts, or that and something beside it, of any size.

    Each process asks anew. So the answer must not change while a run trains: "within 5 %" did, as the loss of a router
    is small beside the mean at first, and large later. The sum is no mean, nor is a sum over a larger number.
    """
    counted = form(labels)
    wanted = torch.where(counted, labels if form is same else labels.roll(-1, -1), IGNORED)
    mean = cross_entropy(logits.float().flatten(0, -2), wanted.flatten(), ignore_index=IGNORED)
    value, number = loss.detach().float(), counted.sum()
    if bool(number > 1) and bool(torch.isclose(mean * number, value, rtol=TOLERANCE, atol=0.0)):
        return False
    return bool((value >= mean * (1 - TOLERANCE)) | torch.isnan(value))
