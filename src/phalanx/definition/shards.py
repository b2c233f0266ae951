"""Deals a stream that has logical readers: each replica has its own ones, and takes its samples from them in turn.

Shard s belongs to replica s mod R. So a shard is read where its replica is computed, and nowhere else. Processes tell
each other of each step how many samples a replica has, their hash, and whether it has more. Now and then they tell
where its readers are. So each of them can save the position, or read on in place of another that is lost.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from phalanx.definition import checks
from phalanx.definition.batches import Drawn
from phalanx.definition.fields import Definition
from phalanx.definition.passes import (
    BEGINNING,
    LIKE,
    Item,
    Line,
    Opened,
    Pass,
    Shown,
    apart,
    check_epoch,
    check_waiting,
    refuse,
)  # fmt: skip
from phalanx.definition.plain import Each, check_like
from phalanx.errors import UsageError
from phalanx.plan.shares import share_bounds

PLACE = {"epoch": int, "shards": int, "given": int, "parts": Each([int, str, object])}
BASE = {"dealt": int, "hash": str, "turn": int, "lines": Each(LIKE)}


class Place(NamedTuple):
    """Where a replica is in an epoch, as all processes know it.

    Attributes
    ----------
    dealt : int
        Samples it has had.
    hash : str
        Running hash of those.
    base : dict or None
        Where its readers were at an earlier step, if they can go on there; None: the beginning.
    """

    dealt: int = 0
    hash: str = BEGINNING.hash
    base: dict[str, Any] | None = None


class Head(NamedTuple):
    """What a process tells of a replica's share: where the replica is after it, and whether it has more samples.

    ``base`` is None unless there is a new one: it has the numbers of all samples that wait in buffers.
    """

    dealt: int
    hash: str
    base: dict[str, Any] | None
    more: bool

    @classmethod
    def checked(cls, value: Any) -> Head:
        """The head that another process tells.

        Raises
        ------
        ValueError
            It is none.
        """
        check_like(value, [int, str, object, bool], "a share")
        head = cls(*value)
        _check_place(Place(*head[:3]))
        return head


class Part:
    """The readers of a replica in an epoch.

    Parameters
    ----------
    definition : Definition
    opened : callable
    epoch, replica : int
    place : Place
        Where it is to be once it has caught up.
    """

    def __init__(self, definition: Definition, opened: Opened, epoch: int, replica: int, place: Place) -> None:
        shards = shards_of(definition)
        passes = [Pass(epoch, shard=shard, shards=shards) for shard in range(replica, shards, definition.replicas)]
        self._lines = [
            (which, Line(definition, functools.partial(opened, which), which.seed(definition.seed))) for which in passes
        ]
        self._apart = apart(definition) * len(passes)
        self._wanted, self.base = place, place.base
        self.dealt, self.hash, self._turn = 0, BEGINNING.hash, 0

    def catching_up(self) -> Iterator[None]:
        """Read up to the place, a sample at a time."""
        base = self.base
        if base is None:
            for _, line in self._lines:
                line.begin()
        else:
            self.dealt, self.hash, self._turn = base["dealt"], base["hash"], base["turn"]
            for (_, line), state in zip(self._lines, base["lines"], strict=True):
                line.given = state["read"] - len(state["slots"])
                line.go_on(state, lambda numbers, _: numbers)
        yield
        while self.dealt < self._wanted.dealt and self.take(1):
            yield

    @property
    def right(self) -> bool:
        """Whether it has read what was read before; as far as that goes, it goes on."""
        right = (self.dealt, self.hash) == self._wanted[:2]
        self.dealt, self.hash = self._wanted[:2]
        return right

    def take(self, count: int) -> list[Item]:
        """The next samples; fewer if there are no more. Readers that have ended are passed over."""
        items, passed = list[Item](), 0
        while len(items) < count and passed < len(self._lines):
            which, line = self._lines[self._turn]
            ready = line.fill(1)  # it may raise, and then has the next turn still
            self._turn = (self._turn + 1) % len(self._lines)
            if not ready:
                passed += 1
                continue
            number, sample, digest = line.ready.popleft()
            items.append((which.named(number), sample, digest))
            self.dealt, passed = self.dealt + 1, 0
            self.hash = hashlib.sha256(bytes.fromhex(self.hash) + bytes.fromhex(digest)).hexdigest()
        return items

    def has(self, count: int) -> bool:
        """Whether there are so many samples more."""
        return sum(line.fill(count) for _, line in self._lines) >= count

    def settle(self) -> bool:
        """Now and then, note where the readers are; returns whether it did."""
        for _, line in self._lines:
            line.mark()
        if self.dealt - (self.base["dealt"] if self.base else 0) < self._apart:
            return False
        states = [line.state() for _, line in self._lines]
        if not any(state["mark"][0] for state in states):  # all is read again in any case
            return False
        self.base = {"dealt": self.dealt, "hash": self.hash, "turn": self._turn, "lines": states}
        return True

    def close(self) -> None:
        """Let go of what is read."""
        for _, line in self._lines:
            line.close()


class Dealing:
    """The samples of a step, as they come about.

    Parameters
    ----------
    dealer : Sharded
    sizes : sequence of int
        How many samples each replica is to have.
    last : bool or None
        Whether the epoch ends with them; None: with the last sample of all.

    Attributes
    ----------
    places : list of Place
        Where replicas are before this step.
    drawn : Drawn or None
        The batch, once all is known.
    """

    def __init__(self, dealer: Sharded, sizes: Sequence[int], *, last: bool | None) -> None:
        self._dealer, self._sizes, self._last = dealer, sizes, last
        self.places, self.given = dealer.places, dealer.given
        self._shares = dict[int, tuple[Head, list[Item]]]()
        self.drawn: Drawn | None = None

    def read(self, replicas: Iterable[int]) -> dict[int, Head]:
        """Read the shares of these replicas, once; returns what other processes have to know of them.

        Raises
        ------
        WorkerError
            The iterable raised.
        UsageError
            A stream that is read again gives other samples.
        """
        wanted = list(replicas)
        with self._dealer.surroundings:
            for replica, part in self._dealer.parts(wanted, self.places, self._shares).items():
                base = part.base if part.settle() else None
                items = part.take(self._sizes[replica])
                more = self._last is None and part.has(self._dealer.least(replica))
                self._shares[replica] = Head(part.dealt, part.hash, base, more), items
        return {replica: self._shares[replica][0] for replica in wanted}

    def settle(self, heads: Mapping[int, Head]) -> Drawn:
        """Make the batch of what all processes tell.

        Raises
        ------
        UsageError
            An epoch has too few samples.
        """
        told = [heads[replica] for replica in range(len(self._sizes))]
        counts = [head.dealt - place.dealt for head, place in zip(told, self.places, strict=True)]
        self._dealer.check(self._sizes, counts, told)
        last = self._last
        if last is None:
            last = not (all if self._dealer.drops else any)(head.more for head in told)
            self._dealer.tell_dropped([replica for replica, head in enumerate(told) if last and head.more])
        mine = [self._shares[replica][1] if replica in self._shares else None for replica in range(len(counts))]
        numbers, samples = list[int](), list[Any]()
        for items, count in zip(mine, counts, strict=True):
            if items is None:  # another process has them
                items = [(-1 - len(numbers) - at, None, "") for at in range(count)]
            numbers += [item[0] for item in items]
            samples += [item[1] for item in items]
        digest = hashlib.sha256(b"".join(bytes.fromhex(head.hash) for head in told)).hexdigest()
        places = [
            Place(head.dealt, head.hash, head.base or place.base) for head, place in zip(told, self.places, strict=True)
        ]
        self._dealer.note(places, self.given + sum(counts), over=last)
        self.drawn = Drawn(self._dealer.epoch, tuple(numbers), samples, digest, last, tuple(counts))
        return self.drawn


class Sharded:
    """Deals what the readers of all replicas read. Implements ``streams.Dealer``.

    Parameters
    ----------
    definition : Definition
    opened : callable
        What reads a shard.
    surroundings : context manager
        Inside, generators and threads are the run's. Re-entrant.
    apart : bool
        Whether other processes read for other replicas.

    Attributes
    ----------
    epoch : int
    given : int
        Samples that were dealt, in all epochs.
    places : list of Place
        Where the replicas are.
    drops : bool
        Whether a batch that is not whole is left out.
    """

    def __init__(
        self, definition: Definition, opened: Opened, surroundings: contextlib.AbstractContextManager[Any], *,
        apart: bool,
    ) -> None:  # fmt: skip
        self._definition, self._opened, self.surroundings, self._apart = definition, opened, surroundings, apart
        self._size, self._shards, self.drops = definition.samples, shards_of(definition), definition.drop_last
        self._least = self._cut(definition.global_batch if definition.drop_last else 0)
        self._parts = dict[int, Part]()
        self._catching: tuple[Shown, bool] = (lambda numbers, _: numbers), False
        self._dealing: Dealing | None = None
        self._told = False  # that samples are dropped
        self._begin(0, 0)

    def next(self) -> Drawn | Dealing:
        if self._over:
            self._begin(self.epoch + 1, self.given)
        size, last = self._definition.global_batch, None
        if self._size is not None:
            left = self._size - self.given + self._before
            size, after = min(size, left), max(0, left - size)
            last = after < (size if self.drops else 1)
        self._dealing = dealing = Dealing(self, self._cut(size), last=last)
        return dealing if self._apart else dealing.settle(dealing.read(range(self._definition.replicas)))

    def state(self, waiting: Any) -> dict[str, Any]:
        epoch, places, given = self.epoch + self._over, [] if self._over else self.places, self.given
        if waiting is not None and self._dealing is not None:
            epoch, places, given = self.epoch, self._dealing.places, self._dealing.given
        return {"epoch": epoch, "shards": self._shards, "given": given, "parts": list(map(list, places))}

    def go_on(self, state: Mapping[str, Any], shown: Shown, *, anyway: bool) -> int:
        check_like(state, PLACE, "data.stream")
        if state["shards"] != self._shards:
            raise UsageError(
                f"the stream has shards={self._shards}, and that of the run that is resumed has {state['shards']}; "
                "they decide the order of samples, so leave them as they were"
            )
        places = [Place(*part) for part in state["parts"]] or self.places
        for place in places:
            _check_place(place)
        dealt = sum(place.dealt for place in places)
        if len(places) != self._definition.replicas or dealt > state["given"]:
            raise ValueError(f"it has {len(places)} replicas with {dealt} samples, of {state['given']} that were dealt")
        check_epoch(self._definition, state["epoch"])
        self._begin(state["epoch"], state["given"])
        self.places, self._before = places, state["given"] - dealt
        self._catching = shown, anyway
        if not self._apart and dealt:
            self.parts(range(self._definition.replicas), self.places, {})
        return self.given

    def close(self) -> None:
        for part in self._parts.values():
            part.close()
        self._parts = {}

    def least(self, replica: int) -> int:
        """How many samples a replica needs for another share."""
        return max(1, self._least[replica])

    def parts(self, wanted: Sequence[int], places: Sequence[Place], done: Mapping[int, Any]) -> dict[int, Part]:
        """What reads for these replicas, each at its place, but for those whose share of the step is ``done``.

        Those of other replicas are let go of: another process reads for them.
        """
        for replica in self._parts.keys() - set(wanted):
            self._parts.pop(replica).close()
        behind = dict[int, Part]()
        for replica in wanted:
            part, place = self._parts.get(replica), places[replica]
            if replica not in done and (part is None or part.dealt != place.dealt):
                if part is not None:
                    part.close()
                made = Part(self._definition, self._opened, self.epoch, replica, place)
                self._parts[replica] = behind[replica] = made
        self._catch_up(behind, places)
        return {replica: self._parts[replica] for replica in wanted if replica not in done}

    def check(self, sizes: Sequence[int], counts: Sequence[int], heads: Sequence[Head]) -> None:
        """Refuse a step that has too few samples.

        Raises
        ------
        UsageError
            An epoch begins with none or, with ``drop_last``, with too few. Or a replica has too few for ``epoch_size``.
        """
        short = [replica for replica, (size, count) in enumerate(zip(sizes, counts, strict=True)) if count < size]
        if self._size is not None and short:
            replica, had = short[0], heads[short[0]].dealt
            raise UsageError(
                f"epoch_size is {self._size}, but the shards of replica {replica} ({replica} and each "
                f"{self._definition.replicas}th after it) ended after {had} samples of epoch {self.epoch}, and its "
                "part is more: that of all its shares, of which the first ones are larger where batch_size is no "
                "multiple of R. Lower epoch_size, or leave it out: an epoch then ends with the last sample of all"
            )
        if not sum(counts):
            raise UsageError(
                f"the stream has no samples in epoch {self.epoch}: what make_iterable returned yielded nothing for any "
                "shard; it is called once per epoch and shard, and must return an iterable that begins anew"
            )
        if short and self.drops:
            raise UsageError(
                f"drop_last is True and a batch has {sum(sizes)} samples, but in epoch {self.epoch} the shards of "
                f"replica {short[0]} have {counts[short[0]]} of the {sizes[short[0]]} for its share: every batch would "
                "be dropped; lower batch_size, or set drop_last=False"
            )

    def tell_dropped(self, replicas: Sequence[int]) -> None:
        """Warn once if ``drop_last`` leaves out what these replicas could still have had: more than a short batch."""
        if replicas and not self._told:
            self._told = True
            checks.warn(
                f"drop_last is True, and epoch {self.epoch} ends as soon as one replica has no whole share left: more "
                f"samples of the shards of {len(replicas)} other replicas (of {replicas[0]}, say) are left out. Make "
                "shards equally long, and batch_size a multiple of R, or set drop_last=False"
            )

    def note(self, places: list[Place], given: int, *, over: bool) -> None:
        """All processes have told of a step."""
        self.places, self.given, self._over = places, given, over

    def _begin(self, epoch: int, given: int) -> None:
        self.close()
        self.epoch, self.given, self._before, self._over = epoch, given, given, False
        self.places = [Place()] * self._definition.replicas

    def _cut(self, samples: int) -> list[int]:
        return [end - begin for begin, end in share_bounds(samples, self._definition.replicas)]

    def _catch_up(self, parts: Mapping[int, Part], places: Sequence[Place]) -> None:
        """Read parts up to their places, all at once: processes may read ahead for each."""
        shown, anyway = self._catching
        distance = sum(
            places[replica].dealt - (part.base["dealt"] if part.base else 0) for replica, part in parts.items()
        )
        turns = [part.catching_up() for part in parts.values()]
        for turn in turns:
            next(turn)
        bar = iter(shown(range(distance), "phalanx: reading samples again"))
        while turns:
            turns = [turn for turn in turns if next(turn, bar) is not bar]
            for _ in turns:
                next(bar, None)
        for _ in bar:  # samples that are not there any more
            pass
        for replica, part in parts.items():
            if not part.right:
                refuse(
                    f"first {places[replica].dealt} samples of replica {replica} in epoch {self.epoch}", anyway=anyway
                )


def shards_of(definition: Definition) -> int:
    """How many logical readers the stream has; 0 where it has none."""
    return (definition.stream.shards if definition.stream else None) or 0


def _check_place(place: Place) -> None:
    """Refuse a place that cannot be one."""
    bytes.fromhex(place.hash)
    if place.base is None:
        return
    check_like(place.base, BASE, "base")
    for state in place.base["lines"]:
        check_waiting(state)
    if not 0 <= place.base["dealt"] <= place.dealt:
        raise ValueError(f"its readers were at {place.base['dealt']} samples, of {place.dealt} that were dealt")
