"""The devices of a jax run: found by name, with blocks of replicas, and arithmetic where gradients lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.definition import checks
from phalanx.errors import UsageError
from phalanx.frameworks import arithmetic
from phalanx.frameworks.arithmetic import Gradient
from phalanx.frameworks.jax.environment import named_device
from phalanx.plan.fold import place
from phalanx.seams import Todo


def found(names: Sequence[str], replicas: int) -> list[Any]:
    """The devices with these names; a kind alone, other than "cpu", is all of its devices, at most one per replica.

    Raises
    ------
    UsageError
        jax cannot use one here, one comes twice, they are of several kinds, or there are more than replicas.
    """
    devices: list[Any] = []
    for name in names:
        try:
            alone = len(names) == 1 and ":" not in name and name != "cpu"
            devices += _all_of(name, replicas) if alone else [named_device(name)]
        except (RuntimeError, ValueError, IndexError) as error:
            raise UsageError(
                f"devices names {name!r}, which jax cannot use here ({error}); use ['cpu'], or leave it out"
            ) from error
    checks.alike(names, devices, [device.device_kind for device in devices], replicas)
    return devices


def _all_of(kind: str, replicas: int) -> list[Any]:
    named_device(kind)  # says why it cannot be used
    devices = jax.devices(kind)
    if len(devices) > replicas:
        checks.warn(
            f"devices is {kind!r}: {replicas} of {len(devices)} devices are used, as replicas is {replicas}; raise it "
            "(which is part of the answer) to use more"
        )
    return devices[:replicas]


def available() -> list[tuple[str, str, str]]:
    """Each device that jax can use here: name, what it is, "". With the CPU alone: what others need."""
    rows = [(f"{device.platform}:{device.id}", str(device.device_kind), "") for device in jax.devices()]
    if jax.default_backend() == "cpu":
        rows.append(("cuda", "", "jax finds no accelerator; for NVIDIA GPUs: pip install 'jax[cuda12]'"))
    return rows


class Blocks:
    """Implements ``seams.Lanes``: which device computes which replicas, and where each parameter is updated.

    Parameters
    ----------
    replicas : int
    devices : sequence of jax.Device
    owners : sequence of int
        The number of the device that updates each parameter.
    """

    def __init__(self, replicas: int, devices: Sequence[Any], owners: Sequence[int]) -> None:
        self.placement = place(replicas, len(devices))
        self.following: Callable[[], Sequence[Todo]] | None = None  # nothing is read ahead
        self._homes = [devices[owner] for owner in owners]
        self._computes = {
            replica: device for device, block in zip(devices, self.placement.blocks, strict=True) for replica in block
        }

    def device_of(self, replica: int) -> Any:
        """Where a replica is computed."""
        return self._computes[replica]

    def moved(self, vector: Gradient) -> Gradient:
        """See ``seams.Lanes.moved``."""
        return [jax.device_put(entry, home) for entry, home in zip(vector, self._homes, strict=True)]


class DeviceArithmetic:
    """Implements ``seams.Arithmetic`` where the arrays lie: one operation a program, so that each is rounded once."""

    def add(self, left: Gradient, right: Gradient) -> Gradient:
        """See ``seams.Arithmetic.add``."""
        return [jnp.add(a, b) for a, b in zip(left, right, strict=True)]

    def scale(self, vector: Gradient, factor: float) -> Gradient:
        """See ``arithmetic.scale``."""
        return [_applied(jnp.multiply, entry, factor) for entry in vector]

    def divide(self, vector: Gradient, divisor: float) -> Gradient:
        """See ``arithmetic.divide``."""
        return [_applied(jnp.divide, entry, divisor) for entry in vector]

    read = staticmethod(arithmetic.read)
    checksum = staticmethod(arithmetic.checksum)

    def finite(self, vector: Gradient) -> bool:
        """See ``seams.Arithmetic.finite``."""
        return all(bool(jnp.isfinite(entry).all()) for entry in vector)

    def norm(self, vector: Gradient) -> float:
        """2-norm over all entries; of each the squares are added where it lies, in float32 at least."""
        wide = [_wide(entry).reshape(-1) for entry in vector]
        return math.sqrt(math.fsum([float(found) for found in [jnp.vdot(entry, entry) for entry in wide]]))


def arithmetic_on(device: Any) -> Any:
    """How gradients on a device are added: on the CPU, numpy reads and writes what is jax's."""
    return arithmetic if device.platform == "cpu" else DeviceArithmetic()


def _wide(entry: Any) -> Any:
    return entry.astype(jnp.promote_types(entry.dtype, jnp.float32))


def _applied(operation: Callable[[Any, Any], Any], entry: Any, number: float) -> Any:
    """By an array of the number: by the number, XLA would multiply by its rounded inverse instead of dividing."""
    wide = _wide(entry)
    return operation(wide, jnp.full_like(wide, number)).astype(entry.dtype)
