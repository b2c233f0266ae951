"""Buffers that go on from batch to batch: each sample's rows with its position in the batch.

An LSTM's hidden state, say. Such a buffer is as long as the batch along one dimension, as in a plain loop; each replica
sees the rows of its own samples, and what it leaves there is what the next step begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from phalanx.definition.data import Share
from phalanx.errors import UsageError


class Carried:
    """Shows a model the rows of one share at a time.

    Parameters
    ----------
    model : torch.nn.Module
        As it was made: where ``Share.fresh`` says so, rows are what they are now.
    carry : mapping of str to int
        Names of buffers, and the dimension of each that runs over the batch.
    batch : int or None
        How many samples a batch has; None: those that the caller brings have any number.
    """

    def __init__(self, model: torch.nn.Module, carry: Mapping[str, int], batch: int | None) -> None:
        buffers = dict(model.named_buffers())
        self._places: list[tuple[str, torch.nn.Module, str, int]] = []
        for path, dim in carry.items():
            _check(path, dim, buffers, batch)
            above, _, name = path.rpartition(".")
            self._places.append((path, model.get_submodule(above), name, dim))
        self._made = [buffers[path].detach().clone() for path in carry]
        self._whole = list(self._made)

    def put(self, share: Share) -> None:
        """Before a forward pass: each buffer is the rows of these samples."""
        first, count = share.first, len(share.samples)
        for number, (path, module, name, dim) in enumerate(self._places):
            whole = getattr(module, name)
            if first + count > whole.shape[dim]:
                raise UsageError(
                    f"carry names {path!r}, which has {whole.shape[dim]} rows along dimension {dim}, but the batch has "
                    f"at least {first + count} samples; make the buffer as long as the batch"
                )
            self._whole[number] = whole
            begun = self._made[number] if share.fresh else whole
            setattr(module, name, begun.narrow(dim, first, count).clone())

    def take(self, share: Share) -> None:
        """After it: each buffer is whole again, with the rows that it left; they are no part of a graph."""
        first, count = share.first, len(share.samples)
        for (path, module, name, dim), whole in zip(self._places, self._whole, strict=True):
            left, rows = whole.clone(), getattr(module, name)
            mine = left.narrow(dim, first, count)
            if rows is None or (rows.shape, rows.dtype) != (mine.shape, mine.dtype):
                told = "None" if rows is None else f"{rows.dtype} {tuple(rows.shape)}"
                raise UsageError(
                    f"buffer {path!r} was {mine.dtype} {tuple(mine.shape)} for {count} samples, and forward left "
                    f"{told} there; a carried buffer keeps shape and dtype"
                )
            mine.copy_(rows.detach())
            setattr(module, name, left)


def joined(values: Sequence[torch.Tensor], samples: Sequence[int], dim: int) -> torch.Tensor:
    """What a carried buffer becomes: from each replica, in order, the rows of its samples."""
    whole, first = values[0].clone(), 0
    for value, count in zip(values, samples, strict=True):
        whole.narrow(dim, first, count).copy_(value.narrow(dim, first, count))
        first += count
    return whole


def _check(path: str, dim: int, buffers: Mapping[str, torch.Tensor], batch: int | None) -> None:
    if path not in buffers:
        there = ", ".join(buffers) or "none"
        raise UsageError(
            f"carry names {path!r}, which is no buffer of the model (those are: {there}); register it in __init__ with "
            "self.register_buffer"
        )
    if dim >= buffers[path].dim():
        raise UsageError(
            f"carry says that dimension {dim} of {path!r} runs over the batch, but its shape is "
            f"{tuple(buffers[path].shape)}; name one of its dimensions"
        )
    rows = buffers[path].shape[dim]
    if batch is not None and rows > batch:
        raise UsageError(
            f"carry names {path!r}, which has {rows} rows along dimension {dim}, but a batch has {batch} samples, and "
            "the others would never be used; make the buffer as long as the batch"
        )
