"""A folder that all hosts see, each through a mount of its own, and what befalls those mounts.

Real are ``mark``, ``is_marked`` and ``first``. What these ask their system for is simulated here: links and folders.
"""

from __future__ import annotations

import collections
import errno
import fnmatch
from types import SimpleNamespace
from typing import NamedTuple

from phalanx.checkpoint import files
from phalanx.checkpoint.directory import MARK
from tests.simulation.replacing import altered

CALL, SLUGGISH = 0.01, 1.5  # seconds that a call takes; the longer ones take more than a silent host has
FAILS = {  # which calls fail at a mount, and how, by each fault
    "full": (("make",), errno.ENOSPC),
    "readonly": (("make", "remove"), errno.EROFS),
    "unread": (("read",), errno.EIO),
    "stale": (("make", "remove", "read"), errno.ESTALE),
}
# A folder that is not mounted any more is an empty one of the host's own, at the same path.
MOUNTS = *FAILS, "sluggish", "unmount"


class Disk:
    """What lies in the folder, and how each host sees it.

    Attributes
    ----------
    faults : dict of int to set of str
        By hosts.
    claims : dict of str to str
        All links that were ever made where all can see them, by their names, with the first word of each.
    """

    def __init__(self, schedule):
        self.schedule, self.faults = schedule, collections.defaultdict(set)
        self.claims, self._shared, self._bare = {}, {}, collections.defaultdict(dict)

    def names(self):
        """What stands for what ``checkpoint.directory`` asks its system for."""
        path = SimpleNamespace(lexists=self.lexists)
        calls = SimpleNamespace(mkdir=self.mkdir, symlink=self.symlink, readlink=self.readlink, path=path)
        return {"os": calls, "files": altered(files, remove=self.remove)}

    def strike(self, fault, rank):
        """Do a fault to the mount of a host, or undo all of them; returns whether that changed anything."""
        faults = self.faults[rank]
        before = set(faults)
        faults.clear() if fault == "remount" else faults.add(fault)
        return faults != before

    def claim(self, run, number):
        """The half that has claimed to go on after an incarnation; None if none has."""
        return self.claims.get(f"{MARK}{run}/{number}")

    def newest_step(self, _):
        """There is one snapshot, which is as good as the state that a run begins with."""
        return -1 if self._fails("read") else 0

    def mkdir(self, path):
        self._make(path, None)

    def symlink(self, word, path):
        if self._make(path, word) is self._shared:
            self.claims.setdefault(path.name, word)

    def readlink(self, path):
        seen = self._called("read")
        if path.name not in seen:
            raise FileNotFoundError
        return seen[path.name]

    def lexists(self, path):
        try:
            return path.name in self._called("read")
        except OSError:
            return False

    def remove(self, path):
        """It goes with all that is in it, at once."""
        seen = self._called("remove")
        for name in [name for name in seen if f"{name}/".startswith(f"{path.name}/")]:
            del seen[name]

    def listed(self, pattern):
        return [name for name in fnmatch.filter(self._called("read"), pattern) if "/" not in name]

    def _make(self, path, content):
        seen, (folder, _, _) = self._called("make"), path.name.rpartition("/")
        if folder and folder not in seen:
            raise FileNotFoundError
        if path.name in seen:
            raise FileExistsError
        seen[path.name] = content
        return seen

    def _called(self, what):
        """What the host that acts sees there, by its names, once a call has come there."""
        faults = self.faults[self.schedule.process.rank]
        self.schedule.wait(seconds=SLUGGISH if "sluggish" in faults else CALL)
        if number := self._fails(what):
            raise OSError(number, errno.errorcode[number])
        return self._bare[self.schedule.process.rank] if "unmount" in faults else self._shared

    def _fails(self, what):
        faults = self.faults[self.schedule.process.rank]
        return next((number for fault, (calls, number) in FAILS.items() if fault in faults and what in calls), 0)


class Path(NamedTuple):
    """The folder, or what is in it, as ``pathlib`` has them."""

    disk: Disk
    name: str = ""

    def __truediv__(self, name):
        return self._replace(name=f"{self.name}/{name}".lstrip("/"))

    def __str__(self):
        return f"/shared/{self.name}"

    def glob(self, pattern):
        return [self / name for name in self.disk.listed(pattern)]
