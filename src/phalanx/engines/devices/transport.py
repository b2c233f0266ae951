"""Moves bytes between the devices of all workers, by what torch.distributed has for their kind. It never adds."""

from __future__ import annotations

import datetime
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore

from phalanx.engines.hosts.gloo import LONGEST_NAP_SECONDS, LOOPBACK, Gloo, Rendezvous, answer, in_thread, poll
from phalanx.errors import RunError, SeveredError, UsageError

BACKENDS: Any = dist.Backend
FILE: Any = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
CLOCKS = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ENABLE_MONITORING",
)
NEVER_DAYS = 365
ABORT_SECONDS = 10.0
DEVICE_NAP_SECONDS = 0.00005  # the device idles until the host has seen that the norm is there
TRIED = 1 << 17  # numbers of 8 bytes that are sent when workers meet
NOTICED_SECONDS = 5.0  # until somebody has seen that a worker is gone


class Transport:
    """Moves memory between the devices of all workers, by what torch has for their kind, else through host memory.

    Parameters
    ----------
    store : torch.distributed.Store
        Where workers find each other.
    rank, size : int
    device : torch.device
        This worker's.
    seconds : float
        How long to wait for another worker.
    interface : str
        The network interface for what goes through host memory.
    check : callable
        Raises if a worker is gone, so that nobody waits for it.
    hosts : int
        On how many the workers are; equally many on each, one after another.

    Implements ``engines.flat.Carrier``, too.

    Attributes
    ----------
    beside : torch.Stream or None
        For what is to be done beside the current stream; None: works are waited for on the host.
    levels : list of Transport
        Where there are several hosts, this host's workers, and those of equal position; else all.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        seconds: float,
        interface: str,
        check: Callable[[], None],
        hosts: int = 1,
    ) -> None:
        self.in_place = False
        self._check, self._device, self._rank, self._size = check, device, rank, size
        name = BACKENDS.default_device_backend_map.get(device.type, "gloo")
        self._on_host = name == "gloo"  # works are done when the host says so, not when a stream comes to them
        self._staged = self._on_host and device.type != "cpu"
        # Small kernels, which others wait for: before what computes.
        self.beside = None if self._on_host else torch.Stream(device, priority=-1)
        self._group: Any = None
        self.levels: list[Transport] = []
        self._whole = self  # of whose levels this is one
        try:  # in a thread, as whoever waits for a worker that died meanwhile waits for ever
            in_thread(lambda: self._meet(name, store, seconds, interface), check)
            if hosts == 1:
                self.levels.append(self)
            else:
                self._cut(store, rank, size // hosts, hosts, seconds, interface)
        except (SeveredError, RuntimeError) as error:
            self._lost(error)
        except BaseException:
            self.close()
            raise

    def _cut(self, store: Any, rank: int, each: int, hosts: int, seconds: float, interface: str) -> None:
        host, position = divmod(rank, each)
        facts = self._device, seconds, interface, self._check
        for name, at, count in (f"host {host}", position, each), (f"position {position}", host, hosts):
            level = Transport(PrefixStore(name, store), at, count, *facts)
            level._whole = self
            self.levels.append(level)

    def _meet(self, name: str, store: Any, seconds: float, interface: str) -> None:
        """Make the group, compare the devices, and see that bytes arrive."""
        if self._on_host:
            self._group = Gloo(store, self._rank, self._size, seconds, interface).group
        else:
            torch.get_device_module(self._device).set_device(self._device)  # each thread has its own
            self._group = _created(name, store, self._rank, self._size)
        self._compare(store)
        self._try_out()

    def _compare(self, store: Any) -> None:
        """Refuse devices of several models: they choose kernels, and how these divide their work, by themselves."""
        store.set(f"kind {self._rank}", description(self._device))
        names = [f"kind {other}" for other in range(self._size)]
        poll(lambda: store.check(names), self._check)
        kinds = [store.get(name).decode() for name in names]
        for other, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise UsageError(
                    f"worker {other} has another device than worker 0 ({kind}; {kinds[0]}), and kernels of different "
                    "devices come to different bits; name devices of one model"
                )

    def _try_out(self) -> None:
        """See that bytes arrive: between devices whose direct access is broken, zeros come without an error."""
        if self._on_host:
            return
        rank, size, part = self._rank, self._size, TRIED // self._size
        mine = torch.arange(size * part, device=self._device).add_(rank * TRIED)
        came = torch.empty_like(mine)
        self.wait(self.all_to_all(came, mine, [part] * size, [part] * size))
        wanted = torch.arange(part, device="cpu") + rank * part
        wrong = [at for at, row in enumerate(came.view(size, part).cpu()) if not torch.equal(row, wanted + at * TRIED)]
        if wrong:
            raise RunError(
                f"what worker {wrong[0]} sent to {self._device} arrived with other bytes; copies between these devices "
                "are broken (often by an IOMMU or PCIe ACS: see NCCL's troubleshooting page); set NCCL_P2P_DISABLE=1"
            )

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, comes: list[int], goes: list[int]) -> Any:
        """Send ``goes[q]`` elements to each worker q, one after another; receive ``comes[q]`` from each."""
        cuts = [[count * sent.itemsize for count in counts] for counts in (comes, goes)]
        return self._begun(self._group.alltoall_base, received, sent, *cuts)

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Any:
        """Fill ``whole`` with what all workers have, equally much of each."""
        return self._begun(self._group._allgather_base, whole, mine)

    def deal(self, sums: torch.Tensor, counts: Sequence[int], room: Callable[..., torch.Tensor]) -> Any:
        """As of ``engines.flat.Carrier``; what a worker sends to itself comes with the rest."""
        own, size, length = sums.shape
        sent = sums
        if own > 1:
            sent = room("sent", sums.numel(), own=True).view(size, own, length)
            sent.copy_(sums.transpose(0, 1))
        received = room("received", sum(counts) * length)
        work = self.all_to_all(received, sent.view(-1), [count * length for count in counts], [own * length] * size)
        return work, list(received.view(-1, length))

    def all_reduce(self, whole: torch.Tensor) -> None:
        """What a run never does: let the library add. To compare times with."""
        self.wait((self._group.allreduce([whole]), None, None))

    def wait(self, work: Any) -> None:
        """Wait for what was begun; on an accelerator its stream waits, and the host goes on."""
        work, target, arrived = work
        if self._on_host:
            poll(work.is_completed, self._check)
        try:
            work.wait()
        except RuntimeError as error:
            self._lost(error)
        if target is not None:
            target.copy_(arrived)

    @property
    def waiter(self) -> Callable[[Callable[[], bool]], None] | None:
        """Waits for something of the device, and looks whether the others live; None: works were waited for before."""
        return None if self._on_host else functools.partial(poll, check=self._check, longest=DEVICE_NAP_SECONDS)

    def close(self) -> None:
        """Leave the others, at all levels; what was begun is given up."""
        whole = {id(link): link for link in [self._whole, *self._whole.levels, self]}.values()
        groups = [link._group for link in whole if link._group is not None]
        for link in whole:
            link._group = None
        if groups:
            _abort(groups, self._device)

    def _begun(self, operation: Callable[..., Any], target: torch.Tensor, source: torch.Tensor, *cuts: Any) -> Any:
        """Begin to move bytes: no backend has to know a dtype, and none could add."""
        target, source = target.view(torch.uint8), source.view(torch.uint8)
        try:
            if not self._staged:
                return operation(target, source, *cuts), None, None
            arrived = torch.empty(target.shape, dtype=target.dtype, device="cpu")
            return operation(arrived, source.cpu(), *cuts), target, arrived
        except RuntimeError as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        """Most likely a worker is gone: give whoever watches it the time to say so."""
        self.close()
        end = time.monotonic() + NOTICED_SECONDS
        while time.monotonic() < end:
            self._check()
            time.sleep(LONGEST_NAP_SECONDS)
        raise SeveredError(f"gradients could not be exchanged: {error}; start again") from error


def description(device: torch.device) -> str:
    """What decides which kernels a device runs."""
    if device.type == "cpu":
        return "cpu"
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    units = getattr(properties, "multi_processor_count", "")
    facts = name, units, torch.version.cuda or torch.version.hip, torch.backends.cudnn.version()
    return " ".join(str(fact) for fact in facts if fact)


def connected(
    fd: int, rank: int, size: int, device: str, seconds: float, generation: int, check: Callable[[], None]
) -> Transport:
    """Meet the other workers of this host, for the ``generation``-th time, in memory that they share."""
    store = PrefixStore(str(generation), FILE(f"/proc/self/fd/{fd}", size))
    return Transport(store, rank, size, torch.device(device), seconds, LOOPBACK, check)


def reached(rendezvous: Rendezvous, device: str, generation: int, check: Callable[[], None]) -> Transport:
    """Meet the workers of the other processes, through the store of their world."""
    store, size = rendezvous.store(f"devices {generation}"), len(rendezvous.blocks)
    facts = torch.device(device), rendezvous.seconds, rendezvous.interface, check, rendezvous.hosts
    return Transport(store, rendezvous.rank, size, *facts)


def _abort(groups: Sequence[Any], device: torch.device) -> None:
    """End what these groups began, though a worker is gone, and wait for the device.

    A kernel of NCCL that waits for a lost peer never ends. To abort one group may wait for kernels of another
    (pytorch#119797), so that all are aborted at once, each in a thread. torch opens a group of NCCL's calls around its
    aborts. But they run in threads of torch's own, and NCCL counts open groups by thread. What was enqueued behind the
    kernels is computed then, of garbage, in memory that is used again: whoever goes on at once would race with it. None
    of this may take for ever, as it would on a device that is lost.
    """
    end = time.monotonic() + ABORT_SECONDS
    works = [group.abort for group in groups if hasattr(group, "abort")]
    for together in works, [functools.partial(torch.accelerator.synchronize, device)] * (device.type != "cpu"):
        threads = [threading.Thread(target=answer, args=(Future(), work), daemon=True) for work in together]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


def _created(name: str, store: Any, rank: int, size: int) -> Any:
    """A group of the backend that torch registered under this name.

    NCCL's own clocks are off: a limit counts from when something is enqueued, before others have come to it, and ends
    the process. Cluster templates set these variables otherwise. That a worker hangs is seen by the caller's process.
    """
    limit = datetime.timedelta(days=NEVER_DAYS)
    os.environ.update(dict.fromkeys(CLOCKS, "0"))
    plugin = BACKENDS._plugins.get(name.upper())
    if plugin is None:
        kind = getattr(dist, f"ProcessGroup{name.upper()}")
        if not hasattr(kind, "Options"):
            return kind(store, rank, size, limit)
        given = kind.Options()
        given._timeout = limit
        if hasattr(given, "is_high_priority_stream"):
            given.is_high_priority_stream = True
        return kind(store, rank, size, given)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, limit)
    options: Any = c10d._DistributedBackendOptions()  # pyright: ignore[reportPrivateImportUsage]
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, limit
    return plugin.creator_fn(options, None)
