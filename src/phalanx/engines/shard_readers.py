"""The processes that read shards of a stream ahead, as the caller's process sees them.

Nothing is lost when one dies or hangs. Another begins at the shard's last mark, and reads again what was not heard. A
process that ends again and again is given up, and the caller reads its shards: the answer is the same.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from phalanx.definition import checks
from phalanx.definition.data import own
from phalanx.definition.fields import Definition
from phalanx.definition.passes import BEGINNING, EACH_TIME, LED_ELSEWHERE, Mark, Pass, Readings, Source
from phalanx.definition.shards import shards_of
from phalanx.engines.processes.driver import beside
from phalanx.engines.processes.handle import Output, WorkerHandle
from phalanx.engines.processes.serialization import pack_recipe, pieces_of, unpack_bytes
from phalanx.engines.processes.starter import WARM
from phalanx.engines.shard_reading import AHEAD, CLOSE, ENDED, HEADER, LEFT, OPEN, SAID, SAMPLES, TOOK
from phalanx.errors import UsageError, WorkerError
from phalanx.frameworks.registry import reduced_copy
from phalanx.shared.inputs import HANGING_SECONDS
from phalanx.shared.memory import Memory, aligned
from phalanx.surroundings import interrupts
from phalanx.surroundings.presence import usable_cores

LIVES = "phalanx.engines.shard_reading"
LOOK_SECONDS = 0.1
FUTILE = 5  # times in a row that a process ended before it had read anything


class Remote:
    """A shard that another process reads. Implements ``passes.Source``."""

    def __init__(self, readers: ShardReaders, key: int, which: Pass, mark: Mark) -> None:
        self.number, self.hash, self.ended = mark.number, mark.hash, False
        self.key, self.which, self.marks = key, which, deque([mark])
        self.heard = mark.number  # samples that have come, and those before
        self.queue = deque[tuple[str, Any]]()  # running hash and sample
        self.over = ""  # how it ended there
        self.failed = 0  # times in a row that its process ended and nothing had come
        self._readers, self._took = readers, 0
        self._here: Source | None = None

    def next(self) -> Any:
        while self._here is None and not self.queue and not self.over:
            self._readers.hear(self)
        if self.queue:
            self.hash, sample = self.queue.popleft()
            self.number += 1
            self._took += 1
            if self._took == AHEAD // 8 or not self.queue:
                self._readers.say(self, TOOK, self._took)
                self._took = 0
            # One that stays in a buffer would keep the memory of all that came with it.
            return own(sample) if self._readers.keeps else sample
        if self.over == ENDED:
            self.ended = True
            return None
        if self._here is None:
            self._here = self._readers.read_here(self)
        sample = self._here.next()
        self.number, self.hash, self.ended = self._here.number, self._here.hash, self._here.ended
        return sample

    def mark(self) -> Mark | None:
        if self._here is not None:
            return self._here.mark()
        while len(self.marks) > 2 and self.marks[2].number <= self.number:  # one before the newest stays, too
            self.marks.popleft()
        newest = [mark for mark in self.marks if mark.number <= self.number][-1]
        return newest if newest.state is not None else None

    def before(self, number: int) -> Mark:
        """The last mark before a sample, so that what is read again can be compared; else where it was opened."""
        return next((mark for mark in reversed(self.marks) if mark.number < number), self.marks[0])

    def close(self) -> None:
        self._readers.forget(self)
        if self._here is not None:
            self._here.close()


class Process:
    """A process that reads shards, and the message that is coming from it.

    Parameters
    ----------
    number : int
    memories : sequence of int
        Descriptors that it inherits.
    """

    def __init__(self, number: int, memories: Sequence[int]) -> None:
        self.handle = WorkerHandle(number, memories, LIVES)
        self._begin()

    def heard(self) -> tuple[bool, memoryview | None]:
        """Take what has come, without waiting for more: whether its end has, and a message if one is whole.

        It may hang, or be stopped, in the middle of a message.
        """
        try:
            count = os.readv(self.handle.channel.fileno(), [self._room[self._have :]])
        except OSError:
            return True, None
        self._have += count
        if count == 0 or self._have < len(self._room):
            return count == 0, None
        room, head = self._room, self._head
        if head:
            self._head = False
            self._room, self._have = aligned(bytes(int.from_bytes(room, "little"))), 0
            return False, None
        self._begin()
        return False, room

    def _begin(self) -> None:
        self._room, self._have, self._head = memoryview(bytearray(HEADER)), 0, True


class ShardReaders:
    """Processes that read shards ahead.

    Parameters
    ----------
    definition : Definition
    framework : str
        The name of the recipe's framework.
    count : int
        How many processes.

    Attributes
    ----------
    keeps : bool
        Whether samples wait in a buffer.
    """

    def __init__(self, definition: Definition, framework: str, count: int) -> None:
        self._here, self.keeps = (
            Readings(definition),
            definition.stream is not None and definition.stream.shuffle_buffer > 1,
        )
        self._memories = Memory(0), Memory(0)
        self._processes: list[Process | None] = [None] * count
        self._open = dict[int, Remote]()
        self._keys = 0
        self._output = Output()
        try:
            WARM.prepare(definition)
            pack_recipe(definition, framework, *self._memories, {})
        except BaseException:
            self.close()
            raise

    def opened(self, which: Pass, mark: Mark) -> Source:
        """Read a shard from a mark on."""
        if not self._processes:
            return self._here.opened(which, mark)
        self._keys += 1
        remote = self._open[self._keys] = Remote(self, self._keys, which, mark)
        self._begin(remote)
        return remote

    def close(self) -> None:
        """End the processes."""
        self._give_up()
        for memory in self._memories:
            memory.close()

    def say(self, remote: Remote, kind: str, *facts: Any) -> None:
        """Tell a shard's process something; if it is gone, that shows where it is heard."""
        process = self._process_of(remote)
        if process is not None:
            with contextlib.suppress(OSError):
                process.handle.channel.send_bytes(b"".join(pieces_of((kind, remote.key, *facts), reduced_copy)))

    def forget(self, remote: Remote) -> None:
        """A shard is read no more."""
        if self._open.pop(remote.key, None) is not None:
            self.say(remote, CLOSE)

    def read_here(self, remote: Remote) -> Source:
        """Read a shard in this process, from where the caller is."""
        self._open.pop(remote.key, None)
        mark = remote.before(remote.number)
        for first in [mark, BEGINNING] if mark.number else [mark]:
            with contextlib.suppress(*([WorkerError] if first.number else [])):
                source = self._here.opened(remote.which, first)
                while source.number < remote.number and not source.ended:
                    source.next()
                if (source.number, source.hash) == (remote.number, remote.hash):
                    if first is not mark:
                        checks.warn(LED_ELSEWHERE)
                    return source
                source.close()
        raise UsageError(
            f"the first {remote.number} samples of {remote.which} are others when they are read again, as a process "
            f"that reads ahead has ended; {EACH_TIME}"
        )

    def hear(self, remote: Remote) -> None:
        """Wait until something comes for a shard, or it is given up."""
        began = time.monotonic()
        while not (remote.queue or remote.over):
            interrupts.check()
            process = self._process_of(remote)
            if process is None:
                remote.over = LEFT
                return
            poller = select.poll()
            for fd in process.handle.watched:
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(1000 * LOOK_SECONDS)}
            self._output.carry(ready)
            if process.handle.channel.fileno() in ready:
                gone, content = process.heard()
                began = time.monotonic()
                if content is not None:
                    self._take(*unpack_bytes(content))
            else:
                gone = process.handle.pidfd in ready or time.monotonic() - began > HANGING_SECONDS
            if gone:
                self._replace(remote)
                began = time.monotonic()

    def _process_of(self, remote: Remote) -> Process | None:
        return self._processes[remote.key % len(self._processes)] if self._processes else None

    def _take(self, key: int, kind: str, facts: tuple[Any, ...]) -> None:
        """Take a message."""
        if kind == SAID:
            self._output.warn(*facts)
        elif (remote := self._open.get(key)) is not None:
            remote.failed = 0
            if kind != SAMPLES:
                remote.over = kind
                return
            for running, sample, mark in facts:
                remote.heard += 1
                remote.queue.append((running, sample))
                if mark is not None:
                    remote.marks.append(mark)

    def _begin(self, remote: Remote) -> None:
        """Have its process read a shard, from the last mark before what was heard."""
        at = remote.key % len(self._processes)
        if self._processes[at] is None:
            process = self._processes[at] = Process(at, [memory.fd for memory in self._memories])
            self._output.follow(process.handle.pipes)
        running = remote.queue[-1][0] if remote.queue else remote.hash
        self.say(remote, OPEN, remote.which, remote.before(remote.heard), remote.heard, running)

    def _replace(self, remote: Remote) -> None:
        """Start another process for those shards whose process is gone, or hangs."""
        at = remote.key % len(self._processes)
        self._end(at)
        remote.failed += 1  # of this shard: its process may read others on each time, without an end
        if remote.failed >= FUTILE:
            checks.warn(
                f"a process that reads shards ahead ended {FUTILE} times without a sample, so this process reads them "
                f"(same answer); it was to read {remote.which}"
            )
            self._give_up()
            return
        for other in list(self._open.values()):
            if other.key % len(self._processes) == at and not other.over:
                self._begin(other)

    def _give_up(self) -> None:
        for at in range(len(self._processes)):
            self._end(at)
        self._processes = []

    def _end(self, at: int) -> None:
        process, self._processes[at] = self._processes[at], None
        if process is not None:
            self._output.forget(process.handle.pipes)
            process.handle.end()


def readers_of(definition: Definition, framework: str, readers: int | None, workers: int) -> ShardReaders | None:
    """``readers`` processes; None: one for each worker, as far as cores are free, and none beside a run in one process.

    A host's own shards are dealt among them, so there are no more than shards.
    """
    count = readers if readers is not None else beside(None, workers, usable_cores()) if workers > 1 else 0
    count = min(count, shards_of(definition))
    return ShardReaders(definition, framework, count) if count else None
