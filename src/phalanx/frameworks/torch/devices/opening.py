"""Which torch framework a run gets: the CPU's, or one for accelerators and for several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.frameworks.torch.adapter import Torch
from phalanx.frameworks.torch.devices import accelerators
from phalanx.frameworks.torch.devices.lanes import TorchLanes
from phalanx.frameworks.torch.model import checked


def open_torch(definition: Definition, names: Sequence[str], model: Any, *, allow: bool) -> Torch | TorchLanes:
    """The state before the first step, on the devices with these names; none: where the model is.

    Raises
    ------
    UsageError
        A name, the model, or something else of the recipe is wrong.
    """
    home = next(checked(model).parameters()).device
    devices = accelerators.found(names, definition.replicas) if names or home.type == "cpu" else [home]
    if len(devices) > 1 or (devices and devices[0].type != "cpu"):
        return TorchLanes(definition, devices, model, allow=allow)
    return Torch(definition, model)
