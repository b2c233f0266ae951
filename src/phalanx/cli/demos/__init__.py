"""Demonstrations: whole training jobs on real data, as ``phalanx demo NAME`` runs them."""

from __future__ import annotations

from phalanx.cli.demos.bundled import Demo, digits, iris
from phalanx.cli.demos.fashion import fashion_mnist
from phalanx.errors import UsageError

CHAPTER = "fashion-mnist"  # d2l's; shown with one worker and with all
NAMES = ("digits", "iris", CHAPTER)


def demo(name: str, framework: str, folder: str, *, digits_instead: bool) -> Demo:
    """The demo of this name.

    Raises
    ------
    UsageError
        There is none, or the options are another's.
    """
    if name == CHAPTER:
        return fashion_mnist(framework, folder, digits=digits_instead)
    if name not in NAMES:
        raise UsageError(f"NAME is {name!r}; there are {', '.join(NAMES)}")
    if framework != "torch" or digits_instead:
        raise UsageError(f"NAME is {name!r}, which has neither --framework nor --digits; {CHAPTER} has both")
    return digits() if name == "digits" else iris()
