"""Demos on scikit-learn's bundled data, which need no network; and what every demo is made of."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from phalanx.definition.evaluation import Evaluation
from phalanx.errors import UsageError
from phalanx.recipe import Recipe

DIGITS_HELD_OUT, IRIS_HELD_OUT = 360, 30  # samples to test with
EPOCHS = 20
BATCH = 32
PEAK_LR = 5e-3


@dataclass(frozen=True)
class Demo:
    """A training job with its evaluation; ``title`` says in one line what it is."""

    title: str
    recipe: Recipe
    evaluation: Evaluation


def accuracy(output: Any, target: Any) -> float:
    """Share of samples whose largest output is the target class; works for one sample without a batch axis too."""
    found, wanted = (each.numpy() if hasattr(each, "numpy") else np.asarray(each) for each in (output, target))
    return float((found.argmax(-1) == wanted).mean())


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


def lenet() -> nn.Module:
    """The LeNet of d2l's multi-GPU chapter, with paddings for 8 x 8 images instead of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * 2 * 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def digits() -> Demo:
    """LeNet on scikit-learn's digits, images of 8 x 8: 1,437 to train on, 360 held out, 20 epochs."""
    data = bundled("load_digits")
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = mixed[:DIGITS_HELD_OUT], mixed[DIGITS_HELD_OUT:]
    steps = EPOCHS * -(-len(train) // BATCH)
    recipe = Recipe(
        lenet,
        (x[train], y[train]),
        nn.functional.cross_entropy,
        replicas=8,
        batch_size=BATCH,
        epochs=EPOCHS,
        optimizer=functools.partial(torch.optim.AdamW, lr=PEAK_LR),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, steps),
    )
    return Demo("LeNet on scikit-learn's digits", recipe, Evaluation(accuracy, (x[test], y[test])))


def network() -> nn.Module:
    """4 inputs, 32 hidden units, 3 classes."""
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))


def iris(framework: str) -> Demo:
    """The ``dp_train`` vignette of ggmlR: one sample per replica and step, clipped gradients, Adam.

    120 flowers as a list of (x, y) samples, 30 held out, 2,000 steps of 4 replicas. ``framework``: torch or tinygrad.
    """
    data = bundled("load_iris")
    x = torch.tensor(data.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(data.target)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).tolist()
    made: tuple[Any, Any, dict[str, Any]] = network, nn.functional.cross_entropy, {"lr": 1e-3}
    samples: list[tuple[Any, Any]] = list(zip(x, y, strict=True))
    if framework == "tinygrad":
        made = _tinygrad_network()
        samples = list(zip(x.numpy(), y.numpy().astype(np.int32), strict=True))
    make_model, loss_fn, more = made
    recipe = Recipe(
        make_model,
        [samples[i] for i in mixed[IRIS_HELD_OUT:]],
        loss_fn,
        replicas=4,
        batch_size=None,
        steps=2000,
        max_norm=5.0,
        **more,
    )
    held_out = Evaluation(accuracy, [samples[i] for i in mixed[:IRIS_HELD_OUT]])
    return Demo(f"a 4-32-3 network on iris, in {framework}", recipe, held_out)


def _tinygrad_network() -> tuple[Any, Any, dict[str, Any]]:
    """The same network in tinygrad, its loss, and what else a recipe gets."""
    try:
        from tinygrad import nn as layers
        from tinygrad.nn.optim import Adam
        from tinygrad.tensor import Tensor
    except ImportError as error:
        raise UsageError(f"--framework tinygrad needs it ({error}); pip install 'phalanx[tinygrad]'") from error

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return output.reshape(1, -1).sparse_categorical_crossentropy(target.reshape(1))

    more = {
        "forward_fn": lambda model, x: x.sequential(model),
        "optimizer": functools.partial(Adam, lr=1e-3),
    }
    return lambda: [layers.Linear(4, 32), Tensor.relu, layers.Linear(32, 3)], loss_fn, more
