"""Sums and other reductions in a fixed order: pairs of neighbours, then pairs of pairs, by rank; that of the fold.

float16 and bfloat16 are added in float32 and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.backend.rounds import DTYPES, OPERATIONS
from phalanx.errors import UsageError
from phalanx.plan.fold import fold_values

Op = Callable[..., torch.Tensor]
OPS: dict[str, Op] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
NARROW = (torch.float16, torch.bfloat16)


@functools.lru_cache
def reduction(op: Any, dtype: torch.dtype, ranks: int) -> Reduction:
    """How values of several ranks become one; ``op`` is one of torch.distributed's."""
    return Reduction(str(op).rpartition(".")[2], dtype, ranks)


class Reduction:
    """How values of several ranks become one.

    Parameters
    ----------
    name : str
        Of the operation.
    dtype : torch.dtype
    ranks : int

    Raises
    ------
    UsageError
        There is no such reduction.
    """

    def __init__(self, name: str, dtype: torch.dtype, ranks: int) -> None:
        if name not in OPS:
            raise UsageError(f"op is {name}, which backend 'phalanx' has not; use one of {', '.join(OPERATIONS)}")
        if dtype not in DTYPES:
            raise UsageError(f"a tensor of {dtype} cannot be reduced; convert it first, to float32 for example")
        plain = not (dtype.is_floating_point or dtype.is_complex)
        wrong = (
            (name in ("BAND", "BOR", "BXOR") and not plain)
            or (name in ("MIN", "MAX") and dtype.is_complex)
            or (name == "AVG" and plain)
        )
        if wrong:
            raise UsageError(f"op {name} cannot be done for {dtype}; use another op, or convert the tensor first")
        self.number = OPERATIONS.index(name)
        self._op = OPS[name]
        self._narrow = dtype in NARROW
        self._divisor = ranks if name == "AVG" else 1

    def into(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce ``parts``, one per rank, into ``out``, which may be none of them."""
        op = self._op
        if len(parts) == 2 and not self._narrow:
            op(parts[0], parts[1], out=out)
        else:
            total = fold_values([part.float() for part in parts] if self._narrow else parts, op)
            assert total is not None  # there is a part of every rank
            out.copy_(total / self._divisor if self._narrow and self._divisor != 1 else total)
        if self._divisor != 1 and not self._narrow:
            (torch.view_as_real(out) if out.is_complex() else out).div_(self._divisor)
