"""Picks the framework of a recipe and imports it then, not before."""

from __future__ import annotations

from typing import Any

from phalanx.contracts import Framework
from phalanx.definition import Definition
from phalanx.state.tensors import Tensor


def open_framework(definition: Definition, device: str | None) -> Framework:
    """The recipe's state before its first step, on ``device`` (None: where the model is made)."""
    from phalanx.frameworks.torch.adapter import Torch

    return Torch(definition, device)


def prepare_process() -> None:
    """Import, in a process of our own, what workers will need."""
    import phalanx.frameworks.torch.adapter  # noqa: F401
    from phalanx.frameworks.torch import process

    process.without_compiler()


def numeric_environment() -> dict[str, Any]:
    """Settings of this process that change bits."""
    from phalanx.frameworks.torch import process

    return process.numeric_environment()


def recorded_environment() -> dict[str, Any]:
    """The same and the framework's version as text, for snapshots."""
    from phalanx.frameworks.torch import process

    return process.recorded_environment()


def tensor_of(stored: Tensor) -> Any:
    """A tensor of a snapshot as the framework's own."""
    from phalanx.frameworks.torch import snapshot

    return snapshot.tensor_of(stored)


def adopt_numeric_environment(settings: dict[str, Any]) -> None:
    """Set this process to another one's."""
    from phalanx.frameworks.torch import process

    process.adopt(settings)


def reduced(thing: Any) -> Any:
    """How a parcel takes a framework's arrays along; NotImplemented for all else."""
    from phalanx.frameworks.torch import process

    return process.reduced(thing)
