"""Where the time of a step goes, operation by operation."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any

from phalanx.definition import checks
from phalanx.errors import UsageError


class Profile:
    """Profiles some steps with torch.profiler; the files open in https://ui.perfetto.dev and chrome://tracing.

    It looks at the process that it is in, so the recipe is trained in that: ``engine="inline"``, or several devices.

    Parameters
    ----------
    steps : iterable of int, default (3, 4, 5)
        Which, counted from 0; the first ones are slower than the rest.
    where : path-like, default "profile"
        A folder; each step becomes a file ``step-K.json`` in it.

    Raises
    ------
    UsageError
        A step is no integer of at least 0.
    """

    def __init__(self, steps: Iterable[int] = (3, 4, 5), where: Any = "profile") -> None:
        self._steps = frozenset(checks.integer("steps", step, least=0) for step in steps)
        self._folder = checks.path("where", where)
        self._run: Any = None
        self._profiler: Any = None
        self.files: list[pathlib.Path] = []

    def begin(self, run: Any) -> None:
        """Begin, if the first step is one of them."""
        self._run = run
        self._start(run.steps)

    def step(self, report: Any) -> None:
        """Write a step's profile, and begin the next."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.__exit__(None, None, None)
            self._folder.mkdir(parents=True, exist_ok=True)
            self.files.append(self._folder / f"step-{report.step}.json")
            profiler.export_chrome_trace(str(self.files[-1]))
        self._start(report.step + 1)

    def end(self, result: Any) -> None:
        """Leave a profile that was begun for a step that did not come."""
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._profiler = None

    def _start(self, step: int) -> None:
        if step not in self._steps:
            return
        if self._run.worker_pids:
            raise UsageError(
                "Profile sees this process only, and replicas are computed by worker processes; train with "
                "engine='inline' to profile (same answer)"
            )
        from torch.profiler import profile

        self._profiler = profile()
        self._profiler.__enter__()
