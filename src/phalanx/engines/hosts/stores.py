"""The store of a torch.distributed world: where its processes find each other when a run begins."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.engines.hosts.gloo import TCP
from phalanx.errors import PeersLostError, PhalanxError, UsageError

POLL_SECONDS = 0.05
ANSWER_SECONDS = 2.0  # until a process asks again which run is the newest
STORES: dict[tuple[int, int, str, int], Any] = {}


def surroundings() -> tuple[int, int, str, int]:
    """The rank of this process in its world, how many there are, and the address and port of the world's store.

    Raises
    ------
    UsageError
        There is no world.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), *address_of(c10d._get_default_store())
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return rank, size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"engine is 'distributed', but this is no process of a torch.distributed world ({error}); start it with "
            "torchrun, srun or the like, which set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or call "
            "torch.distributed.init_process_group before"
        ) from error


def opened(rank: int, size: int, address: str, port: int, seconds: float) -> Any:
    """The store of the world that this process lives in.

    Raises
    ------
    PeersLostError
        The store did not answer.
    """
    if dist.is_initialized():
        return c10d._get_default_store()
    key = rank, size, address, port
    try:
        if key not in STORES:  # one for all runs of a process: others may still ask that of the run before
            STORES[key] = _open(rank, address, port, datetime.timedelta(seconds=seconds))
        return STORES[key]
    except Exception as error:
        raise PeersLostError(
            f"the processes of this run did not find each other at {address}:{port} within {seconds:.0f} s: {error}; "
            "start all of them, and let them reach MASTER_ADDR and MASTER_PORT"
        ) from error


def address_of(store: Any) -> tuple[str, int]:
    """Where other processes reach the TCP store behind prefixes."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCP):
        raise UsageError(
            f"torch.distributed was initialised with a {type(store).__name__}, which worker processes cannot reach; "
            "initialise it by env:// or tcp://, as torchrun does"
        )
    return store.host, store.port


@contextlib.contextmanager
def reached(address: str) -> Iterator[None]:
    """Inside, an error of torch means that the store is gone."""
    try:
        yield
    except PhalanxError:
        raise
    except Exception as error:
        raise PeersLostError(
            f"the store at {address}, which the host of process 0 has, cannot be reached any more ({error}): process 0 "
            "has ended, or its host is lost. Start all processes again: with a run_dir the run goes on from its newest "
            "snapshot, to the same digest"
        ) from None


def run_of(store: Any, rank: int, size: int, seconds: float, look: Callable[[], object] = bool) -> int:
    """The number of the run that all processes begin now; rank 0 draws it, and answers every process that asks.

    What earlier processes left in the store does not matter, because no process answers there any more. (torchrun may
    keep its store when it begins again, and count restarts differently on each host.) ``look`` is called in all waits.

    Raises
    ------
    PeersLostError
        Rank 0, or a process that should have asked, did not come.
    """
    end = time.monotonic() + seconds
    if rank == 0:
        run = secrets.randbits(62)
        store.set("run", str(run))
        own = c10d.PrefixStore(str(run), store)
        for other in range(1, size):
            own.set(f"welcome/{other}", _awaited(own, f"hello/{other}", end, other, look).decode())
        return run
    word = secrets.token_hex(8)
    while True:
        run = int(_awaited(store, "run", end, 0, look))
        own = c10d.PrefixStore(str(run), store)
        own.set(f"hello/{rank}", word)
        answer = min(end, time.monotonic() + ANSWER_SECONDS)
        while time.monotonic() < answer:
            if own.check([f"welcome/{rank}"]) and own.get(f"welcome/{rank}").decode() == word:
                return run
            look()
            time.sleep(POLL_SECONDS)
        if answer == end:
            raise _absent(0)


def _awaited(store: Any, key: str, end: float, rank: int, look: Callable[[], object]) -> bytes:
    """The value of ``key``, once process ``rank`` has set it."""
    while not store.check([key]):
        if time.monotonic() > end:
            raise _absent(rank)
        look()
        time.sleep(POLL_SECONDS)
    return store.get(key)


def _absent(rank: int) -> PhalanxError:
    return PeersLostError(
        f"process {rank} did not come to this run in time; start all processes of the world, and let them train the "
        "same recipe"
    )


def _open(rank: int, address: str, port: int, limit: datetime.timedelta) -> Any:
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = served(address, port, limit) if serves else TCP(address, port, timeout=limit, wait_for_workers=False)
    return c10d.PrefixStore(os.environ.get("TORCHELASTIC_RUN_ID", ""), store)


def served(address: str, port: int, limit: datetime.timedelta) -> Any:
    """A store of this process; port 0: at any that is free."""
    listening = _listening(address, port)
    options = {"timeout": limit, "wait_for_workers": False, "master_listen_fd": listening}
    # libuv's store in torch 2.6 takes no socket that listens.
    return TCP(address, port, is_master=True, use_libuv=not torch.__version__.startswith("2.6."), **options)


def _listening(address: str, port: int) -> int | None:
    """A descriptor that listens on this address only; None where it is not one of this host's own."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(sockaddr)
            listener.listen()
            return os.dup(listener.fileno())
    return None
