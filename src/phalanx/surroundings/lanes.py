"""Lanes: the devices of one process, each with the replicas that it computes one after another.

Whoever computes replicas in one process, the inline engine or a loop by hand, deals them to lanes and runs the lanes. A
process with one device has one lane, and that runs in the calling thread; several run at the same time, each in a
thread of its own, and meet when all are done. Knows no framework, and no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

D = TypeVar("D")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lane(Generic[D]):
    """Replicas, by number and in order, and what computes them: a device, or the framework whose state is there."""

    device: D
    replicas: tuple[int, ...]


def dealt(devices: Sequence[D]) -> list[Lane[D]]:
    """Lanes for replicas of which number ``r`` is computed on ``devices[r]``, which may come several times.

    The first lane has replica 0. It is the owner: what replicas have in common, such as their buffers, is settled there
    first, and copied to the others.
    """
    replicas: dict[D, list[int]] = {}
    for replica, device in enumerate(devices):
        replicas.setdefault(device, []).append(replica)
    return [Lane(device, tuple(numbers)) for device, numbers in replicas.items()]


def run(
    lanes: Sequence[Lane[D]],
    compute: Callable[[Lane[D]], T],
    around: Callable[[Lane[D]], contextlib.AbstractContextManager[Any]] | None = None,
) -> list[T]:
    """What ``compute(lane)`` returns for each lane, in their order; returns, or raises, when all lanes have ended.

    Parameters
    ----------
    lanes : sequence of Lane
        At least one.
    compute : callable
        Computes the replicas of a lane.
    around : callable, optional
        ``around(lane)`` gives a context that is made in the calling thread and entered in the lane's: it hands on what
        is a thread's own, such as modes. A lone lane needs none, as it runs in the calling thread.

    Raises
    ------
    Exception
        What a lane raised; of several, the first in their order.
    """
    if len(lanes) == 1:
        return [compute(lanes[0])]
    contexts = [contextlib.nullcontext() if around is None else around(lane) for lane in lanes]

    def threaded(lane: Lane[D], context: contextlib.AbstractContextManager[Any]) -> T:
        with context:
            return compute(lane)

    with ThreadPoolExecutor(len(lanes)) as pool:
        return list(pool.map(threaded, lanes, contexts))
