"""A loss over the whole batch in jax: outputs of all replicas in, a gradient for each of their rows out.

As in torch (``frameworks/torch/replica/over_batch.py``): every worker computes the same loss from the rows of all, and
a replica goes back from its own.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.definition import rows
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
        self._form: tuple[Any, Any] = None, None  # an output and a target, as user code made them
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
            outputs.append(passed.output)
            targets.append(self._forward.target(batch))
            counts.append(len(piece.samples))
            self._kept = (one.replica, passed) if keep else None
        self._form = outputs[0], targets[0]
        read, known = ([jax.tree.map(_read, each) for each in column] for column in (outputs, targets))
        output, target = self._stacked(read, known, counts)
        return rows.encoded({"samples": sum(counts), "output": output, "target": target}, rows.numpy_packed)

    def compute(self, said: Sequence[bytes]) -> int:
        """The loss from what all replicas said; returns a checksum of it."""
        ran = [replica for replica, text in enumerate(said) if text]
        heard = [rows.decoded(said[replica], rows.numpy_unpacked) for replica in ran]
        samples = [count for count, _, _ in heard]
        output, target = self._stacked([each for _, each, _ in heard], [each for _, _, each in heard], samples)
        loss, gradient = self._forward.of_rows(output, target)
        ends = np.cumsum(samples)[:-1]
        cut = [np.split(np.asarray(leaf), ends) for leaf in jax.tree.leaves(gradient)]
        self._loss = float(loss)
        self._seeds = {replica: [parts[at] for parts in cut] for at, replica in enumerate(ran)}
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
        return [share] if self._parts == 1 else share.cut(self._parts)

    def _passed(self, one: Todo, number: int, piece: Share, state: Any) -> tuple[Any, Pass]:
        batch = self._batch(None if number else one.key, piece)
        part = number if self._parts > 1 else None
        return batch, Pass(*self._forward.passed(self._begin(one.replica)[0], batch, one.key, part, state))

    def _stacked(self, outputs: Sequence[Any], targets: Sequence[Any], samples: Sequence[int]) -> tuple[Any, Any]:
        output = rows.stacked(outputs, samples, "output", self._form[0])
        return output, rows.stacked(targets, samples, "target", self._form[1])


def _read(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


@functools.lru_cache(64)
def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, jax.dtypes.float0)


def _nothing(leaf: Any) -> np.ndarray:
    """The gradient of what has none."""
    return _zeros(tuple(leaf.shape))
