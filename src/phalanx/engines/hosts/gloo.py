"""Sends bytes between processes of several hosts by Gloo, in a group of its own, which user code does not see.

The default group of ``torch.distributed`` is neither used nor made. So code that asks whether there is one gets the
same answer as in a run on one host.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from phalanx.errors import SeveredError, UsageError
from phalanx.plan.levels import grouped

T = TypeVar("T")
BRIEF_SECONDS = 0.005
INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
NAP_SECONDS, LONGEST_NAP_SECONDS = 0.00001, 0.0005
LEFT: list[Any] = []  # groups that were left while something was under way
GROUP: Any = dist.ProcessGroupGloo
TCP: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class Rendezvous:
    """Where workers of several hosts find each other; can be pickled.

    Attributes
    ----------
    address : (str, int)
        Host and port of the store of the run's torch.distributed world.
    run : int
        The run's number, drawn by rank 0.
    rank : int
        This process's position in ``blocks``.
    blocks : tuple of range
        The replicas of each process.
    seconds : float
        How long to wait for another process.
    interface : str
        The network interface to use; "" leaves the choice to torch.
    hosts : int
        On how many the processes are, where each has equally many, one after another; else 1.
    key : bytes
        Of the job; b"" where nobody has to show that it has it.
    """

    address: tuple[str, int]
    run: int
    rank: int
    blocks: tuple[range, ...]
    seconds: float
    interface: str
    hosts: int = 1
    key: bytes = field(default=b"", repr=False)

    def store(self, name: str) -> PrefixStore:
        """The part of the world's store that those have who meet under this name."""
        limit = datetime.timedelta(seconds=self.seconds)
        store = TCP(*self.address, is_master=False, timeout=limit)
        return PrefixStore(f"phalanx/{self.run}/{name}", store)

    def meet(self, name: str, rank: int, size: int, check: Callable[[], object] = bool) -> Gloo:
        """Connections between those who meet under this name."""
        return Gloo(self.store(name), rank, size, self.seconds, self.interface, check, key=self.key)


class Gloo:
    """Connections between the processes that come with the same store.

    Parameters
    ----------
    store : torch.distributed.Store
        Where they find each other.
    rank, size : int
    seconds : float
        How long to wait for another process.
    interface : str
        The network interface to use, unless the environment names one; "" leaves the choice to torch.
    check : callable, optional
        Called while ``gather`` waits; raises to end that.
    key : bytes
        All others have to show that they have it, too. b"": nobody has to.
    """

    def __init__(
        self, store: Any, rank: int, size: int, seconds: float, interface: str, check: Callable[[], object] = bool,
        key: bytes = b"",
    ) -> None:  # fmt: skip
        self._check, self._rank, self._size = check, rank, size
        named = os.environ.get(INTERFACE, interface).partition(",")[0]
        options = GROUP._Options()
        options._timeout = datetime.timedelta(seconds=seconds)
        try:
            options._devices = [GROUP.create_device(interface=named) if named else GROUP.create_default_device()]
        except RuntimeError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(f"{INTERFACE} is {named!r}, which Gloo cannot use here; name one of {known}") from error
        self.group: Any = None
        self.group = self._call(GROUP, store, rank, size, options)
        if key and size > 1:
            self._prove(key, rank, size)

    def _prove(self, key: bytes, rank: int, size: int) -> None:
        """See that all have the key: each draws a number, and signs all of them. Gloo lets in whoever connects."""
        drawn = self._bytes_of_all(secrets.randbits(62).to_bytes(8, "big"), size)
        wanted = [hmac.digest(key, b"%d of %d\n" % (at, size) + drawn, hashlib.sha256) for at in range(size)]
        if not hmac.compare_digest(self._bytes_of_all(wanted[rank], size), b"".join(wanted)):
            self.close()
            raise SeveredError("a process that does not have the key of this job has connected in place of a member")

    def _bytes_of_all(self, mine: bytes, size: int) -> bytes:
        gathered = torch.empty(size * len(mine), dtype=torch.uint8, device="cpu")
        self.gather(gathered, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return gathered.numpy().tobytes()

    def gather(self, gathered: torch.Tensor, mine: torch.Tensor) -> None:
        """Fill ``gathered`` with the bytes of all processes, equally many of each, in the order of ranks."""
        if len(grouped(self._size)) > 1:
            in_thread(lambda: self._gather_by_doubling(gathered, mine), self._check)
            return
        work = self._call(self.group._allgather_base, gathered, mine)
        try:
            poll(work.is_completed, self._check)
        except BaseException:  # torch's destructor would wait for what is under way
            LEFT[:] = [one for one in LEFT if not one[1].is_completed()]
            LEFT.append((self.group, work, gathered, mine))
            raise
        self._call(work.wait)

    def _gather_by_doubling(self, gathered: torch.Tensor, mine: torch.Tensor) -> None:
        """The same in log2 rounds of a message each, for any number of processes: who has k rows gets the next k.

        Gloo's own gather is a ring, of H - 1 rounds of two messages. A thread waits here, as no one can ask torch
        whether something that was sent or received by itself is there.
        """
        rows, have = torch.empty_like(gathered).view(self._size, -1), 1  # of this process, and those that follow
        rows[0] = mine
        while have < self._size:
            more = min(have, self._size - have)
            came = self.begin_receive(rows[have : have + more], (self._rank + have) % self._size)
            self.wait([came, self.begin_send(rows[:more], (self._rank - have) % self._size)])
            have += more
        gathered.view(self._size, -1).copy_(rows.roll(self._rank, 0))

    def begin_send(self, tensor: torch.Tensor, other: int) -> Any:
        """Begin to send memory to another process. It must not be written until the work is waited for."""
        return self._call(self.group.send, [tensor.view(torch.uint8)], other, 0)

    def begin_receive(self, tensor: torch.Tensor, other: int) -> Any:
        """Begin to receive what another process sends, in the order in which it sends; to be waited for."""
        return self._call(self.group.recv, [tensor.view(torch.uint8)], other, 0)

    def wait(self, works: Sequence[Any]) -> None:
        """Wait until works that were begun are done."""
        for work in works:
            self._call(work.wait)

    def close(self) -> None:
        """Close all connections, for all to see."""
        self.group = None

    def _call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Call torch. An error of it means that a process is gone, and nothing can be sent any more."""
        try:
            return operation(*arguments)
        except Exception as error:
            self.close()
            raise SeveredError(f"another process cannot be reached: {_short(error)}") from error


def poll(done: Callable[[], bool], check: Callable[[], object], longest: float = LONGEST_NAP_SECONDS) -> None:
    """Nap until something is done, ``longest`` seconds at a time; ``check`` raises to end that."""
    nap = NAP_SECONDS
    while not done():
        check()
        time.sleep(nap)
        nap = min(2 * nap, longest)


def in_thread(ask: Callable[[], T], check: Callable[[], object]) -> T:
    """Ask torch in a thread of its own, as it may wait long; ``check`` is called meanwhile, and may raise."""
    future: Future[T] = Future()
    thread = threading.Thread(target=answer, args=(future, ask), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(BRIEF_SECONDS)
        check()
    return future.result()


def answer(future: Future[T], ask: Callable[[], T]) -> None:
    """Ask, and put what came of it into ``future``."""
    try:
        future.set_result(ask())
    except BaseException as error:
        future.set_exception(error)


def _short(error: Exception) -> str:
    """Torch's message, without its source location and its advice."""
    return re.sub(r"\[[^\]]*\.cc:\d+\] ?", "", str(error)).partition(". This is typically")[0].strip()
