"""What of jax a run depends on: settings, threads, programs that are kept, and devices, with arithmetic on them."""

from __future__ import annotations

import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import optax

from phalanx.definition import checks
from phalanx.errors import UsageError
from phalanx.frameworks import arithmetic
from phalanx.frameworks.arithmetic import Gradient
from phalanx.surroundings.turns import Anew

NAME = re.compile(r"([a-zA-Z_]+)(?::([0-9]+))?")
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


def compiling() -> Anew:
    """A context: functions are compiled, whatever the caller's ``jax.disable_jit`` says."""
    return Anew(functools.partial(jax.disable_jit, False))


def recorded(device: Any) -> dict[str, str]:
    """What changes bits and is not in a recipe, as text."""
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__, "optax": optax.__version__}
    settings = {name: str(getattr(jax.config, name)) for name in SETTINGS}
    return {**versions, **settings, "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), "device": device.device_kind}


CACHE, SECONDS, BYTES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
PLAIN = (bool, int, float, str, type(None))
ELSEWHERE = {"jax_num_cpu_devices", "jax_platforms", "jax_platform_name", CACHE, SECONDS, BYTES}


def share_programs(folder: str) -> None:
    """From here on, processes that are forked keep what they compile in a folder, unless the environment names one.

    So a worker that replaces another one starts at once.
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
    running = running_threads()
    if running not in (None, count):
        raise UsageError(
            f"threads is {count}, but jax's CPU backend was started before this run, with {running} threads, and their "
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


def devices_of(names: Sequence[str], replicas: int) -> list[Any]:
    """The devices with these names; a kind alone, other than "cpu", is all of its devices, at most one per replica.

    Raises
    ------
    UsageError
        jax cannot use one here, one comes twice, they are of several kinds, or there are more than replicas.
    """
    devices: list[Any] = []
    for name in names:
        parts = NAME.fullmatch(name)
        try:
            if parts is None:
                raise ValueError("names are as 'cpu' or 'cuda:0'")
            there = jax.devices(parts[1])
            alone = len(names) == 1 and parts[2] is None and name != "cpu"
            devices += there[:replicas] if alone else [there[int(parts[2] or 0)]]
        except (RuntimeError, ValueError, IndexError) as error:
            raise UsageError(
                f"devices names {name!r}, which jax cannot use here ({error}); use ['cpu'], or leave it out"
            ) from error
    checks.alike(names, devices, [device.device_kind for device in devices], replicas)
    return devices


def available() -> list[tuple[str, str, str]]:
    """Each device that jax can use here: name, what it is, "". With the CPU alone: what others need."""
    rows = [(f"{device.platform}:{device.id}", str(device.device_kind), "") for device in jax.devices()]
    if jax.default_backend() == "cpu":
        rows.append(("cuda", "", "jax finds no accelerator; for NVIDIA GPUs: pip install 'jax[cuda12]'"))
    return rows


class DeviceArithmetic:
    """Implements ``seams.Arithmetic`` on the arrays' device. Each operation is a program, so it is rounded once."""

    def add(self, left: Gradient, right: Gradient) -> Gradient:
        return [jnp.add(a, b) for a, b in zip(left, right, strict=True)]

    def scale(self, vector: Gradient, factor: float) -> Gradient:
        return [_applied(jnp.multiply, entry, factor) for entry in vector]

    def divide(self, vector: Gradient, divisor: float) -> Gradient:
        return [_applied(jnp.divide, entry, divisor) for entry in vector]

    read = staticmethod(arithmetic.read)
    checksum = staticmethod(arithmetic.checksum)

    def finite(self, vector: Gradient) -> bool:
        return all(bool(jnp.isfinite(entry).all()) for entry in vector)

    def norm(self, vector: Gradient) -> float:
        """2-norm over all entries. Each entry's squares are added on its device, in float32 at least."""
        wide = [_wide(entry).reshape(-1) for entry in vector]
        return math.sqrt(math.fsum([float(square_sum) for square_sum in [jnp.vdot(entry, entry) for entry in wide]]))


def arithmetic_on(device: Any) -> Any:
    """The arithmetic for gradients on a device; on the CPU, numpy reads and writes jax's memory."""
    return arithmetic if device.platform == "cpu" else DeviceArithmetic()


def _wide(entry: Any) -> Any:
    return entry.astype(jnp.promote_types(entry.dtype, jnp.float32))


def _applied(operation: Callable[[Any, Any], Any], entry: Any, number: float) -> Any:
    """Uses an array of the number: for a plain number, XLA would multiply by its rounded inverse, not divide."""
    wide = _wide(entry)
    return operation(wide, jnp.full_like(wide, number)).astype(entry.dtype)
