"""What is taken of TrainingArguments, and what is refused.

A field is translated (``TRANSLATED``), has no effect on the answer (``FREE``), or has to be at its default. What is
refused is not listed, so that a field which a later version adds is refused, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import phalanx

# By the recipe's field that takes their place, if there is one. Where it is given, these do not count.
TRANSLATED = {
    "batch_size": ("per_device_train_batch_size",),
    "replicas": ("gradient_accumulation_steps",),
    "epochs": ("num_train_epochs",),
    "steps": ("max_steps",),
    "lr": ("learning_rate",),
    "optimizer": ("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    "scheduler": ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    "max_norm": ("max_grad_norm",),
    "loss_fn": ("label_smoothing_factor",),
    "precision": ("bf16", "fp16"),
    "seed": ("seed", "data_seed"),
    "drop_last": ("dataloader_drop_last",),
    "shuffle": ("train_sampling_strategy", "group_by_length"),
    "collate_fn": ("remove_unused_columns",),
    "": (
        *("use_cache", "activation_checkpointing", "gradient_checkpointing", "label_names", "prediction_loss_only"),
        *("eval_strategy", "eval_steps", "per_device_eval_batch_size"),
    ),
}
HERE = {name: field for field, names in TRANSLATED.items() for name in names}
VALUES = {  # of some, only these values are translated
    "optim": ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"),
    "lr_scheduler_type": (
        *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"),
        *("inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
    ),
    "train_sampling_strategy": ("random", "sequential"),
    "group_by_length": (False,),
    "fp16": (False,),
    "report_to": ([], ["kubeflow"]),  # TrainingArguments adds that by itself where Kubeflow runs
}
FREE = {
    # Where and when something is written, logged or shown, and what only scripts read.
    *("output_dir", "overwrite_output_dir", "logging_dir", "logging_strategy", "logging_steps", "logging_first_step"),
    *("logging_nan_inf_filter", "log_on_each_node", "log_level", "log_level_replica", "disable_tqdm", "run_name"),
    *("include_num_input_tokens_seen", "skip_memory_metrics", "project", "trackio_space_id", "trackio_bucket_id"),
    *("trackio_static_space_id", "save_strategy", "save_steps", "save_total_limit", "save_on_each_node"),
    *("save_only_model", "save_safetensors", "enable_jit_checkpoint", "hub_token", "hub_private_repo", "hub_model_id"),
    *("hub_strategy", "hub_always_push", "hub_revision", "do_train", "do_eval", "do_predict"),
    *("metric_for_best_model", "greater_is_better", "fsdp_config"),  # of load_best_model_at_end, of fsdp
    # How fast it goes, and where. Devices are not counted.
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_in_order"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "eval_accumulation_steps", "use_cpu"),
    *("no_cuda", "torch_empty_cache_steps", "full_determinism", "average_tokens_across_devices", "local_rank"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
    *("ddp_backend", "ddp_timeout"),
}
BATCHES = "give the recipe's own field: batch_sampler=f, with f(epoch, generator)"
SHARED = "leave it out: workers share one copy of the weights"
WAYS = {
    "optim": "give the recipe's own field: optimizer=lambda named: ...",
    "lr_scheduler_type": "give the recipe's own fields: scheduler=..., schedule_every='epoch', schedule_on='eval/loss'",
    "train_sampling_strategy": BATCHES,
    "group_by_length": BATCHES,
    "fp16": "there is no float16: bf16=True",
    "load_best_model_at_end": "leave it out; train(evaluation=evaluation, callbacks=[phalanx.callbacks.SaveBest("
    "'eval/loss')]) keeps the best weights, which are result.best.weights",
    "report_to": "say 'none'; logs are callbacks: train(callbacks=[phalanx.callbacks.Log('tensorboard')])",
    "push_to_hub": "call result.model.push_to_hub(...) afterwards",
    "resume_from_checkpoint": "train(run_dir='runs/a') goes on by itself",
    "torch_compile": "compile the model in model_init",
    "activation_checkpointing_kwargs": "call model.gradient_checkpointing_enable(...) in model_init",
    "eval_on_start": "call run.evaluate(metric, data) in `with recipe.start() as run`",
    "auto_find_batch_size": "the batch is part of the answer: give per_device_train_batch_size",
    "deepspeed": SHARED,
    "fsdp": SHARED,
}
NAMES = {  # of the Trainer's arguments, and of the recipe's that have another name here
    "compute_loss_func": "it is called loss_fn: loss_fn(output, target)",
    "processing_class": "give what uses it: data_collator=transformers.DataCollatorWithPadding(tokenizer)",
    "data": "it is called train_dataset",
    "make_model": "it is called model_init",
}
INSTEAD = {  # fields of a recipe that take the place of others
    "steps": ("epochs",),
    "epochs": ("steps",),
    "weights": ("shuffle",),
    "batch_sampler": ("batch_size", "shuffle", "drop_last"),
    "loss_fn": ("forward_fn",),
    "phases": ("forward_fn", "optimizer", "scheduler"),
}


def settled_by(fields: Mapping[str, Any]) -> set[str]:
    """Fields of a recipe that are given, and those whose place they take."""
    return {*fields, *(other for name in fields for other in INSTEAD.get(name, ()))}


def check(args: Any, fields: Mapping[str, Any]) -> None:
    """Refuse what has no translation, and what is no field of a recipe.

    Parameters
    ----------
    args : transformers.TrainingArguments
    fields : mapping
        Fields of the recipe by name, which count in place of those of ``args``.

    Raises
    ------
    UsageError
        Names the field, its value and the way out.
    """
    there = {field.name: field for field in dataclasses.fields(args)}
    for name in fields:
        if name in NAMES or (name in there and name != "seed"):
            own = f", or to the recipe as {HERE[name]}=" if HERE.get(name) else ""
            way = NAMES.get(name, f"give it to TrainingArguments{own}")
            raise phalanx.UsageError(f"{name} is not an argument here; {way}")
    settled = settled_by(fields)
    for name, field in there.items():
        value = getattr(args, name)
        if HERE.get(name) not in settled and not _passes(field, value):
            way = WAYS.get(name, "leave it at its default")
            raise phalanx.UsageError(f"{name} is {getattr(value, 'value', value)!r}, which is not translated; {way}")
    if "seed" not in fields and args.data_seed not in (None, args.seed):
        raise phalanx.UsageError(
            f"data_seed is {args.data_seed} and seed is {args.seed}, but here one seed decides all; leave data_seed out"
        )


def _passes(field: Any, value: Any) -> bool:
    """Whether a value is translated, has no effect, or is the default."""
    if field.name in VALUES:
        return value in VALUES[field.name]
    usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    unset = (not usual or usual == "none") and _empty(value)
    return field.name in HERE or field.name in FREE or value == usual or unset


def _empty(value: Any) -> bool:
    """Whether a value says nothing: TrainingArguments makes a list of "none", and a config of None."""
    return not value or (dataclasses.is_dataclass(value) and value == type(value)())
