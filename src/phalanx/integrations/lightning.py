"""A LightningModule as a recipe: ``recipe, evaluation = lightning.recipe(module, datamodule, epochs=3)``.

The module's own steps are called, with a stand-in for the trainer that says only what is true of the answer. What
Lightning's trainer would do beside them (hooks, several optimizers) is translated, or refused by its name.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import phalanx
from phalanx.definition.generators import kept
from phalanx.definition.metrics import check_merges
from phalanx.errors import UsageError
from phalanx.integrations import lightning_steps as steps
from phalanx.integrations.lightning_optimizers import configured, optimizer_of, scheduler_of
from phalanx.integrations.loaders import fields_of

PACKAGES = ("lightning", "pytorch_lightning")
MODULE, DATA_MODULE = "LightningModule", "LightningDataModule"
FREE = r"^(prepare_data|setup|(train|val)_dataloader|teardown|on_exception)$|test|predict|checkpoint"
FREE_IN = {  # what may be overridden: it is called, or never a part of training
    DATA_MODULE: re.compile(FREE),
    MODULE: re.compile(
        rf"{FREE}|^((training|validation)_step|configure_(optimizers|model)|to_\w+|(un)?freeze)$|_batch_(transfer|to_)"
    ),
}
HOOKS = {  # a part of a hook's name, and the way out
    "epoch|validation": "read self.current_epoch in training_step; a metric over all samples is an object of "
    "torchmetrics: self.log('accuracy', self.accuracy) in validation_step",
    "clip": "max_norm=1.0 clips by the norm; by value: docs/cookbook.md",
    "backward|optimizer|zero_grad|schedule": "register a hook of the optimizer: "
    "optimizer.register_step_pre_hook(...) in configure_optimizers",
    "callbacks": "callbacks are an option: recipe.train(callbacks=[...])",
    "": "do it in training_step, or in a callback: recipe.train(callbacks=[...])",
}
EVALUATED = "an evaluation knows how often: dataclasses.replace(evaluation, every_epochs=2), or every_steps=100"
FEWER = "give a loader with fewer data: DataLoader(torch.utils.data.Subset(dataset, range(100)), batch_size=32)"
REMOVED = [f"{stage}_{end}" for stage in ("training", "validation") for end in ("step_end", "epoch_end")]  # in 2.0
ARGUMENTS = {
    **dict.fromkeys(("check_val_every_n_epoch", "val_check_interval"), EVALUATED),
    **dict.fromkeys(("limit_train_batches", "overfit_batches", "limit_val_batches"), FEWER),
    **dict.fromkeys(("make_model", "loss_fn", "loss_takes", "loss_over", "phases"), "the module says that"),
    "fast_dev_run": "it is steps=1",
    "gradient_clip_algorithm": HOOKS["clip"],
    "deterministic": "every run is",
    "strategy": "processes are an option: recipe.train(workers=4)",
}


def recipe(
    module: Any, datamodule: Any = None, *, train_dataloaders: Any = None, val_dataloaders: Any = None, **fields: Any
) -> tuple[phalanx.Recipe, phalanx.Evaluation | None]:
    """Translate a LightningModule. It is copied; its hooks for data are called here, once.

    Parameters
    ----------
    module : LightningModule
        Of ``lightning.pytorch`` or ``pytorch_lightning``.
    datamodule : LightningDataModule, optional
    train_dataloaders, val_dataloaders : torch.utils.data.DataLoader, optional
        In place of the datamodule's, or the module's own.
    **fields
        Of ``phalanx.Recipe``: ``epochs`` or ``steps``, and those that a trainer or a loader would decide.

    Returns
    -------
    recipe : phalanx.Recipe
    evaluation : phalanx.Evaluation or None
        Of the values that ``validation_step`` logs; None without that, or without data for it.

    Raises
    ------
    UsageError
        Something would not be called or not have its effect; the message names it and the way out.
    """
    _check(module, datamodule, fields)
    module = steps.prepared(_copied(module), fields.get("epochs"), fields.get("steps"), datamodule)
    with steps.attached(module):
        train, held_out = _loaders(module, datamodule, train_dataloaders, val_dataloaders, fields)
    named = dict(module.named_modules())
    modules = [path for path, one in named.items() if _base(one, "LightningModule")]
    steps.tell(module, modules=modules, metrics=[path for path, one in named.items() if steps.is_metric(one)])
    fields = {**({} if train is None else fields_of(train, "train_dataloaders", fields)), **fields}
    with warnings.catch_warnings(action="ignore"):  # the recipe that is returned warns
        plain = phalanx.Recipe(module, loss_fn=steps.loss_of, loss_takes="model", **fields)
    per_epoch, total = (math.inf if number is None else number for number in (plain.per_epoch, plain.total))
    steps.tell(module, num_training_batches=per_epoch, estimated_stepping_batches=total)
    evaluation = None if held_out is None else _evaluation(module, fields_of(held_out, "val_dataloaders"))
    metrics = evaluation.metric_fn if evaluation else {}
    return plain.replace(**_optimization(module, fields, metrics)), evaluation


def _copied(module: Any) -> Any:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise UsageError(f"module is a {type(module).__name__} that cannot be copied: {error}") from error


def _base(value: Any, *names: str) -> type | None:
    """Lightning's own class of one of these names that ``value`` is an instance of."""
    kinds = (kind for kind in type(value).__mro__ if kind.__module__.partition(".")[0] in PACKAGES)
    return next((kind for kind in kinds if kind.__name__ in names), None)


def _overridden(owner: Any) -> list[str]:
    """Which methods of Lightning's an object has of its own: what this version of Lightning would call on it."""
    base = _base(owner, MODULE, DATA_MODULE)
    theirs = {name: inspect.getattr_static(base, name) for name in dir(base) if not hasattr(torch.nn.Module, name)}
    own = [
        name
        for name, method in theirs.items()
        if not name.startswith("_") and callable(method)
        if name in vars(owner) or inspect.getattr_static(type(owner), name) is not method
    ]
    return own + [name for name in REMOVED if name not in theirs and callable(getattr(owner, name, None))]


def _check(module: Any, datamodule: Any, fields: Mapping[str, Any]) -> None:
    """Refuse what is no module of Lightning's, what nobody would call, and arguments that are not a recipe's."""
    for owner, kind in ((module, MODULE), *([] if datamodule is None else [(datamodule, DATA_MODULE)])):
        if _base(owner, kind) is None:
            raise UsageError(
                f"a {type(owner).__name__} is no {kind}; pass a module, and either a datamodule or loaders by name: "
                "train_dataloaders=, val_dataloaders="
            )
        for name in _overridden(owner):
            if not FREE_IN[kind].search(name):
                way = next(way for part, way in HOOKS.items() if re.search(part, name))
                raise UsageError(
                    f"{type(owner).__name__} overrides {name}, which would not be called; remove it: {way}"
                )
    taken = inspect.signature(module.training_step).parameters
    if not module.automatic_optimization or "optimizer_idx" in taken:
        raise UsageError(
            "training_step steps several optimizers, or one by hand (automatic_optimization is False); write a recipe "
            "with phases, one for each optimizer: docs/steps.md"
        )
    if odd := taken.keys() & {"dataloader_iter", "hiddens"}:
        raise UsageError(f"training_step takes {min(odd)}; it is called with a batch, and batch_idx")
    known = [field.name for field in dataclasses.fields(phalanx.Recipe)]
    for name, value in fields.items():
        if name in ARGUMENTS:
            raise UsageError(f"{name} is not an argument here; {ARGUMENTS[name]}")
        if name not in known:
            phalanx.Recipe(module, **{name: value})  # says what it is called, or where it goes
    if fields.get("epochs") is None and fields.get("steps") is None:
        raise UsageError("epochs (max_epochs of Lightning's Trainer) is missing; give it, or steps")


def _loaders(module: Any, datamodule: Any, train: Any, val: Any, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Call the hooks for data; the loaders for training and validation, where there are any."""
    if datamodule is not None and not (train is None and val is None):
        raise UsageError("datamodule is given, and so is a loader; pass the one or the other")
    owners = [module] if datamodule is None else [datamodule, module]
    for owner in owners:
        owner.prepare_data()
    for owner in owners:
        owner.setup(stage="fit")
    module.configure_model()
    own = _overridden(owners[0])
    if train is None and "data" not in fields:
        if "train_dataloader" not in own:
            raise UsageError("train_dataloaders is missing; give it, or a datamodule, or data= and batch_size=")
        train = owners[0].train_dataloader()
    if "validation_step" not in _overridden(module):
        if val is not None:
            raise UsageError("val_dataloaders is given, but the module has no validation_step; leave it out")
    elif val is None and "val_dataloader" in own:
        val = owners[0].val_dataloader()
    return train, val


def _evaluation(module: Any, fields: Mapping[str, Any]) -> phalanx.Evaluation:
    """Ask ``validation_step`` once what it logs, and evaluate that."""
    if "weights" in fields:
        raise UsageError("val_dataloaders draws samples by weights; let it have each once")
    size = fields["batch_size"]
    samples = steps.Numbered(fields["data"], size, fields["collate_fn"], drop_last=fields["drop_last"])
    if not len(samples):
        raise UsageError(f"val_dataloaders has no batch of {size}, and drops a smaller one; give drop_last=False")
    steps.tell(module, num_val_batches=[-(-len(samples) // size)])
    probe = copy.deepcopy(module).eval()
    with kept(), torch.no_grad():
        logged = steps.validated(probe, samples.collate([samples[index] for index in range(min(size, len(samples)))]))
    if not logged:
        raise UsageError("validation_step logs nothing that could be evaluated; call self.log('val_loss', loss)")
    steps.tell(module, logged=frozenset(logged))
    for value in logged.values():
        if len(samples) > size and steps.is_metric(value):
            check_merges(value)
    metrics = {name: steps.Merged(name) if steps.is_metric(logged[name]) else steps.reading(name) for name in logged}
    functions = {"forward_fn": steps.validated, "target_fn": lambda batch: None, "collate_fn": samples.collate}
    return phalanx.Evaluation(metrics, samples, batch_size=size, **functions)


def _optimization(module: Any, fields: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """``configure_optimizers`` as fields."""
    if "optimizer" in fields:
        return {}
    with steps.attached(probe := copy.deepcopy(module)):
        options = configured(probe.configure_optimizers())[1]
    if not options:
        return {"optimizer": optimizer_of}
    if "scheduler" in fields:
        raise UsageError(
            "scheduler is given, and configure_optimizers makes one; leave it out, or give optimizer=, too"
        )
    on = options["monitor"] if isinstance(options["scheduler"], ReduceLROnPlateau) else None
    if on is not None and on not in metrics:
        raise UsageError(
            f"monitor is {on!r}, which validation_step does not log ({sorted(metrics)}); for the mean training loss of "
            "an epoch give optimizer=, scheduler=, schedule_every='epoch'"
        )
    made = {"optimizer": optimizer_of, "scheduler": scheduler_of}
    return {**made, "schedule_every": options["interval"], "schedule_on": on}
