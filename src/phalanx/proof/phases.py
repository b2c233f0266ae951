"""Where a step, with all of its phases, spends its time in one process: input, forward, backward, fold, update."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.definition.batches import BatchShares
from phalanx.definition.fields import Definition
from phalanx.definition.streams.supply import supplied
from phalanx.engines.links import LocalLink
from phalanx.frameworks.registry import open_framework
from phalanx.seams import Computed, Framework, RunState, Todo
from phalanx.step import commit, propose

PHASES = ("input", "forward", "backward", "fold", "update")


def phases(definition: Definition, seconds: float, warm: int) -> dict[str, float] | None:
    """Mean seconds of each phase in a step, over steps of about so many seconds in all, after ``warm`` ones.

    None where the framework does not tell: it may compute forward and backward as one.
    """
    watched: Any = _Watched(open_framework(definition, ()))
    shares = BatchShares(definition, watched.opened)
    link = LocalLink(watched, range(definition.replicas))
    supply = supplied(definition, RunState(), contextlib.nullcontext(), lambda numbers, _: numbers)
    spent, rounds = [0.0] * len(PHASES), definition.rounds
    began, steps, updates = time.perf_counter(), 0, 0
    with contextlib.closing(supply) if supply else contextlib.nullcontext(), watched.environment:
        while steps <= warm or updates < rounds.updates(steps) or time.perf_counter() - began < seconds:
            if updates == rounds.updates(warm):
                spent, began = [0.0] * len(PHASES), time.perf_counter()
            drawing = time.perf_counter()
            if supply is None:
                dealt = shares.planned(updates)
            else:
                dealt = shares.brought(supply.draw(rounds.at(updates).step))
            link.begin(updates, dealt)
            watched.seconds.clear()
            started = time.perf_counter()
            proposal = propose(watched, link, definition, updates, dealt)
            proposed = time.perf_counter()
            commit(watched, link, updates, proposal)
            if None in watched.seconds:
                return None
            computed = [sum(column) for column in zip(*watched.seconds, strict=True)]
            parts = [*computed, proposed - started - sum(computed), time.perf_counter() - proposed]
            parts[0] += started - drawing if supply else 0.0  # a stream is read before its samples are dealt
            spent = [before + part for before, part in zip(spent, parts, strict=True)]
            updates += 1
            steps = rounds.at(updates - 1).step + 1
    return {name: total / (steps - warm) for name, total in zip(PHASES, spent, strict=True)}


class _Watched:
    """A framework that keeps how long each replica's parts took."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self.seconds: list[tuple[float, float, float] | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._framework, name)

    def gradients(self, todo: Sequence[Todo]) -> Iterator[Computed]:
        for computed in self._framework.gradients(todo):
            self.seconds.append(computed.seconds)
            yield computed
