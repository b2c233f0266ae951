"""What ``compute_metrics`` is given: predictions and labels of a whole dataset, as arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

import phalanx
from phalanx.integrations.transformers.loss import IGNORED, Look


@dataclasses.dataclass(frozen=True)
class Measured:
    """What metrics see of a batch: the ``forward_fn`` of an evaluation.

    Attributes
    ----------
    look : Look
    compute : callable or None
        The ``compute_metrics``; without it only the loss is seen.
    preprocess : callable or None
        ``preprocess(logits, labels)`` in place of the logits.
    """

    look: Look
    compute: Callable[[Any], Mapping[str, Any]] | None
    preprocess: Callable[[Any, Any], Any] | None

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Loss and number of labels; predictions and labels row by row, as batches may be padded to unlike lengths."""
        loss, count, outputs = self.look.loss.of(model, batch)
        seen = {"loss": loss, "count": count}
        if self.compute is None:
            return seen
        left_out, named = (*self.look.ignored, "loss"), isinstance(outputs, Mapping)
        logits = tuple(value for name, value in outputs.items() if name not in left_out) if named else outputs[1:]
        logits, labels = _alone(logits), _alone(tuple(batch[name] for name in self.look.labels if name in batch))
        if self.preprocess is not None:
            logits = self.preprocess(logits, labels)
        return seen | {"predictions": _rows(logits), "label_ids": _rows(labels)}

    def metrics(self, *, loss: bool) -> dict[str, Any]:
        """Metrics by name; ``loss``: whether that of the model is one."""
        whole = {} if self.compute is None else {"eval": phalanx.whole(functools.partial(_computed, self.compute))}
        return ({"eval/loss": _loss} if loss else {}) | whole


def no_target(batch: Any) -> dict[str, Any]:
    """The ``target_fn`` of an evaluation: labels are among what is measured."""
    return {}


def _loss(output: Mapping[str, Any], target: Any) -> Any:
    return output["loss"] if output["count"] is None else (output["loss"], output["count"])


def _computed(compute: Callable[[Any], Mapping[str, Any]], output: Mapping[str, Any], target: Any) -> dict[str, Any]:
    from transformers import EvalPrediction

    seen = EvalPrediction(predictions=_stacked(output["predictions"]), label_ids=_stacked(output["label_ids"]))
    return {name.removeprefix("eval_"): value for name, value in compute(seen).items()}


def _alone(items: tuple[Any, ...]) -> Any:
    return items[0] if len(items) == 1 else items


def _rows(tree: Any) -> Any:
    """Each row in a tuple of its own: rows of unlike shapes are not joined, and a list of tuples is no tensor."""
    return tuple(map(_rows, tree)) if isinstance(tree, tuple) else [(row,) for row in tree]


def _stacked(rows: Any) -> Any:
    """All rows in one array; short ones end in -100, as the Trainer pads them."""
    if isinstance(rows, tuple):
        return tuple(map(_stacked, rows))
    tensors = [row.float() if row.dtype == torch.bfloat16 else row for (row,) in rows]
    if len({row.shape for row in tensors}) == 1:
        return torch.stack(tensors).numpy()
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=IGNORED).numpy()
