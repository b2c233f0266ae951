"""The torch.distributed world of a run: which processes are there, whether all do the same run, and which left it.

Its store is opened here. In it the processes of one run find each other, and it outlives the run. Nothing is unpickled:
processes exchange JSON in the world's store, and bytes of known layout.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from phalanx.definition.checks import warn
from phalanx.engines.hosts.exchange import Rendezvous
from phalanx.engines.hosts.gloo import LOOPBACK, TCP, Gloo, towards
from phalanx.errors import LeftError, PhalanxError, RunError, UsageError

SECONDS = 120.0  # to wait for another host; a first step may be compiled meanwhile
GRACE_SECONDS = 6.0  # until survivors have said that they are there
STORE_SECONDS = 5.0  # for the store's answer once something is wrong
POLL_SECONDS = 0.05
CLOSED = "it was closed after"
LONGEST = 1000  # characters of an error that are told to others
RUNS = [0]  # begun in this process; the same number in all processes
ANSWER_SECONDS = 2.0  # until a process asks again which run is the newest
STORES: dict[tuple[int, int, str, int], Any] = {}


class World:
    """All processes of a run, before its first step and after something went wrong.

    Parameters
    ----------
    seconds : float or None
        How long to wait for others.

    Attributes
    ----------
    rank, size : int
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = SECONDS if seconds is None else seconds
        RUNS[0] += 1
        base, self.rank, self.size = opened(self.seconds)
        self._tcp = address_of(base)
        store = c10d.PrefixStore(f"phalanx/{RUNS[0]}", base)
        with reached(self._tcp[0]):
            self.run = run_of(store, self.rank, self.size, self.seconds)
        self._store = c10d.PrefixStore(str(self.run), store)
        self._names = [""] * self.size
        self._gloo: Gloo | None = None
        self._told = False

    def agree(self, facts: Mapping[str, Any], doubts: Mapping[str, str], cores: Sequence[int]) -> int:
        """Check that all have the same recipe in the same environment; returns how many workers each has room for.

        ``facts`` must be equal. Where ``doubts`` are not, a warning says so.

        Raises
        ------
        UsageError
            A process differs; names it and the field.
        RunError
            A process did not come, or has left again.
        """
        given = {**facts, "doubts": doubts, "host": _host(), "cores": list(cores)}
        mine = json.loads(json.dumps(given, default=repr))
        self._store.set(f"facts/{self.rank}", json.dumps(mine))
        everybody = [json.loads(self._get(f"facts/{rank}", rank)) for rank in range(self.size)]
        self._names = [item["host"].split()[0] for item in everybody]
        for rank, theirs in enumerate(everybody):
            for name in facts:
                if theirs.get(name) != mine[name]:
                    raise UsageError(_differing(rank, self.rank, name, theirs.get(name), mine[name]))
            for name, value in mine["doubts"].items():
                if theirs["doubts"].get(name, value) != value:
                    here, there = f"process {self.rank}", f"process {rank}"
                    warn(
                        f"{name} is {value} in {here}, and {theirs['doubts'][name]} in {there}; if it decides the "
                        "answer, that depends on who computes what"
                    )
        self._hosts = [item["host"] for item in everybody]
        together = len(set(self._hosts)) == 1
        self._interface = LOOPBACK if together else towards(self._tcp[0])
        store = c10d.PrefixStore("callers", self._store)
        self._gloo = Gloo(store, self.rank, self.size, self.seconds, self._interface)
        return min(_room(item, everybody) for item in everybody)

    def rendezvous(self, blocks: Sequence[range]) -> Rendezvous:
        """Where this process's workers find those of others."""
        facts = self.run, self.rank, tuple(blocks), self.seconds, self._interface, in_rows(self._hosts)
        return Rendezvous(self._tcp, *facts)

    def broadcast(self, content: bytes) -> bytes:
        """Rank 0's bytes, in every process."""
        size = torch.tensor([len(content)])
        self._met.broadcast(size)
        data = torch.empty(int(size), dtype=torch.uint8)
        if content:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._met.broadcast(data)
        return data.numpy().tobytes()

    def odd_one(self, content: bytes) -> int | None:
        """The first process whose bytes differ from rank 0's, at equal length; None if all have the same."""
        gathered = torch.empty(self.size * len(content), dtype=torch.uint8)
        self._met.gather(gathered, torch.frombuffer(bytearray(content), dtype=torch.uint8))
        rows = gathered.numpy().reshape(self.size, -1)
        differing = np.flatnonzero((rows != rows[0]).any(1))
        return int(differing[0]) if len(differing) else None

    def tell(self, why: str) -> None:
        """Let others know why this process leaves the run, before they miss it. The first reason counts."""
        if not self._told:
            self._told = True
            _within(STORE_SECONDS, self._store.set, f"left/{self.rank}", why[:LONGEST])

    def lost(self, error: BaseException, step: int) -> RunError:
        """The error for a run whose connections are gone: which process left and why, or which does not answer."""
        reasons, missing = dict[int, str](), set(range(self.size))
        _within(GRACE_SECONDS + STORE_SECONDS, self._look_round, reasons, missing)
        if reasons:
            rank = min(reasons)
            kind = LeftError if reasons[rank].startswith(CLOSED) else RunError
            return kind(
                f"{self._named(rank)} left the run: {reasons[rank]}. So it has ended here in step {step}, too",
                step=step,
            )
        if self.rank in missing:
            who = f"{self._named(0)}, whose host has the store, and perhaps others"
        else:
            who = ", ".join(map(self._named, sorted(missing))) or "a process that is back by now"
        return RunError(
            f"lost {who}, in step {step}: {error}; this run has ended. Start again with the hosts that are left, or "
            "more: with a run_dir it goes on from its newest snapshot, to the same digest",
            step=step,
        )

    def close(self) -> None:
        """Close what was opened for this run; the store stays. If rank 0 left early, it lets others read why."""
        if self._gloo is not None:
            self._gloo.close()
        _within(STORE_SECONDS, self._store.set, f"gone/{self.rank}", "1")
        if self._told and self.rank == 0:
            _within(GRACE_SECONDS + STORE_SECONDS, self._see_off)

    @property
    def _met(self) -> Gloo:
        assert self._gloo is not None  # agree() comes first
        return self._gloo

    def _look_round(self, reasons: dict[int, str], missing: set[int]) -> None:
        """Say that this process is there; note which others said the same, and why others left."""
        self._store.set(f"here/{self.rank}", "1")
        end = time.monotonic() + GRACE_SECONDS
        while missing and not reasons and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            for rank in range(self.size):
                if rank in missing and self._store.check([f"here/{rank}"]):
                    missing.discard(rank)
                if rank != self.rank and self._store.check([f"left/{rank}"]):
                    reasons[rank] = self._store.get(f"left/{rank}").decode(errors="replace")

    def _see_off(self) -> None:
        """Wait until all others have gone, but not for long: they may have to read in the store why this run ends."""
        end = time.monotonic() + GRACE_SECONDS
        others = [f"gone/{rank}" for rank in range(1, self.size)]
        while time.monotonic() < end and not self._store.check(others):
            time.sleep(POLL_SECONDS)

    def _get(self, key: str, rank: int) -> bytes:
        """What a process says at the start of a run; raises if it has said that it leaves."""
        end = time.monotonic() + self.seconds
        with reached(self._tcp[0]):
            while time.monotonic() < end:
                if self._store.check([key]):
                    return self._store.get(key)
                if self._store.check([f"left/{rank}"]):
                    why = self._store.get(f"left/{rank}").decode(errors="replace")
                    raise RunError(f"{self._named(rank)} left before this run began: {why}")
                time.sleep(POLL_SECONDS)
        raise RunError(
            f"{self._named(rank)} did not come to this run within {self.seconds:.0f} s; all processes of the "
            "world must train the same recipe"
        )

    def _named(self, rank: int) -> str:
        return f"process {rank} on {self._names[rank]}" if self._names[rank] else f"process {rank}"


def in_rows(hosts: Sequence[str]) -> int:
    """How many hosts there are, if each has equally many processes, at least two, one after another; else 1."""
    count = len(set(hosts))
    rows = [hosts[first : first + len(hosts) // count] for first in range(0, len(hosts), len(hosts) // count)]
    regular = len(rows) == count and all(len(set(row)) == 1 for row in rows)
    return count if regular and len(hosts) > count else 1


def _within(seconds: float, ask: Any, *arguments: Any) -> None:
    """Ask the store in a thread of its own: where its host has stopped, it would never answer, whatever its timeout."""

    def asking() -> None:
        with contextlib.suppress(Exception):
            ask(*arguments)

    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    thread.join(seconds)


def _room(item: Mapping[str, Any], everybody: Sequence[Mapping[str, Any]]) -> int:
    """How many processors a process has for itself, where others of the same host may run on them too."""
    mine = set(item["cores"])
    sharing = sum(other["host"] == item["host"] and bool(mine & set(other["cores"])) for other in everybody)
    return len(mine) // sharing


def _differing(rank: int, own: int, name: str, theirs: Any, value: Any) -> str:
    if isinstance(value, dict) and isinstance(theirs, dict):
        field = next(key for key in {**value, **theirs} if value.get(key) != theirs.get(key))
        name, value, theirs = f"{name}.{field}", value.get(field), theirs.get(field)
    return (
        f"{name} is {value!r} in process {own}, but {theirs!r} in process {rank}; all processes must have the same "
        "recipe, options, library versions and numeric environment"
    )


def _host() -> str:
    """What this host is called, and what tells network namespaces of one machine apart."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def opened(seconds: float) -> tuple[Any, int, int]:
    """The store of the world that this process lives in, its rank, and how many there are.

    Raises
    ------
    UsageError
        There is no world, or its store cannot be reached by other processes.
    RunError
        The store did not answer.
    """
    if dist.is_initialized():
        return c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"engine is 'distributed', but this is no process of a torch.distributed world ({error}); start it with "
            "torchrun, srun or the like, which set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or call "
            "torch.distributed.init_process_group before"
        ) from error
    key = rank, size, address, port
    try:
        if key not in STORES:  # one for all runs of a process: others may still ask that of the run before
            STORES[key] = _open(*key, datetime.timedelta(seconds=seconds))
        return STORES[key], rank, size
    except Exception as error:
        raise RunError(
            f"the processes of this run did not find each other at {address}:{port} within {seconds:.0f} s: {error}; "
            "start all of them, and let them reach MASTER_ADDR and MASTER_PORT"
        ) from error


def address_of(store: Any) -> tuple[str, int]:
    """Where other processes reach the TCP store behind prefixes."""
    bare = _bare(store)
    if not isinstance(bare, TCP):
        raise UsageError(
            f"torch.distributed was initialised with a {type(bare).__name__}, which worker processes cannot reach; "
            "initialise it by env:// or tcp://, as torchrun does"
        )
    return bare.host, bare.port


@contextlib.contextmanager
def reached(address: str) -> Iterator[None]:
    """Inside, an error of torch means that the store is gone."""
    try:
        yield
    except PhalanxError:
        raise
    except Exception as error:
        raise RunError(
            f"the store at {address}, which the host of process 0 has, cannot be reached any more ({error}): process 0 "
            "has ended, or its host is lost. Start all processes again: with a run_dir the run goes on from its newest "
            "snapshot, to the same digest"
        ) from None


def run_of(store: Any, rank: int, size: int, seconds: float) -> int:
    """The number of the run that all processes begin now; rank 0 draws it, and answers every process that asks.

    What earlier processes left in the store does not matter, because no process answers there any more. (torchrun may
    keep its store when it begins again, and count restarts differently on each host.)

    Raises
    ------
    RunError
        Rank 0, or a process that should have asked, did not come.
    """
    end = time.monotonic() + seconds
    if rank == 0:
        run = secrets.randbits(62)
        store.set("run", str(run))
        own = c10d.PrefixStore(str(run), store)
        for other in range(1, size):
            own.set(f"welcome/{other}", _awaited(own, f"hello/{other}", end, other).decode())
        return run
    word = secrets.token_hex(8)
    while True:
        run = int(_awaited(store, "run", end, 0))
        own = c10d.PrefixStore(str(run), store)
        own.set(f"hello/{rank}", word)
        answer = min(end, time.monotonic() + ANSWER_SECONDS)
        while time.monotonic() < answer:
            if own.check([f"welcome/{rank}"]) and own.get(f"welcome/{rank}").decode() == word:
                return run
            time.sleep(POLL_SECONDS)
        if answer == end:
            raise _absent(0)


def _awaited(store: Any, key: str, end: float, rank: int) -> bytes:
    """The value of ``key``, once process ``rank`` has set it."""
    while not store.check([key]):
        if time.monotonic() > end:
            raise _absent(rank)
        time.sleep(POLL_SECONDS)
    return store.get(key)


def _absent(rank: int) -> PhalanxError:
    return RunError(
        f"process {rank} did not come to this run in time; start all processes of the world, and let them train the "
        "same recipe"
    )


def _open(rank: int, size: int, address: str, port: int, limit: datetime.timedelta) -> Any:
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listening = _listening(address, port)
        options = {"timeout": limit, "wait_for_workers": False, "master_listen_fd": listening}
        # libuv's store in torch 2.6 takes no socket that listens.
        options["use_libuv"] = not torch.__version__.startswith("2.6.")
        store = TCP(address, port, size, is_master=True, **options)
    else:
        store = _bare(next(iter(rendezvous("env://", rank, size, timeout=limit)))[0])
    return c10d.PrefixStore(os.environ.get("TORCHELASTIC_RUN_ID", ""), store)


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


def _bare(store: Any) -> Any:
    """A store without prefixes: torchrun's has the number of restarts, which hosts may count differently."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store
