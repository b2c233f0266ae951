"""jax as seen before it is known to be needed: nothing here imports it.

XLA decides once per process, when its CPU backend starts, how many threads it has; they are part of the answer. So the
number is set around ``make_model``, where the first array may be made, and looked at afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.errors import UsageError

VARIABLES = ("PJRT_NPROC", "NPROC")  # what XLA's CPU client asks for its number of threads, before it counts processors
TASKS = pathlib.Path("/proc/self/task")
POOL = "tf_XLAEigen"  # the name of the threads that share one operation's work


def takes_key(function: Callable[..., Any] | None, *, required: bool = False) -> bool:
    """Whether ``function`` has a parameter named ``key``; ``required``: and no default for it."""
    try:
        parameter = inspect.signature(function).parameters.get("key")  # type: ignore[arg-type]
    except (TypeError, ValueError):  # None, or written in C
        return False
    return parameter is not None and not (required and parameter.default is not inspect.Parameter.empty)


def takes_state(function: Callable[..., Any] | None) -> bool:
    """Whether ``function`` has a parameter named ``state``."""
    try:
        return "state" in inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # None, or written in C
        return False


def is_pytree(value: Any) -> bool:
    """Whether there is a jax array in ``value``, which may be a tree. False where jax was never imported."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let XLA's CPU backend have ``count`` threads if it is started inside the block."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, str(count)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def check_threads(count: int) -> None:
    """Refuse a backend that was started earlier with another number of threads; on Linux only, where it can be seen.

    Raises
    ------
    UsageError
        Names both numbers and the ways out.
    """
    found = running_threads()
    if found not in (None, count):
        raise UsageError(
            f"threads is {count}, but jax's CPU backend was started before this run, with {found} threads, and their "
            f"number changes bits; make the first jax array in make_model (data as numpy arrays), or start Python with "
            f"{VARIABLES[1]}={count} in its environment"
        )


def running_threads() -> int | None:
    """Threads of XLA's CPU backend in this process; None where that cannot be seen."""
    try:
        names = [(task / "comm").read_text() for task in TASKS.iterdir()]
    except OSError:
        return None
    return sum(name.startswith(POOL) for name in names) or None
