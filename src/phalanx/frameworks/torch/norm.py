"""The norm of a gradient on an accelerator, by a definition that does not depend on where the gradient is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from phalanx.frameworks.torch.arithmetic import FOREACH
from phalanx.shared.layout import Spec

PIECE = 1 << 16  # elements: what a block of threads adds up in torch's kernel, which looks at nothing else then


@torch.no_grad()
def norm_of_pieces(
    gradient: Iterable[torch.Tensor | None], specs: Sequence[Spec], device: torch.device
) -> torch.Tensor:
    """The 2-norm of a gradient, as a scalar on ``device``; not waited for.

    Each tensor is taken as its parameter lies in memory, in pieces of 65,536 elements. torch has the norm of each piece
    in float32, of float64 in float64; complex numbers are pairs. The whole norm is that of theirs in float64, one dtype
    after another.

    torch's own norm of a long tensor depends on its length, and it adds up groups of a dtype in an order that depends
    on the device's number. The norm of a piece depends on its elements, and on whether its address and length allow to
    read four at once (``LpNormFunctor`` in torch's ForeachReduceOp.cu, whose chunks are these pieces). So whoever has
    slices of a gradient, cut between pieces, has the same norms.

    Parameters
    ----------
    gradient : iterable of (torch.Tensor or None)
        None: absent, and left out.
    specs : sequence of Spec
        How each parameter lies in memory, also those that have no gradient.
    device : torch.device
    """
    pairs = zip(gradient, specs, strict=True)
    flat = [_flat(entry, spec) for entry, spec in pairs if entry is not None and entry.numel()]
    if not flat:
        return torch.zeros((), device=device)
    wide = any(entry.dtype is torch.float64 for entry in flat)
    norms: list[torch.Tensor] = []
    for dtype in dict.fromkeys(entry.dtype for entry in flat):  # one kernel takes many of one dtype
        pieces = [piece for entry in flat if entry.dtype == dtype for piece in entry.split(PIECE)]
        norms += FOREACH._foreach_norm(pieces, 2, torch.float64 if dtype is torch.float64 else torch.float32)
    total = torch.linalg.vector_norm(torch.stack(norms).double())
    return total if wide else total.float()


def _flat(entry: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The elements as the parameter lies in memory, complex ones as pairs."""
    entry = entry.detach().resolve_conj().resolve_neg()
    if entry.stride() != spec.strides:
        entry = torch.empty_strided(spec.shape, spec.strides, dtype=entry.dtype, device=entry.device).copy_(entry)
    flat = entry.as_strided((entry.numel(),), (1,))
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
