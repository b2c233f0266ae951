"""Losses that are means over something else than samples: how to say so, and a warning where it is not said."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from phalanx.definition import Definition
from phalanx.errors import UsageError

IGNORED = -100


def weighted(loss_fn: Callable[[Any, Any], Any], count: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss that tells its weight, so that shares with more to count weigh more.

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


def check_stateless(loss_fn: Any) -> None:
    """Parameters of a loss would never be trained: the optimizer gets the model's."""
    if isinstance(loss_fn, torch.nn.Module) and any(True for _ in loss_fn.parameters()):
        raise UsageError(
            f"loss_fn is a {type(loss_fn).__name__} with parameters, which would not be trained; make it a part of the "
            "model, let forward return the loss, and pass loss_fn=None"
        )


class AmbiguousMean:
    """Warns once if the loss looks like a mean over something else than samples, and returned no weight."""

    def __init__(self, definition: Definition) -> None:
        check_stateless(definition.loss_fn)
        self._loss_fn = definition.loss_fn
        self._settled = definition.replicas == 1

    def warn(self, weight: float | None, batch: Any) -> None:
        """Look at the first replica-step of a run."""
        if self._settled:
            return
        self._settled = True
        reason = None if weight is not None else _class_weights(self._loss_fn) or self._ignored_targets(batch)
        if reason is not None:
            warnings.warn(
                f"loss_fn {reason}, so its mean is not over samples, and it returns no weight: the replicas' mean "
                "differs from the whole batch's. Wrap it: phalanx.weighted(loss_fn, count)",
                UserWarning,
                stacklevel=2,
            )

    def _ignored_targets(self, batch: Any) -> str | None:
        ignored = _option(self._loss_fn, "ignore_index", IGNORED)
        for leaf in _tensors(batch):
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
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (tuple, list)) else [batch]
    return [value for value in values if isinstance(value, torch.Tensor)]
