"""What hosts tell each other in a step: losses and weights of all replicas, sums of gradients, buffers.

Each worker of a host talks to its counterparts on the other hosts, which own the same parameters.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.distributed_c10d import PrefixStore

from phalanx.engines.hosts.gloo import TCP, Gloo
from phalanx.engines.hosts.slices import Mask
from phalanx.engines.hosts.sums import ReceiveBuffers, Sums
from phalanx.errors import SeveredError
from phalanx.plan.fold import remaining
from phalanx.seams.records import Part

CHECK_STEPS = 100  # how often hosts compare the sums of their weights
HEADER = ("run", "step", "weights")
ROW = len(Part._fields)
Told = tuple[list[Part], list[Mask], list[bytes]]  # by replica, by node, by replica


@dataclass(frozen=True)
class Rendezvous:
    """Where workers of several hosts find each other; can be pickled.

    Attributes
    ----------
    address : (str, int)
        Host and port of the store of the run's torch.distributed world.
    run : int
        The run's number, drawn by rank 0.
    rank : int
        This process's place among ``blocks``.
    blocks : tuple of range
        The replicas of each process.
    seconds : float
        How long to wait for another one.
    interface : str
        The network interface to use; "" leaves the choice to torch.
    """

    address: tuple[str, int]
    run: int
    rank: int
    blocks: tuple[range, ...]
    seconds: float
    interface: str


class Across:
    """One worker's connection to its counterparts.

    Parameters
    ----------
    rendezvous : Rendezvous
    worker : int
    replicas : int
        R.
    blanks : sequence of arrays
        Shaped as the parameters' gradients, with any content; tensors, or numpy arrays.
    owned : sequence of int
        The parameters that this worker and its counterparts own.

    Attributes
    ----------
    sums : Sums
        Of these parameters' gradients.
    """

    def __init__(
        self, rendezvous: Rendezvous, worker: int, replicas: int, blanks: Sequence[Any], owned: Sequence[int]
    ) -> None:
        self._run = rendezvous.run
        self._rank = rendezvous.rank
        self._blocks = rendezvous.blocks
        self._count = len(blanks)
        self._nodes = [remaining(replicas, block) for block in rendezvous.blocks]
        self._received = ReceiveBuffers()
        limit = datetime.timedelta(seconds=rendezvous.seconds)
        store = TCP(*rendezvous.address, is_master=False, timeout=limit)
        place = PrefixStore(f"phalanx/{rendezvous.run}/worker {worker}", store)
        self._gloo = Gloo(place, rendezvous.rank, len(rendezvous.blocks), rendezvous.seconds, rendezvous.interface)
        self.sums = Sums(self._gloo, rendezvous.rank, replicas, self._nodes, blanks, owned)

    @property
    def nodes(self) -> list[tuple[int, int]]:
        """The nodes of the fold's tree that this host adds up."""
        return self._nodes[self._rank]

    def tell(
        self, step: int, weights: int, parts: Sequence[Part], masks: Sequence[Mask], notes: Sequence[bytes]
    ) -> Callable[[], Told]:
        """Give this host's parts, which gradients each of its nodes has, and notes; call what is returned for all's.

        Parameters
        ----------
        step : int
        weights : int
            A checksum of what this worker owns, compared every CHECK_STEPS steps.
        parts : sequence of Part
            One per replica of this host.
        masks : sequence of bytes
            One per node of this host.
        notes : sequence of bytes
            One per replica, all of one length.
        """
        hosts, most, most_nodes = len(self._blocks), max(map(len, self._blocks)), max(map(len, self._nodes))
        head = np.array([self._run, step, weights if step % CHECK_STEPS == 0 else 0], np.int64)
        rows = np.zeros((most, ROW))
        rows[: len(parts)] = parts
        flags = np.zeros((most_nodes, self._count), np.uint8)
        for row, mask in zip(flags, masks, strict=False):
            row[:] = np.frombuffer(mask, np.uint8)
        texts = np.zeros((most, len(notes[0])), np.uint8)
        for row, note in zip(texts, notes, strict=False):
            row[:] = np.frombuffer(note, np.uint8)
        pieces = head, rows, flags, texts
        mine = torch.from_numpy(np.concatenate([piece.view(np.uint8).reshape(-1) for piece in pieces]))
        found = self._received.take("parts", hosts * len(mine), torch.uint8)
        return functools.partial(self._told, pieces, found, self._gloo.begin_gather(found, mine))

    def _told(self, mine: Sequence[np.ndarray], found: torch.Tensor, works: Sequence[Any]) -> Told:
        """What all hosts told, once it is there; ``mine`` is what this one did."""
        self._gloo.wait(works)
        told: Told = [], [], []
        cuts = np.cumsum([piece.nbytes for piece in mine])[:-1]
        for rank, message in enumerate(found.numpy().reshape(len(self._blocks), -1)):
            head, rows, flags, texts = (
                part.view(piece.dtype).reshape(piece.shape)
                for part, piece in zip(np.split(message, cuts), mine, strict=True)
            )
            self._check_head(rank, mine[0], head)
            count = len(self._blocks[rank])
            told[0].extend(Part._make(row) for row in rows[:count].tolist())
            told[1].extend(row.tobytes() for row in flags[: len(self._nodes[rank])])
            told[2].extend(row.tobytes() for row in texts[:count])
        return told

    def spread(self, pieces: Sequence[Sequence[memoryview]]) -> None:
        """Fill in what other hosts left: ``pieces[replica]``, some memory for each, as long everywhere."""
        lengths = [sum(len(piece) for replica in block for piece in pieces[replica]) for block in self._blocks]
        most = max(lengths)
        if not most:
            return
        content = b"".join(piece for replica in self._blocks[self._rank] for piece in pieces[replica])
        mine = self._received.take("mine", most, torch.uint8)
        mine.numpy()[: len(content)] = np.frombuffer(content, np.uint8)
        found = self._received.take("left", len(self._blocks) * most, torch.uint8)
        self._gloo.gather(found, mine)
        received = memoryview(found.numpy().data)
        for rank, block in enumerate(self._blocks):
            at = rank * most
            for piece in (piece for replica in block if rank != self._rank for piece in pieces[replica]):
                piece[:] = received[at : at + len(piece)]
                at += len(piece)

    def _check_head(self, rank: int, mine: np.ndarray, theirs: np.ndarray) -> None:
        for name, ours, other in zip(HEADER, mine.tolist(), theirs.tolist(), strict=True):
            if ours != other:
                told = f"process {rank} differs from process {self._rank} in its {name}: {other} there, {ours} here"
                if name == "weights":
                    told += (
                        f" (checksums, compared every {CHECK_STEPS} steps): memory or a library differs between them, "
                        "and the weights of one are wrong. Compare them, and go on from an earlier snapshot"
                    )
                else:
                    told += "; they do not do the same run: start all of them again"
                self._gloo.close()
                raise SeveredError(told, step=int(mine[1]))
