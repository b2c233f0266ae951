"""A loss over the whole batch in jax: outputs of all replicas in, a gradient for each of their rows out.

As in torch (``frameworks/torch/replica/over_batch.py``): every worker computes the same loss from the rows of all, and
a replica goes back from its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.definition import rows
from phalanx.definition.batches import cut
from phalanx.definition.data import Share
from phalanx.definition.fields import Definition
from phalanx.frameworks.arithmetic import Gradient
from phalanx.frameworks.jax.forward import Forward, left
from phalanx.seams.records import Computed, Todo


@dataclass
class Pass:
    """A forward pass of a replica: its output, what goes back from it, and the state that it left."""

    output: Any
    back: Callable[[Any], tuple[Any]]
    state: Any


class OverBatch:
    """Computes a loss over the whole batch.

    Parameters
    ----------
    definition : Definition
    forward : Forward
    batch : callable
        ``batch(key, share)``.
    begin : callable
        ``begin(replica)``: the parameters where that replica is computed, and the state at the step's start.
    add : callable
        ``add(gradient, other)``.
    """

    def __init__(
        self,
        definition: Definition,
        forward: Forward,
        batch: Callable[[int | None, Share], Any],
        begin: Callable[[int], tuple[Any, Any]],
        add: Callable[[Gradient, Gradient], Gradient],
    ) -> None:
        self._parts, self._forward = definition.micro_batches, forward
        self._batch, self._begin, self._add = batch, begin, add
        self._rows = rows.Rows(rows.numpy_packed, rows.numpy_unpacked)
        self._kept: tuple[int, Pass] | None = None
        self._loss = 0.0
        self._seeds: dict[int, list[Any]] = {}

    def said(self, one: Todo, *, keep: bool) -> bytes:
        """Compute a replica's outputs; what it says to all. ``keep``: what goes back from it stays until it does."""
        self._kept = None
        outputs, targets, counts = list[Any](), list[Any](), list[int]()
        state = self._begin(one.replica)[1]
        for number, piece in enumerate(self._pieces(one.share)):
            batch, passed = self._passed(one, number, piece, state)
            state = passed.state
            outputs.append(jax.tree.map(_read, passed.output))
            targets.append(jax.tree.map(_read, self._forward.target(batch)))
            counts.append(len(piece.samples))
            self._kept = (one.replica, passed) if keep else None
        return self._rows.said(outputs, targets, counts)

    def compute(self, said: Sequence[bytes]) -> int:
        """The loss from what all replicas said; returns a checksum of it."""
        output, target, _ = self._rows.heard(said)
        loss, gradient = self._forward.of_rows(output, target)
        ends = np.cumsum(self._rows.samples)[:-1]
        self._loss = float(loss)
        self._seeds = self._rows.dealt([np.split(np.asarray(leaf), ends) for leaf in jax.tree.leaves(gradient)])
        return zlib.crc32(np.asarray(loss).tobytes())

    def gradient(self, one: Todo) -> Computed:
        """Go back from a replica's rows."""
        kept, self._kept = self._kept, None
        state = begun = self._begin(one.replica)[1]
        total: Gradient = []
        at = 0
        for number, piece in enumerate(self._pieces(one.share)):
            there = kept is not None and kept[0] == one.replica
            passed = kept[1] if kept is not None and there else self._passed(one, number, piece, state)[1]
            state, until = passed.state, at + len(piece.samples)
            leaves, tree = jax.tree.flatten(passed.output)
            seeds = [
                seed[at:until] if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) else _nothing(leaf)
                for leaf, seed in zip(leaves, self._seeds[one.replica], strict=True)
            ]
            gradient = jax.tree.leaves(passed.back(jax.tree.unflatten(tree, seeds))[0])
            total = self._add(total, gradient) if total else gradient
            at = until
        return Computed(self._loss, 1.0, total, left(begun, state))

    def _pieces(self, share: Share) -> list[Share]:
        return [share] if self._parts == 1 else cut(share, self._parts)

    def _passed(self, one: Todo, number: int, piece: Share, state: Any) -> tuple[Any, Pass]:
        batch = self._batch(None if number else one.key, piece)
        part = number if self._parts > 1 else None
        return batch, Pass(*self._forward.passed(self._begin(one.replica)[0], batch, one.key, part, state))


def _read(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _nothing(leaf: Any) -> np.ndarray:
    """The gradient of what has none."""
    return np.zeros(leaf.shape, jax.dtypes.float0)
