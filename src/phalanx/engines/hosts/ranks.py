"""The mean gradient of workers that each have a device: torch.distributed moves bytes, and every addition is ours.

Gradients travel in buckets. Each worker gets its slice of every partial sum (all-to-all), adds these up in the fold's
order, divides, and gives the result to all (all-gather). That is the traffic of a ring all-reduce, 2 N (P - 1) / P
elements, where each worker has one partial sum. A library that only moves bytes cannot change a bit.
"""

from __future__ import annotations

import datetime
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore

from phalanx.engines.hosts.exchange import PATTERNS, Mask, Rendezvous, Run, fold_runs, stretches
from phalanx.engines.hosts.gloo import LOOPBACK, TCP, Gloo
from phalanx.errors import RunError, SeveredError, UsageError
from phalanx.frameworks.torch.accelerators import watched
from phalanx.frameworks.torch.arithmetic import copy_all
from phalanx.plan.fold import Node, added, remaining
from phalanx.seams.records import Vector
from phalanx.shared.layout import Spec

BACKENDS: Any = dist.Backend
FILE: Any = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
BUCKET = 25 << 20  # bytes
ALIGNED = 512  # bytes: kernels may compute otherwise at addresses that a gradient of torch's own would not have
TRIED = 1 << 17  # numbers of 8 bytes that are sent when workers meet
NOTICED_SECONDS = 5.0  # until somebody has seen that a worker is gone
NAP_SECONDS, LONGEST_NAP_SECONDS = 0.00001, 0.0005


Gathered = tuple[Any, torch.Tensor]  # what to wait for, and the slices of all workers


class Bucket(NamedTuple):
    """Parameters whose gradients travel together.

    Attributes
    ----------
    dtype : torch.dtype
    places : dict
        The offset of each parameter, in elements.
    runs : list of Run
        Stretches of parameters that the same partial sums have.
    width : int
        Elements of a slice; each worker adds up one.
    """

    dtype: torch.dtype
    places: dict[int, int]
    runs: list[Run]
    width: int


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

    Attributes
    ----------
    beside : torch.Stream or None
        For what is to be done beside the current stream; None: works are waited for on the host.
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
    ) -> None:
        self._check, self._device = check, device
        name = BACKENDS.default_device_backend_map.get(device.type, "gloo")
        self._on_host = name == "gloo"  # works are done when the host says so, not when a stream comes to them
        self._staged = self._on_host and device.type != "cpu"
        self.beside = None if self._on_host else torch.Stream(device)
        self._group: Any = None
        try:
            if self._on_host:
                self._group = Gloo(store, rank, size, seconds, interface).group
            else:
                self._group = _created(name, store, rank, size, seconds)
            self._compare(store, rank, size)
        except (SeveredError, RuntimeError) as error:
            self._lost(error)
        self._try_out(rank, size)

    def _compare(self, store: Any, rank: int, size: int) -> None:
        """Refuse devices of several models: they choose kernels, and how these divide their work, by themselves."""
        store.set(f"kind {rank}", description(self._device))
        kinds = [store.get(f"kind {other}").decode() for other in range(size)]
        for other, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise UsageError(
                    f"worker {other} has another device than worker 0 ({kind}; {kinds[0]}), and kernels of different "
                    "devices come to different bits; name devices of one model"
                )

    def _try_out(self, rank: int, size: int) -> None:
        """See that bytes arrive: between devices whose direct access is broken, zeros come without an error."""
        if self._on_host:
            return
        part = TRIED // size
        mine = torch.arange(size * part, device=self._device).add_(rank * TRIED)
        came = torch.empty_like(mine)
        self.wait(self.all_to_all(came, mine, [part] * size, [part] * size))
        wanted = torch.arange(part) + rank * part
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

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Any:
        """Fill ``whole`` with what all workers have, equally much of each."""
        return self._begun(self._group._allgather_base, whole, mine)

    def all_reduce(self, whole: torch.Tensor) -> None:
        """What a run never does: let the library add. To compare times with."""
        self.wait((self._group.allreduce([whole]), None, None))

    def wait(self, work: Any) -> None:
        """Wait for what was begun; on an accelerator its stream waits, and the host goes on."""
        work, target, arrived = work
        if self._on_host:
            self._poll(work.is_completed)
        try:
            work.wait()
        except RuntimeError as error:
            self._lost(error)
        if target is not None:
            target.copy_(arrived)

    def settle(self) -> None:
        """Wait until the device has done all that was begun."""
        if not self._on_host:
            reached = torch.Event(self._device)
            reached.record()
            self._poll(reached.query)

    def close(self) -> None:
        """Leave the others; what was begun is given up."""
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()

    def _begun(self, operation: Callable[..., Any], target: torch.Tensor, source: torch.Tensor, *cuts: Any) -> Any:
        """Begin to move bytes: no backend has to know a dtype, and none could add."""
        target, source = target.view(torch.uint8), source.view(torch.uint8)
        try:
            if not self._staged:
                return operation(target, source, *cuts), None, None
            arrived = torch.empty(target.shape, dtype=target.dtype)
            return operation(arrived, source.cpu(), *cuts), target, arrived
        except RuntimeError as error:
            self._lost(error)

    def _poll(self, done: Callable[[], bool]) -> None:
        nap = NAP_SECONDS
        while not done():
            self._check()
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_SECONDS)

    def _lost(self, error: Exception) -> None:
        """Most likely a worker is gone: give whoever watches it the time to say so."""
        self.close()
        end = time.monotonic() + NOTICED_SECONDS
        while time.monotonic() < end:
            self._check()
            time.sleep(LONGEST_NAP_SECONDS)
        raise SeveredError(f"gradients could not be exchanged: {error}; start again") from error


class Exchange:
    """The mean gradient over all workers.

    Parameters
    ----------
    specs : sequence of Spec
        What each parameter's gradient looks like.
    replicas : int
        R.
    blocks : sequence of range
        The replicas of each worker, in order.
    rank : int
        This worker's position there.
    device : str
        Where gradients are.

    Attributes
    ----------
    watched : callable
        A context in which a failure of the device is told as such.
    """

    def __init__(self, specs: Sequence[Spec], replicas: int, blocks: Sequence[range], rank: int, device: str) -> None:
        self._rank, self._device = rank, device
        self.watched = functools.partial(watched, [torch.device(device)])
        self._like = [
            torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype), device="meta")
            for spec in specs
        ]
        nodes = [remaining(replicas, block) for block in blocks]
        self._counts = [len(own) for own in nodes]
        every = [node for own in nodes for node in own]
        self._laid_out = functools.lru_cache(PATTERNS)(functools.partial(self._lay_out, replicas, every))
        self._rooms: dict[Any, torch.Tensor] = {}

    def total(
        self, transport: Transport, masks: Sequence[Mask], mine: Sequence[Vector | None], over: Callable[[Any], Any]
    ) -> Vector:
        """The mean gradient: an entry for each parameter that any node has a gradient of, None for others.

        Parameters
        ----------
        transport : Transport
        masks : sequence of bytes
            Which gradients each node of all workers has.
        mine : sequence of Vector or None
            The sums at this worker's nodes.
        over : callable
            Divides a tensor by the sum of weights, in place.
        """
        buckets = self.layout(masks)
        begun = []
        for number, bucket in enumerate(buckets):
            self._pack(number, bucket, mine)
            begun.append(self.deal(transport, number, bucket))
        gathered: list[Gathered] = []
        for number, (bucket, (work, rows)) in enumerate(zip(buckets, begun, strict=True)):
            transport.wait(work)
            gathered.append(self.gather(transport, number, bucket, over(self.added(number, bucket, rows))))
        for work, _ in gathered:
            transport.wait(work)
        return self.unpacked(buckets, gathered)

    def layout(self, masks: Sequence[Mask]) -> list[Bucket]:
        """The buckets of a step in which each node of all workers has these gradients."""
        return self._laid_out(tuple(masks))

    def homes(self, number: int, bucket: Bucket, index: int) -> list[torch.Tensor]:
        """Where this worker's sums of a parameter lie in a bucket that it sends, one for each of its nodes."""
        like, offset = self._like[index], bucket.places[index]
        rows = self._packed(number, bucket)
        return [row.as_strided(like.shape, like.stride(), row.storage_offset() + offset) for row in rows]

    def deal(self, transport: Transport, number: int, bucket: Bucket) -> tuple[Any, list[torch.Tensor]]:
        """Send every worker its slice of this worker's sums; returns what to wait for, and the rows that come."""
        workers, own, width = len(self._counts), self._counts[self._rank], bucket.width
        packed = self._packed(number, bucket)
        sent = packed
        if own > 1:  # memory that nobody else gets while it is under way
            sent = self._room(("sent", number), packed.numel(), bucket.dtype).view(workers, own, width)
            sent.copy_(packed.view(own, workers, width).transpose(0, 1))
        received = self._room(("received", number), sum(self._counts) * width, bucket.dtype)
        comes, goes = [count * width for count in self._counts], [own * width] * workers
        work = transport.all_to_all(received, sent.view(-1), comes, goes)
        return work, list(received.view(-1, width))

    def added(self, number: int, bucket: Bucket, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add up this worker's slice of all sums, which have come."""
        total = self._room(("mean", number), bucket.width, bucket.dtype)
        fold_runs(total, rows, bucket.runs, self._rank * bucket.width, spare=True)
        return total

    def gather(self, transport: Transport, number: int, bucket: Bucket, mine: torch.Tensor) -> Gathered:
        """Give a slice to all; returns what to wait for, and where the slices of all come."""
        whole = self._room(("whole", number), len(self._counts) * bucket.width, bucket.dtype)
        return transport.all_gather(whole, mine), whole

    def unpacked(self, buckets: Sequence[Bucket], gathered: Sequence[Gathered]) -> Vector:
        """The gradients of all parameters, where they came."""
        total: Vector = [None] * len(self._like)
        for bucket, (_, whole) in zip(buckets, gathered, strict=True):
            for index, offset in bucket.places.items():
                like = self._like[index]
                total[index] = whole.as_strided(like.shape, like.stride(), offset)
        return total

    def _packed(self, number: int, bucket: Bucket) -> torch.Tensor:
        own, whole = self._counts[self._rank], len(self._counts) * bucket.width
        return self._room(("packed", number), own * whole, bucket.dtype).view(own, whole)

    def _pack(self, number: int, bucket: Bucket, mine: Sequence[Vector | None]) -> None:
        """Put this worker's sums into a bucket."""
        for row, vector in zip(self._packed(number, bucket), mine, strict=True):
            start, there = row.storage_offset(), [] if vector is None else vector
            pairs = [(index, there[index]) for index in bucket.places if there and there[index] is not None]
            likes = [self._like[index] for index, _ in pairs]
            places = [start + bucket.places[index] for index, _ in pairs]
            homes = [row.as_strided(each.shape, each.stride(), at) for each, at in zip(likes, places, strict=True)]
            copy_all(zip(homes, [entry for _, entry in pairs], strict=True))

    def _lay_out(self, replicas: int, nodes: Sequence[Node], masks: tuple[Mask, ...]) -> list[Bucket]:
        """Buckets in the order in which a backward pass comes to the parameters: the last first."""
        there = [index for index in reversed(range(len(self._like))) if any(mask[index] for mask in masks)]
        buckets: list[Bucket] = []
        for dtype in dict.fromkeys(self._like[index].dtype for index in there):
            step = max(1, ALIGNED // dtype.itemsize)
            places, size = dict[int, int](), 0
            pending = [index for index in there if self._like[index].dtype == dtype]
            for at, index in enumerate(pending):
                places[index] = size
                size += -(-self._like[index].numel() // step) * step
                if at + 1 == len(pending) or (size + self._like[pending[at + 1]].numel()) * dtype.itemsize > BUCKET:
                    width = -(-size // (len(self._counts) * step)) * step
                    runs = [
                        Run(begin, end, present, added(replicas, nodes, present))
                        for present, begin, end in stretches(masks, places, self._like)
                    ]
                    buckets.append(Bucket(dtype, places, runs, width))
                    places, size = {}, 0
        return buckets

    def _room(self, name: Any, size: int, dtype: torch.dtype) -> torch.Tensor:
        """So many elements, with any content, in memory that is used again in every step."""
        room = self._rooms.get(name)
        if room is None or room.numel() != size or room.dtype != dtype:
            room = self._rooms[name] = torch.zeros(size, dtype=dtype, device=self._device)
        return room


class Spread:
    """Losses, and what replicas left in buffers: every worker gets it of all replicas, in one all-gather.

    Parameters
    ----------
    specs : sequence of Spec
        What each buffer looks like.
    blocks : sequence of range
        The replicas of each worker, in order.
    rank : int
        This worker's position there.
    device : str
        Where buffers are.
    """

    def __init__(self, specs: Sequence[Spec], blocks: Sequence[range], rank: int, device: str) -> None:
        self._specs, self._blocks, self._rank, self._device = specs, blocks, rank, device
        self._views = functools.lru_cache(PATTERNS)(self._laid_out)

    def total(
        self, transport: Transport, changed: np.ndarray, mine: Mapping[int, Sequence[Any]], losses: Sequence[Any]
    ) -> tuple[list[list[Any]], list[Any]]:
        """For each replica its buffers, where ``changed[replica, buffer]`` says that it wrote them; and its losses.

        ``losses`` are equally many of each of this worker's replicas, one after another. Those that come lie on the
        device, as float64, one after another for all replicas. Nothing is waited for.
        """
        packed, whole, into, rows = self._views(changed.any(0).tobytes(), len(losses) // len(self._blocks[self._rank]))
        for home, loss in zip((loss for *_, own in into for loss in own), losses, strict=True):
            home.copy_(loss) if isinstance(loss, torch.Tensor) else home.fill_(loss)
        pairs = [
            (home, mine[replica][number])
            for replica, (*homes, _) in zip(self._blocks[self._rank], into, strict=True)
            for number, home in enumerate(homes)
            if home is not None and changed[replica, number] and replica in mine  # else it has no samples
        ]
        copy_all(pairs)
        transport.wait(transport.all_gather(whole, packed))
        return [row[:-1] for row in rows], [loss for row in rows for loss in row[-1]]

    def _laid_out(self, written: bytes, losses: int) -> tuple[torch.Tensor, torch.Tensor, list[Any], list[Any]]:
        """What this worker sends and what comes, as bytes; the same for each replica, as its buffers and its losses."""
        specs = [*self._specs, Spec((losses,), (1,), "float64", 8)]
        places, width = list[int | None](), 0
        for spec, sends in zip(specs, [*written, True], strict=True):
            places.append(width if sends else None)
            width += -(-spec.nbytes // ALIGNED) * ALIGNED * sends
        most = max(map(len, self._blocks))
        packed = torch.zeros(most * width, dtype=torch.uint8, device=self._device)
        whole = torch.zeros(len(self._blocks) * most * width, dtype=torch.uint8, device=self._device)

        def row(flat: torch.Tensor, number: int) -> list[torch.Tensor | None]:
            return [
                None if place is None else _at(flat, number * width + place, spec)
                for place, spec in zip(places, specs, strict=True)
            ]

        numbers = [rank * most + at for rank, block in enumerate(self._blocks) for at in range(len(block))]
        mine = [row(packed, number) for number in range(len(self._blocks[self._rank]))]
        return packed, whole, mine, [row(whole, number) for number in numbers]


def _at(flat: torch.Tensor, offset: int, spec: Spec) -> torch.Tensor:
    """A tensor in the memory of a flat one, ``offset`` bytes from its start."""
    dtype = getattr(torch, spec.dtype)
    home = torch.empty(0, dtype=dtype, device=flat.device)
    return home.set_(flat.untyped_storage(), offset // dtype.itemsize, spec.shape, spec.strides)


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


def reached(
    rendezvous: Rendezvous, device: str, seconds: float, generation: int, check: Callable[[], None]
) -> Transport:
    """Meet the workers of the other processes, through the store of their world."""
    limit = datetime.timedelta(seconds=seconds)
    store = TCP(*rendezvous.address, is_master=False, timeout=limit)
    own = PrefixStore(f"phalanx/{rendezvous.run}/devices {generation}", store)
    size = len(rendezvous.blocks)
    return Transport(own, rendezvous.rank, size, torch.device(device), seconds, rendezvous.interface, check)


def _created(name: str, store: Any, rank: int, size: int, seconds: float) -> Any:
    """A group of the backend that torch registered under this name."""
    limit = datetime.timedelta(seconds=seconds)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # a worker decides itself what a lost peer means
    plugin = BACKENDS._plugins.get(name.upper())
    if plugin is None:
        return getattr(dist, f"ProcessGroup{name.upper()}")(store, rank, size, limit)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, limit)
    options: Any = c10d._DistributedBackendOptions()  # pyright: ignore[reportPrivateImportUsage]
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, limit
    return plugin.creator_fn(options, None)
