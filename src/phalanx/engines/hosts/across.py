"""What hosts tell each other in a step: losses and weights of all replicas, which gradients there are, and buffers.

Each worker of a host talks to its counterparts on the other hosts, which own the same parameters.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from phalanx.engines.flat import Mask, scratch
from phalanx.engines.hosts.gloo import Gloo, Rendezvous
from phalanx.engines.processes.board import CHECK_STEPS
from phalanx.errors import CorruptionError, RunError
from phalanx.plan.fold import remaining
from phalanx.seams.records import Part, packed

HEADER = ("run", "step", "weights", "norm")
UNKNOWN = 0  # the norm of a step that a worker has not done, or does again
ROW, NAMED = len(Part._fields), operator.attrgetter("named")
Decoded = tuple[list[Part], list[Mask], list[bytes]]  # by replica, by node, by replica


class Across:
    """What one worker tells its counterparts.

    Parameters
    ----------
    rendezvous : Rendezvous
    gloo : Gloo
        The connection to them.
    replicas, parameters : int
        How many there are.
    """

    def __init__(self, rendezvous: Rendezvous, gloo: Gloo, replicas: int, parameters: int) -> None:
        self._run, self._rank, self._blocks = rendezvous.run, rendezvous.rank, rendezvous.blocks
        self._counts = [len(remaining(replicas, block)) for block in rendezvous.blocks]
        self._parameters, self._gloo = parameters, gloo
        self._rooms: dict[Any, torch.Tensor] = {}

    def tell(
        self, compared: tuple[int, int, int], parts: Sequence[Part], masks: Sequence[Mask], notes: Sequence[bytes]
    ) -> Decoded:
        """Send this host's parts, which gradients each of its nodes has, and notes; returns those of all hosts.

        Parameters
        ----------
        compared : tuple of int
            The step; every CHECK_STEPS steps a checksum of what this worker owns; the bits of the norm one step before,
            or UNKNOWN.
        parts : sequence of Part
            One per replica of this host.
        masks : sequence of bytes
            One per node of this host.
        notes : sequence of bytes
            One per replica, all of one length.
        """
        most, most_nodes = max(map(len, self._blocks)), max(self._counts)
        head = np.array([self._run, *compared], np.int64)
        rows = np.zeros((most, ROW))
        named = [packed(part.named) if part.named else b"" for part in parts]
        if any(named):
            parts = [part._replace(named=len(text)) for part, text in zip(parts, named, strict=True)]
        rows[: len(parts)] = parts
        flags = np.zeros((most_nodes, self._parameters), np.uint8)
        for row, mask in zip(flags, masks, strict=False):
            row[:] = np.frombuffer(mask, np.uint8)
        texts = np.zeros((most, len(notes[0])), np.uint8)
        for row, note in zip(texts, notes, strict=False):
            row[:] = np.frombuffer(note, np.uint8)
        pieces = head, rows, flags, texts
        mine = torch.from_numpy(np.concatenate([piece.view(np.uint8).reshape(-1) for piece in pieces]))
        messages = scratch(self._rooms, "parts", len(self._blocks) * len(mine), torch.uint8)
        self._gloo.gather(messages, mine)
        decoded = self._decoded(pieces, messages)
        if any(map(NAMED, decoded[0])):
            self._spread_named(decoded[0], named)
        return decoded

    def _spread_named(self, parts: list[Part], mine: Sequence[bytes]) -> None:
        """Put named losses into the parts of all replicas; ``mine``: the texts of this host's."""
        texts = self._spread_texts([int(part.named) for part in parts], mine)
        parts[:] = [
            part._replace(named=json.loads(bytes(text)) if text else 0.0)
            for part, text in zip(parts, texts, strict=True)
        ]

    def exchange(self, mine: Sequence[bytes]) -> list[bytes]:
        """The texts of all replicas, of any length; ``mine``: those of this host's."""
        most = max(map(len, self._blocks))
        own = torch.tensor([*map(len, mine), *[0] * (most - len(mine))], device="cpu")
        lengths = torch.empty(len(self._blocks) * most, dtype=torch.int64, device="cpu")
        self._gloo.gather(lengths, own)
        rows = lengths.view(len(self._blocks), most).tolist()
        known = [length for row, block in zip(rows, self._blocks, strict=True) for length in row[: len(block)]]
        return list(map(bytes, self._spread_texts(known, mine)))

    def _spread_texts(self, lengths: Sequence[int], mine: Sequence[bytes]) -> list[memoryview]:
        texts = [memoryview(bytearray(length)) for length in lengths]
        for replica, text in zip(self._blocks[self._rank], mine, strict=True):
            texts[replica][:] = text
        self.spread([[text] for text in texts])
        return texts

    def spread(self, pieces: Sequence[Sequence[memoryview]]) -> None:
        """Fill in ``pieces[replica]``, the memory of other hosts' replicas; its lengths are the same on all hosts."""
        lengths = [sum(len(piece) for replica in block for piece in pieces[replica]) for block in self._blocks]
        most = max(lengths)
        if not most:
            return
        content = b"".join(piece for replica in self._blocks[self._rank] for piece in pieces[replica])
        mine = scratch(self._rooms, "mine", most, torch.uint8)
        mine.numpy()[: len(content)] = np.frombuffer(content, np.uint8)
        contents = scratch(self._rooms, "left", len(self._blocks) * most, torch.uint8)
        self._gloo.gather(contents, mine)
        received = memoryview(contents.numpy().data)
        for rank, block in enumerate(self._blocks):
            at = rank * most
            for piece in (piece for replica in block if rank != self._rank for piece in pieces[replica]):
                piece[:] = received[at : at + len(piece)]
                at += len(piece)

    def _decoded(self, mine: Sequence[np.ndarray], messages: torch.Tensor) -> Decoded:
        """Decode the messages of all hosts; ``mine`` is what this host sent."""
        decoded: Decoded = [], [], []
        cuts = np.cumsum([piece.nbytes for piece in mine])[:-1]
        for rank, message in enumerate(messages.numpy().reshape(len(self._blocks), -1)):
            head, rows, flags, texts = (
                part.view(piece.dtype).reshape(piece.shape)
                for part, piece in zip(np.split(message, cuts), mine, strict=True)
            )
            self._check_head(rank, mine[0], head)
            count = len(self._blocks[rank])
            decoded[0].extend(Part._make(row) for row in rows[:count].tolist())
            decoded[1].extend(row.tobytes() for row in flags[: self._counts[rank]])
            decoded[2].extend(row.tobytes() for row in texts[:count])
        return decoded

    def _check_head(self, rank: int, mine: np.ndarray, theirs: np.ndarray) -> None:
        for name, ours, other in zip(HEADER, mine.tolist(), theirs.tolist(), strict=True):
            if ours != other and not (name == "norm" and UNKNOWN in (ours, other)):
                message = f"process {rank} differs from process {self._rank} in its {name}: {other} there, {ours} here"
                if name == "norm":
                    message += (
                        " (bits of the gradient's norm one step before): a device or a library computes or copies "
                        "wrongly in one of them. Go on without it, from the newest snapshot up to which phalanx verify "
                        "finds the same"
                    )
                elif name == "weights":
                    message += (
                        f" (checksums, compared every {CHECK_STEPS} steps): memory or a library differs between them, "
                        "and the weights of one are wrong. Compare them, and go on from an earlier snapshot"
                    )
                else:
                    message += "; they do not do the same run: start all of them again"
                self._gloo.close()
                raise (CorruptionError if name in ("weights", "norm") else RunError)(message, step=int(mine[1]))
