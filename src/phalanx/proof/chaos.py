"""Chaos on purpose: workers are killed at random while a recipe trains, and the digest must be what it would have been.

Three parts that know nothing of each other: the nemesis kills, the run trains, the checker compares.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from phalanx.engines.processes.starter import WARM
from phalanx.errors import PhalanxError
from phalanx.recipe import Recipe
from phalanx.run.result import Result
from phalanx.run.run import Run
from phalanx.seams.events import Incident

STEPS_BETWEEN = 3.0  # kills, on the average
ALL_AT_ONCE = 0.05  # of the kills hit every worker
AGAIN = 0.2  # of the kills are followed by one while replacements start
REPLACING = 0.06  # seconds that this may take
SLOWEST = 0.03  # seconds that the first step of a replacement may take, even if others take less


@dataclass(frozen=True)
class Trial:
    """One run under fire.

    Attributes
    ----------
    seed, workers : int
    kills : int
        SIGKILLs that hit a living worker.
    right : bool
        Whether digest and losses are those of the undisturbed run.
    problem : str
        What else went wrong, or nothing.
    seconds : float
        From the first step to the last.
    steps : int
    incidents : sequence of Incident
        In seconds since the first step began.
    """

    seed: int
    workers: int
    kills: int
    right: bool
    problem: str
    seconds: float
    steps: int
    incidents: Sequence[Incident] = field(repr=False, default=())

    @property
    def pauses(self) -> list[float]:
        """Seconds from each death that was noticed to its replacement."""
        found: list[float] = []
        since: dict[int, float] = {}
        for incident in self.incidents:
            if incident.kind == "death":
                since.setdefault(incident.worker, incident.seconds)
            elif incident.kind == "replaced" and incident.worker in since:
                found.append(incident.seconds - since.pop(incident.worker))
        return found


class Nemesis(threading.Thread):
    """Kills workers of a run, when and whom its seed says; only processes that the run names as its workers.

    Parameters
    ----------
    run : Run
    kills : int
        It stops after so many.
    seed : int
    pause : float
        Mean seconds from a replacement to the next kill.
    """

    def __init__(self, run: Run, kills: int, seed: int, pause: float) -> None:
        super().__init__(name="nemesis", daemon=True)
        self.kills = 0
        self._run = run
        self._most = kills
        self._random = random.Random(seed)
        self._pause = pause
        self._stopped = threading.Event()

    def run(self) -> None:
        """Kill until enough are dead or the run is over."""
        while self.kills < self._most and not self._stopped.wait(self._random.uniform(0.2, 1.8) * self._pause):
            noticed = self._noticed()
            for _ in range(2 if self._random.random() < AGAIN else 1):
                pids = self._run.worker_pids
                everybody = self._random.random() < ALL_AT_ONCE
                victims = list(pids) if everybody or not pids else [self._random.choice(pids)]
                for pid in victims[: self._most - self.kills]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        self.kills += 1
                self._stopped.wait(self._random.uniform(0, REPLACING))
            self._await_progress(noticed)

    def _noticed(self) -> int:
        return sum(one.kind == "death" for one in self._run.incidents)

    def _await_progress(self, noticed: int) -> None:
        """Deaths in a row at one place end a run: wait until it is past that."""
        while not self._stopped.wait(0.002):
            if self._noticed() == noticed:
                continue
            found = [one for one in self._run.incidents if one.kind != "rollback"]
            latest = {one.worker: one.kind for one in found}
            if latest and set(latest.values()) == {"replaced"} and self._run.steps > max(one.step for one in found) + 1:
                return

    def stop(self) -> None:
        """Come to an end."""
        self._stopped.set()
        self.join()


def trial(recipe: Recipe, quiet: Result, kills: int, seed: int, workers: int) -> Trial:
    """Train ``recipe`` while up to ``kills`` of its workers are killed, and compare with the undisturbed result."""
    WARM.zygote()  # stays
    before = _descriptors()
    found = _under_fire(recipe, quiet, kills, seed, workers)
    left = _descriptors() - before
    return found if left <= 0 else replace(found, problem=f"{found.problem} {left} descriptors are left")


def _under_fire(recipe: Recipe, quiet: Result, kills: int, seed: int, workers: int) -> Trial:
    pause = STEPS_BETWEEN * max(quiet.seconds / max(quiet.steps, 1), SLOWEST)
    began, problem, result = time.perf_counter(), "", None
    with recipe.start(workers=workers, engine="processes", progress=False) as run:
        nemesis = Nemesis(run, kills, seed, pause)
        nemesis.start()
        try:
            run.finish()
            result = run.result()
        except PhalanxError as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            nemesis.stop()
    if run.worker_pids:
        problem += f" workers {run.worker_pids} are left"
    right = result is not None and (result.digest, result.loss_history) == (quiet.digest, quiet.loss_history)
    seconds = time.perf_counter() - began if result is None else result.seconds
    first = began if result is None else began + result.startup_seconds
    incidents = tuple(one._replace(seconds=one.seconds - first) for one in run.incidents)
    return Trial(seed, workers, nemesis.kills, right, problem, seconds, quiet.steps, incidents)


def campaign(recipe: Recipe, kills: int, seed: int, workers: int, show: Callable[[Trial], None]) -> list[Trial]:
    """Trials with the seeds ``seed``, ``seed + 1``, ... until so many workers were killed."""
    quiet = recipe.train(engine="inline", progress=False)
    trials: list[Trial] = []
    while (left := kills - sum(one.kills for one in trials)) > 0:
        trials.append(trial(recipe, quiet, left, seed + len(trials), workers))
        show(trials[-1])
        if trials[-1].kills == 0 and len(trials) > kills:
            break  # the run is too short to be hit
    return trials


def _descriptors() -> int:
    """Open descriptors of this process; 0 where that cannot be seen."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
