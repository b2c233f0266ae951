"""What a process does that reads shards of a stream ahead.

It reads the shards that the caller opens in it, those first of which the least is on its way. A thread sends what was
read, so that the next samples are read meanwhile. What cannot be read or sent here, the caller reads itself: an error
is raised there, and the answer is the same.
"""

from __future__ import annotations

import contextlib
import queue
import select
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

from phalanx.definition.fields import Definition, unpacked
from phalanx.definition.passes import Mark, Pass, Reading, Readings, apart, following
from phalanx.engines.processes.messages import DriverChannel
from phalanx.engines.processes.serialization import adopt_environment, pieces_of, unpack, unpack_bytes
from phalanx.errors import RunError
from phalanx.frameworks.registry import reading, reduced_copy, starting
from phalanx.shared.memory import Memory, aligned
from phalanx.surroundings.presence import CURRENT

OPEN, TOOK, CLOSE = "open", "took", "close"  # what the caller says
SAMPLES, ENDED, LEFT, SAID = "samples", "ended", "left", "said"  # what it hears
HELD, HELD_SECONDS = 16, 0.02  # samples of a shard that are sent together, unless one would wait for longer
HELD_BYTES = 1 << 20  # or they are large
HEADER = 8  # bytes of a message's length
AHEAD = 64  # samples of a shard that are on their way
AHEAD_BYTES = 64 << 20  # of all shards of a process; one sample of each may always be


class Ahead:
    """A shard that is read ahead.

    Parameters
    ----------
    which : Pass
    mark : Mark
        Where to begin.
    number : int
        The first sample that the caller has not got.
    running : str
        The running hash of those that it has.
    """

    def __init__(self, which: Pass, mark: Mark, number: int, running: str) -> None:
        self.which, self.mark, self.number, self._running = which, mark, number, running
        self.reading: Reading | None = None
        self.fresh = list[Any]()  # samples that are read, not hashed yet: many at once, as code that is warm is fast
        self.held = list[tuple[str, Any, Mark | None]]()  # those that are hashed: the running hash, a mark behind it
        self.since, self.size = 0.0, HELD_BYTES  # the bytes of a sample, as far as is known
        self.sizes = deque[int]()  # of the samples that are on their way
        self.over = self.left = False  # whether no more is read here; whether the caller has to read on

    @property
    def waiting(self) -> int:
        """Samples that are not sent yet."""
        return len(self.fresh) + len(self.held)

    def hash(self) -> None:
        """Hash what is fresh; the caller has those before ``number``.

        Raises
        ------
        RunError
            Those are others now, so the caller reads on.
        """
        assert self.reading is not None
        first = self.reading.number - len(self.fresh) + 1
        for number, sample in enumerate(self.fresh, first):
            self.reading.hash = following(self.reading.hash, sample)
            if number > self.number:
                self.held.append((self.reading.hash, sample, None))
            elif number == self.number and self.reading.hash != self._running:
                raise RunError("other samples than before")
        self.fresh = []
        if self.reading.ended and self.reading.number < self.number:
            raise RunError("other samples than before")


def live(channel: int, memories: Sequence[int], number: int) -> None:
    """Read shards for the caller until it closes the channel."""
    caller = DriverChannel(channel)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the caller's
    environment_memory, recipe_memory = (Memory(0, fd) for fd in memories)
    environment = unpack(environment_memory)
    adopt_environment(environment)
    with starting(environment["threads"]):
        definition = unpacked(unpack(recipe_memory))
    surroundings, _ = reading(environment["framework"], definition)
    with surroundings, contextlib.suppress(EOFError, OSError):
        _Reader(caller, definition, channel).run()


class _Reader:
    def __init__(self, caller: DriverChannel, definition: Definition, channel: int) -> None:
        self._caller, self._definition = caller, definition
        self._readings, self._apart = Readings(definition), apart(definition)
        self._shards, self._last = dict[int, Ahead](), 0
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._sent = queue.SimpleQueue[Any]()
        warnings.showwarning = lambda message, category, file, line, *_: self._say(
            0, SAID, str(message), category, file, line
        )
        threading.Thread(target=self._send, daemon=True).start()

    def run(self) -> None:
        """Read until the caller is gone."""
        while True:
            due = self._due()
            for key, shard in self._shards.items():
                if shard.waiting and (due is None or time.monotonic() - shard.since > HELD_SECONDS):
                    self._hand(key, shard)
            while self._poller.poll(0 if due else None):
                self._hear(*unpack_bytes(aligned(self._caller.received())))
                due = self._due()
            if due:
                self._read(*due)

    def _hear(self, kind: str, key: int, *facts: Any) -> None:
        if kind == OPEN:
            self._shards[key] = Ahead(*facts)
        elif kind == CLOSE:
            shard = self._shards.pop(key, None)
            if shard is not None and shard.reading is not None:
                shard.reading.close()
        elif key in self._shards:
            sizes = self._shards[key].sizes
            for _ in range(min(len(sizes), *facts)):  # some may have come from the process that this one replaces
                sizes.popleft()

    def _due(self) -> tuple[int, Ahead] | None:
        """The shard to read a sample of now."""
        if (last := self._shards.get(self._last)) is not None and last.waiting and not last.over:
            return self._last, last  # one after another, as what is sent together costs less
        bytes_ahead = sum(sum(shard.sizes) for shard in self._shards.values())
        most = AHEAD if bytes_ahead < AHEAD_BYTES else 1
        due = [(len(shard.sizes) + shard.waiting, key) for key, shard in self._shards.items() if not shard.over]
        least, key = min(due, default=(AHEAD, 0))
        return (key, self._shards[key]) if least < most else None

    def _read(self, key: int, shard: Ahead) -> None:
        self._last, CURRENT.step, CURRENT.epoch = key, None, shard.which.epoch
        try:
            if shard.reading is None:
                shard.reading = self._readings.opened(shard.which, shard.mark)
                shard.reading.hashes = False
            at = shard.reading
            sample = at.next()
            shard.over = at.ended
            if not at.ended:
                shard.since = shard.since if shard.waiting else time.monotonic()
                shard.fresh.append(sample)
                self._mark(shard, at)
            if at.ended or shard.waiting >= HELD or shard.waiting * shard.size >= HELD_BYTES:
                self._hand(key, shard)
            if at.ended and not shard.left:
                self._say(key, ENDED)
        except Exception:  # it is raised again where the caller reads it
            self._leave(key, shard)

    def _mark(self, shard: Ahead, at: Reading) -> None:
        """Now and then, mark where the iterable is."""
        if at.number - shard.mark.number < self._apart:
            return
        shard.hash()
        mark = at.mark()
        shard.mark = mark or shard.mark
        if shard.held:
            shard.held[-1] = *shard.held[-1][:2], mark

    def _hand(self, key: int, shard: Ahead) -> None:
        """Send the samples that are not sent yet."""
        try:
            shard.hash()
            held, shard.held = shard.held, []
            if not held:  # the caller has them all: to hear nothing is no sign that this process gets on
                return
            size = self._say(key, SAMPLES, *held)
        except Exception:
            self._leave(key, shard)
        else:
            shard.size = size // len(held)
            shard.sizes.extend([shard.size] * len(held))

    def _leave(self, key: int, shard: Ahead) -> None:
        """Leave the rest of a shard to the caller: it cannot be read, or sent, here."""
        shard.over, shard.left, shard.fresh, shard.held = True, True, [], []
        self._say(key, LEFT)

    def _say(self, key: int, kind: str, *facts: Any) -> int:
        pieces = pieces_of((key, kind, facts), reduced_copy)
        content = b"".join(pieces)
        self._sent.put(len(content).to_bytes(HEADER, "little") + content)
        return len(content)

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the caller is gone
            while True:
                self._caller.send(self._sent.get())
