"""The store of a torch.distributed world: where its processes find each other when a run begins.

Whoever reaches the store can write into it. So what processes put there has a MAC and is read at the door
(``messages``); what does not fit is as if it were not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pathlib
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.definition.checks import warn
from phalanx.engines.hosts.gloo import TCP
from phalanx.engines.hosts.messages import FOREIGN, Door
from phalanx.errors import PeersLostError, PhalanxError, UsageError
from phalanx.surroundings.presence import say

POLL_SECONDS = 0.05
ANSWER_SECONDS = 2.0  # until a process asks again which run is the newest
SAID_AFTER, SAID_AGAIN = 5.0, 30.0  # seconds of a wait
OWN_SECONDS = 2.0  # without a look: this process did something of its own, so the next wait is another one
LONELY_SECONDS = 30.0  # until nobody is waited for any more, where the address is known to be bad
FIRST = "process 0, or one that it waits for,"  # it answers those of lower rank first
STORES: dict[tuple[int, int, str, int], Any] = {}
SECRET, JOB = "PHALANX_SECRET", "PHALANX_JOB"
LEAST_BYTES = 16  # of a secret
PORTS = 1 << 16


class Waiting:
    """Says for whom this process waits: once that takes long, and then now and then. Each loop that waits ticks.

    Parameters
    ----------
    text : str
        The line, with {} for whom.
    """

    def __init__(self, text: str = "waits for {}") -> None:
        self._text, self._whom, self._due = text, "", SAID_AFTER
        self._since = self._last = time.monotonic()

    @contextlib.contextmanager
    def on(self, whom: str) -> Iterator[None]:
        """Inside, ``whom`` is waited for."""
        before, self._whom = self._whom, whom
        try:
            yield
        finally:
            self._whom = before

    def tick(self) -> None:
        """Look whether it is time to say something."""
        if not self._whom:
            return
        now = time.monotonic()
        if now - self._last > OWN_SECONDS:
            self._since, self._due = now, SAID_AFTER
        self._last = now
        if now - self._since >= self._due:
            self._due += SAID_AGAIN
            say(self._text.format(self._whom))


@dataclasses.dataclass
class Values:
    """What the processes of a world tell each other in its store when a run begins.

    Attributes
    ----------
    store : torch.distributed.Store
    door : Door
    ask : callable
        ``ask(do)`` does something that waits for the store, and returns what it returned.
    path : str
        What comes before each key, so that a value of another run does not fit.
    waiting : Waiting
    """

    store: Any
    door: Door
    ask: Callable[[Callable[[], Any]], Any]
    path: str = ""
    waiting: Waiting = dataclasses.field(default_factory=Waiting)

    def within(self, name: str) -> Values:
        """Those below a name."""
        return dataclasses.replace(self, store=c10d.PrefixStore(name, self.store), path=f"{self.path}{name}/")

    def put(self, key: str, value: Any) -> None:
        """Tell the others something."""
        data = self.door.seal(value, self.path + key)
        self.ask(lambda: self.store.set(key, data))

    def take(self, key: str) -> Any:
        """What somebody told; None if nobody did, or what is there does not fit."""
        data = self.ask(lambda: self.store.get(key) if self.store.check([key]) else b"")
        return self.door.open_value(key.partition("/")[0], self.path + key, data) if data else None


def secret_of(file: pathlib.Path | None) -> bytes:
    """The secret of this job, out of a file or of the environment; b"" if it has none.

    Raises
    ------
    UsageError
        The file cannot be read, or the secret is short.
    """
    if file is None and SECRET not in os.environ:
        return b""
    name, secret = SECRET, os.fsencode(os.environ.get(SECRET, ""))
    if file is not None:
        name = f"the secret of secret_file={str(file)!r}"
        try:
            secret, mode = file.read_bytes().strip(), file.stat().st_mode
        except OSError as error:
            raise UsageError(f"secret_file is {str(file)!r}, but it cannot be read: {error.strerror}") from None
        if mode & 0o077:
            warn(f"secret_file is {str(file)!r}, which others on this machine may read; chmod 600 it")
    if len(secret) < LEAST_BYTES:
        raise UsageError(f"{name} has {len(secret)} bytes; give at least {LEAST_BYTES}, as openssl rand -hex 32 prints")
    return secret


def job_of(size: int, address: str, port: int) -> str:
    """What tells this job from others on the same hosts and ports."""
    name = os.environ.get(JOB) or address
    return f"{port} {size} {os.environ.get('TORCHELASTIC_RUN_ID', 'none')} {name}"  # torchrun's default


def hint(door: Door) -> str:
    """What may be wrong where others did not come."""
    if not door.dropped[FOREIGN]:
        return ""
    names = f"MASTER_ADDR, MASTER_PORT, WORLD_SIZE, {JOB} and the secret"
    return f". Something came that has another key: {names} must be the same in all processes, to the letter"


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
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"engine is 'distributed', but this is no process of a torch.distributed world ({error}); start it with "
            "torchrun, srun or the like, which set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or call "
            "torch.distributed.init_process_group before"
        ) from error
    if port + size > PORTS:
        raise UsageError(
            f"MASTER_PORT is {port}, and process N listens at MASTER_PORT + N, for N up to {size - 1}; choose at most "
            f"{PORTS - size}"
        )
    return rank, size, address, port


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
        raise unfound(address, port, str(error)) from error


def unfound(address: str, port: int, why: str) -> PhalanxError:
    """There is no store."""
    return PeersLostError(
        f"the processes of this run did not find each other at {address}:{port}: {why}; start all of them, let them "
        "reach MASTER_ADDR and MASTER_PORT, and see that nothing else listens there"
    )


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


def run_of(
    values: Values, rank: int, size: int, seconds: float, look: Callable[[], object] = bool, lonely: str = ""
) -> int:
    """The number of the run that all processes begin now; rank 0 draws it, and answers every process that asks.

    What earlier processes left in the store does not matter, because no process answers there any more. (torchrun may
    keep its store when it begins again, and count restarts differently on each host.) ``look`` is called in all waits.
    ``lonely``: why perhaps nobody can come. Then this process does not wait the whole time for the first one.

    Raises
    ------
    PeersLostError
        Rank 0, or a process that should have asked, did not come.
    """
    end = time.monotonic() + seconds
    if rank == 0:
        run = secrets.randbits(62)
        values.put("run", run)
        own = values.within(str(run))
        hellos = {other: f"hello/{other}" for other in range(1, size)}
        if lonely:
            _awaited(own, hellos.values(), min(end, end - seconds + LONELY_SECONDS), 1, look, lonely)
        for other, hello in hellos.items():
            own.put(f"welcome/{other}", _awaited(own, [hello], end, other, look))
        return run
    drawn = secrets.token_hex(8)
    while True:
        run = _awaited(values, ["run"], end, 0, look)
        own = values.within(str(run))
        own.put(f"hello/{rank}", drawn)
        answer = min(end, time.monotonic() + ANSWER_SECONDS)
        with values.waiting.on(FIRST):
            while time.monotonic() < answer:
                if own.take(f"welcome/{rank}") == drawn:
                    return run
                look()
                time.sleep(POLL_SECONDS)
        if answer == end:
            raise _absent(FIRST, values)


def _awaited(
    values: Values, keys: Collection[str], end: float, rank: int, look: Callable[[], object], lonely: str = ""
) -> Any:
    """The value of the first of ``keys`` that is set; process ``rank`` is to do that."""
    whom = f"process {rank}"
    with values.waiting.on(whom):
        while (value := next(filter(None, map(values.take, keys)), None)) is None:
            if time.monotonic() > end:
                raise _absent(whom, values, lonely)
            look()
            time.sleep(POLL_SECONDS)
    return value


def _absent(whom: str, values: Values, lonely: str = "") -> PhalanxError:
    advice = "start all processes of the world, and let them train the same recipe"
    return PeersLostError(f"{whom} did not come to this run in time; {lonely or advice}{hint(values.door)}")


def _open(rank: int, address: str, port: int, limit: datetime.timedelta) -> Any:
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:  # a client of torch's tries for up to 2.4 times as long as it is told; this one is to do that alone
        TCP(address, port, timeout=limit / 2.5, wait_for_workers=False)
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
