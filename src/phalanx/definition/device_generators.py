"""Random generators of torch's accelerators, of any kind; none before this process uses one, and none without torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


class DeviceGenerator:
    """The random generator of one device.

    Parameters
    ----------
    module : module
        What torch has for this kind of device (``torch.get_device_module``).
    number : int
        Of the device.
    """

    def __init__(self, module: Any, number: int) -> None:
        listed = getattr(module, "default_generators", ())
        own = listed[number] if len(listed) > number else None
        self.listed = own  # its generator as an object, of kinds that show them
        self._module = module
        self._which = (number,) if hasattr(module, "set_device") else ()  # kinds of one device, as mps, name none
        # Kinds without a list of generators seed all of theirs at once: then each is seeded before it is used.
        seed_all = getattr(module, "manual_seed_all", None) or module.manual_seed
        self.seed: Callable[[int], Any] = seed_all if own is None else own.manual_seed

    def kept(self) -> Callable[[], Any]:
        """Puts it back into the state that it has now."""
        state = self._module.get_rng_state(*self._which)
        return lambda: self._module.set_rng_state(state, *self._which)


def in_use() -> tuple[DeviceGenerator, ...]:
    """Those of the accelerators that this process uses; asking starts none, and lets the process fork as before."""
    torch: Any = sys.modules.get("torch")
    try:
        kind = torch and torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        return ()
    if not kind:
        return ()
    # By its name: torch remembers what it answers when asked without one, and a kind may be registered later.
    module = torch.get_device_module(kind)
    # To use them only for that would take memory.
    if not getattr(module, "is_initialized", module.is_available)():
        return ()
    return _of(module, module.device_count())


def listed() -> tuple[Any, ...]:
    """Their generators as torch's objects, of kinds that show them."""
    return tuple(each.listed for each in in_use() if each.listed is not None)


@functools.cache
def _of(module: Any, count: int) -> tuple[DeviceGenerator, ...]:
    return tuple(DeviceGenerator(module, number) for number in range(count))
