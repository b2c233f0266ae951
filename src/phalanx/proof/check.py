"""Does a recipe end in the same bits on these devices: a table that a bug report can take along.

A few steps are trained on one device twice, on two, and on all; and what a copy between two devices takes is measured.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phalanx.errors import PhalanxError, UsageError
from phalanx.frameworks import registry
from phalanx.frameworks.registry import all_devices as all_devices
from phalanx.frameworks.registry import device_facts, device_names
from phalanx.recipe import Recipe

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit statuses
DETERMINISTIC = "deterministic"  # what torch's error about such an operation contains


@dataclass(frozen=True)
class Row:
    """One run of the check.

    Attributes
    ----------
    what : str
    devices : tuple of str
    digest : str or None
        None where it ended with an error.
    seconds : float
        Of a step, the first one left out.
    problem : str
        The error, or nothing.
    compared : bool
        Whether its digest is to be the others'.
    """

    what: str
    devices: tuple[str, ...]
    digest: str | None
    seconds: float
    problem: str = ""
    compared: bool = True


def check(recipe: Recipe, devices: Sequence[str], steps: int) -> Iterator[Row]:
    """Train so many steps on one device twice, on two and on all; each row as soon as it is there.

    Parameters
    ----------
    recipe : Recipe
    devices : sequence of str
        As ``Recipe.train`` takes them; a kind alone means all that are visible, at most R.
    steps : int
        At least 2.

    Raises
    ------
    UsageError
        A device cannot be used.
    """
    if steps < 2:
        raise UsageError(f"--steps is {steps}; give at least 2, as the first one is not timed")
    if recipe.data is None:
        raise UsageError("the recipe has data=None, so there is nothing to train on; check one that has data")
    short = dataclasses.replace(recipe, steps=steps, epochs=None)
    named = device_names(devices, recipe.replicas)
    counts = sorted({1, min(2, len(named)), len(named)})
    one = _row(short, "1 device", named[:1])
    yield one
    if DETERMINISTIC in one.problem:
        yield _row(short, "1 device, nondeterministic allowed", named[:1], compared=False, allow="allow")
    yield _row(short, "1 device again", named[:1])
    for count in counts[1:]:
        yield _row(short, f"{count} devices", named[:count])
    if recipe.replicas > 1:
        alone = dataclasses.replace(short, replicas=1)
        yield _row(alone, "1 device, replicas=1: another answer", named[:1], compared=False)


def verdict(rows: Sequence[Row]) -> int:
    """Whether all runs of the recipe ended in the same digest: ``SAME``, ``DIFFERENT`` or ``UNKNOWN``."""
    digests = {row.digest for row in rows if row.compared}
    if None in digests:
        return UNKNOWN
    return SAME if len(digests) == 1 else DIFFERENT


def circumstances(devices: Sequence[str], replicas: int) -> dict[str, str]:
    """What the bits may depend on besides the recipe, and how fast two devices exchange memory."""
    named = device_names(devices, replicas)
    facts = {"machine": f"{platform.system()} {platform.machine()}", "python": platform.python_version()}
    facts |= {name: str(value) for name, value in registry.recorded_environment().items()}
    facts |= device_facts(named)
    return facts


def _row(recipe: Recipe, what: str, devices: Sequence[str], *, compared: bool = True, allow: str = "error") -> Row:
    marks: list[float] = []
    note: Callable[[object], None] = lambda _: marks.append(time.perf_counter())  # noqa: E731
    try:
        result = recipe.train(
            devices=list(devices), nondeterministic=allow, engine="inline", progress=False, callbacks=[note]
        )
    except PhalanxError as error:
        if isinstance(error, UsageError) and DETERMINISTIC not in str(error):
            raise
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        return Row(what, tuple(devices), None, float("nan"), f"{type(error).__name__}: {reason}", compared)
    seconds = (marks[-1] - marks[0]) / (len(marks) - 1)
    return Row(what, tuple(devices), result.digest, seconds, compared=compared)
