"""A loss over the whole batch: outputs of all replicas in, a gradient for each of their rows out.

Every worker gets the rows of all, and computes the same loss from them: same shapes, threads and generators. So the
loss needs no exchange of its own. A replica goes back from its own rows. With one replica, in one part, its graph is
still there; else each part is computed once more, from the same key and buffers (GradCache: Gao et al., 2021). Both
passes record a graph, though the first one drops it: without, some modules of torch compute by other kernels.

Gradients of the loss with respect to parameters that it uses itself are there once, and belong to no replica. The last
replica's backward pass begins with them, so they are in the sum once and at one place, wherever replicas are computed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.definition import rows
from phalanx.definition.batches import cut
from phalanx.definition.data import Share, map_tree
from phalanx.definition.fields import Definition
from phalanx.frameworks.torch.arithmetic import Gradient, bytes_of, checksum
from phalanx.frameworks.torch.replica.buffers import Buffers, Left
from phalanx.frameworks.torch.replica.feed import Feed
from phalanx.frameworks.torch.replica.forward import Forward
from phalanx.frameworks.torch.replica.gradient import Seeds
from phalanx.seams.records import Named, Todo, Watch

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass
class Outcome:
    """What the loss of a batch came to.

    Attributes
    ----------
    loss : torch.Tensor
    named : Named or None
    seeds : dict of int to list
        By replica: the gradient of the loss with respect to each tensor of its outputs, None where there is none.
    own : Gradient
        With respect to parameters.
    last : int
        The replica that takes up ``own``.
    """

    loss: torch.Tensor
    named: Named | None
    seeds: dict[int, list[torch.Tensor | None]]
    own: Gradient
    last: int


class OverBatch:
    """Computes a model's loss over the whole batch.

    Parameters
    ----------
    definition : Definition
    forwards : sequence of Forward
        Of each phase.
    batch : callable
        ``batch(key, share, watch)``.
    host : Feed
        Seeds generators and knows their states.
    buffers : Buffers
    parameters : sequence of torch.nn.Parameter

    Attributes
    ----------
    outcome : Outcome or None
        Of the present step.
    """

    def __init__(
        self,
        definition: Definition,
        forwards: Sequence[Forward],
        batch: Callable[[int | None, Share, Watch | None], Any],
        host: Feed,
        buffers: Buffers,
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self._forwards = forwards
        self._batch, self._host, self._buffers = batch, host, buffers
        self._parameters = parameters
        self._device = parameters[0].device
        self._parts = definition.micro_batches
        self._rows = rows.Rows(_pack, self._unpack)
        self._kept: tuple[int, list[torch.Tensor], list[Callable[[], Any]]] | None = None
        self.outcome: Outcome | None = None

    def pieces(self, share: Share) -> list[Share]:
        """The parts that are computed one after another."""
        return [share] if self._parts == 1 else cut(share, self._parts)

    def said(self, one: Todo, *, keep: bool) -> bytes:
        """Compute a replica's outputs; what it says to all. ``keep``: its graph stays until it goes back."""
        self.outcome = self._kept = None
        self._buffers.begin()
        outputs, seen, counts, trained = list[Any](), list[Any](), list[int](), list[list[bool]]()
        forward = self._forwards[one.phase]
        for number, piece in enumerate(self.pieces(one.share)):
            batch = self._batch(None if number else one.key, piece, None)
            output, target = forward.rows(batch, piece.origin)
            trained.append([getattr(leaf, "requires_grad", False) for leaf in rows.leaves_of(output)])
            outputs.append(output if keep else map_tree(_detached, output))
            seen.append(target)
            counts.append(len(piece.samples))
        left = self._buffers.left()
        if keep:
            self._kept = one.replica, rows.leaves_of(outputs[0]), self._host.remembered()
        changed = [None if value is start else value for value, start in zip(left, self._buffers.starts, strict=True)]
        beside = {"trained": _any_of(trained), "buffers": changed}
        return self._rows.said([map_tree(_detached, each) for each in outputs], seen, counts, beside)

    def compute(self, said: Sequence[bytes], key: int, phase: int, chosen: Sequence[torch.Tensor] | None) -> int:
        """The loss from what all replicas said; returns a checksum of it, and of what it wrote into buffers."""
        output, seen, beside = self._rows.heard(said)
        starts, samples = self._buffers.starts, self._rows.samples
        lefts = [
            [mine if value is None else value for mine, value in zip(starts, each["buffers"], strict=True)]
            for each in beside
        ]
        leaves = rows.leaves_of(output)
        goes_back = _any_of([each["trained"] for each in beside])  # whether a gradient goes back from each
        wanted = [leaf for leaf, goes in zip(leaves, goes_back, strict=True) if goes]
        for leaf in wanted:
            leaf.requires_grad_()
        self._host.seed(key)
        self._buffers.of_loss = {}
        with self._buffers.shown(list(zip(samples, lefts, strict=True))):
            loss, _, named = self._forwards[phase].of_rows(map_tree(_given, output), seen)
        trained = [leaf for leaf in self._parameters if leaf.requires_grad] if chosen is None else chosen
        inputs = [*wanted, *trained]
        found = dict(zip(map(id, inputs), torch.autograd.grad(loss, inputs, allow_unused=True), strict=True))
        gradients = [found.get(id(leaf)) for leaf in leaves]
        seeds = self._rows.dealt([None if grad is None else grad.split(samples) for grad in gradients])
        own = [found.get(id(parameter)) for parameter in self._parameters]
        self.outcome = Outcome(loss.detach().reshape(()), named, seeds, own, self._rows.ran[-1])
        written = self._buffers.of_loss
        facts = [*written, checksum(list(written.values()))]
        if self._device.type == "cpu" or torch.are_deterministic_algorithms_enabled():  # kernels may be allowed others
            facts.append(checksum([self.outcome.loss]))
        return zlib.crc32(repr(facts).encode())

    def begin(self, one: Todo, watch: Watch | None) -> None:
        """A replica is about to go back: it starts from the step's buffers, unless its graph is still there."""
        if self._kept is None or watch is not None or self._kept[0] != one.replica:
            self.forget()
            self._buffers.begin()

    def forget(self) -> None:
        """Nobody goes back from the graph that is still there."""
        self._kept = None

    def takes_up(self, one: Todo) -> bool:
        """Whether this replica takes up the gradient of parameters that the loss itself uses."""
        assert self.outcome is not None
        return one.replica == self.outcome.last and any(entry is not None for entry in self.outcome.own)

    def backward(self, one: Todo, watch: Watch | None) -> Iterator[Seeds]:
        """For each part of a replica: outputs with their gradients, and parameters with the loss's own.

        The backward pass of a part finds generators as its forward pass left them, wherever that was. So do forward
        passes of later parts, which came after no backward pass when they were computed first.
        """
        assert self.outcome is not None
        seeds, kept = self.outcome.seeds[one.replica], self._kept
        own: Seeds = []
        if self.takes_up(one):
            pairs = zip(self._parameters, self.outcome.own, strict=True)
            own = [(parameter, entry.clone()) for parameter, entry in pairs if entry is not None]
        pieces = self.pieces(one.share)
        sizes = [len(piece.samples) for piece in pieces]
        parted = [[None] * len(pieces) if seed is None else seed.split(sizes) for seed in seeds]
        for number, piece in enumerate(pieces):
            if kept is not None:
                leaves, states = kept[1:]
                _put_back(states)
            else:
                leaves = self._again(one, None if number else one.key, piece, watch)
                states = self._host.remembered() if len(pieces) > 1 else []
            pairs = zip(leaves, (parts[number] for parts in parted), strict=True)
            yield [*own, *((leaf, seed) for leaf, seed in pairs if seed is not None and leaf.requires_grad)]
            own = []
            _put_back(states)

    def left(self) -> Left:
        """The buffers as the replica that went back has left them: backward passes may write them, too."""
        self.forget()
        return self._buffers.left()

    def _again(self, one: Todo, key: int | None, piece: Share, watch: Watch | None) -> list[torch.Tensor]:
        batch = self._batch(key, piece, watch)
        output, _ = self._forwards[one.phase].rows(batch, piece.origin)
        if watch is not None:
            watch.report("output", "", output)
        return rows.leaves_of(output)

    def _unpack(self, dtype: str, shape: Sequence[int], memory: memoryview) -> Any:
        if dtype not in DTYPES:
            return rows.numpy_unpacked(dtype, shape, memory)
        content = (
            torch.frombuffer(bytearray(memory), dtype=torch.uint8) if len(memory) else torch.empty(0, device="cpu")
        )
        flat = content.view(DTYPES[dtype]) if len(memory) else content.to(DTYPES[dtype])
        return flat.view(tuple(shape)).to(self._device)


def _put_back(states: Sequence[Callable[[], Any]]) -> None:
    for restore in states:
        restore()


def _any_of(flags: Sequence[Sequence[bool]]) -> list[bool]:
    return [any(column) for column in zip(*flags, strict=False)]  # unlike ones are refused where they are joined


def _given(leaf: Any) -> Any:
    """What the loss gets: it may write outputs in place, which torch refuses at the beginning of a graph."""
    return leaf.clone() if getattr(leaf, "requires_grad", False) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _pack(leaf: Any) -> rows.Packed:
    if not isinstance(leaf, torch.Tensor):
        return rows.numpy_packed(leaf)
    content = memoryview(bytes_of(leaf).cpu().numpy().data) if leaf.numel() else b""
    return str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), content
