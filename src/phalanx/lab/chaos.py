"""Chaos on purpose: workers are killed at random while a recipe trains, and the digest must be what it would have been.

Three parts that know nothing of each other: the nemesis kills, the run trains, the checker compares.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.recipe import Recipe
from phalanx.run.result import Result
from phalanx.run.run import Run
from phalanx.seams.records import Incident

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
    steps : int
    incidents : sequence of Incident
    """

    seed: int
    workers: int
    kills: int
    right: bool
    problem: str
    steps: int
    incidents: Sequence[Incident] = field(repr=False, default=())

    @property
    def pauses(self) -> list[float]:
        """Seconds from each death that was noticed to its replacement."""
        pauses: list[float] = []
        since: dict[int, float] = {}
        for incident in self.incidents:
            if incident.kind == "death":
                since.setdefault(incident.worker, incident.seconds)
            elif incident.kind == "replaced" and incident.worker in since:
                pauses.append(incident.seconds - since.pop(incident.worker))
        return pauses


def trial(recipe: Recipe, quiet: Result, kills: int, seed: int, workers: int, evaluation: Any = None) -> Trial:
    """Train ``recipe`` while up to ``kills`` of its workers are killed, and compare with the undisturbed result."""
    pause = STEPS_BETWEEN * max(quiet.seconds / max(quiet.steps, 1), SLOWEST)
    problem, result, over = "", None, threading.Event()
    options = {"workers": workers, "engine": "processes", "progress": False, "evaluation": evaluation}
    with recipe.start(**options) as run, ThreadPoolExecutor(1) as nemesis:
        killed = nemesis.submit(_kill, run, kills, seed, pause, over)
        try:
            run.finish()
            result = run.result()
        except PhalanxError as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            over.set()
    if run.worker_pids:
        problem += f" workers {run.worker_pids} are left"
    right = result is not None and (result.digest, result.loss_history) == (quiet.digest, quiet.loss_history)
    return Trial(seed, workers, killed.result(), right, problem, quiet.steps, run.incidents)


def _kill(run: Run, most: int, seed: int, pause: float, over: threading.Event) -> int:
    """Kill workers of a run as ``seed`` says, until ``most`` are dead or the run is over; returns how many.

    ``pause``: mean seconds from a replacement to the next kill.
    """
    draw, kills = random.Random(seed), 0
    while kills < most and not over.wait(draw.uniform(0.2, 1.8) * pause):
        deaths = _deaths(run)
        for _ in range(2 if draw.random() < AGAIN else 1):
            pids = run.worker_pids
            everybody = draw.random() < ALL_AT_ONCE
            victims = list(pids) if everybody or not pids else [draw.choice(pids)]
            for pid in victims[: most - kills]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
            over.wait(draw.uniform(0, REPLACING))
        while not over.wait(0.002) and not _recovered(run, deaths):
            pass
    return kills


def _deaths(run: Run) -> int:
    return sum(one.kind == "death" for one in run.incidents)


def _recovered(run: Run, deaths: int) -> bool:
    """Whether a run has noticed a death and is past that step: deaths in a row at one step end a run."""
    incidents = [one for one in run.incidents if one.kind != "rollback"]
    latest = {one.worker: one.kind for one in incidents}
    replaced = _deaths(run) > deaths and set(latest.values()) == {"replaced"}
    return replaced and run.steps > max(one.step for one in incidents) + 1


def campaign(
    recipe: Recipe, kills: int, seed: int, workers: int, show: Callable[[Trial], None], evaluation: Any = None
) -> list[Trial]:
    """Trials with the seeds ``seed``, ``seed + 1``, ... until ``kills`` workers were killed."""
    quiet = recipe.train(engine="inline", progress=False, evaluation=evaluation)
    trials: list[Trial] = []
    while (remaining := kills - sum(one.kills for one in trials)) > 0:
        trials.append(trial(recipe, quiet, remaining, seed + len(trials), workers, evaluation))
        show(trials[-1])
        if trials[-1].kills == 0 and len(trials) > kills:
            break  # the run is too short to be hit
    return trials
