"""Tensors over shared memory, and elementwise arithmetic over gradients: lists of tensors, None where absent.

Implements ``seams.Arrays`` and ``seams.Arithmetic``. They are elementwise, so slicing changes no bit.
"""

from __future__ import annotations

import functools
import math
import mmap
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from phalanx.frameworks.torch.accelerators import can_pin, watched
from phalanx.shared.layout import Spec, row_major

Gradient = list[torch.Tensor | None]
FOREACH: Any = torch  # these functions are private, but torch's optimizers use them
GROUPED: Any = torch._C._group_tensors_by_device_and_dtype  # type: ignore[attr-defined]
WHOLE = {  # numbers of the same width, for which equal means the same bytes
    torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64,
    torch.int64: torch.int64,
}  # fmt: skip
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, and without a pattern in its bits
STAGED = 1 << 22  # bytes of a piece of what is copied to the host
SLICE = 1 << 16  # elements: what is added stays in cache until it is divided


def add(left: Gradient, right: Gradient) -> Gradient:
    """``left + right``, written into ``left``; absent + x = x. An entry that is both was added already."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None and b is not a]
    if pairs:
        into, sources = zip(*pairs, strict=True)
        FOREACH._foreach_add_(into, sources)
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def scale(vector: Gradient, factor: float) -> Gradient:
    """``vector * factor``, in place."""
    return [None if a is None else a.mul_(factor) for a in vector]  # over lists, a factor is rounded to their dtype


def divide(vector: Gradient, divisor: float) -> Gradient:
    """``vector / divisor``, in place."""
    return [None if a is None else _over(a, divisor) for a in vector]


def read(scalars: list[float]) -> list[float]:
    """Losses are read when they are computed, so they are numbers already."""
    return scalars


def checksum(vector: Sequence[torch.Tensor | None]) -> int:
    """The checksum of the bytes of all entries."""
    return functools.reduce(
        lambda total, entry: zlib.crc32(b"-" if entry is None else bytes_of(entry).cpu().numpy().data, total), vector, 0
    )


def finite(vector: Gradient) -> bool:
    """Whether every element is finite."""
    return all(bool(torch.isfinite(a).all()) for a in vector if a is not None)


def add_into(left: Gradient, right: Gradient, homes: Gradient) -> Gradient:
    """``left + right`` in ``left``, which lies in ``homes``. An entry that is both was added already."""
    added: Gradient = []
    for mine, other, home in zip(left, right, homes, strict=True):
        if mine is not None:
            added.append(mine if other is None or other is mine else mine.add_(other))
        else:
            added.append(other if other is None or home is None else home.copy_(other))
    return added


def add_up(
    parts: Sequence[torch.Tensor | None], additions: Sequence[tuple[int, int]], first: int, divisor: float
) -> torch.Tensor:
    """Do the additions (into, from) between ``parts``, then divide part ``first``; slice by slice, while in cache."""
    total = parts[first]
    assert total is not None
    there = [part for part in parts if part is not None]
    size = total.numel()
    if size <= SLICE or any(part.stride() != total.stride() for part in there):
        _add(parts, additions, total, divisor)
        return total
    flat = [None if part is None else part.as_strided((size,), (1,)) for part in parts]
    whole = total.as_strided((size,), (1,))
    for start in range(0, size, SLICE):
        slices = [None if part is None else part[start : start + SLICE] for part in flat]
        _add(slices, additions, whole[start : start + SLICE], divisor)
    return total


def spec_of(tensor: torch.Tensor) -> Spec:
    """The layout that autograd gives a tensor's gradient: its own strides if it is dense, else row by row."""
    shape = tuple(tensor.shape)
    strides = tensor.stride() if is_dense(tensor) else row_major(shape)
    return Spec(shape, strides, str(tensor.dtype).removeprefix("torch."), tensor.dtype.itemsize)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side from its first, in any order."""
    steps = [(length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.numel() > 0 and sum(steps) + 1 == tensor.numel()


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bytes."""
    if left is right:
        return True
    whole = WHOLE.get(left.dtype)
    if whole is None or left.requires_grad or right.requires_grad or left.is_neg() or right.is_neg():
        return torch.equal(bytes_of(left), bytes_of(right))
    return torch.equal(left.view(whole), right.view(whole))  # a fourth of the calls, for the usual buffers


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy (to, from): a kernel for many tensors of a dtype."""
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for into, source in pairs:
        by_dtype.setdefault(into.dtype, []).append((into, source))
    with torch.no_grad():
        for group in by_dtype.values():
            FOREACH._foreach_copy_(*zip(*group, strict=True))


def brought(tensor: torch.Tensor, home: torch.Tensor | None = None) -> torch.Tensor:
    """What a device has, in new host memory (``home``); what is in host memory already as it is.

    A copy to memory that is not pinned is several times slower. So large ones go through two pinned pieces, of which
    one is filled while the other is emptied.
    """
    if tensor.device.type == "cpu" and home is None:
        return tensor
    if home is None:
        home = torch.empty_like(tensor, device="cpu")
    plain = is_dense(tensor) and tensor.stride() == home.stride() and not tensor.is_conj() and not tensor.is_neg()
    if tensor.device.type == "cpu" or tensor.nbytes < STAGED or not plain or not can_pin():
        return home.copy_(tensor)
    pieces = [torch.empty(STAGED, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
    flat = [each.as_strided((each.numel(),), (1,)).view(torch.uint8).split(STAGED) for each in (home, tensor)]
    filled: deque[Callable[[], Any]] = deque()
    for number, (target, source) in enumerate(zip(*flat, strict=True)):
        if len(filled) == len(pieces):
            filled.popleft()()
        filled.append(_filling(pieces[number % len(pieces)][: len(source)], target, source))
    for empty in filled:
        empty()
    return home


def _filling(piece: torch.Tensor, target: torch.Tensor, source: torch.Tensor) -> Callable[[], Any]:
    """Begin to fill a pinned piece; what is returned waits for it and empties it."""
    piece.copy_(source, non_blocking=True)
    arrived = torch.Event(source.device)
    arrived.record(torch.accelerator.current_stream(source.device))

    def empty() -> None:
        arrived.synchronize()
        target.copy_(piece)

    return empty


def word_sum(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bytes in words of 64 bits: a checksum at the speed of memory, on its device."""
    content = bytes_of(tensor)
    whole = content.numel() // 8 * 8
    words = content[:whole] if content.storage_offset() % 8 == 0 else content[:whole].clone()
    return int(words.view(torch.int64).sum()) + int(content[whole:].sum())


def _mixed(tensor: torch.Tensor) -> torch.Tensor:
    """A checksum on the tensor's device. Each word is multiplied by an odd number of its own.

    So no two changes that kernels make in another order, one up and one down, undo each other.
    """
    content = bytes_of(tensor)
    if content.numel() % 8 or content.storage_offset() % 8:
        content = torch.cat([content, content.new_zeros(-content.numel() % 8)])
    words = content.view(torch.int64)
    return (words * torch.arange(1, 2 * words.numel(), 2, device=words.device).mul_(ODD)).sum()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in C order, as a flat uint8 tensor."""
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return own.as_strided((own.numel(),), (1,)).view(torch.uint8)  # one element may be contiguous at any stride


def blank(spec: Spec) -> torch.Tensor:
    """A tensor with any content."""
    return torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype), device="cpu")


def view(memory: mmap.mmap, offset: int, spec: Spec) -> torch.Tensor:
    """A tensor over memory, with a version counter of its own."""
    if spec.elements == 0:
        return blank(spec)
    flat = torch.frombuffer(memory, dtype=getattr(torch, spec.dtype), count=spec.elements, offset=offset)
    return flat.as_strided(spec.shape, spec.strides)


def placed(vector: Gradient, homes: Sequence[torch.device | None]) -> Gradient:
    """The entries on these devices; None: where they are.

    A copy to the CPU is waited for, as the host may read it at once.
    """
    return [
        entry if entry is None or home is None else entry.to(home, non_blocking=home.type != "cpu")
        for entry, home in zip(vector, homes, strict=True)
    ]


class DeviceArithmetic:
    """Implements ``seams.Arithmetic``: as on the CPU, with one kernel for many tensors where that changes no bit."""

    def add(self, left: Gradient, right: Gradient) -> Gradient:
        pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
        for (mine, theirs), _ in GROUPED(list(zip(*pairs, strict=True)), False).values() if pairs else ():
            FOREACH._foreach_add_(mine, theirs)
        return [b if a is None else a for a, b in zip(left, right, strict=True)]

    def divide(self, vector: Gradient, divisor: float) -> Gradient:
        """One kernel for all where that is a product, whose bits are the same."""
        there = [entry for entry in vector if entry is not None]
        if not there:  # a kernel for many tensors takes no empty list
            return vector
        factor = None if any(map(torch.is_complex, there)) else _factor(divisor)
        if factor is None:
            return divide(vector, divisor)
        FOREACH._foreach_mul_(there, factor.item())
        return vector

    scale = staticmethod(scale)
    finite = staticmethod(finite)

    def checksum(self, vector: Sequence[torch.Tensor | None]) -> int:
        """Computed on the device, of which one number for each entry is read."""
        sums = iter(self.read([_mixed(entry) for entry in vector if entry is not None]))
        return zlib.crc32(repr([None if entry is None else next(sums) for entry in vector]).encode())

    def read(self, scalars: Sequence[Any]) -> list[float]:
        return self.begin_read(scalars)()

    def begin_read(self, scalars: Sequence[Any]) -> Callable[..., list[float]]:
        """Begin to copy numbers to the host; what this returns waits for them, and for nothing that is enqueued later.

        One copy from each device, to pinned memory; one more for whole numbers, which others would round. ``wait``, if
        given, is called with a function that says whether a copy is there.
        """
        groups: dict[Any, list[int]] = {}
        for at, scalar in enumerate(scalars):
            if isinstance(scalar, torch.Tensor):
                groups.setdefault((scalar.device, scalar.is_floating_point()), []).append(at)
        begun = [(home, at, self._copy_home(home, scalars, at)) for (home, _), at in groups.items()]

        def finish(wait: Callable[[Callable[[], bool]], None] | None = None) -> list[float]:
            numbers = list(scalars)
            for home, positions, (row, arrived) in begun:
                with watched([home]):
                    if arrived is not None:
                        arrived.synchronize() if wait is None else wait(arrived.query)
                    values = row.tolist()
                for at, value in zip(positions, values, strict=True):
                    numbers[at] = value
            return numbers

        return finish

    @functools.cached_property
    def _pins(self) -> bool:
        return can_pin()

    def _copy_home(
        self, home: torch.device, scalars: Sequence[Any], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Event | None]:
        """A row that is copied to the host, and the event after which it is there; None: reading it waits."""
        with watched([home]):
            values = torch.stack([scalars[at] for at in positions])  # of the widest dtype: nothing is lost
            if home.type == "cpu" or not self._pins:
                return values, None
            row = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            row.copy_(values, non_blocking=True)
            arrived = torch.Event(home)
            arrived.record(torch.accelerator.current_stream(home))
        return row, arrived


def _add(
    parts: Sequence[torch.Tensor | None], additions: Sequence[tuple[int, int]], total: torch.Tensor, divisor: float
) -> None:
    for into, source in additions:
        parts[into].add_(parts[source])  # type: ignore[union-attr, arg-type]
    if divisor != 1:
        _over(total, divisor)


def _over(array: torch.Tensor, divisor: float) -> torch.Tensor:
    """``array / divisor``, in place; a power of two as a factor, which gives the same bits in half the time."""
    factor = _factor(divisor) if array.is_floating_point() else None  # complex products have other zeros
    return array.div_(divisor) if factor is None else array.mul_(factor)


@functools.lru_cache(64)
def _factor(divisor: float) -> torch.Tensor | None:
    """``1 / divisor`` of a power of two that float32 has, as a scalar tensor: torch makes one of a number each time.

    It is kept, so it lies on the CPU whatever the caller's default device is; it may be multiplied with any.
    """
    mantissa, exponent = math.frexp(divisor)
    if mantissa != 0.5 or abs(exponent) > 64:
        return None
    return torch.tensor(1 / divisor, dtype=torch.float64, device="cpu")
