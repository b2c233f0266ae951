"""Which parts the link of a worker is made of."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from phalanx.engines.devices.exchanged import Exchanged
from phalanx.engines.devices.transport import connected, reached
from phalanx.engines.hosts.board import Network
from phalanx.engines.hosts.pieces import added_across
from phalanx.engines.link import Link
from phalanx.engines.processes.arena import Owned
from phalanx.engines.processes.board import Shared, Station
from phalanx.shared.memory import Memories
from phalanx.shared.posts import Posts


def linked(station: Station, memories: Memories, setup: Mapping[str, Any]) -> Link:
    """The link of a worker.

    Parameters
    ----------
    station : Station
    memories : Memories
    setup : mapping
        What all workers were told: ``hosts``, the rendezvous of several; ``devices``, by name; ``seconds``, how long to
        wait for another worker.
    """
    hosts, placement, worker = setup["hosts"], station.placement, station.worker
    posts = Posts(memories.posts.fd)
    board, beyond = Shared(station, posts), None
    if hosts is not None:
        gloo = hosts.meet(f"worker {worker}", hosts.rank, len(hosts.blocks), station.check)
        board = Network(station, posts, hosts, gloo)
        beyond = None if placement.copies else added_across(station, hosts, gloo, board.groups)
    if not placement.copies:
        return Link(station.hosted, board, Owned(station, board, beyond))
    device, blocks, rank, machines = setup["devices"][worker], placement.blocks, worker, 1
    meet = functools.partial(connected, memories.meeting.fd, rank, len(blocks), device, setup["seconds"])
    if hosts is not None:
        blocks, rank, machines = hosts.blocks, hosts.rank, hosts.hosts
        meet = functools.partial(reached, hosts, device)
    return Link(station.hosted, board, Exchanged(station, board, device, blocks, rank, meet, machines))
