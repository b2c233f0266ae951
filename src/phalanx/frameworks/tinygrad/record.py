"""tinygrad as the registry knows it, before it is needed: nothing here imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.definition.generators import Global
from phalanx.errors import UsageError
from phalanx.frameworks.record import Made, OptionalRecord, stored
from phalanx.seams import Framework
from phalanx.seams.records import Tensor


class TinygradRecord(OptionalRecord):
    """tinygrad as the registry knows it."""

    name = module = packages = "tinygrad"
    returns = "an object with tensors of tinygrad"
    takes_models = True  # which are never written

    def recognises(self, model: Any) -> bool:
        """Whether there is a tensor of tinygrad in it, an object or a tree."""
        if isinstance(model, type):
            return False
        from tinygrad.nn.state import get_state_dict

        try:
            return bool(get_state_dict(model))
        except RecursionError:  # an object that holds itself
            return False

    def open(self, made: Made) -> Framework:
        """In a single process only."""
        if made.processes > 1:
            raise UsageError(
                f"this is one of {made.processes} processes, but a recipe with tinygrad computes in one; use one "
                "process, with several devices"
            )
        return self.adapter.Tinygrad(made.definition, made.devices, made.model)

    def random(self) -> Sequence[Global]:
        """The generator of its tensors, for all devices."""
        from phalanx.frameworks.tinygrad.devices import GENERATOR

        return (GENERATOR,)

    def knows(self, names: Sequence[str]) -> bool:
        """Whether all are in capitals, which torch and jax never use."""
        return bool(names) and all(name.split(":")[0].isupper() for name in names)

    def facts(self, names: Sequence[str]) -> dict[str, str]:
        """Facts of the devices and their compilers."""
        from phalanx.frameworks.tinygrad.devices import facts

        return facts(names)

    def weights(self, model: Any, params: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Tensor | None]:
        """Each tensor is converted by its own method: numpy cannot read it."""
        return {name: stored(instead.get(name, tensor).numpy()) for name, tensor in params.items()}


RECORD = TinygradRecord()
