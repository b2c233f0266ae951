"""Which device updates which parameter, and has the optimizer's state for it: each leaf once over all devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from phalanx.frameworks.arithmetic import Gradient
from phalanx.frameworks.jax.optimizer import Update
from phalanx.frameworks.jax.snapshot import State
from phalanx.plan.fold import dealt

ALL = -1  # what belongs to no parameter, such as a step count: every device updates its own copy


class Owners:
    """Updates each parameter on its owner; all on the first device where an update couples parameters.

    That is so where clipping looks at the whole gradient or the optimizer at several parameters, where a parameter's
    update would be another program beside small ones, and where the state changes its shapes in the first update.

    Parameters
    ----------
    updates : Update
    params, optimizer : pytree
        The state before the first step.
    devices : sequence of jax.Device

    Attributes
    ----------
    owners : list of int
        The number of the device that updates each parameter.
    """

    def __init__(self, updates: Update, params: Any, optimizer: Any, devices: Sequence[Any]) -> None:
        self._updates = updates
        self._homes = devices
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
        self.owners = dealt(sizes, len(devices))
        users = updates.users() if updates.steady else None
        parts = [self._mine(number, users) for number in range(len(devices))] if users is not None else []
        self._busy = [(part, device) for part, device in zip(parts, devices, strict=False) if part[0]]
        if not self._busy or not all(updates.fits(*part) for part, _ in self._busy):
            self._busy, self.owners = [], [0] * len(sizes)
        self._steps = [updates.owned(*part, device) for part, device in self._busy]

    def step(self, state: State, gradient: Gradient) -> None:
        """Take the state to the next; returns when it is computed."""
        if not self._busy:
            first = self._homes[0]
            state.params, state.optimizer = jax.device_put((state.params, state.optimizer), first)
            self._updates.step(state, [jax.device_put(entry, first) for entry in gradient])
            return
        params, of_params = jax.tree.flatten(state.params)
        optimizer, of_optimizer = jax.tree.flatten(state.optimizer)
        begun = [
            step(*(jax.device_put(leaves, device) for leaves in _chosen(part, gradient, params, optimizer)))
            for step, (part, device) in zip(self._steps, self._busy, strict=True)
        ]
        for ((owned, held), _), (mine, kept) in reversed([*zip(self._busy, begun, strict=True)]):
            for index, leaf in zip(owned, mine, strict=True):
                params[index] = leaf
            for index, leaf in zip(held, kept, strict=True):
                optimizer[index] = leaf  # of what all have, the first device's stays
        state.params = jax.tree.unflatten(of_params, jax.block_until_ready(params))
        state.optimizer = jax.tree.unflatten(of_optimizer, jax.block_until_ready(optimizer))

    def _mine(self, number: int, users: Sequence[int]) -> tuple[list[int], list[int]]:
        """The parameters that a device updates, and the leaves of the optimizer's state that it has."""
        owned = [index for index, owner in enumerate(self.owners) if owner == number]
        return owned, [index for index, user in enumerate(users) if user == ALL or user in owned]


def _chosen(
    part: tuple[list[int], list[int]], gradient: Gradient, params: Sequence[Any], optimizer: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    owned, held = part
    return [gradient[i] for i in owned], [params[i] for i in owned], [optimizer[i] for i in held]
