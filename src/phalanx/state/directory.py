"""A run's directory: snapshots of which the newest good one is the truth, a log of events, and a lock."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import time
import warnings
from typing import Any

from phalanx.errors import SnapshotError, UsageError
from phalanx.state import files, snapshot
from phalanx.state.snapshot import Snapshot

try:
    import fcntl
except ImportError:  # Windows has another way, and there two runs in one directory are not noticed
    fcntl = None  # type: ignore[assignment]

SNAPSHOTS, LOG, LOCK = "snapshots", "events.jsonl", "lock"
NAME = re.compile(r"step-(\d{12})")


class RunDirectory:
    """A directory that one run at a time works in.

    Parameters
    ----------
    path : path-like
    keep : int
        How many snapshots stay.

    Raises
    ------
    UsageError
        It cannot be made or written, or another run works in it.
    """

    def __init__(self, path: Any, keep: int) -> None:
        self.path = pathlib.Path(path)
        self._keep = keep
        self._lock = -1
        if (self.path / snapshot.MANIFEST).exists():
            raise UsageError(
                f"run_dir is {str(self.path)!r}, which is a snapshot, not a run's directory; choose another, or "
                "begin from it with warm_start"
            )
        try:
            files.make_folder(self.path)
            files.make_folder(self.path / SNAPSHOTS)
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | files.NOFOLLOW, files.MODE)
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._log = os.open(self.path / LOG, os.O_CREAT | os.O_APPEND | os.O_WRONLY | files.NOFOLLOW, files.MODE)
        except BlockingIOError:
            os.close(self._lock)
            raise UsageError(
                f"run_dir is {str(self.path)!r}, in which another run is at work; wait for it, or choose another"
            ) from None
        except OSError as error:
            if self._lock >= 0:
                os.close(self._lock)
            raise UsageError(
                f"run_dir is {str(self.path)!r}, which cannot be used: {error.strerror}; choose a directory that may "
                "be written"
            ) from error
        files.clear_away(self.path / SNAPSHOTS)

    def newest(self) -> Snapshot | None:
        """The newest snapshot that is whole; None if there is none at all. See ``newest_of``."""
        return newest_of(self.path)

    def write(self, state: Snapshot) -> None:
        """Write a snapshot, then remove those that are too old; what is good is removed only after that.

        Raises
        ------
        OSError
            It could not be written; those that were there still are.
        """
        target = self.path / SNAPSHOTS / f"step-{state.step:012d}"
        if os.path.lexists(target):  # of an earlier run, and damaged, or it would not be written again
            _remove(target)
        snapshot.write(state, target)
        older = [place for place in places(self.path) if place.name <= target.name]  # newer ones could not be read
        for place in older[self._keep :]:
            with contextlib.suppress(OSError):
                _remove(place)

    def note(self, kind: str, **facts: Any) -> None:
        """Add a line to the log. A log that cannot be written stops nothing."""
        plain = {key: repr(value) if _odd(value) else value for key, value in facts.items()}
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **plain}) + "\n"
        with contextlib.suppress(OSError):
            os.write(self._log, line.encode())

    def close(self) -> None:
        """Let others work here."""
        for fd in (self._log, self._lock):
            with contextlib.suppress(OSError):
                os.close(fd)


def newest_of(path: pathlib.Path) -> Snapshot | None:
    """The newest snapshot of a run that is whole; None if there is none. Damaged ones are told of and passed over.

    Raises
    ------
    SnapshotError
        There are some, and all are damaged.
    """
    refused: list[str] = []
    for place in places(path):
        try:
            found = snapshot.read(place)
        except SnapshotError as error:
            refused.append(str(error))
            continue
        if refused:
            warnings.warn(f"{'; '.join(refused)}; going on from step {found.step} instead", stacklevel=2)
        return found
    if refused:
        raise SnapshotError(
            f"no snapshot in {str(path)!r} can be used: {'; '.join(refused)}; mend them, or choose another run_dir to "
            "begin anew"
        )
    return None


def places(path: pathlib.Path) -> list[pathlib.Path]:
    """Folders of a run's snapshots, newest first."""
    found = [place for place in (path / SNAPSHOTS).iterdir() if NAME.fullmatch(place.name)]
    return sorted(found, key=lambda place: place.name, reverse=True)


def _remove(place: pathlib.Path) -> None:
    if place.is_symlink() or not place.is_dir():
        place.unlink()
    else:
        shutil.rmtree(place)


def _odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
