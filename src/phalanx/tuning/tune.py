"""How many replicas, workers and threads suit a recipe on this machine: measured, with a picture and one sentence.

A step is trained for a short while in each way, so the figures are those of the user's own model and data. Nothing of
the recipe changes, and nothing is kept: whoever follows the advice on ``replicas`` or ``threads`` chooses another
answer, since both are part of it; ``workers`` changes the speed only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tqdm

from phalanx.definition.batches import BatchShares
from phalanx.definition.fields import Definition
from phalanx.definition.streams import supplied
from phalanx.engines.links import LocalLink
from phalanx.errors import UsageError
from phalanx.frameworks.registry import open_framework
from phalanx.recipe import Recipe
from phalanx.seams import Computed, Framework, RunState, Todo
from phalanx.step import commit, propose
from phalanx.surroundings.presence import shows, usable_cores

REPLICAS = (1, 2, 4, 8, 16)
WARM_STEPS = 3  # of each way, left out: the first ones fault memory in and fill caches
ENOUGH_STEPS = 200
AS_GOOD = 0.95  # of the best throughput; what two measurements of one thing differ by on a shared machine
PARTS = ("input", "forward", "backward", "fold", "update")
FOREVER = 1 << 40  # steps; a run is broken off when its time is over


@dataclass(frozen=True)
class Choice:
    """One way to train, and what it took here.

    Attributes
    ----------
    replicas, workers, threads : int
        R, W, and the intra-op threads of each replica. ``replicas=1`` is the plain loop.
    seconds : float
        Of a step, the median.
    samples_per_second : float
    price : float or None
        Processor time of a step in one process over that of the plain loop with one thread; None for other ways.
    memory : int
        Bytes of all processes after the last step; pages that they share count once. 0 where the system does not tell.
    phases : dict or None
        Seconds of a step that go into input, forward, backward, fold and update, in one process with one thread; None
        for other ways, and where the framework does not tell.
    """

    replicas: int
    workers: int
    threads: int
    seconds: float
    samples_per_second: float
    price: float | None
    memory: int
    phases: dict[str, float] | None = None


@dataclass(frozen=True)
class Tuned:
    """What ``tune`` found.

    Attributes
    ----------
    replicas, workers, threads : int
        What is advised.
    rows : tuple of Choice
        Everything that was measured.
    advice : str
        One sentence with the reason.
    """

    replicas: int
    workers: int
    threads: int
    rows: tuple[Choice, ...]
    advice: str

    def plot(self) -> Any:
        """Samples per second over R, a line for each number of workers or threads; returns the axes.

        Raises
        ------
        UsageError
            matplotlib is not installed.
        """
        from phalanx.run.plots import plot_choices

        lines = []
        for row in self.rows:
            name = f"workers={row.workers}" if row.replicas > 1 else f"plain loop, threads={row.threads}"
            lines.append((name, row.replicas, row.samples_per_second))
        return plot_choices(lines, f"advice: replicas={self.replicas}, workers={self.workers}, threads={self.threads}")


def tune(recipe: Recipe, seconds: float = 60.0, *, progress: bool | str = "auto") -> Tuned:
    """Measure R = 1, 2, 4, 8, 16, threads and workers up to the cores, on this recipe and machine.

    Parameters
    ----------
    recipe : Recipe
        With data. It is trained a little in each way; none of that is kept.
    seconds : float, default 60
        About how long all of it may take, without the starts of workers.
    progress : bool or "auto"
        A progress bar on stderr; "auto": if that is a terminal.

    Returns
    -------
    Tuned

    Raises
    ------
    UsageError
        The recipe has no data, or ``seconds`` is not a positive number.
    RunError
        Training went wrong; ``Recipe.train`` says in which ways.
    """
    if recipe.data is None:
        raise UsageError("tune() needs data to train on, but data is None; give a recipe that has some")
    if not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
        raise UsageError(f"seconds is {seconds!r}; give how long all measurements may take, as in seconds=60")
    ways = candidates(recipe, usable_cores())
    rows = list(tqdm.tqdm(measured(recipe, ways, seconds), total=len(ways), disable=not shows(progress), unit="way"))
    most = recipe.plan.samples or recipe.global_batch
    return advised(None if recipe.batch_size is None else min(recipe.batch_size, most), rows)


def candidates(recipe: Recipe, cores: int) -> list[tuple[int, int, int]]:
    """(R, W, threads) that are worth a look: the plain loop with each number of threads, then replicas and workers."""
    most = min(REPLICAS[-1], recipe.batch_size or recipe.replicas)
    several = sorted({count for count in (*REPLICAS[1:], recipe.replicas) if 1 < count <= max(most, recipe.replicas)})
    numbers = sorted({1, 2, cores // 2, cores} & set(range(1, cores + 1)))
    plain = [(1, 1, threads) for threads in numbers]
    return plain + [(count, workers, 1) for count in several for workers in numbers if workers <= count]


def measured(recipe: Recipe, ways: Sequence[tuple[int, int, int]], seconds: float) -> Iterator[Choice]:
    """Each way as soon as it was tried; after the first, without those that a recipe refuses: no workers, say."""
    plain = math.nan  # measured first
    for replicas, workers, threads in ways:
        try:
            row = _measure(recipe, replicas, workers, threads, seconds / len(ways))
        except UsageError:
            if (replicas, workers, threads) == ways[0]:
                raise
            continue
        if (replicas, workers, threads) == (1, 1, 1):
            plain = row.seconds
        yield dataclasses.replace(row, price=row.seconds / plain if workers == threads == 1 else None)


def advised(samples: int | None, rows: Sequence[Choice]) -> Tuned:
    """The largest R that costs next to nothing, as it leaves room for more workers; with the fastest way for it.

    ``samples``: of a batch; None: one per replica.
    """
    fastest = {}
    for row in rows:
        if row.replicas not in fastest or row.samples_per_second > fastest[row.replicas].samples_per_second:
            fastest[row.replicas] = row
    best = max(fastest.values(), key=lambda row: row.samples_per_second)
    chosen = max(
        (row for row in fastest.values() if row.samples_per_second >= AS_GOOD * best.samples_per_second),
        key=lambda row: row.replicas,
    )
    return Tuned(chosen.replicas, chosen.workers, chosen.threads, tuple(rows), _advice(samples, chosen, rows, fastest))


def _advice(samples: int | None, chosen: Choice, rows: Sequence[Choice], fastest: dict[int, Choice]) -> str:
    plain = max(row.samples_per_second for row in rows if row.replicas == 1)
    said = f"take replicas={chosen.replicas} with workers={chosen.workers}: that"
    if chosen.replicas == 1:
        said = f"take replicas=1 with threads={chosen.threads}: the plain loop"
    ratio = chosen.samples_per_second / plain
    text = f"{said} trains {chosen.samples_per_second:,.0f} samples/s here"
    if chosen.replicas > 1:
        text += f", {ratio:.2f} times the plain loop on its best number of threads; shares have "
        text += f"{_share(samples, chosen.replicas)} samples"
    dearer = [row for row in rows if row.replicas > chosen.replicas and row.price is not None]
    if dearer:
        row = dearer[0]
        lost = fastest[row.replicas].samples_per_second / chosen.samples_per_second
        text += (
            f"; replicas={row.replicas} would make shares of {_share(samples, row.replicas)}, for which a step takes "
            f"{row.price or 0:.2f} times the plain loop's processor time, and train at {lost:.2f} of this speed"
        )
    return text + "."


def _share(samples: int | None, replicas: int) -> str:
    return "1" if samples is None else f"{samples / replicas:g}"


def _measure(recipe: Recipe, replicas: int, workers: int, threads: int, seconds: float) -> Choice:
    # A scheduler may be made for so many steps as the recipe has, and takes no time.
    changes = {"replicas": replicas, "threads": threads, "steps": FOREVER, "epochs": None, "scheduler": None}
    tried = dataclasses.replace(recipe, **changes)
    spans: list[float] = []
    samples = 0
    with tried.start(workers=workers, engine="inline" if workers == 1 else "processes", progress=False) as run:
        for _ in range(WARM_STEPS):
            next(run)
        began = last = time.perf_counter()
        for report in run:
            now = time.perf_counter()
            spans.append(now - last)
            samples += report.samples
            last = now
            if len(spans) == ENOUGH_STEPS or now - began > seconds:
                break
        memory = sum(map(_shared_bytes, [os.getpid(), *run.worker_pids]))
    parts = phases(tried, seconds / 4, WARM_STEPS) if workers == threads == 1 else None
    return Choice(replicas, workers, threads, statistics.median(spans), samples / sum(spans), None, memory, parts)


def _shared_bytes(pid: int) -> int:
    """Memory of a process, a page that several have divided among them."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def phases(definition: Definition, seconds: float, warm: int) -> dict[str, float] | None:
    """Mean seconds that a step, with all of its phases, spends in each part, in one process.

    Over steps of about so many seconds in all, after ``warm`` ones.

    None where the framework does not tell: it may compute forward and backward as one.
    """
    watched: Any = _Watched(open_framework(definition, ()))
    shares = BatchShares(definition, watched.opened)
    link = LocalLink(watched, range(definition.replicas))
    supply = supplied(definition, RunState(), contextlib.nullcontext())
    spent, rounds = [0.0] * len(PARTS), definition.rounds
    began, steps, updates = time.perf_counter(), 0, 0
    with contextlib.closing(supply) if supply else contextlib.nullcontext(), watched.environment:
        while steps <= warm or updates < rounds.updates(steps) or time.perf_counter() - began < seconds:
            if updates == rounds.updates(warm):
                spent, began = [0.0] * len(PARTS), time.perf_counter()
            drawing = time.perf_counter()
            if supply is None:
                dealt = shares.planned(updates)
            else:
                dealt = shares.brought(supply.draw(rounds.at(updates).step))
            link.begin(updates, dealt)
            watched.seconds.clear()
            started = time.perf_counter()
            proposal = propose(watched, link, definition, updates, dealt)
            proposed = time.perf_counter()
            commit(watched, link, updates, proposal)
            if None in watched.seconds:
                return None
            computed = [sum(column) for column in zip(*watched.seconds, strict=True)]
            parts = [*computed, proposed - started - sum(computed), time.perf_counter() - proposed]
            parts[0] += started - drawing if supply else 0.0  # a stream is read before its samples are dealt
            spent = [before + part for before, part in zip(spent, parts, strict=True)]
            updates += 1
            steps = rounds.at(updates - 1).step + 1
    return {name: total / (steps - warm) for name, total in zip(PARTS, spent, strict=True)}


class _Watched:
    """A framework that keeps how long each replica's parts took."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self.seconds: list[tuple[float, float, float] | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._framework, name)

    def gradients(self, todo: Sequence[Todo]) -> Iterator[Computed]:
        for computed in self._framework.gradients(todo):
            self.seconds.append(computed.seconds)
            yield computed
