"""Which devices the frameworks can use here, by the names that users give them."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import UsageError
from phalanx.frameworks import registry
from phalanx.frameworks.tinygrad import outside as outside_tinygrad


def device_names(names: Sequence[str], replicas: int) -> list[str]:
    """These devices one by one: a kind alone becomes the devices that it has, at most one per replica."""
    if outside_tinygrad.are_names(names):
        return list(names)
    from phalanx.frameworks.torch.devices.names import spelled

    return spelled(names, replicas)


def device_facts(names: Sequence[str]) -> dict[str, str]:
    """What their framework says of these devices."""
    if outside_tinygrad.are_names(names):
        from phalanx.frameworks.tinygrad.devices import facts as tinygrad_facts

        return tinygrad_facts(names)
    from phalanx.frameworks.torch.devices.names import facts

    return facts(names)


def all_devices() -> list[tuple[str, str, str, str]]:
    """Framework, name, what it is, and what is missing for it: every device here, and every kind without one."""
    from phalanx.frameworks.torch.devices.names import available

    rows = [("torch", *row) for row in available()]
    for name, opened in (("jax", registry.opened_jax), ("tinygrad", registry.opened_tinygrad)):
        try:
            rows += [(name, *row) for row in opened().available()]
        except UsageError as error:  # it is not installed
            rows.append((name, "any", "", str(error)))
    return rows
