"""What a reader process does, and how its shares are taken where replicas are computed.

A reader reads its own shares, step after step, as far ahead as there is room. It leaves two kinds of shares to the
process that computes: those that raise, and those that draw random numbers which a replica goes on with.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.definition import generators
from phalanx.definition.batches import BatchShares
from phalanx.definition.data import Collated, Reader, Share
from phalanx.definition.fields import Definition, unpacked
from phalanx.engines.processes.messages import DriverChannel, sendable
from phalanx.engines.processes.serialization import adopt_environment, pieces_of, unpack, unpack_bytes
from phalanx.frameworks.registry import reading, reduced_sample, starting
from phalanx.plan.keys import replica_key
from phalanx.plan.orders import Indices
from phalanx.shared.inputs import Inputs, Ring
from phalanx.shared.memory import Memory
from phalanx.surroundings.presence import CURRENT

NAP_MILLISECONDS = 1


def live(channel: int, memories: Sequence[int], number: int) -> None:
    """Be reader ``number`` of a run until all is read, or the caller closes the channel."""
    caller = DriverChannel(channel)
    warnings.showwarning = lambda *_: None
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the caller's
    environment_memory, recipe_memory, memory = (Memory(0, fd) for fd in memories)
    try:
        environment = unpack(environment_memory)
        adopt_environment(environment)
        with starting(environment["threads"]):
            setup = unpack(recipe_memory)
            definition = unpacked(setup)
        surroundings, collate = reading(environment["framework"], definition)
        with surroundings:
            blocks = [range(definition.replicas)] if "placement" not in setup else setup["placement"].blocks
            ring = Ring(Inputs(memory, definition.replicas), number, sorted(itertools.chain(*blocks)))
            _read_shares(caller, definition, ring, Collate(collate, definition.generators))
        caller.tell("done")
    except Exception as error:
        caller.tell("failed", *sendable(error))


class Collate:
    """Reads shares and collates them to batches, until collating draws random numbers.

    Those are a replica's first ones. They must be drawn where the replica is computed, which goes on with the next.

    Parameters
    ----------
    collate : callable or None
        None: samples stay samples.
    owned : mapping
        The user's generators.
    """

    def __init__(self, collate: Callable[[Any], Any] | None, owned: Mapping[str, Any]) -> None:
        self._collate = collate
        self._owned = owned

    def read(self, share: Share, key: int) -> Any:
        """A share's samples, or their batch. ``key``: the replica's; it seeds the generators for collating."""
        samples = share.read()
        if self._collate is None:
            return samples
        generators.seed(key, self._owned)  # it may look at a seed, or draw and put back
        before = generators.places(self._owned)
        batch = self._collate(samples)
        if generators.places(self._owned) == before:
            return Collated(batch)
        self._collate = None
        return share.read()  # collating may have changed them


def _read_shares(caller: DriverChannel, definition: Definition, ring: Ring, collate: Collate) -> None:
    shares = BatchShares(definition, lambda source: source)
    step = ring.begun()
    while step < definition.plan.steps:
        if not ring.may_claim(step):
            caller.sleep(NAP_MILLISECONDS)  # ends this process if the caller is gone
            continue
        dealt = shares.planned(definition.rounds.updates(step))
        CURRENT.step, CURRENT.epoch = step, dealt[0].epoch
        for replica in ring.mine(step):
            if ring.begun() > step:  # workers read the rest of this step themselves: the next one helps them more
                break
            share = dealt[replica]
            if len(share.samples) and ring.claim(step, replica):
                key = replica_key(definition.seed, step, replica, definition.replicas)
                put = False
                with contextlib.suppress(Exception):  # it will be raised where the share is computed
                    put = _put(caller, ring, step, replica, collate.read(share, key))
                if not put:
                    ring.give_up(step, replica)
        caller.sleep(0)
        step = max(step + 1, ring.begun())


def _put(caller: DriverChannel, ring: Ring, step: int, replica: int, thing: Any) -> bool:
    """Put a share into the ring as soon as there is room; False if there will be none."""
    pieces = pieces_of(thing, reduced_sample)
    size = sum(map(len, pieces))
    while True:
        hopeless = ring.hopeless(step, replica, size)
        start = ring.place(size)
        if start is not None:
            ring.put(step, replica, start, pieces)
            return True
        if hopeless:
            return False
        caller.sleep(NAP_MILLISECONDS)


@dataclass(frozen=True, slots=True)
class Taken:
    """Takes a share of a step from the process that has read it; if none has, it is read here."""

    inputs: Inputs
    step: int
    replica: int
    here: Reader

    @property
    def collated(self) -> bool:
        """As it is read here."""
        return self.here.collated

    def read(self, indices: Indices) -> Any:
        """The share."""
        content = self.inputs.take(self.step, self.replica)
        return self.here.read(indices) if content is None else unpack_bytes(content)
