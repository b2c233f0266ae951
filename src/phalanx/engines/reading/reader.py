"""A reader's life: read the shares that are its own, step after step, as far ahead as there is room."""

from __future__ import annotations

import functools
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.definition import generators
from phalanx.definition.batches import BatchShares, Collated
from phalanx.definition.data import Share
from phalanx.definition.fields import Definition
from phalanx.engines.processes.environment import adopt_environment
from phalanx.engines.processes.messages import DriverChannel, as_told
from phalanx.engines.processes.serialization import pieces_of, unpack
from phalanx.engines.reading.stream_reader import read_stream
from phalanx.frameworks.registry import reading, reduced_sample, starting
from phalanx.plan import replica_key
from phalanx.shared.inputs import Inputs
from phalanx.shared.inputs.ring import Ring
from phalanx.shared.memory import Memory
from phalanx.surroundings.presence import CURRENT

NAP_MILLISECONDS = 1


def live(channel: int, memories: Sequence[int], number: int) -> None:
    """Be reader ``number`` of a run, of its stream if it has one, until the caller closes the channel."""
    caller = DriverChannel(channel)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the caller's
    environment_memory, parcel, *others = (Memory(0, fd) for fd in memories)
    try:
        place = unpack(environment_memory)
        adopt_environment(place)
        if others:
            warnings.simplefilter("ignore")  # who computes what could not be read here warns
        with starting(place["threads"]):
            setup = unpack(parcel)
            definition = Definition(**setup["fields"])
        if not others:
            read_stream(caller, definition, place["framework"], setup["stream"], setup["step"])
            return
        placement = setup.get("placement")
        blocks = [range(definition.replicas)] if placement is None else placement.blocks
        hosted = sorted(replica for block in blocks for replica in block)
        ring = Ring(Inputs(others[0], definition.replicas), number, hosted)
        shares = BatchShares(definition, lambda source: source)
    except Exception as error:
        caller.tell("failed", *as_told(error))
        return
    caller.tell("ready")
    surroundings, collate = reading(place["framework"], definition)
    with surroundings:
        _serve(caller, definition, shares, ring, Collate(collate, definition.generators))


class Collate:
    """Reads shares and makes batches of them, until random numbers are drawn for that.

    Those are the first ones of a replica, and drawn where it is computed, which goes on with the next.

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
        """A share's samples, or the batch that they are; ``key``: of the replica, under which they are collated."""
        samples = share.read(share.samples)
        if self._collate is None:
            return samples
        generators.seed(key, self._owned)  # it may look at a seed, or draw and put back
        before = generators.places(self._owned)
        batch = self._collate(samples)
        if generators.places(self._owned) == before:
            return Collated(batch)
        self._collate = None
        return share.read(share.samples)  # collating may have changed them


def _serve(caller: DriverChannel, definition: Definition, shares: BatchShares, ring: Ring, collate: Collate) -> None:
    step = ring.begun()
    while step < definition.plan.steps:
        if not ring.may_claim(step):
            caller.sleep(NAP_MILLISECONDS)  # ends this process if the caller is gone
            continue
        dealt = shares.planned(definition.rounds.updates(step))
        CURRENT.step = step
        seed, count = definition.seed, definition.replicas
        for replica in ring.mine(step):
            if ring.begun() > step:  # they read the rest of it by themselves meanwhile: the next one helps them more
                break
            share = dealt[replica]
            if len(share.samples) and ring.claim(step, replica):
                key = replica_key(seed, step, replica, count)
                _read(caller, ring, step, replica, functools.partial(collate.read, share, key))
        caller.sleep(0)
        step = max(step + 1, ring.begun())
    while True:  # until the caller closes the channel
        caller.sleep(1000)


def _read(caller: DriverChannel, ring: Ring, step: int, replica: int, read: Callable[[], Any]) -> None:
    try:
        pieces = pieces_of(read(), reduced_sample)
    except Exception:  # it will be raised where the share is computed
        ring.give_up(step, replica)
        return
    size = sum(map(len, pieces))
    while (start := ring.place(size)) is None:
        if ring.hopeless(step, replica, size):
            ring.give_up(step, replica)
            return
        caller.sleep(NAP_MILLISECONDS)
    ring.put(step, replica, start, pieces)
