"""What a report of a fault has to say of a machine: versions, processor, limits, and what three recipes end in.

Two machines with the same digests compute alike. Where only one digest differs, its name says where to look: in
matrix products (``perceptron``), convolutions and statistics of batches (``convolution``), or attention.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from phalanx.definition.reachable import version
from phalanx.errors import PhalanxError
from phalanx.frameworks import registry
from phalanx.recipe import Recipe
from phalanx.shared.memory import available_bytes
from phalanx.surroundings import system
from phalanx.surroundings.presence import processors, usable_cores

# Of the environment, what changes threads, kernels and the order of things. The rest is not told: it may be secret.
TELLING = (
    "OMP_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "ATEN_", "CUBLAS_", "CUDA_VISIBLE", "NCCL_", "GLOO_", "XLA_",
    "PYTHONHASHSEED", "LD_PRELOAD", "MALLOC_CONF",
)  # fmt: skip
LIMITS = {
    "open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK",
    "memory": "RLIMIT_AS",
}  # fmt: skip
NAME, DEVELOPMENT = re.compile(r"[\w.-]+"), re.compile(r"extra == .dev")
SAMPLES, STEPS, REPLICAS, BATCH = 48, 4, 4, 16


def described() -> dict[str, Any]:
    """What the bits and the speed of runs here may depend on; sizes are in bytes."""
    system = platform.system(), platform.release(), platform.machine(), *platform.libc_ver()
    return {
        "versions": {"python": sys.version.split()[0], **_versions()},
        "system": " ".join(filter(None, system)),
        "processor": _processor(),
        "cores": {"of the machine": os.cpu_count(), "allowed": len(processors()), "usable": usable_cores()},
        "threads": {"torch": torch.get_num_threads(), "between operations": torch.get_num_interop_threads()},
        "limits": _limits(),
        "memory": {"available": available_bytes()},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(TELLING)},
        "settings": {name: str(value) for name, value in registry.recorded_environment().items()},
    }


def digests() -> dict[str, dict[str, Any]]:
    """Of each built-in recipe the digest inline, and whether two workers come to it; or the error that came."""
    found = dict[str, dict[str, Any]]()
    for name, make_model in MODELS.items():
        recipe = _recipe(name, make_model)
        try:
            digest = recipe.train(engine="inline", progress=False).digest
            shared = recipe.train(workers=2, progress=False).digest if system.has_workers() else None
        except PhalanxError as error:
            found[name] = {"digest": None, "error": f"{type(error).__name__}: {error}"}
        else:
            found[name] = {"digest": digest, "same with two workers": None if shared is None else shared == digest}
    return found


def _versions() -> dict[str, str]:
    """Those of phalanx and of what it needs or can use, where that is installed."""
    found = {"phalanx": version("phalanx")}
    try:
        requirements = importlib.metadata.requires("phalanx") or ()
    except importlib.metadata.PackageNotFoundError:  # it is imported from a folder, and was not installed
        requirements = ("torch", "numpy")
    for requirement in requirements:
        name = NAME.match(requirement)
        if name is not None and not DEVELOPMENT.search(requirement):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name[0]] = importlib.metadata.version(name[0])
    return found


def _processor() -> str:
    """The name that the system has for it; the class of its instructions is among the settings."""
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return platform.processor() or "unknown"


def _limits() -> dict[str, int | None]:
    """The soft limits of this process; None stands for no limit. Where a system has none of them, there are none."""
    if os.name != "posix":
        return {}
    import resource

    soft = {name: resource.getrlimit(getattr(resource, limit))[0] for name, limit in LIMITS.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 10))


def _convolution() -> nn.Module:
    body = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(128, 10))


class _Attention(nn.Module):
    """One layer over eight rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The scores of ten classes, (B, 10), of images (B, 1, 8, 8)."""
        return self.out(self.layer(self.into(images.squeeze(1))).mean(1))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "perceptron": _perceptron, "convolution": _convolution, "attention": _Attention,
}  # fmt: skip
OPTIMIZERS: Mapping[str, Any] = {
    "perceptron": functools.partial(torch.optim.AdamW, lr=1e-2),
    "convolution": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "attention": functools.partial(torch.optim.Adam, lr=1e-2),
}


def _recipe(name: str, make_model: Callable[[], nn.Module]) -> Recipe:
    """A few steps on images that are drawn here: the same numbers on every machine."""
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, 1, 8, 8, generator=draw), torch.randint(10, (SAMPLES,), generator=draw)
    return Recipe(
        make_model, data, nn.functional.cross_entropy, replicas=REPLICAS, batch_size=BATCH, steps=STEPS,
        optimizer=OPTIMIZERS[name], max_norm=1.0,
    )  # fmt: skip
