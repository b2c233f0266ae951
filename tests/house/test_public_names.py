"""The public names: exactly these, each with a promise."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import phalanx
from phalanx.run import options

pytestmark = pytest.mark.house

FIRST_RUNG = {
    "Recipe",
    "Plan",
    "Stream",
    "Result",
    "train",
    "train_all",
    "tune",
    "load",
    "close",
    "digest",
    "weighted",
    "current_epoch",
    "current_step",
    "whole",
    "find_lr",
}
PROOF = {"Difference", "Replayed", "Verified", "diff", "replay", "verify"}
SECOND_RUNG = {"Phase", "Run", "StepReport", "Evaluation", "Evaluated", "Incident", "Loaded"}
ERRORS = {
    "PhalanxError", "UsageError", "RunError", "WorkerError", "NonFiniteError", "SnapshotError", "LeftError",
    "Preempted", "CorruptionError", "StateError",
}  # fmt: skip


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class that phalanx itself defines, inherited ones too."""
    for base in owner.__mro__:
        if base.__module__.split(".")[0] != phalanx.__name__:
            continue
        for name, member in vars(base).items():
            documented = inspect.isroutine(member) or isinstance(member, property) or hasattr(member, "__set_name__")
            if documented and not name.startswith("_"):
                yield f"{owner.__name__}.{name}", member


def undocumented(name: str, value: Any) -> list[str]:
    """Which of a public name and its public members have no docstring of their own."""
    found = [(name, value), *(members(value) if inspect.isclass(value) else ())]
    return [spelled for spelled, item in found if not (getattr(item, "__doc__", None) or "").strip()]


def test_public_names_are_these():
    """The package offers exactly the expected names, sorted, each there."""
    assert set(phalanx.__all__) == FIRST_RUNG | SECOND_RUNG | ERRORS | PROOF
    assert list(phalanx.__all__) == sorted(phalanx.__all__)
    assert [name for name in phalanx.__all__ if not hasattr(phalanx, name)] == []


@pytest.mark.parametrize("name", sorted(phalanx.__all__))
def test_public_names_say_what_they_promise(name):
    """A public name and its public methods and properties have docstrings of their own."""
    assert undocumented(name, getattr(phalanx, name)) == []


def test_options_are_the_same_wherever_they_stand():
    """What type checkers accept, and what is checked and there without saying, are the same names, told of once."""
    names = list(options.Options.__annotations__)
    assert list(options.DEFAULTS) == names
    told = inspect.getdoc(phalanx.Recipe.train) or ""
    assert [name for name in names if not re.search(rf"^{name} : ", told, re.MULTILINE)] == []


def test_errors_form_one_tree():
    """Every error is a PhalanxError, and a wrong call is a ValueError too."""
    assert all(issubclass(getattr(phalanx, name), phalanx.PhalanxError) for name in ERRORS)
    assert issubclass(phalanx.UsageError, ValueError)
    assert not issubclass(phalanx.RunError, ValueError)


def test_a_missing_docstring_is_seen():
    """The check notices a method without a docstring, and does not ask for one of what Python adds."""

    class Silent(phalanx.Run):
        """Says what it is."""

        def speak(self):
            pass

    Silent.__module__ = "phalanx.made_up"
    assert undocumented("Silent", Silent) == ["Silent.speak"]
    assert undocumented("StepReport", phalanx.StepReport) == []
