"""Starting worker processes: which zygotes are kept warm between runs, and what they import for workers beforehand.

The caller's process is never forked. ``close`` ends what is kept.
"""

from __future__ import annotations

import atexit
import contextlib
import select
import sys
import threading
from collections.abc import Mapping, Sequence

from phalanx.definition.fields import Definition
from phalanx.engines.processes import environment
from phalanx.engines.processes.handle import WorkerHandle
from phalanx.engines.processes.serialization import needed
from phalanx.engines.processes.starter import Zygote
from phalanx.errors import StartError
from phalanx.frameworks.registry import reduced
from phalanx.surroundings import forks
from phalanx.surroundings.imports import installed

CAPABLE = hasattr(select, "poll")  # of having other processes work for a run
ATTEMPTS, OWN_ENDS = 20, 2  # zygotes to start a worker with, and how many of them may end by themselves
MOST_HARMS = 3  # imports that cost a zygote, until nothing is imported beforehand any more


class Warm:
    """What is kept for the next run: a zygote, and one more if jax was imported when there was one without.

    Attributes
    ----------
    left_out : set of str
        The packages that zygotes do not import beforehand, as these could not be forked after that.
    """

    def __init__(self) -> None:
        self.leave()
        forks.own(self)

    def leave(self) -> None:
        """See ``forks.Owned``."""
        self._lock = threading.RLock()
        self._zygotes: dict[bool, Zygote] = {}
        self._modules: dict[str, str] = {}  # what workers import, and from where
        self.left_out: set[str] = set()
        self._harms = 0

    def zygote(self) -> Zygote:
        """The zygote, started if there is none."""
        with self._lock:
            jax = "jax" in sys.modules
            if jax not in self._zygotes or not self._zygotes[jax].usable:
                self._drop(jax)
                self._zygotes[jax] = Zygote(jax=jax)
                atexit.unregister(self.close)
                atexit.register(self.close)
                self._tell(jax)
            return self._zygotes[jax]

    def prepare(self, definition: Definition) -> None:
        """Start the zygote if there is none, and have it import what the recipe's code comes from, beside the caller.

        Raises
        ------
        OSError, UsageError
            No process can be started here.
        """
        self.zygote()
        code = [value for value in vars(definition).values() if callable(value)]
        self.need(installed([*needed(code, reduced), type(definition.data).__module__]))

    def need(self, modules: Mapping[str, str]) -> None:
        """Have zygotes import these modules, which lie in these files, before their next workers."""
        with self._lock:
            if modules.items() - self._modules.items():
                self._modules |= modules
                for jax in self._zygotes:
                    self._tell(jax)

    def _tell(self, jax: bool) -> None:
        """Tell a zygote what workers import; jax only where that was made ready for it."""
        zygote = self._zygotes[jax]
        if self._modules and self._harms < MOST_HARMS and zygote.usable and (jax or "jax" not in self._modules):
            with contextlib.suppress(StartError):  # it has ended, which shows elsewhere
                zygote.want({**environment.importing(), "modules": self._modules, "left_out": list(self.left_out)})

    def handle(self, number: int, memories: Sequence[int]) -> WorkerHandle:
        """A new worker; its zygote is started again if it has ended, at whatever moment.

        Raises
        ------
        StartError
            No zygote lives long enough.
        """
        lost: list[StartError] = []
        while True:
            try:
                return WorkerHandle(self.zygote(), number, memories)
            except StartError as error:
                lost.append(error)
                if len(lost) == ATTEMPTS or sum(not each.outside for each in lost) == OWN_ENDS:
                    break
        raise StartError(f"{len(lost)} times in a row, the last time: {lost[-1]}", outside=False) from lost[-1]

    @property
    def awake(self) -> bool:
        """Whether a worker would start at once."""
        zygote = self._zygotes.get("jax" in sys.modules)
        return zygote is not None and zygote.usable and zygote.awake

    def close(self) -> None:
        """End what is kept."""
        with self._lock:
            for jax in list(self._zygotes):
                self._drop(jax)

    def _drop(self, jax: bool) -> None:
        zygote = self._zygotes.pop(jax, None)
        if zygote is None:
            return
        zygote.close()
        self._harms += bool(zygote.harmful)
        self.left_out.update(zygote.harmful)


WARM = Warm()
