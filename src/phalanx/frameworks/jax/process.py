"""What jax needs to work in another process: its settings, copied before any array is made there."""

from __future__ import annotations

from typing import Any

import jax

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
