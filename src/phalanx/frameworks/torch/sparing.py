"""Making a model in a worker without a copy of the frozen weights that all processes of the run have already.

``make_model`` is called in every worker, so that all of the user's code has run there. What it makes of the size of a
frozen weight is put into pages of this module's own; as soon as they hold what a frozen weight holds, they are
replaced by the pages of that, which are written only in copies. User code sees the same values at the same addresses.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from phalanx.shared.memory import Memory

LEAST = 1 << 20  # bytes of a weight that is worth it
PLAIN = torch.Tensor, torch.nn.Parameter
FIXED = 0x10  # MAP_FIXED: in place of what is mapped there
FAILED = ctypes.c_void_p(-1).value


class Sparing(TorchDispatchMode):
    """Within it, tensors that come to equal a frozen weight share its memory.

    Parameters
    ----------
    memory : Memory
        Where the frozen weights lie.
    places : sequence of (bytes, offset)
        Of each; at the beginning of a page.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What ``make_model`` compiles is compiled: code that was not, for this mode's sake, would have other bits."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler (0.7 s, 85 MB) to exempt what this mode does from compilation."""
        return False

    def __init__(self, memory: Memory, places: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._fd = memory.fd
        self._frozen = memory.map(private=True)
        self._offsets = {size: [offset for other, offset in places if other == size] for size, _ in places}
        self._own: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by their addresses
        libc = ctypes.CDLL(None, use_errno=True)
        self._compare, self._map = libc.memcmp, libc.mmap
        self._compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
        self._map.restype = ctypes.c_void_p

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        alone = isinstance(func, OpOverload) and not _get_current_dispatch_mode_stack()  # other modes record operations
        if alone and type(made) in PLAIN and made.device.type == "cpu" and made.layout == torch.strided:
            size = made.untyped_storage().nbytes()
            if size in self._offsets and not made.is_quantized:
                alias, address = func._schema.returns[0].alias_info, made.untyped_storage().data_ptr()
                given = [one for one in args if isinstance(one, torch.Tensor)]  # one may be returned, unsaid
                if alias is None and address not in [one.untyped_storage().data_ptr() for one in given]:
                    filled = torch.are_deterministic_algorithms_enabled()
                    made = self._placed(made, size, empty=func.overloadpacket is torch.ops.aten.empty and not filled)
                if alias is None or alias.is_write:
                    self._merge(made.untyped_storage().data_ptr(), size)
        return made

    def _placed(self, made: torch.Tensor, size: int, *, empty: bool) -> torch.Tensor:
        """The same tensor in pages of our own."""
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = torch.frombuffer(pages, dtype=torch.uint8)
        self._own[raw.data_ptr()] = pages
        if not empty:
            raw.copy_(torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()))
        where = made.storage_offset(), made.size(), made.stride()
        return torch.empty(0, dtype=made.dtype).set_(raw.untyped_storage(), *where)

    def _merge(self, address: int, size: int) -> None:
        """Replace the pages of a storage if they hold what a frozen weight does."""
        if len(self._own.get(address, b"")) != size:  # not ours, or the beginning of something longer
            return
        frozen = ctypes.addressof(ctypes.c_char.from_buffer(self._frozen))
        for offset in self._offsets[size]:
            if self._compare(address, frozen + offset, size) == 0:
                length = math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE
                access, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | FIXED
                if self._map(address, length, access, how, self._fd, offset) == FAILED:
                    raise OSError(ctypes.get_errno(), "frozen weights cannot be mapped")
                return
