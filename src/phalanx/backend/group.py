"""A process group of torch.distributed over shared memory: what DDP and its kin call, for CPU tensors on one host.

Tensors go to ``collectives`` flat, contiguous and without autograd, as numbers or as bytes. A collective is done when
its call returns, whatever ``async_op`` says.
"""

# torch calls these methods from C++ by position, with lists: its stubs name parameters that it never names.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false, reportAssignmentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _create_work_from_future,  # pyright: ignore[reportAttributeAccessIssue]  (torch's own group of threads uses it)
)

from phalanx.backend import collectives
from phalanx.backend.memory import GroupMemory
from phalanx.backend.rounds import DTYPES, Rounds
from phalanx.errors import UsageError

Tensors = Sequence[torch.Tensor]
Flat = list[torch.Tensor]
Back = list[tuple[torch.Tensor, torch.Tensor]]  # what has to be copied back, and from where


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
        self._rounds = Rounds(memory)
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

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Every rank ends with the reduction of all."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp.op
        back: Back = []
        flats = [flattened(tensor, back) for tensor in tensors]
        calls = [
            functools.partial(collectives.all_reduce, self._rounds, flat, self._reduction(op, flat)) for flat in flats
        ]
        return self._done("all_reduce", calls, back, tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """The root ends with the reduction of all."""
        back: Back = []
        flat = flattened(tensors[0], back)
        reduction = self._reduction(opts.reduceOp.op, flat)
        call = functools.partial(collectives.reduce, self._rounds, flat, reduction, opts.rootRank)
        return self._done("reduce", [call], back, tensors, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Every rank ends with what the root has."""
        back: Back = []
        flats = [movable(flattened(tensor, back)) for tensor in tensors]
        calls = [functools.partial(collectives.broadcast, self._rounds, flat, opts.rootRank) for flat in flats]
        return self._done("broadcast", calls, back, tensors, opts)

    def allgather(self, output_lists: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> dist.Work:
        """Every rank ends with what each has, in a list of tensors."""
        back: Back = []
        calls = [
            self._gathering(fitting("outputs", outputs, tensor, self.size(), back), tensor)
            for outputs, tensor in zip(output_lists, tensors, strict=True)
        ]
        return self._done("all_gather", calls, back, output_lists, opts)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> dist.Work:
        """The same for several, with a list for each rank."""
        return self.allgather([list(outputs) for outputs in zip(*output_lists, strict=True)], tensors, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        """Every rank ends with what each has, in one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> dist.Work:
        """The same for several."""
        back: Back = []
        calls = [
            self._gathering(self._cut(flattened(output, back), tensor), tensor)
            for output, tensor in zip(outputs, tensors, strict=True)
        ]
        return self._done("all_gather", calls, back, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, output_lists: Sequence[Tensors], tensors: Tensors, opts: Any) -> dist.Work:
        """The root ends with what each rank has."""
        back: Back = []
        outputs = fitting("outputs", output_lists[0], tensors[0], self.size(), back) if output_lists else []
        flat = movable(flattened(tensors[0]))
        call = functools.partial(collectives.gather, self._rounds, outputs, flat, opts.rootRank)
        return self._done("gather", [call], back, output_lists, opts)

    def scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> dist.Work:
        """Each rank ends with its part of what the root has."""
        back: Back = []
        inputs = fitting("inputs", input_lists[0], outputs[0], self.size()) if input_lists else []
        flat = movable(flattened(outputs[0], back))
        call = functools.partial(collectives.scatter, self._rounds, flat, inputs, opts.rootRank)
        return self._done("scatter", [call], back, outputs, opts)

    def reduce_scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> dist.Work:
        """Each rank ends with the reduction of its part, out of lists of parts."""
        back: Back = []
        calls = [
            self._reduce_scattering(flattened(output, back), [flattened(part) for part in parts], opts)
            for output, parts in zip(outputs, input_lists, strict=True)
        ]
        return self._done("reduce_scatter", calls, back, outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        """Each rank ends with the reduction of its part, out of one tensor."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any) -> dist.Work:
        """The same for several."""
        return self.reduce_scatter(outputs, [split(flattened(tensor), self.size()) for tensor in tensors], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> dist.Work:
        """Nobody goes on before all have come."""
        return self._done("barrier", [functools.partial(collectives.barrier, self._rounds)], [], [], opts)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """What data-parallel training does not call."""
        raise UsageError(
            "backend 'phalanx' has no messages between two ranks (send, recv) and no all_to_all; make a group for "
            "those, dist.new_group(backend='gloo'), and pass it as group="
        )

    send = recv = recv_anysource = alltoall = alltoall_base = all_to_all_single = _refuse

    def shutdown(self) -> None:
        """Give back what the group holds."""
        self._memory.close()

    abort = shutdown

    def _cut(self, flat: torch.Tensor, tensor: torch.Tensor) -> Flat:
        if len(flat) != tensor.numel() * self.size() or flat.dtype != tensor.dtype:
            raise UsageError(
                f"the output has {len(flat)} elements of {flat.dtype}, and {self.size()} ranks bring "
                f"{tensor.numel()} of {tensor.dtype} each; make it {tensor.numel() * self.size()} of that"
            )
        return [movable(part) for part in split(flat, self.size())]

    def _reduction(self, op: Any, flat: torch.Tensor) -> collectives.Reduction:
        return collectives.reduction(op, flat.dtype, self._rounds.size)

    def _gathering(self, outputs: Flat, tensor: torch.Tensor) -> Callable[[], None]:
        return functools.partial(collectives.all_gather, self._rounds, outputs, movable(flattened(tensor)))

    def _reduce_scattering(self, flat: torch.Tensor, parts: Tensors, opts: Any) -> Callable[[], None]:
        inputs = fitting("inputs", parts, flat, self.size())
        reduction = self._reduction(opts.reduceOp.op, flat)
        return functools.partial(collectives.reduce_scatter, self._rounds, flat, inputs, reduction)

    def _done(self, name: str, calls: Sequence[Callable[[], None]], back: Back, outputs: Any, opts: Any) -> dist.Work:
        """Do one after another, then copy back what was copied; what torch gets has ended."""
        given = getattr(opts, "timeout", None)
        seconds = 0.0 if given is None else given.total_seconds()
        with self._rounds.collective(name, seconds if seconds > 0 else self._seconds):
            for call in calls:
                call()
            if back:
                with torch.inference_mode():
                    for own, copy in back:
                        own.copy_(copy.view(own.shape))
        future = torch.futures.Future()
        future.set_result(outputs)
        return _create_work_from_future(future)


def flattened(tensor: torch.Tensor, back: Back | None = None) -> torch.Tensor:
    """``tensor`` in one dimension: itself, or a copy, which is noted in ``back`` if it will be written.

    Tensors of inference mode are copied too: only in that mode may they be written, and a wait may come outside of it.

    Raises
    ------
    UsageError
        It is not on the CPU, not dense, or to be written and expanded.
    """
    if tensor.is_cpu and tensor.dim() == 1 and not tensor.requires_grad and tensor.layout == torch.strided:
        own = tensor
    elif tensor.device.type != "cpu" or tensor.layout != torch.strided:
        kind = tensor.device.type if tensor.device.type != "cpu" else str(tensor.layout)
        raise UsageError(
            f"a tensor is {kind}, and backend 'phalanx' moves dense tensors on the CPU; use 'nccl' for GPUs, and "
            "to_dense() for sparse ones"
        )
    else:
        own = tensor.detach()
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
    return flat if flat.dtype in DTYPES else raw(flat)


def fitting(name: str, parts: Sequence[torch.Tensor], like: torch.Tensor, ranks: int, back: Back | None = None) -> Flat:
    """One part for each rank, each with as many elements as ``like`` and of its dtype; flat.

    Raises
    ------
    UsageError
        They are not.
    """
    if len(parts) != ranks or any(part.numel() != like.numel() or part.dtype != like.dtype for part in parts):
        told = ", ".join(f"{part.numel()} of {part.dtype}" for part in parts)
        raise UsageError(
            f"{name} are {len(parts)} tensors of elements: {told}; there must be {ranks}, each with {like.numel()} of "
            f"{like.dtype}"
        )
    return [movable(flattened(part, back)) for part in parts]


def split(flat: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """A flat tensor in equal parts.

    Raises
    ------
    UsageError
        It cannot be cut so.
    """
    if len(flat) % ranks:
        raise UsageError(f"a tensor of {len(flat)} elements cannot be cut for {ranks} ranks; pad it")
    return list(flat.view(ranks, -1))
