"""The Trainer's loss and batches, as far as they follow from the model: read off it once, in the caller's process."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

import phalanx

IGNORED = -100  # the label of what does not count


@dataclasses.dataclass(frozen=True)
class Loss:
    """A share's loss, and how many labels it is the mean of: the ``forward_fn`` of a recipe.

    The Trainer divides the sum over the labels of a batch by their number. The mean of the shares' means, each weighted
    by its number of labels, is the same. A model that takes ``num_items_in_batch`` is given that of the share, so that
    one replica has the Trainer's bits.

    Attributes
    ----------
    counted : bool
        Whether the model takes ``num_items_in_batch``.
    shifted : bool
        Whether each position predicts the next one's label, so that the first label does not count.
    smoothed : callable or None
        ``smoothed(outputs, labels, count)`` in place of the model's own loss.
    """

    counted: bool
    shifted: bool
    smoothed: Callable[..., Any] | None

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Loss and weight; without labels the loss alone, which samples weigh."""
        loss, count, _ = self.of(model, batch)
        return loss if count is None else (loss, count)

    def of(self, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Loss, number of labels (None without labels), and outputs."""
        inputs, count = dict(batch), self._count(batch)
        labels = inputs.pop("labels", None) if self.smoothed else None
        outputs = model(**inputs, **({"num_items_in_batch": count} if self.counted and count is not None else {}))
        if self.smoothed and labels is not None:
            return self.smoothed(outputs, labels, count), count, outputs
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if loss is None:
            raise phalanx.UsageError(
                f"the model returned no loss for a batch of {', '.join(batch)}; give samples labels, or pass loss_fn="
            )
        return loss, count, outputs

    def _count(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor):
            return None
        return batch.get("shift_labels", labels[..., 1:] if self.shifted else labels).ne(IGNORED).sum()


@dataclasses.dataclass(frozen=True)
class Look:
    """What the Trainer reads off a model.

    Attributes
    ----------
    loss : Loss
    labels : tuple of str
        Columns that are labels.
    ignored : tuple of str
        Outputs that are no predictions.
    columns : tuple of str or None
        Columns that are kept of samples; None: all.
    """

    loss: Loss
    labels: tuple[str, ...]
    ignored: tuple[str, ...]
    columns: tuple[str, ...] | None

    @classmethod
    def at(cls, model: Any, args: Any) -> Look:
        """Look at a model, or at the one inside a wrapper of PEFT's."""
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        from transformers.trainer_pt_utils import LabelSmoother
        from transformers.utils.generic import find_labels

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        config, taken = getattr(base, "config", None), inspect.signature(base.forward).parameters
        counted = getattr(base, "accepts_loss_kwargs", any(each.kind is each.VAR_KEYWORD for each in taken.values()))
        causal = LOSS_MAPPING.get(getattr(base, "loss_type", None) or "") is ForCausalLMLoss
        shifted = causal and not getattr(config, "is_encoder_decoder", False)
        smoothed = None
        if args.label_smoothing_factor:
            smoother = LabelSmoother(args.label_smoothing_factor)
            # The Trainer has another rule here for what is shifted. Its first versions do not give the number.
            shift = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            smoothed = functools.partial(
                _smoothed, smoother, shift, counted and "num_items_in_batch" in inspect.signature(smoother).parameters
            )
        labels = tuple(find_labels(type(base)) if args.label_names is None else args.label_names)
        columns = (*taken, "label", "label_ids", *labels) if args.remove_unused_columns else None
        return cls(
            Loss(counted, shifted, smoothed), labels, tuple(getattr(config, "keys_to_ignore_at_inference", ())), columns
        )


def _smoothed(smoother: Any, shift: bool, counted: bool, outputs: Any, labels: Any, count: Any) -> Any:
    return smoother(outputs, labels, shift_labels=shift, **({"num_items_in_batch": count} if counted else {}))


@dataclasses.dataclass(frozen=True)
class Collate:
    """Leaves out columns that the model does not take, and has the rest collated."""

    collator: Callable[[list[Any]], Any]
    columns: tuple[str, ...] | None

    def __call__(self, samples: list[Any]) -> Any:
        """A batch of samples."""
        return self.collator([self._kept(sample) for sample in samples])

    def _kept(self, sample: Any) -> Any:
        if self.columns is None or not isinstance(sample, Mapping):
            return sample
        return {name: value for name, value in sample.items() if name in self.columns}
