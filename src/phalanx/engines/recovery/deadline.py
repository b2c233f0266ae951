"""Intervals that follow from how long steps take: when a silent worker counts as hung, and when workers save."""

from __future__ import annotations

import math
import pathlib
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable

RECENT = 21  # steps whose median tells how long one takes
PATIENCE, SLOWER, FIRST_PATIENCE = 60.0, 20, 600.0  # seconds; times a usual step; seconds while none is known
STARTING = 120.0  # seconds for imports and make_model, at least
AWAKE_SECONDS = 5.0  # between two looks: more means that this process was stopped, and perhaps the workers with it


class Deadline:
    """Seconds of silence that are too many.

    Parameters
    ----------
    seconds : float or None
        None: 20 usual steps, at least a minute; none at all under a debugger.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._recent: deque[float] = deque(maxlen=RECENT)

    def note(self, seconds: float) -> None:
        """A step took so long."""
        self._recent.append(seconds)

    @property
    def least(self) -> float:
        """Silence up to this is never too long; unlike the answer of ``seconds``, this costs nothing."""
        return PATIENCE if self._seconds is None else self._seconds

    @property
    def seconds(self) -> float:
        """How long a worker may be silent now."""
        if self._seconds is not None:
            return self._seconds
        if sys.gettrace() is not None or _traced():
            return math.inf
        return max(PATIENCE, SLOWER * statistics.median(self._recent)) if self._recent else FIRST_PATIENCE


class Watch:
    """Notices that nothing has changed for too long, as far as this process was awake to see it."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._last = b""
        self._since = self._seen = time.monotonic()

    def expired(self, progress: bytes, *, starting: bool) -> bool:
        """Whether ``progress`` has been the same for too long; starts anew then. Starting may take longer."""
        now = time.monotonic()
        asleep, self._seen = now - self._seen > AWAKE_SECONDS, now
        if progress != self._last or asleep:
            self._last, self._since = progress, now
            return False
        silent = now - self._since
        expired = silent > self._deadline.least and silent > max(self._deadline.seconds, STARTING if starting else 0)
        if expired:
            self._since = now
        return expired


class Stillness:
    """Notices that another process does nothing, however slow the machine is.

    Attributes
    ----------
    stopped : bool
        Whether it was stopped (SIGSTOP) when it was last looked at.
    total : float
        Seconds that this has been watched.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used = -1
        self._began = self._since = self._seen = time.monotonic()
        self.stopped = False
        self.total = 0.0

    def seconds(self) -> float:
        """How long it has used no processor time, though it could have had some, as far as this one was awake."""
        now = time.monotonic()
        asleep, self._seen = now - self._seen > AWAKE_SECONDS, now
        state, used = _processor_time(self._pid)
        self.stopped = state == "T"
        if used != self._used or state in ("R", "D") or asleep:  # it waits for a processor or a disk
            self._used, self._since = used, now
        self.total = now - self._began
        return now - self._since


def _processor_time(pid: int) -> tuple[str, int]:
    """The state of a process, and the processor time that it has used, in ticks; ("", 0) if that cannot be seen."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[11]) + int(fields[12])


def _traced() -> bool:
    """Whether a debugger is attached to this process."""
    try:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)


SHARE = 0.005  # of the time, for snapshots


class SnapshotTimer:
    """Times snapshots in memory.

    Attributes
    ----------
    pace : float
        Seconds of the latest step.
    """

    def __init__(self) -> None:
        self.pace = 0.0
        self._seconds = 0.0

    def keep(self, save: Callable[[], None]) -> None:
        """Save, and note what it took."""
        began = time.perf_counter()
        save()
        self._seconds = time.perf_counter() - began

    def interval(self) -> float:
        """Steps from one snapshot to the next."""
        return self._seconds / (SHARE * self.pace) if self.pace else 1
