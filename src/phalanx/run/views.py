"""Views of a run's state that were given out, and whether somebody wrote through them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.errors import UsageError


class Views:
    """Parameters that a caller may look at until the next step.

    Tensors that count their changes are watched; what is written past the counters (through ``.data``, or numpy) is not
    seen.
    """

    def __init__(self) -> None:
        self._given: dict[str, tuple[Any, int]] = {}

    def give(self, params: Mapping[str, Any]) -> None:
        """Watch these from now on."""
        for name, view in params.items():
            if name not in self._given and (version := getattr(view, "_version", None)) is not None:
                self._given[name] = view, version

    def check(self) -> None:
        """Before the state changes: forget the views, unless one was written.

        Raises
        ------
        UsageError
            It was.
        """
        for name, (view, version) in self._given.items():
            if view._version != version:
                raise UsageError(
                    f"parameter {name!r} was written through run.model or run.params, which are for looking, so no "
                    "step can follow: the weights are not those of any step. Change a copy (run.result()), or begin "
                    "from changed weights: make_model returns them, or warm_start"
                )
        self._given.clear()
