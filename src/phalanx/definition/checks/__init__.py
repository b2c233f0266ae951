"""Checks of plain arguments at the door. Each raises a UsageError that names the argument, the value, the way out."""

from __future__ import annotations

import inspect
import math
import operator
import os
import pathlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from phalanx.errors import UsageError

SHOWN_CHARACTERS = 80
BETWEEN = ("phalanx", "contextlib", "functools", "typer", "click")  # who calls the package is none of these


def shown(value: Any) -> str:
    """``repr(value)`` on one line, cut to a readable length."""
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def described(value: Any) -> str:
    """A value as an error message shows it: arrays and tensors by shape and dtype unless they are one number."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None and math.prod(shape) != 1:
        kind = type(value).__name__.removesuffix("Impl")
        return f"a {kind} of shape {tuple(shape)} and {dtype}"
    return shown(value)


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


def choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """``value`` is one of ``allowed``."""
    if not any(value is option or (type(value) is type(option) and value == option) for option in allowed):
        raise UsageError(f"{name} is {shown(value)}; it must be one of {', '.join(map(repr, allowed))}")


def function(name: str, value: Any, example: str) -> None:
    """``value`` is None or can be called."""
    if value is not None and not callable(value):
        if hasattr(value, "step"):  # an optimizer, a schedule
            kind = type(value).__name__
            raise UsageError(f"{name} is an instance of {kind}; pass what makes one, as in {example}")
        raise UsageError(f"{name} is {shown(value)} ({type(value).__name__}); it must be callable, as in {example}")


def optimizer(name: str, value: Any, example: str) -> None:
    """``value`` is None, can be called, or is a pair of functions, as an optimizer of optax is."""
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
            "how many things the loss is the mean of, and no part of the graph"
        )
    return number


def callers_level() -> int:
    """The ``stacklevel`` of a warning, given where this is called, that shows the line of who calls the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        level += 1
        if frame.f_back is None:
            return 2
        frame = frame.f_back
    return level


def warn(message: str) -> None:
    """Warn, with the line of who calls the package."""
    warnings.warn(message, stacklevel=callers_level())


def shares(batch_size: int, replicas: int, micro_batches: int) -> None:
    """Warn of replicas that never get a sample, and of parts of a share that there cannot be."""
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
    """Refuse ``devices``, found by their ``names``, of several ``kinds``, named twice, or more than replicas."""
    if len(set(devices)) < len(devices):  # "cuda" and "cuda:0"
        raise UsageError(f"devices is {list(names)}, which names a device more than once; name each once")
    if len(set(kinds)) > 1:
        told = ", ".join(sorted(set(kinds)))
        raise UsageError(f"devices is {list(names)}, which are of several kinds, whose bits differ: {told}")
    if len(devices) > replicas:
        raise UsageError(
            f"devices names {len(devices)} devices, but {counted(replicas, 'replica')} to compute; name at most "
            f"{replicas}, or raise replicas= (which is part of the answer)"
        )


def takes(function: Any, name: str, *, required: bool = False) -> bool:
    """Whether ``function`` has a parameter with this name; ``required``: and no default for it."""
    try:
        parameter = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # None, or written in C
        return False
    return parameter is not None and not (required and parameter.default is not inspect.Parameter.empty)
