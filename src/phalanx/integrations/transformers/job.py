"""From the Trainer's arguments to a recipe's fields. What needs the Trainer's functions calls them in this process."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import phalanx
from phalanx.definition.generators import kept
from phalanx.integrations.transformers.arguments import check, settled_by
from phalanx.integrations.transformers.loss import Collate, Look
from phalanx.integrations.transformers.metrics import Measured, no_target


def recipe(
    model_init: Any,
    args: Any,
    train_dataset: Any,
    data_collator: Callable[[list[Any]], Any] | None = None,
    eval_dataset: Any = None,
    compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
    *,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    **fields: Any,
) -> tuple[phalanx.Recipe, phalanx.Evaluation | dict[str, phalanx.Evaluation] | None]:
    """What a Trainer would train, as a recipe, and its evaluation.

    A batch is what the Trainer takes for an update on one device; each accumulation step is a replica. Devices are not
    counted: what this machine has is no part of the answer.

    Parameters
    ----------
    model_init : callable or torch.nn.Module
        Called without arguments, here and in each process that computes; a model is copied.
    args : transformers.TrainingArguments
    train_dataset : map-style dataset, list of dicts or phalanx.Stream
    data_collator : callable, optional
        Makes a dict of tensors of a list of samples; by default ``transformers.default_data_collator``.
    eval_dataset : map-style dataset, list of dicts, or a dict of such by name, optional
    compute_metrics : callable, optional
        Given an ``EvalPrediction`` of the whole dataset, in arrays of numpy, it returns numbers by name.
    preprocess_logits_for_metrics : callable, optional
        ``f(logits, labels)`` is kept of each batch in place of its logits.
    **fields
        Fields of ``phalanx.Recipe``, which count whatever ``args`` says.

    Returns
    -------
    recipe : phalanx.Recipe
    evaluation : phalanx.Evaluation, dict of them, or None
        For ``train(evaluation=evaluation)``. Metrics are "eval/loss", and as "eval/accuracy" those that are computed.

    Raises
    ------
    UsageError
        A field of ``args`` has no translation and is not at its default; or an argument is wrong.
    """
    library = _library()
    if not isinstance(args, library.TrainingArguments):
        raise phalanx.UsageError(f"args is a {type(args).__name__}; it must be transformers.TrainingArguments")
    check(args, fields)
    maker = functools.partial(_model, model_init, args.gradient_checkpointing, args.use_cache)
    with kept():
        model = maker()
    look, settled = Look.at(model, args), settled_by(fields)
    own: dict[str, Any] = _plain(args) | {
        "forward_fn": look.loss,
        "collate_fn": Collate(data_collator or library.default_data_collator, look.columns),
    }
    if "optimizer" not in settled:
        own["optimizer"] = _grouped(library.Trainer, model, args, fields.pop("lr", args.learning_rate))
    given = {name: value for name, value in own.items() if name not in settled} | fields
    data = _samples("train_dataset", train_dataset)
    made = phalanx.Recipe(model if isinstance(model_init, torch.nn.Module) else maker, data, **given)
    made = made.replace(**_length(made, args, settled))
    measured = Measured(look, None if args.prediction_loss_only else compute_metrics, preprocess_logits_for_metrics)
    return made, _evaluation(eval_dataset, measured.metrics(loss="loss_fn" not in fields), measured, made, args)


def _model(model_init: Any, checkpointing: bool, use_cache: bool) -> torch.nn.Module:
    """The model as the Trainer sets it up; a copy of a model."""
    model = copy.deepcopy(model_init) if isinstance(model_init, torch.nn.Module) else model_init()
    if not isinstance(model, torch.nn.Module):
        raise phalanx.UsageError(f"model_init returned a {type(model).__name__}; it must return the model")
    anything: Any = model
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or anything.gradient_checkpointing_enable
        enable()
    if getattr(model, "config", None) is not None:
        anything.config.use_cache = use_cache
    return model.train()


def _plain(args: Any) -> dict[str, Any]:
    """Fields of the recipe that follow from a field or two of ``args``."""
    length = {"epochs": math.ceil(args.num_train_epochs)} if args.max_steps < 0 else {"steps": args.max_steps}
    return length | {
        "replicas": args.gradient_accumulation_steps,
        "batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps,
        "max_norm": args.max_grad_norm or math.inf,
        "shuffle": getattr(args, "train_sampling_strategy", "random") == "random",
        "drop_last": args.dataloader_drop_last,
        "seed": args.seed,
        "precision": "bfloat16" if args.bf16 else None,
    }


def _grouped(trainer: Any, model: torch.nn.Module, args: Any, lr: float) -> Callable[[Any], Any]:
    """What makes the Trainer's optimizer."""
    kind, options = trainer.get_optimizer_cls_and_kwargs(args)
    decayed = trainer.get_decay_parameter_names(None, model)  # a method that asks nothing of its trainer
    return functools.partial(_optimizer, kind, {**options, "lr": lr}, sorted(decayed), args.weight_decay)


def _optimizer(kind: Any, options: dict[str, Any], decayed: Sequence[str], decay: float, named: Any) -> Any:
    groups = [
        {"params": [item for name, item in named if (name in decayed) is decays], "weight_decay": decay * decays}
        for decays in (True, False)
    ]
    return kind([group for group in groups if group["params"]], **options)


def _length(made: phalanx.Recipe, args: Any, settled: set[str]) -> dict[str, Any]:
    """What follows from the number of steps of an epoch: parts of epochs, and the schedule."""
    if made.total is None:
        raise phalanx.UsageError("max_steps is -1, and how long an epoch is is not known; give max_steps")
    changes, total, own = dict[str, Any](), made.total, args.per_device_train_batch_size
    if made.epochs and "epochs" not in settled and made.epochs != args.num_train_epochs:
        total = math.ceil(args.num_train_epochs * (total / made.epochs))
        changes = {"epochs": None, "steps": total}
    if made.drop_last and "drop_last" not in settled and made.samples:
        there, here = made.samples % own, made.samples % made.global_batch
        if there != here:
            raise phalanx.UsageError(
                f"dataloader_drop_last is True, which leaves out {there} of {made.samples} samples in the Trainer, but "
                f"{here} here, where batches have {made.global_batch}; give drop_last=True, or False, to the recipe"
            )
    if "scheduler" not in settled:
        kind, warmup = str(args.lr_scheduler_type.value), args.get_warmup_steps(total)
        changes["scheduler"] = functools.partial(_schedule, kind, warmup, total, args.lr_scheduler_kwargs)
    return changes


def _schedule(kind: str, warmup: int, steps: int, options: Any, optimizer: Any) -> Any:
    from transformers.optimization import get_scheduler

    return get_scheduler(kind, optimizer, warmup, steps, options)


def _evaluation(
    eval_dataset: Any, metrics: Mapping[str, Any], measured: Measured, made: phalanx.Recipe, args: Any
) -> phalanx.Evaluation | dict[str, phalanx.Evaluation] | None:
    """As often as ``eval_strategy`` says, and after the last step."""
    if eval_dataset is None:
        if args.eval_strategy != "no":
            raise phalanx.UsageError(f"eval_strategy is {args.eval_strategy.value!r}; pass an eval_dataset, too")
        return None
    total = made.total or 1
    steps = args.eval_steps if args.eval_strategy == "steps" else total
    common: dict[str, Any] = {
        "batch_size": args.per_device_eval_batch_size,
        "every_steps": None
        if args.eval_strategy == "epoch"
        else int(steps if steps >= 1 else math.ceil(total * steps)),
        "forward_fn": measured,
        "target_fn": no_target,
    }
    several = eval_dataset if isinstance(eval_dataset, Mapping) else {"eval_dataset": eval_dataset}
    made_of = {name: phalanx.Evaluation(metrics, _samples(name, data), **common) for name, data in several.items()}
    return made_of if several is eval_dataset else made_of["eval_dataset"]


def _samples(name: str, data: Any) -> Any:
    """Data that is read sample by sample: columns would pass the collator by."""
    if isinstance(data, (Mapping, tuple)) or hasattr(data, "dtype"):
        raise phalanx.UsageError(
            f"{name} is a {type(data).__name__}; it must be a dataset of dicts, which the collator makes batches of: a "
            "map-style dataset or a list"
        )
    return data


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise phalanx.UsageError("transformers is not installed; pip install 'phalanx[transformers]'") from error
    return transformers
