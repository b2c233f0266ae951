"""How to choose what a recipe leaves open: replicas, workers and threads by measuring, a learning rate by trying.

``tune`` trains for a short while in each way, so its figures are those of the user's own model and data. ``find_lr``
trains with a rate that grows, as Smith (2017) proposed. Nothing of the recipe changes, and nothing is kept. Whoever
follows advice on ``replicas``, ``threads`` or a rate chooses another answer; ``workers`` changes the speed only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tqdm

from phalanx.errors import NonFiniteError, UsageError
from phalanx.recipe import Recipe
from phalanx.surroundings.presence import shows, usable_cores

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPLICAS = (1, 2, 4, 8, 16)
WARM_STEPS = 3  # of each way, left out: the first ones fault memory in and fill caches
ENOUGH_STEPS = 200
AS_GOOD = 0.95  # of the best throughput: two measurements of one thing differ by that on a shared machine
FOREVER = 1 << 40  # steps; a run is broken off when its time is over
SMOOTHING = 0.9  # of the loss, over steps
FIRST = 10  # steps that say little, as few losses are smoothed
WIDE = 5  # steps on either side, over which a slope is taken
DIVERGED = 4.0  # times the best smoothed loss


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
        Processor time of a step in one process, divided by that of the plain loop with one thread; else None.
    memory : int
        Bytes of all processes after the last step; pages that they share count once. 0 where the system does not tell.
    """

    replicas: int
    workers: int
    threads: int
    seconds: float
    samples_per_second: float
    price: float | None
    memory: int


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
    """Yield each way once it was tried. After the first, ways that the recipe refuses are left out."""
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
    """Advise the largest R that costs next to nothing, as it leaves room for more workers, and its fastest way.

    ``samples`` is the number in a batch; None means one per replica.
    """
    good = AS_GOOD * max(row.samples_per_second for row in rows)
    near = [row for row in rows if row.samples_per_second >= good]
    chosen = max(near, key=lambda row: (row.replicas, row.samples_per_second))
    return Tuned(chosen.replicas, chosen.workers, chosen.threads, tuple(rows), _advice(samples, chosen, rows))


def _advice(samples: int | None, chosen: Choice, rows: Sequence[Choice]) -> str:
    speed = f"{chosen.samples_per_second:,.0f} samples/s here"
    if chosen.replicas == 1:
        return f"take replicas=1 with threads={chosen.threads}: the plain loop trains {speed}."
    ratio = chosen.samples_per_second / max(row.samples_per_second for row in rows if row.replicas == 1)
    share = 1 if samples is None else samples / chosen.replicas
    return (
        f"take replicas={chosen.replicas} with workers={chosen.workers}: that trains {speed}, {ratio:.2f} times the "
        f"plain loop on its best number of threads; shares have {share:g} samples."
    )


def _measure(recipe: Recipe, replicas: int, workers: int, threads: int, seconds: float) -> Choice:
    # The scheduler is left out: it may be made for the recipe's number of steps, and it takes no time.
    length = {"steps": FOREVER, "epochs": None, "scheduler": None, "schedule_every": None, "schedule_on": None}
    tried = dataclasses.replace(recipe, replicas=replicas, threads=threads, **length)
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
    return Choice(replicas, workers, threads, statistics.median(spans), samples / sum(spans), None, memory)


def _shared_bytes(pid: int) -> int:
    """Memory of a process in bytes; a page that several processes share is divided among them."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


@dataclass(frozen=True)
class Rates:
    """Losses over learning rates.

    Attributes
    ----------
    lrs, losses : list of float
        The rate of each step, and its smoothed loss.
    suggestion : float
        Where the loss fell fastest.
    """

    lrs: list[float] = field(repr=False)
    losses: list[float] = field(repr=False)
    suggestion: float

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw losses over rates, with the suggestion.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            A new figure's by default.
        """
        from phalanx.run.plots import plot_rates

        return plot_rates(self.lrs, self.losses, self.suggestion, ax)


def find_lr(recipe: Recipe, lowest: float = 1e-7, highest: float = 1.0, steps: int = 100, **options: Any) -> Rates:
    """Train a copy of a recipe with a learning rate that grows from step to step, until the loss diverges.

    Parameters
    ----------
    recipe : Recipe
        With data, and an optimizer of torch; it is not changed.
    lowest, highest : float
        The first rate and the last; each step multiplies the rate by the same factor.
    steps : int, default 100
    **options
        As for ``recipe.train``: ``workers=2``. They do not change what is found.

    Returns
    -------
    Rates
        ``.suggestion``, ``.lrs``, ``.losses``, ``.plot()``.

    Raises
    ------
    UsageError
        There is no data, the rates are in no order, or the optimizer's rate is not that of a parameter group.
    """
    if recipe.data is None or not 0 < lowest < highest < math.inf or steps < 2 * FIRST:
        raise UsageError(
            f"lowest is {lowest}, highest is {highest}, steps is {steps}; find_lr needs 0 < lowest < highest, at least "
            f"{2 * FIRST} steps, and a recipe with data"
        )
    from phalanx.frameworks.torch.schedules import exponential

    growth = (highest / lowest) ** (1 / (steps - 1))
    rising = functools.partial(exponential, lowest=lowest, growth=growth)
    trial = dataclasses.replace(
        recipe, steps=steps, epochs=None, scheduler=rising, on_nonfinite="stop", schedule_every=None, schedule_on=None
    )
    lrs: list[float] = []
    losses: list[float] = []
    mean = 0.0
    with trial.start(**{"progress": False, **options}) as run:  # type: ignore[arg-type]
        try:
            for report in run:
                if math.isnan(report.lr):
                    raise UsageError("the optimizer keeps its rate to itself, as optax's do; find_lr needs torch's")
                mean = SMOOTHING * mean + (1 - SMOOTHING) * report.loss
                lrs.append(report.lr)
                losses.append(mean / (1 - SMOOTHING ** len(lrs)))
                least = min(losses)
                size = least if least > 0 else max(-least, abs(losses[0]))  # a likelihood's loss may be below 0
                if losses[-1] - least > (DIVERGED - 1) * size:
                    break
        except NonFiniteError:  # it diverged in one step
            pass
    return Rates(lrs, losses, _steepest(lrs, losses))


def _steepest(lrs: Sequence[float], losses: Sequence[float]) -> float:
    """The rate at which the loss falls fastest over the logarithm of rates, before its lowest."""
    lowest = min(range(len(losses)), key=losses.__getitem__) if losses else 0
    slopes = [losses[at + WIDE] - losses[at - WIDE] for at in range(FIRST, lowest - WIDE)]
    if not slopes:
        raise UsageError("the loss never fell, so there is no rate to suggest; take a lower lowest, or more steps")
    return lrs[FIRST + min(range(len(slopes)), key=slopes.__getitem__)]
