"""The devices of a tinygrad run by tinygrad's own names, and their blocks of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.definition import checks
from phalanx.errors import UsageError
from phalanx.frameworks.arithmetic import Gradient
from phalanx.frameworks.tinygrad.environment import described, recorded
from phalanx.frameworks.tinygrad.listing import opened
from phalanx.frameworks.tinygrad.model import Model
from phalanx.plan.fold import place
from phalanx.seams import Todo


def found(names: Sequence[str], replicas: int) -> list[str]:
    """The devices with these names, opened, as tinygrad spells them: "CL:0" is "CL".

    Raises
    ------
    UsageError
        tinygrad cannot use one here, one comes twice, they are of several kinds, or there are more than replicas.
    """
    devices = [opened(name) for name in names]
    checks.alike(names, devices, [described(device) for device in devices], replicas)
    return devices


class Blocks:
    """Implements ``seams.Lanes``: which device computes which replicas. Gradients are added in host memory.

    Parameters
    ----------
    replicas : int
    devices : sequence of str
    """

    def __init__(self, replicas: int, devices: Sequence[str]) -> None:
        self.placement = place(replicas, len(devices))
        self.following: Callable[[], Sequence[Todo]] | None = None  # nothing is read ahead
        self.number_of = {replica: number for number, block in enumerate(self.placement.blocks) for replica in block}

    def moved(self, vector: Gradient) -> Gradient:
        """See ``seams.Lanes.moved``: they are in host memory."""
        return vector


def home_of(model: Model) -> str:
    """Where a model was made.

    Raises
    ------
    UsageError
        On several devices.
    """
    homes = sorted({str(tensor.device) for tensor in model.tensors})
    if len(homes) > 1:
        raise UsageError(f"make_model returned a model spread over {homes}; put it on one device")
    return homes[0]


def facts(names: Sequence[str]) -> dict[str, str]:
    """What tinygrad says of these devices, for a report."""
    devices = [opened(name) for name in names]
    return {"devices": ", ".join(devices), "tinygrad": "; ".join(sorted({str(recorded(name)) for name in devices}))}
