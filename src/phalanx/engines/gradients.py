"""Copies of the mean gradients that callbacks asked for, by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from phalanx.definition.checks import answer
from phalanx.errors import UsageError
from phalanx.plan.rounds import Moment
from phalanx.seams import Framework
from phalanx.seams.records import Vector


class Gradients:
    """The mean gradients of the latest step, before clipping, as far as somebody asked and this worker owns them.

    Parameters
    ----------
    framework : Framework
    patterns : sequence of str
        Names of parameters, or patterns as of ``fnmatch``.

    Attributes
    ----------
    latest : dict
        By the parameter's number: its name, and its gradient. Parameters without one are left out.
    step : int
        Which step that was; -1 if none was begun here.
    """

    def __init__(self, framework: Framework, patterns: Sequence[str]) -> None:
        self.latest: dict[int, tuple[str, Any]] = {}
        self.step = -1
        self._names: dict[int, str] = {}
        with framework.environment:
            names = list(framework.export(0, copy=False, digest=False).params)
        for pattern in patterns:
            if not (matching := [at for at, name in enumerate(names) if fnmatch.fnmatchcase(name, pattern)]):
                raise UsageError(f"gradients has {pattern!r}, which is not a parameter; {answer(pattern, names, {})}")
            self._names |= {index: names[index] for index in matching}

    def keep(self, moment: Moment, gradient: Vector) -> None:
        """Copy what was asked for: updates may write into gradients."""
        if moment.first:
            self.step, self.latest = moment.step, {}
        there = {index: name for index, name in self._names.items() if gradient and gradient[index] is not None}
        self.latest |= {index: (name, _copied(gradient[index])) for index, name in there.items()}


def named(latest: dict[int, tuple[str, Any]]) -> dict[str, Any]:
    """Gradients by name, in the order of parameters."""
    return dict(latest[index] for index in sorted(latest))


def _copied(array: Any) -> Any:
    """A copy in memory of its own, computed now."""
    copy = array.clone() if hasattr(array, "clone") else array.copy()
    return copy.realize() if hasattr(copy, "realize") else copy
