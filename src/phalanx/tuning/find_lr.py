"""Which learning rate a recipe may take: trained for some steps with a rate that grows, as Smith (2017) proposed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.errors import NonFiniteError, UsageError
from phalanx.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHING = 0.9  # of the loss, over steps
FIRST = 10  # steps that say little, as few losses are smoothed
WIDE = 5  # steps on either side, over which a slope is taken
DIVERGED = 4.0  # times the best smoothed loss


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
        The first rate and the last; each step's is the same factor higher.
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
    changes: dict[str, Any] = {
        "steps": steps,
        "epochs": None,
        "scheduler": functools.partial(exponential, lowest=lowest, growth=growth),
        "on_nonfinite": "stop",
    }
    made = dataclasses.replace(recipe, **changes, schedule_every=None, schedule_on=None)
    lrs: list[float] = []
    losses: list[float] = []
    mean = 0.0
    with made.start(**{"progress": False, **options}) as run:  # type: ignore[arg-type]
        try:
            for report in run:
                if math.isnan(report.lr):
                    raise UsageError("the optimizer keeps its rate to itself, as optax's do; find_lr needs torch's")
                mean = SMOOTHING * mean + (1 - SMOOTHING) * report.loss
                lrs.append(report.lr)
                losses.append(mean / (1 - SMOOTHING ** len(lrs)))
                if losses[-1] > DIVERGED * min(losses):
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
