"""A lane on a device that computes by itself: the host gives it work, and waits for nothing."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.definition import checks
from phalanx.definition.data import Share, map_tree
from phalanx.definition.fields import Definition
from phalanx.errors import RunError
from phalanx.frameworks.torch.devices.accelerators import Generator, current
from phalanx.frameworks.torch.devices.buffers import DeviceBuffers
from phalanx.frameworks.torch.environment import StaticShapes
from phalanx.frameworks.torch.forward import AmbiguousMean
from phalanx.frameworks.torch.lane import Lane
from phalanx.seams import Computed, Todo
from phalanx.surroundings import interrupts


class DeviceLane(Lane):
    """Computes replicas on one of several devices, or on an accelerator.

    Parameters
    ----------
    definition : Definition
    model : torch.nn.Module
        On its device already.
    shapes : StaticShapes
    ambiguous : AmbiguousMean
    generator : Generator or None
        The device's own; None for the CPU.
    """

    def __init__(
        self,
        definition: Definition,
        model: torch.nn.Module,
        shapes: StaticShapes,
        ambiguous: AmbiguousMean,
        generator: Generator | None,
    ) -> None:
        super().__init__(definition, model, shapes, ambiguous, written=True)
        self.buffers = DeviceBuffers(model)
        self._generator = generator
        self._ahead: dict[int, Any] = {}  # batches of the next step, by key
        self._sources: list[torch.Tensor] = []  # pinned memory that copies may still read
        self._default = definition.collate_fn is None
        self._pins = generator is not None and _can_pin()
        self._forward.weigh = _unread

    def gradient(self, todo: Todo) -> Computed:
        """Begin to compute one replica; runs user code."""
        try:
            with current(self.device):
                return super().gradient(todo)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"{self.device} is out of memory at replica {todo.replica} ({error}); use more devices, which share "
                "the optimizer's state, or a larger replicas= (part of the answer), which makes each share smaller"
            ) from error

    def loss(self, loss: torch.Tensor) -> Any:
        """It is read when all devices have their work."""
        return loss.detach().reshape(())

    def begin(self) -> None:
        """The host has waited for the devices: no copy is under way."""
        self._sources = []

    def read_ahead(self, todo: Todo) -> None:
        """Read the batch of a replica of the next step, and begin to copy it to the device.

        Batches that user code collates are left alone: it may draw random numbers, which come before those of forward.
        """
        if self._default and todo.key not in self._ahead:
            with interrupts.breakable():
                self._ahead[todo.key] = self._copied(self._read(todo.share))

    def batch(self, key: int, share: Share) -> Any:
        """See ``Lane.batch``."""
        self._shapes.settle()
        ready = key in self._ahead
        samples = self._ahead.pop(key) if ready else share.read(share.samples)
        self.seed(key)
        if ready:
            return samples
        return self._copied(samples if share.collated else self._collate(samples))

    def rewind(self) -> None:
        """See ``Lane.rewind``."""
        self._ahead.clear()
        super().rewind()

    def seed(self, key: int) -> None:
        """See ``Lane.seed``."""
        super().seed(key)
        if self._generator is not None:
            self._generator.seed(key)

    def _read(self, share: Share) -> Any:
        samples = share.read(share.samples)
        return samples if share.collated else self._collate(samples)

    def _copied(self, batch: Any) -> Any:
        return batch if self.device.type == "cpu" else map_tree(self._to_device, batch)

    def _to_device(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self._pins and leaf.device.type == "cpu":
            leaf = leaf.pin_memory()
            self._sources.append(leaf)
        return leaf.to(self.device, non_blocking=self._pins)


class Unread:
    """A weight that the loss returned on a device, not looked at yet."""

    def __init__(self, name: str, value: Any) -> None:
        self._name = name
        self._value = value

    def read(self) -> float:
        """The weight; waits for the device."""
        return checks.weight(self._name, self._value)


def _unread(name: str, value: Any) -> Any:
    on_device = isinstance(value, torch.Tensor) and value.device.type != "cpu"
    return Unread(name, value) if on_device else checks.weight(name, value)


def _can_pin() -> bool:
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:
        return False
    return True
