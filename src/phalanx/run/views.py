"""Views of a run's state that were given out, and whether somebody changed them."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.errors import UsageError
from phalanx.seams import Exported


class Views:
    """Models and parameters that a caller may look at. Who keeps one may change it at any later step."""

    def __init__(self) -> None:
        self._given: set[Callable[[], str]] = set()

    def give(self, shown: Exported) -> None:
        """Watch these from now on."""
        self._given.add(shown.changed)

    def check(self) -> None:
        """Before the state changes: whether all of them are as they were.

        Raises
        ------
        UsageError
            One is not.
        """
        for changed in self._given:
            if told := changed():
                raise UsageError(
                    f"{told} through run.model or run.params, which are for looking, in every engine, so no step can "
                    "follow. Put back what is no weight; use run.predict or run.evaluate for outputs. For training, "
                    "make it so in make_model; in user code, let it follow from phalanx.current_step(); or begin "
                    "another run from a changed copy of run.result().model, with warm_start for its weights"
                )
