"""What a demo is made of: a recipe, held-out data, and a metric to show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.definition.evaluation import Evaluation
from phalanx.errors import UsageError
from phalanx.recipe import Recipe


@dataclass(frozen=True)
class Demo:
    """A training job with its evaluation; ``title`` says in one line what it is."""

    title: str
    recipe: Recipe
    evaluation: Evaluation


def accuracy(output: Any, target: Any) -> float:
    """Share of samples whose largest output is the target class; works for one sample without a batch axis too."""
    return float((np.asarray(output).argmax(-1) == np.asarray(target)).mean())


def bundled(name: str) -> Any:
    """One of scikit-learn's bundled data sets, by its loader's name.

    Raises
    ------
    UsageError
        scikit-learn is not installed.
    """
    try:
        import sklearn.datasets
    except ImportError as error:
        raise UsageError(
            "this demo needs scikit-learn's bundled data; install it: pip install 'phalanx[demo]'"
        ) from error
    return getattr(sklearn.datasets, name)()
