"""Names that other libraries have for what is here, and what is said to who writes one of them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from phalanx.errors import UsageError

Kind = TypeVar("Kind", bound=type)

WORKERS = "processes that compute replicas are workers=, an option of train() and start()"
REPLICAS = "replicas are that: batch_size is split over them, and gradients are added up exactly (docs/guide.md)"
HELD_OUT = "held-out data is evaluated: evaluation=phalanx.Evaluation(metric, data), an option of train()"
RUN_DIR = "it is called run_dir, an option of train(): where there are snapshots, the run goes on from the newest"
DEVICES = "it is called devices, an option of train(): devices=['cuda']; never part of the answer"
LOGS = "logs are callbacks: callbacks=[phalanx.callbacks.Log('csv')]"
ARGUMENTS = {
    "learning_rate": "it is called lr (for the default optimizer; else give it to yours)",
    "max_epochs": "it is called epochs",
    "num_train_epochs": "it is called epochs",
    "max_steps": "it is called steps",
    "num_workers": "processes that compute replicas are workers=, those that read ahead readers=, both options of "
    "train() and start()",
    "world_size": WORKERS,
    "nproc_per_node": WORKERS,
    "device": DEVICES,
    "accelerator": DEVICES,
    "gradient_clip_val": "it is called max_norm",
    "max_grad_norm": "it is called max_norm",
    "grad_clip": "it is called max_norm",
    "accumulate_grad_batches": REPLICAS,
    "gradient_accumulation_steps": REPLICAS,
    "gradient_accumulation": REPLICAS,
    "amp": "it is called precision: precision='bfloat16'",
    "model": "it is called make_model, a function that makes it, or the model itself",
    "dataset": "it is called data",
    "train_dataset": "it is called data",
    "batch_sampler": "samples are dealt to batches here: batch_size=, shuffle=, drop_last=; for batches of your own, "
    "data=None and run.step(batch)",
    "loss": "it is called loss_fn",
    "criterion": "it is called loss_fn",
    "logger": LOGS,
    "log_dir": LOGS,
    "patience": "to stop early is a callback: callbacks=[phalanx.callbacks.EarlyStopping('loss', patience=3)]",
    "metrics": "they are evaluated: evaluation=phalanx.Evaluation(metrics, data)",
    "compute_metrics": "they are evaluated: evaluation=phalanx.Evaluation(metrics, data), metrics of (output, target)",
    "val_dataloaders": HELD_OUT,
    "val_data": HELD_OUT,
    "validation_data": HELD_OUT,
    "eval_dataset": HELD_OUT,
    "checkpoint_dir": "it is called run_dir",
    "output_dir": "it is called run_dir",
    "ckpt_path": RUN_DIR,
    "resume_from_checkpoint": RUN_DIR,
}
VERBS = {
    "fit": "it is called train: recipe.train()",
    "compile": "what it would say is in the arguments of Recipe; recipe.train() begins",
    "evaluate": "a run has it: run.evaluate(metric, data) in `with recipe.start() as run`, or train(evaluation=...)",
    "predict": "what was trained has it: recipe.train().predict(data)",
    "step": "a run has it: run.step() in `with recipe.start() as run`",
    "save": "what was trained has it: recipe.train().save('model.safetensors')",
    "to": "devices are an option: recipe.train(devices=['cuda'])",
}
CALLBACKS = {
    "ModelCheckpoint": "the best weights are kept by SaveBest('accuracy'), the state to go on from by train(run_dir=)",
    "Callback": "any object with hooks is one, and nothing has to be inherited: help(phalanx.callbacks)",
    "EarlyStoppingCallback": "it is called EarlyStopping",
    "CSVLogger": "it is Log('csv')",
    "TensorBoard": "it is Log('tensorboard')",
    "LearningRateMonitor": "Log writes the learning rate of each step",
    "StochasticWeightAveraging": "weights are averaged by EMA(0.999)",
}


def answer(name: str, known: Iterable[str], names: Mapping[str, str] = ARGUMENTS) -> str:
    """What is said to who wrote ``name``: the name here; or the likeliest one, or all there are."""
    if name in names:
        return names[name]
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"


def answering(**names: str) -> Callable[[Kind], Kind]:
    """A decorator of classes: an argument that one does not have is answered with ``names``, as far as it is there."""

    def decorated(kind: Kind) -> Kind:
        made = kind.__init__
        known = [name for name in inspect.signature(made).parameters if name != "self"]

        @functools.wraps(made)
        def checked(self: object, *arguments: object, **given: object) -> None:
            for name in given:
                if name not in known:
                    told = answer(name, known, names)
                    raise UsageError(f"{name} is not an argument of {kind.__name__}; {told}")
            made(self, *arguments, **given)

        kind.__init__ = checked
        return kind

    return decorated
