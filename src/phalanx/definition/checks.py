"""Checks of plain arguments. Each raises a UsageError that names the argument, the value and the way out.

A user who writes another library's name for an argument is told the name that it has here.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import operator
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from phalanx.errors import UsageError, safe_str

SHOWN_CHARACTERS = 80
OUTLINED = 6  # entries of a container
NOTES = GIVEN, BATCH = "output was", "the batch was"
SIZES = re.compile(r"(?:Using a t|T)arget size \(torch\.Size\(\[(.*?)\]\)\).* input size \(torch\.Size\(\[(.*?)\]\)\)")
BETWEEN = ("phalanx", "contextlib", "functools", "typer", "click")  # packages that are not the caller's code
Kind = TypeVar("Kind", bound=type)

WORKERS = "processes that compute replicas are workers=, an option of train() and start()"
REPLICAS = "replicas are that: batch_size is split over them, and gradients are added up exactly (docs/guide.md)"
HELD_OUT = "held-out data is evaluated: evaluation=phalanx.Evaluation(metric, data), an option of train()"
RUN_DIR = "it is called run_dir, an option of train(): where there are snapshots, the run goes on from the newest"
DEVICES = "it is called devices, an option of train(): devices=['cuda']; never part of the answer"
LOGS = "logs are callbacks: callbacks=[phalanx.callbacks.Log('csv')]"
MODEL_LOSS = "it is called loss_fn: loss_fn(output, target), or loss_fn(model, batch) with loss_takes='model'"
ARGUMENTS = {
    "learning_rate": "it is called lr (for the default optimizer; else give it to yours)",
    "max_epochs": "it is called epochs",
    "num_train_epochs": "it is called epochs",
    "max_steps": "it is called steps",
    "max_time": "it is called max_seconds, an option of train() and start(): max_seconds=3600",
    "num_workers": "processes that compute replicas are workers=, those that read ahead readers=, both options of "
    "train() and start()",
    "world_size": WORKERS,
    "n_jobs": WORKERS,
    "jobs": WORKERS,
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
    "sampler": "to draw samples by weights, as WeightedRandomSampler does: weights=, one number per sample; for "
    "batches of your own: batch_sampler=f, with f(epoch, generator) -> list of lists of sample numbers",
    "loss": "it is called loss_fn",
    "criterion": "it is called loss_fn",
    "logger": LOGS,
    "log_dir": LOGS,
    "patience": "to stop early is a callback: callbacks=[phalanx.callbacks.EarlyStopping('loss', patience=3)]",
    "metrics": "they are evaluated: evaluation=phalanx.Evaluation(metrics, data)",
    "compute_loss": MODEL_LOSS,
    "training_step": MODEL_LOSS,
    "mixup": "it is a loss of model and batch, with loss_takes='model': docs/cookbook.md",
    "compute_metrics": "they are evaluated: evaluation=phalanx.Evaluation(metrics, data), metrics of (output, target)",
    "val_dataloaders": HELD_OUT,
    "val_data": HELD_OUT,
    "validation_data": HELD_OUT,
    "eval_dataset": HELD_OUT,
    "validation_freq": "an evaluation knows how often: phalanx.Evaluation(metric, data, every_epochs=2)",
    "verbose": "it is called progress, an option of train()",
    "validation_split": f"cut the data yourself, as (x[:900], y[:900]); {HELD_OUT}",
    "class_weight": "it belongs to the loss: torch.nn.CrossEntropyLoss(weight=...) in phalanx.weighted, which says of "
    "how much it is the mean; or draw rare classes more often: weights=, one number per sample",
    "weight_decay": "give it to the optimizer: optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.01)",
    "warmup_steps": "it is a scheduler: scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, "
    "total_iters=100)",
    "fp16": "it is called precision: precision='bfloat16'; float16 needs a scaled loss, which phalanx has not",
    "bf16": "it is called precision: precision='bfloat16'",
    "worker_init_fn": "it is not needed: all random generators are seeded for each sample, in any process that reads",
    "pin_memory": "it is not needed: on accelerators batches go through pinned memory as it is",
    "persistent_workers": "it is not needed: processes that read, readers=, live as long as the run",
    "gradient_checkpointing": "the model does it: call model.gradient_checkpointing_enable(), or use "
    "torch.utils.checkpoint, in make_model",
    "clip_value": "gradients are clipped by their norm, max_norm=; by value in the optimizer: docs/cookbook.md",
    "global_clipnorm": "it is called max_norm",
    "clipnorm": "the norm of all gradients together is clipped, by max_norm=; of each alone: a hook, docs/cookbook.md",
    "gradient_clip_algorithm": "gradients are clipped by their norm, max_norm=; by value: docs/cookbook.md",
    "find_unused_parameters": "it is not needed: a parameter without a gradient in a step is left as it is",
    "sync_batchnorm": "BatchNorm sees the share of a replica, for any number of workers; docs/cookbook.md has what to "
    "do where shares are small",
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
    "EarlyStoppingCallback": "it is called EarlyStopping",
    "CSVLogger": "it is Log('csv')",
    "TensorBoard": "it is Log('tensorboard')",
    "LearningRateMonitor": "Log writes the learning rate of each step",
    "BaseFinetuning": "parameters are frozen until an epoch by Thaw('encoder.*', epoch=2)",
    "BackboneFinetuning": "parameters are frozen until an epoch by Thaw('encoder.*', epoch=2)",
    "StochasticWeightAveraging": "weights are averaged by EMA(0.999)",
}


def shown(value: Any) -> str:
    """``repr(value)`` on one line, cut to a readable length."""
    text = " ".join(safe_str(value, repr).split())
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def described(value: Any) -> str:
    """A value as an error message shows it: arrays and tensors by shape and dtype unless they are one number."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None and math.prod(shape) != 1:
        kind = type(value).__name__.removesuffix("Impl")
        return f"a {kind} of shape {tuple(shape)} and {dtype}"
    return shown(value)


def outline(value: Any) -> str:
    """A tree of arrays by types, dtypes and shapes, as in "dict(x float32[8, 4])"."""
    kind = type(value).__name__
    if getattr(value, "shape", None) is not None and getattr(value, "dtype", None) is not None:
        return f"{str(value.dtype).rpartition('.')[2]}{list(value.shape)}"
    if isinstance(value, Mapping):
        parts = [f"{key} {outline(entry)}" for key, entry in value.items()]
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None) or [""] * len(value)
        parts = [f"{name} {outline(entry)}".strip() for name, entry in zip(names, value, strict=True)]
    else:
        return kind
    return f"{kind}({', '.join(parts[:OUTLINED] + ['...'] * (len(parts) > OUTLINED))})"


@contextlib.contextmanager
def noting(output: Any, target: Any, more: str = "") -> Iterator[None]:
    """An error that is raised inside gets a note that tells what output and target were."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"{GIVEN} {outline(output)}, target was {outline(target)}; forward_fn=lambda model, batch: ... and "
            f"target_fn=lambda batch: ... change them{more}"
        )
        raise


@contextlib.contextmanager
def comparing(compared: set[Any], what: Any) -> Iterator[None]:
    """Refuse a loss or metric of torch that is called inside with n outputs and n targets, and compares n * n pairs.

    torch warns of such sizes, through Python. Its warning is looked at whatever filters say, others are passed on. That
    makes Python forget which warnings it has shown, so it is done once: ``what`` is then added to ``compared``.
    """
    if what in compared:
        yield
        return

    def look(message: Any, *more: Any) -> None:
        if not _sizes(str(message)):
            shown(message, *more)

    with warnings.catch_warnings():
        shown, warnings.showwarning = warnings.showwarning, look
        warnings.filterwarnings("always", "Using a target size")
        try:
            yield
        except ValueError as error:  # some losses raise it
            _sizes(safe_str(error))
            raise
    compared.add(what)


def _sizes(text: str) -> bool:
    """Whether torch says that a target and an output have other sizes. Pairs by mistake are refused.

    There an axis of one is missing: (n,) and (n, 1) broadcast to (n, n). (n, 1) with (1,), or with (1, n), is meant so.
    """
    if (found := SIZES.match(text)) is None:
        return False
    target, output = (tuple(map(int, re.findall(r"\d+", sizes))) for sizes in found.groups())
    (short, less), (long, more) = sorted([(target, "target"), (output, "output")], key=lambda pair: len(pair[0]))
    if math.prod(short) > 1 and long == (*short, 1):
        raise UsageError(
            f"a loss or metric was called with outputs of shape {output} and targets of shape {target}, and would "
            f"compare each output with every target; give them one shape, as in {less}[{':, ' * len(short)}None] or "
            f"{more}.squeeze({len(short)})"
        )
    return True


def integer(name: str, value: Any, *, least: int, most: int | None = None, hint: str = "") -> int:
    """``value`` as an int within bounds; numpy integers pass, bools and floats do not."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        wanted = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        raise UsageError(f"{name} is {shown(value)}; it must be {wanted}{hint and '; ' + hint}")
    return number


def positive(name: str, value: Any, *, most: float = math.inf, hint: str = "") -> float:
    """``value`` as a float above 0 and up to ``most``; NaN does not pass."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= most:
        limit = "" if most == math.inf else ", and finite"
        raise UsageError(f"{name} is {shown(value)}; it must be a number above 0{limit}{hint and '; ' + hint}")
    return number


def choice(name: str, value: Any, allowed: Sequence[Any]) -> Any:
    """``value``, if it is one of ``allowed``."""
    if not any(value is option or (type(value) is type(option) and value == option) for option in allowed):
        raise UsageError(f"{name} is {shown(value)}; it must be one of {', '.join(map(repr, allowed))}")
    return value


def function(name: str, value: Any, example: str) -> None:
    """Refuse a value that is neither None nor callable."""
    if value is not None and not callable(value):
        if hasattr(value, "step"):  # an optimizer, a schedule
            kind = type(value).__name__
            raise UsageError(f"{name} is an instance of {kind}; pass what makes one, as in {example}")
        raise UsageError(f"{name} is {shown(value)} ({type(value).__name__}); it must be callable, as in {example}")


def optimizer(name: str, value: Any, example: str) -> None:
    """Refuse a value that is not None, callable, or a pair of functions, as an optimizer of optax is."""
    if not (isinstance(value, tuple) and len(value) == 2 and all(map(callable, value))):
        function(name, value, example)


def path(name: str, value: Any, *, hint: str = "give a directory") -> pathlib.Path:
    """``value`` as an absolute path: what it means now, wherever the process goes later."""
    try:
        text = os.fspath(value)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"{name} is {shown(value)}, which is no path; {hint}")
    try:
        return pathlib.Path(text).absolute()
    except OSError as error:
        raise UsageError(
            f"{name} is {shown(value)}, which begins at the working directory, and that cannot be found "
            f"({error.strerror}); give an absolute path"
        ) from error


def weight(name: str, value: Any) -> float:
    """The weight that a loss returned, as a float; no part of a graph."""
    try:
        number = math.nan if getattr(value, "requires_grad", False) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            f"{name} returned the weight {described(value)}; the second value must be a finite number of at least 0: "
            "how many things the loss is the mean of, and no part of the graph. In torch, what is only shown goes "
            "into a dict: {'loss': loss, 'size': size}"
        )
    return number


def same_names(first: Any, other: Any, what: str) -> None:
    """Refuse named losses of a replica or micro-batch (``what``) that are others than the first one's."""
    one, two = ({name: own is not None for name, (_, own) in (named or {}).items()} for named in (first, other))
    if one != two:
        raise UsageError(
            f"the loss returned {list(one) or 'nothing'} beside 'loss' for one {what}, and {list(two) or 'nothing'} "
            "for another, or a weight for one only; return the same names always, each with a weight or each without; "
            "(0.0, 0) is a value that does not count"
        )


def check_numpy(name: str, column: Any) -> None:
    """Refuse masks, and dtypes that no framework has: text, objects, dates, floats of more than 64 bits, foreign bytes.

    Raises
    ------
    UsageError
        Names the array and the way out.
    """
    if not isinstance(column, np.ndarray):
        return
    if type(column) is not np.ndarray and isinstance(column, np.ma.MaskedArray):
        raise UsageError(
            f"{name} is a masked array, and no tensor has a mask; pass {name}.filled(value), and the mask as a column "
            "of its own if the model is to see it"
        )
    dtype = column.dtype
    wide = dtype.kind in "fc" and np.finfo(dtype).bits > 64
    if dtype.kind not in "biufc" or wide or not dtype.isnative:
        raise UsageError(
            f"{name} is a numpy array of {dtype.type.__name__} ({dtype.str}), which no tensor can hold; convert it "
            "to numbers, for instance with .astype(numpy.float32), or pass a list of samples and turn each into "
            "tensors in forward_fn"
        )


def callers_level() -> int:
    """The ``stacklevel`` of a warning, given where this is called, that shows the line that called the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        level += 1
        if frame.f_back is None:
            return 2
        frame = frame.f_back
    return level


def warn(message: str) -> None:
    """Warn, and show the line that called the package."""
    warnings.warn(message, stacklevel=callers_level())


def shares(batch_size: int, replicas: int, micro_batches: int) -> None:
    """Warn of replicas that never get a sample, and of more micro-batches than a share can have."""
    most = -(-batch_size // replicas)
    if batch_size < replicas:
        warn(
            f"batch_size is {batch_size} and replicas is {replicas}, so {replicas - batch_size} of them never get a "
            f"sample; use replicas={batch_size} (which is part of the answer), or a larger batch_size"
        )
    if micro_batches > most:
        warn(
            f"micro_batches is {micro_batches}, but a share has at most {most} of the {batch_size} samples of a batch, "
            f"so it has no more parts than those; use micro_batches={most}, or a larger batch_size"
        )


def counted(count: int, thing: str) -> str:
    """As in "there is 1 replica", "there are 2 replicas"."""
    return f"there is 1 {thing}" if count == 1 else f"there are {count} {thing}s"


def alike(names: Sequence[str], devices: Sequence[Any], kinds: Sequence[str], replicas: int) -> None:
    """Refuse ``devices`` of several ``kinds``, named twice, or more than replicas; ``names``: as they were written."""
    if len(set(kinds)) > 1:
        listed = ", ".join(sorted(set(kinds)))
        raise UsageError(f"devices is {list(names)}, which are of several kinds, whose bits differ: {listed}")
    if len(set(devices)) < len(devices):  # "cuda" and "cuda:0"
        raise UsageError(f"devices is {list(names)}, which names a device more than once; name each once")
    if len(devices) > replicas:
        raise UsageError(
            f"devices names {len(devices)} devices, but {counted(replicas, 'replica')} to compute; name at most "
            f"{replicas}, or raise replicas= (which is part of the answer)"
        )


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Its parameters by name; none where nobody can tell: it is None, or written in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def takes(function: Any, name: str, *, required: bool = False) -> bool:
    """Whether ``function`` has a parameter with this name; ``required``: and no default for it."""
    parameter = parameters_of(function).get(name)
    return parameter is not None and not (required and parameter.default is not inspect.Parameter.empty)


def answer(name: str, known: Iterable[str], names: Mapping[str, str] = ARGUMENTS) -> str:
    """A hint for a user who wrote ``name``: its name here, else the most similar name, else all names."""
    if name in names:
        return names[name]
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"


def answering(**names: str) -> Callable[[Kind], Kind]:
    """A decorator of classes: an unknown argument is refused, with a hint from ``names`` if it is there."""

    def decorated(kind: Kind) -> Kind:
        original = kind.__init__
        known = [name for name in inspect.signature(original).parameters if name != "self"]

        @functools.wraps(original)
        def checked(self: object, *arguments: object, **given: object) -> None:
            for name in given:
                if name not in known:
                    hint = answer(name, known, names)
                    raise UsageError(f"{name} is not an argument of {kind.__name__}; {hint}")
            original(self, *arguments, **given)

        kind.__init__ = checked
        return kind

    return decorated
