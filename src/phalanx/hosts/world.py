"""The torch.distributed world that a run lives in: who is there, whether all mean the same run, and who was lost.

Nothing is unpickled: what processes tell each other is JSON in the world's store, and bytes of known layout.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.errors import RunError, UsageError
from phalanx.hosts.across import Meeting, SeveredError, bound

SECONDS = 120.0  # to wait for another host; a first step may be compiled meanwhile
GRACE_SECONDS = 6.0  # until survivors have said that they are there
STORE_SECONDS = 5.0  # for the store's answer once something is wrong
SIOCGIFADDR = 0x8915
LOOPBACK = "lo"
RUNS = [0]  # of this process, the same in all of them


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
        limit = datetime.timedelta(seconds=self.seconds)
        self._own = not dist.is_initialized()
        if self._own and "RANK" not in os.environ:
            raise UsageError(
                "engine is 'distributed', but this is no process of a torch.distributed world; start it with torchrun, "
                "srun or the like, or call torch.distributed.init_process_group before"
            )
        with bound(_interface_to(os.environ.get("MASTER_ADDR", ""))):
            self._join(limit)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        RUNS[0] += 1
        base = c10d._get_default_store()
        self._tcp = _tcp(base)
        self._store = c10d.PrefixStore(f"phalanx/{RUNS[0]}", base)
        if self.rank == 0:
            self._store.set("run", str(secrets.randbits(62)))
        self.run = int(self._get("run", 0))

    def _join(self, limit: datetime.timedelta) -> None:
        try:
            if self._own:
                dist.init_process_group("gloo", timeout=limit)
            self._group: Any = dist.new_group(backend="gloo", timeout=limit)
        except Exception as error:
            raise RunError(
                f"the processes of this run did not find each other within {self.seconds:.0f} s: {error}; start all of "
                "them, and let them reach MASTER_ADDR and MASTER_PORT"
            ) from error

    def agree(self, facts: Mapping[str, Any], workers: int) -> int:
        """Make sure that all mean the same recipe in the same environment; returns the least number of workers.

        Raises
        ------
        UsageError
            A process differs; names it and the field.
        """
        told = {**facts, "host": _host(), "workers": workers}
        self._store.set(f"facts/{self.rank}", json.dumps(told, default=repr))
        everybody = [json.loads(self._get(f"facts/{rank}", rank)) for rank in range(self.size)]
        own = json.loads(json.dumps(told, default=repr))
        for rank, theirs in enumerate(everybody):
            for name, value in own.items():
                if name not in ("host", "workers") and theirs.get(name) != value:
                    raise UsageError(_differing(rank, self.rank, name, theirs.get(name), value))
        self._together = len({item["host"] for item in everybody}) == 1
        return min(item["workers"] for item in everybody)

    def here(self) -> int:
        """How many processes of this world are on this host."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def meeting(self, blocks: Sequence[range]) -> Meeting:
        """Where this host's workers find those of others."""
        interface = LOOPBACK if self._together else _interface_to(self._tcp[0])
        return Meeting(self._tcp, self.run, self.rank, tuple(blocks), self.seconds, interface)

    def broadcast(self, content: bytes) -> bytes:
        """Rank 0's bytes for everybody."""
        size = torch.tensor([len(content)])
        self._send(size)
        data = torch.empty(int(size), dtype=torch.uint8)
        if content:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._send(data)
        return data.numpy().tobytes()

    def lost(self, error: BaseException, step: int) -> RunError:
        """Who does not answer any more, as far as that can be told: survivors say that they are there."""
        base = self._store
        missing = list(range(self.size))
        with contextlib.suppress(Exception):
            base.set_timeout(datetime.timedelta(seconds=STORE_SECONDS))
            base.set(f"here/{self.rank}", "1")
            end = time.monotonic() + GRACE_SECONDS
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not base.check([f"here/{rank}"])]
                time.sleep(0.1)
        if self.rank in missing:
            who = f"the host of the store, {self._tcp[0]}, and perhaps others"
        else:
            who = ", ".join(f"host {rank} ({self._name(rank)})" for rank in missing) or "a host that is back by now"
        return RunError(
            f"{who} was lost in step {step}: {error}; this run has ended. Start again with the hosts that are left, or "
            "more: with a run_dir it goes on from its newest snapshot, to the same digest",
            step=step,
        )

    def close(self) -> None:
        """Leave the world as it was."""
        with contextlib.suppress(Exception):
            if self._own:
                dist.destroy_process_group()
            else:
                dist.destroy_process_group(self._group)

    def _get(self, key: str, rank: int) -> bytes:
        try:
            return self._store.get(key)
        except Exception as error:
            raise RunError(
                f"host {rank} did not come to this run within {self.seconds:.0f} s ({error}); all processes of the "
                "world must train the same recipe"
            ) from error

    def _send(self, tensor: torch.Tensor) -> None:
        try:
            dist.broadcast(tensor, 0, group=self._group)
        except Exception as error:
            raise SeveredError(f"host 0 cannot be reached: {error}") from error

    def _name(self, rank: int) -> str:
        with contextlib.suppress(Exception):
            return json.loads(self._store.get(f"facts/{rank}"))["host"].split()[0]
        return "unknown"


def _differing(rank: int, own: int, name: str, theirs: Any, value: Any) -> str:
    if isinstance(value, dict) and isinstance(theirs, dict):
        field = next(key for key in {**value, **theirs} if value.get(key) != theirs.get(key))
        name, value, theirs = f"{name}.{field}", value.get(field), theirs.get(field)
    return (
        f"{name} is {value!r} in process {own}, but {theirs!r} in process {rank}; all processes must have the same "
        "recipe, library versions and numeric environment"
    )


def _tcp(store: Any) -> tuple[str, int]:
    """Address of the TCP store behind prefixes."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # pyright: ignore[reportPrivateImportUsage]
        raise UsageError(
            f"torch.distributed was initialised with a {type(store).__name__}, which worker processes cannot reach; "
            "initialise it by env:// or tcp://, as torchrun does"
        )
    return store.host, store.port


def _host() -> str:
    """What this host is called, and what tells network namespaces of one machine apart."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def _interface_to(address: str) -> str:
    """The network interface by which ``address`` is reached; "" if that cannot be told."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return ""
