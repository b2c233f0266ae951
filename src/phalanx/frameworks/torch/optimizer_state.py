"""Optimizer state in an arena: moved there, described for another process, and taken from there."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.definition.data import map_tree
from phalanx.frameworks.torch.arithmetic import view
from phalanx.shared.layout import Spec
from phalanx.shared.memory import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor that lies in the arena."""

    offset: int
    spec: Spec


class OptimizerState:
    """The stretch of arena that each parameter's optimizer state may use.

    Parameters
    ----------
    optimizers : sequence of torch.optim.Optimizer
    parameters : sequence of torch.Tensor
    rooms : sequence of (offset, bytes)
    arena : mmap.mmap
    movable : bool
        Whether the optimizers look their state up anew in each step, as torch's own do.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[torch.Tensor],
        rooms: Sequence[tuple[int, int]],
        arena: mmap.mmap,
        *,
        movable: bool,
    ) -> None:
        self._movable = movable
        self._optimizers = optimizers
        self._parameters = parameters
        self._rooms = rooms
        self._arena = arena
        self._used = [0] * len(rooms)
        self._placed: dict[int, Placed] = {}  # by address

    def reset(self) -> None:
        """Forget all state; the memory stays as it is."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self._used = [0] * len(self._rooms)
        self._placed.clear()

    def used(self, index: int) -> int:
        """Bytes that a parameter's optimizer state takes."""
        return self._used[index]

    def place_in_arena(self, indices: Iterable[int]) -> list[int]:
        """Move the state of these parameters into their rooms; returns those that have none yet."""
        without: list[int] = []
        for index in indices if self._movable else ():
            found = False
            for optimizer in self._optimizers:
                state = optimizer.state.get(self._parameters[index])
                if state:
                    found = True
                    for key, value in state.items():
                        state[key] = map_tree(functools.partial(self._placed_in_arena, index), value)
            if not found:
                without.append(index)
        return without

    def describe(self, indices: Iterable[int]) -> list[dict[Any, Any]]:
        """Per optimizer: state by parameter index, with ``Placed`` for what lies in the arena, and what is beside."""
        indices = list(indices)
        self.place_in_arena(indices)
        described: list[dict[Any, Any]] = []
        for optimizer in self._optimizers:
            state = {index: optimizer.state.get(self._parameters[index]) for index in indices}
            found: dict[Any, Any] = {index: map_tree(self._described, value) for index, value in state.items() if value}
            beside = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
            described.append({"parameters": found, "beside": beside})
        return described

    def take(
        self,
        described: Sequence[dict[Any, Any]],
        indices: Iterable[int],
        *,
        beside: bool = True,
        copies: Sequence[int] | None = None,
    ) -> None:
        """Make described state of these parameters this process's own; it stays where it lies.

        ``copies``: where a copy of each room lies, to take that instead.
        """
        wanted = set(indices)
        for optimizer, state in zip(self._optimizers, described, strict=True):
            for index, value in state["parameters"].items():
                if index in wanted:
                    shift = 0 if copies is None else copies[index] - self._rooms[index][0]
                    take = functools.partial(self._taken, index, shift)
                    optimizer.state[self._parameters[index]] = map_tree(take, value)
            optimizer.state.update(state["beside"] if beside else {})

    def _placed_in_arena(self, index: int, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.data_ptr() in self._placed or leaf.numel() == 0:
            return leaf
        strides = torch.empty_like(leaf, device="meta").stride()
        spec = Spec(tuple(leaf.shape), strides, str(leaf.dtype).removeprefix("torch."), leaf.dtype.itemsize)
        start, size = self._rooms[index]
        needed = _padded(spec)
        if self._used[index] + needed > size:
            return leaf  # stays private; it is sent by value when somebody asks
        place = Placed(start + self._used[index], spec)
        self._used[index] += needed
        home = view(self._arena, place.offset, spec)
        home.copy_(leaf)
        self._placed[home.data_ptr()] = place
        return home

    def _described(self, leaf: Any) -> Any:
        return self._placed.get(leaf.data_ptr(), leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _taken(self, index: int, shift: int, leaf: Any) -> Any:
        if not isinstance(leaf, Placed):
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        end = leaf.offset - self._rooms[index][0] + _padded(leaf.spec)
        self._used[index] = max(self._used[index], end)
        home = view(self._arena, leaf.offset + shift, leaf.spec)
        self._placed[home.data_ptr()] = leaf
        return home


def _padded(spec: Spec) -> int:
    return -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
