"""Picks the framework of a recipe and imports it then, not before."""

from __future__ import annotations

from phalanx.contracts import Framework
from phalanx.definition import Definition


def open_framework(definition: Definition, device: str | None) -> Framework:
    """The recipe's state before its first step, on ``device`` (None: where the model is made)."""
    from phalanx.frameworks.torch.adapter import Torch

    return Torch(definition, device)
