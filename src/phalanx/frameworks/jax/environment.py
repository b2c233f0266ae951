"""The surroundings of a run in this process, and what of them a snapshot records."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib.version
import optax

from phalanx.definition import generators
from phalanx.errors import UsageError

NAME = re.compile(r"([a-zA-Z_]+)(?::([0-9]+))?")
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


class Environment(contextlib.AbstractContextManager[None]):
    """A context, entered once at a time: inside, generators may be seeded, and functions are compiled.

    ``owned``: generators of user code, to be restored as the global ones are.
    """

    def __init__(self, owned: Mapping[str, Any] | None = None) -> None:
        self._owned = owned
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as exits:
            exits.enter_context(generators.kept(self._owned))
            exits.enter_context(jax.disable_jit(False))
            self._exits = exits.pop_all()

    def __exit__(self, *_: object) -> None:
        self._exits.close()


def recorded(device: Any) -> dict[str, str]:
    """What changes bits and is not in a recipe, as text."""
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__, "optax": optax.__version__}
    settings = {name: str(getattr(jax.config, name)) for name in SETTINGS}
    return {**versions, **settings, "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), "device": device.device_kind}


def named_device(name: str) -> Any:
    """The device of jax that is called so, as "cpu" or "cuda:0".

    Raises
    ------
    ValueError, RuntimeError, IndexError
        There is none.
    """
    parts = NAME.fullmatch(name)
    if parts is None:
        raise ValueError("names are as 'cpu' or 'cuda:0'")
    return jax.devices(parts[1])[int(parts[2] or 0)]


CACHE, SECONDS, BYTES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
PLAIN = (bool, int, float, str, type(None))
ELSEWHERE = {"jax_num_cpu_devices", "jax_platforms", "jax_platform_name", CACHE, SECONDS, BYTES}


def share_programs(folder: str) -> None:
    """From here on, processes that are forked keep what they compile in a folder, unless the environment names one.

    So a worker that takes another's place starts at once.
    """
    if jax.config.values[CACHE] is None:
        for name, value in ((CACHE, folder), (SECONDS, 0.0), (BYTES, -1)):  # all that is compiled
            jax.config.update(name, value)


def settings() -> dict[str, Any]:
    """All options of jax in this process, as far as they are plain values and say nothing about devices."""
    values: dict[str, Any] = jax.config.values
    return {name: value for name, value in values.items() if isinstance(value, PLAIN) and name not in ELSEWHERE}


def adopt(wanted: dict[str, Any]) -> None:
    """Set this process to another one's options; it computes on the CPU, whatever else there is."""
    now: dict[str, Any] = jax.config.values
    for name, value in wanted.items():
        if name in now and now[name] != value:
            jax.config.update(name, value)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # each result is waited for at once


TASKS = pathlib.Path("/proc/self/task")
POOL = "tf_XLAEigen"  # the name of the threads that share one operation's work


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
            f"NPROC={count} in its environment"
        )


def running_threads() -> int | None:
    """Threads of XLA's CPU backend in this process; None where that cannot be seen."""
    try:
        names = [(task / "comm").read_text() for task in TASKS.iterdir()]
    except OSError:
        return None
    return sum(name.startswith(POOL) for name in names) or None
