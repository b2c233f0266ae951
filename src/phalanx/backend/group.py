"""A process group of torch.distributed over shared memory: what DDP and its kin call, for CPU tensors on one host."""

# torch calls these methods from C++ by position, with lists: its stubs name parameters that it never names.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.backend import collectives
from phalanx.backend.memory import GroupMemory
from phalanx.backend.messages import Inbox, receive, send
from phalanx.backend.progress import Operation, Queue, Steps, Work, leave, uncompiled
from phalanx.errors import UsageError

Tensors = Sequence[torch.Tensor]
Flat = list[torch.Tensor]
Back = list[tuple[torch.Tensor, torch.Tensor]]  # pairs of a tensor and the copy that is written back into it


@uncompiled
class Group(dist.ProcessGroup):
    """The ranks of one group. Made by ``torch.distributed.init_process_group("phalanx")`` and ``new_group``.

    Parameters
    ----------
    memory : GroupMemory
    seconds : float
        How long to wait for others, unless a call says otherwise.
    """

    def __init__(self, memory: GroupMemory, seconds: float) -> None:
        super().__init__(memory.rank, memory.size)  # type: ignore[call-arg]
        self._memory = memory
        self._seconds = seconds
        self._rounds = collectives.GroupRounds(memory)
        self._queue = Queue()
        self._outboxes = {rank: Queue() for rank in self._rounds.others}
        self._inboxes = {rank: Inbox(memory, rank) for rank in self._rounds.others}
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802
        """Its name."""
        return "phalanx"

    @property
    def group_name(self) -> str:
        """What torch.distributed calls it."""
        return self._name

    def setGroupName(self, group_name: str) -> None:  # noqa: N802
        """Take the name that torch.distributed gives it."""
        self._name = group_name

    _set_group_name = setGroupName

    def _get_backend(self, device: torch.device) -> Group:
        """Itself: torch 2.15 asks what messages go through whether it takes several at once."""
        return self

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Every rank ends with the reduction of all."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp.op
        if {tensor.layout for tensor in tensors} == {torch.sparse_coo}:
            steps = [self._reduced(collectives.all_reduce_sparse, tensor, op) for tensor in tensors]
            return self._begin("sparse all_reduce", steps, [], tensors, opts)
        return self._all("all_reduce", tensors, lambda flat: self._reduced(collectives.all_reduce, flat, op), opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """The root ends with the reduction of all."""
        op, root = opts.reduceOp.op, opts.rootRank
        return self._all("reduce", tensors, lambda flat: self._reduced(collectives.all_reduce, flat, op, root), opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Every rank ends with what the root has."""
        return self._all(
            "broadcast", tensors, lambda flat: collectives.broadcast(self._rounds, movable(flat), opts.rootRank), opts
        )

    def allgather(self, output_lists: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        """Every rank ends with what each has, in a list of tensors."""
        return self._gathered(output_lists, tensors, [], output_lists, opts)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        """The same for several, with a list for each rank."""
        return self.allgather([list(outputs) for outputs in zip(*output_lists, strict=True)], tensors, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Every rank ends with what each has, in one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        """The same for several."""
        back: Back = []
        lists = [split(flattened(output, back), self.size()) for output in outputs]
        return self._gathered(lists, tensors, back, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_lists: Sequence[Tensors], tensors: Tensors, opts: Any) -> Work:
        """The root ends with what each rank has."""
        return self._gathered(output_lists or [[]], tensors, [], output_lists, opts, "gather", opts.rootRank)

    def scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> Work:
        """Each rank ends with its part of what the root has."""
        inputs = fitting("inputs", input_lists[0], outputs[0], self.size()) if input_lists else []
        root = opts.rootRank
        return self._all(
            "scatter", outputs, lambda flat: collectives.scatter(self._rounds, movable(flat), inputs, root), opts
        )

    def reduce_scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> Work:
        """Each rank ends with the reduction of its part, out of lists of parts."""
        back: Back = []
        steps = [
            self._reduced(
                collectives.reduce_scatter,
                flattened(output, back),
                opts.reduceOp.op,
                fitting("inputs", parts, output, self.size()),
            )
            for output, parts in zip(outputs, input_lists, strict=True)
        ]
        return self._begin("reduce_scatter", steps, back, outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work:
        """Each rank ends with the reduction of its part, out of one tensor."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any) -> Work:
        """The same for several."""
        return self.reduce_scatter(outputs, [split(flattened(tensor), self.size()) for tensor in tensors], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Part i of each rank goes to rank i."""
        back: Back = []
        ours = [movable(flattened(part)) for part in inputs]
        theirs = [movable(flattened(part, back)) for part in outputs]
        return self._all_to_all(theirs, ours, back, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """The same for parts of one tensor, cut along the first dimension."""
        back: Back = []
        ours = rows(flattened(tensor), tensor, input_splits, self.size())
        theirs = rows(flattened(output, back), output, output_splits, self.size())
        return self._all_to_all(theirs, ours, back, [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """Nobody goes on before all have come."""
        return self._begin("barrier", [collectives.barrier(self._rounds)], [], [], opts)

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Work:
        """Send a tensor to one rank; it must not be changed before the work is done."""
        steps = send(self._memory, self._peer(target), tag, raw(flattened(tensors[0])))
        name = f"send to rank {self._memory.names[target]}, tag {tag}"
        return self._begin(name, [steps], [], tensors, queue=self._outboxes[target])

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        """Receive a tensor from one rank."""
        queue = self._inboxes[self._peer(source)].queue(tag)
        return self._received(tensors, f"rank {self._memory.names[source]}", tag, queue, [source])

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive a tensor from whichever rank sent one."""
        return self._received(tensors, "any rank", tag, Queue(), [])

    def shutdown(self) -> None:
        """Free what the group holds, and fail the operations that are under way."""
        leave(self._memory)
        self._memory.close()

    abort = shutdown

    def _peer(self, rank: int) -> int:
        if rank not in self._inboxes:
            raise UsageError(f"rank is {rank}, but this is rank {self.rank()} of {self.size()}; name another of them")
        return rank

    def _received(self, tensors: Tensors, name: str, tag: int, queue: Queue, sources: list[int]) -> Work:
        back: Back = []
        steps = receive(self._inboxes, sources, tag, raw(flattened(tensors[0], back)))
        return self._begin(f"recv from {name}, tag {tag}", [steps], back, tensors, queue=queue, sources=sources)

    def _all_to_all(self, theirs: Flat, ours: Flat, back: Back, outputs: Any, opts: Any) -> Work:
        counts, dtypes = {len(theirs), len(ours)}, {part.dtype for part in (*theirs, *ours)}
        if counts != {self.size()} or len(dtypes) > 1:
            raise UsageError(
                f"there are {len(ours)} inputs and {len(theirs)} outputs of {', '.join(map(str, dtypes))}; there "
                f"must be {self.size()} of each, of one dtype"
            )
        return self._begin("all_to_all", [collectives.all_to_all(self._rounds, theirs, ours)], back, outputs, opts)

    def _gathered(
        self,
        output_lists: Any,
        tensors: Tensors,
        back: Back,
        outputs: Any,
        opts: Any,
        kind: str = "all_gather",
        root: int = 0,
    ) -> Work:
        """Only a rank with a list of outputs receives anything."""
        steps = [
            collectives.all_gather(
                self._rounds,
                fitting("outputs", parts, tensor, self.size(), back) if parts or kind != "gather" else [],
                movable(flattened(tensor)),
                kind,
                root,
            )
            for parts, tensor in zip(output_lists, tensors, strict=True)
        ]
        return self._begin(kind, steps, back, outputs, opts)

    def _reduced(self, collective: Any, flat: torch.Tensor, op: Any, *more: Any) -> Steps:
        reduction = collectives.reduction(op, flat.dtype, self._rounds.size)
        return collective(self._rounds, flat, reduction, *more)

    def _all(self, name: str, tensors: Tensors, steps: Any, opts: Any) -> Work:
        back: Back = []
        return self._begin(name, [steps(flattened(tensor, back)) for tensor in tensors], back, tensors, opts)

    def _begin(
        self,
        name: str,
        steps: Sequence[Steps],
        back: Back,
        outputs: Any,
        opts: Any = None,
        queue: Queue | None = None,
        sources: list[int] | None = None,
    ) -> Work:
        """``sources``: the rank that sends a message; an empty list takes one from any rank, and gets its rank."""
        operation = Operation(then(steps, back), self._memory, name, anyone=sources == [])
        (self._queue if queue is None else queue).begin(operation)
        given = getattr(opts, "timeout", None)
        seconds = 0.0 if given is None else given.total_seconds()
        return Work(operation, seconds if seconds > 0 else self._seconds, outputs, sources)


def flattened(tensor: torch.Tensor, back: Back | None = None) -> torch.Tensor:
    """``tensor`` in one dimension: itself, or a copy, which is noted in ``back`` if it will be written.

    Tensors of inference mode are copied too: only in that mode may they be written, and a wait may come outside of it.

    Raises
    ------
    UsageError
        It is not on the CPU, not dense, or to be written and expanded.
    """
    if not tensor.is_cpu or tensor.layout != torch.strided:
        kind = tensor.device.type if tensor.device.type != "cpu" else str(tensor.layout)
        raise UsageError(
            f"a tensor is {kind}, and backend 'phalanx' moves dense tensors on the CPU; use 'nccl' for GPUs, and "
            "to_dense() for sparse ones"
        )
    own = tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach()
    written = back is not None and own.is_inference()
    if own.is_contiguous() and not own.is_neg() and not written:
        return own if own.dim() == 1 else own.view(-1)
    with torch.inference_mode(False):
        copy = own.clone(memory_format=torch.contiguous_format).view(-1)
    if back is not None:
        if any(length > 1 and not stride for length, stride in zip(own.shape, own.stride(), strict=True)):
            raise UsageError(
                f"a tensor has shape {tuple(own.shape)} and strides {own.stride()}, so several of its elements share "
                "memory and cannot be written; take a copy: .contiguous()"
            )
        back.append((own, copy))
    return copy


def raw(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor as bytes."""
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element is contiguous at any stride


def movable(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor of a dtype that slots have: its own, so that ranks can compare it, or bytes."""
    return flat if flat.dtype in collectives.DTYPES else raw(flat)


def fitting(name: str, parts: Sequence[torch.Tensor], like: torch.Tensor, ranks: int, back: Back | None = None) -> Flat:
    """One part for each rank, each with as many elements as ``like`` and of its dtype; flat.

    Raises
    ------
    UsageError
        The parts are not such.
    """
    if len(parts) != ranks or any(part.numel() != like.numel() or part.dtype != like.dtype for part in parts):
        sizes = ", ".join(f"{part.numel()} of {part.dtype}" for part in parts)
        raise UsageError(
            f"{name} are {len(parts)} tensors of elements: {sizes}; there must be {ranks}, each with {like.numel()} of "
            f"{like.dtype}"
        )
    return [movable(flattened(part, back)) for part in parts]


def split(flat: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """A flat tensor in equal parts.

    Raises
    ------
    UsageError
        It cannot be cut into equal parts.
    """
    if len(flat) % ranks:
        raise UsageError(f"a tensor of {len(flat)} elements cannot be cut for {ranks} ranks; pad it")
    return list(flat.view(ranks, -1))


def rows(flat: torch.Tensor, tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> Flat:
    """Cut ``flat``, which is ``tensor``, into parts of ``splits`` rows; into equal parts if that is empty."""
    splits = splits or [len(tensor) // ranks] * ranks
    if len(splits) != ranks or sum(splits) != len(tensor):
        raise UsageError(
            f"splits are {list(splits)} for {len(tensor)} rows and {ranks} ranks; make them add up, or pad"
        )
    row = tensor[0].numel() if len(tensor) else 0
    return [movable(part) for part in flat.split([row * count for count in splits])]


def then(steps: Sequence[Steps], back: Back) -> Steps:
    """Run the operations one after another, then write the copies back."""
    for each in steps:
        yield from each
    if back:
        with torch.inference_mode():
            for own, copy in back:
                own.copy_(copy.view(own.shape))
