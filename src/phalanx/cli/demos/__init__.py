"""Demonstrations: whole training jobs on real data, as ``phalanx demo NAME`` runs them."""

from __future__ import annotations

from phalanx.cli.demos.bundled import Demo, digits, iris
from phalanx.cli.demos.fashion import fashion_mnist
from phalanx.errors import UsageError

CHAPTER = "fashion-mnist"  # d2l's; shown with one worker and with all
NAMES = ("digits", "iris", CHAPTER)
ABOUT = {
    "digits": (
        "digits: LeNet on the 1,797 handwritten digits that come with scikit-learn, 20 epochs, a few seconds. Takes "
        "--workers, --devices, --plot, --json, --quiet."
    ),
    "iris": (
        "iris: a small network on the 150 flowers that come with scikit-learn; a second. Takes --framework torch or "
        "tinygrad, --workers, --devices, --plot, --json, --quiet."
    ),
    CHAPTER: (
        "fashion-mnist: the LeNet of d2l's chapter on several GPUs, with one worker or device and then with all: the "
        "digests have to be equal. Its four files are looked for in --data, and fetched if they are not there; "
        "--digits takes scikit-learn's digits instead, without network. Takes all options."
    ),
}
FRAMEWORKS = {"digits": ("torch",), "iris": ("torch", "tinygrad")}


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
    if digits_instead or framework not in FRAMEWORKS[name]:
        raise UsageError(
            f"NAME is {name!r}, which takes --framework {' or '.join(FRAMEWORKS[name])} and no --digits; {CHAPTER} "
            "takes all frameworks and --digits"
        )
    return digits() if name == "digits" else iris(framework)
