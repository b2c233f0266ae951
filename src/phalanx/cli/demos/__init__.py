"""Demonstrations: whole training jobs on real data, a file for each framework, as ``phalanx demo NAME`` runs them."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np

from phalanx.definition.evaluation import Evaluation
from phalanx.errors import UsageError
from phalanx.recipe import Recipe

CHAPTER = "fashion-mnist"  # d2l's; shown with one worker and with all
FRAMEWORKS = {"digits": ("torch",), "iris": ("torch",), CHAPTER: ("torch", "jax", "tinygrad")}
ABOUT = {
    "digits": "digits: LeNet on the 1,797 handwritten digits that come with scikit-learn, 20 epochs, a few seconds.",
    "iris": "iris: a small network on the 150 flowers that come with scikit-learn; a second.",
    CHAPTER: (
        "fashion-mnist: the LeNet of d2l's chapter on several GPUs, with one worker or device and then with all: the "
        "digests have to be equal. Its four files are looked for in --data, and fetched if they are not there; "
        "--digits takes scikit-learn's digits instead, without network. Takes --framework torch, jax or tinygrad."
    ),
}


class Demo(NamedTuple):
    """A training job with its evaluation; ``title`` says in one line what it is."""

    title: str
    recipe: Recipe
    evaluation: Evaluation


def demo(name: str, framework: str, folder: str | None) -> Demo:
    """The demo of this name; ``folder``: of the files of Fashion-MNIST, None for scikit-learn's digits instead.

    Raises
    ------
    UsageError
        There is none, or what it needs is not installed.
    """
    if framework not in FRAMEWORKS.get(name, ()):
        known = "; ".join(f"{one} with --framework {', '.join(kinds)}" for one, kinds in FRAMEWORKS.items())
        raise UsageError(f"NAME is {name!r} and --framework is {framework!r}; there are {known}")
    try:
        return getattr(importlib.import_module(f"{__name__}.in_{framework}"), name.replace("-", "_"))(folder)
    except ImportError as error:
        extra = "demo" if framework == "torch" else framework
        raise UsageError(f"this demo cannot be run ({error}); pip install 'phalanx[{extra}]'") from error


def accuracy(output: Any, target: Any) -> float:
    """Share of samples whose largest output is the target class; works for one sample without a batch axis too."""
    found, wanted = (each.numpy() if hasattr(each, "numpy") else np.asarray(each) for each in (output, target))
    return float((found.argmax(-1) == wanted).mean())
