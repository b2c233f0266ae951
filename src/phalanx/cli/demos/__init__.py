"""Demonstrations: whole training jobs on real data, a file for each framework, as ``phalanx demo NAME`` runs them.

The images are Fashion-MNIST's, from four IDX files (http://yann.lecun.com/exdb/mnist), or scikit-learn's digits in
their place.
"""

from __future__ import annotations

import gzip
import importlib
import pathlib
import zlib
from typing import Any, NamedTuple

import numpy as np

from phalanx.definition.evaluation import Evaluation
from phalanx.errors import UsageError
from phalanx.recipe import Recipe

CHAPTER = "fashion-mnist"  # d2l's; shown with one worker and with all
FRAMEWORKS = {"digits": ("torch",), "iris": ("torch",), CHAPTER: ("torch", "jax", "tinygrad")}
SIDE, EPOCHS = 28, 10
UNSIGNED_BYTES = 0x0800  # begins an IDX file, with the number of axes
ADDRESS = "https://github.com/zalandoresearch/fashion-mnist/tree/master/data/fashion"
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


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


class Images(NamedTuple):
    """Images (float32, samples x 1 x 28 x 28, from 0 to 1) with labels, to train on and to test with."""

    title: str
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    batch_size: int

    @property
    def steps(self) -> int:
        """In all epochs."""
        return EPOCHS * -(-len(self.train[0]) // self.batch_size)


def images(folder: str | None, labels: type) -> Images:
    """Fashion-MNIST out of a folder, or the digits; ``labels``: the dtype that a framework wants them to have."""
    if folder is None:
        return _digits(labels)
    arrays = [_read(pathlib.Path(folder), name) for name in FILES]
    splits = [(arrays[0], arrays[1]), (arrays[2], arrays[3])]
    for x, y in splits:
        if x.shape != (*y.shape, SIDE, SIDE):
            raise UsageError(
                f"{folder} has images of shape {x.shape} and labels of shape {y.shape}; give a folder with the four "
                "files of one data set, of images of 28 x 28"
            )
    train, test = [((x[:, None] / np.float32(255)).astype(np.float32), y.astype(labels)) for x, y in splits]
    return Images("Fashion-MNIST", train, test, 256)


def _digits(labels: type) -> Images:
    """Each of the 8 x 8 pixels becomes 3 x 3, with a margin of 2."""
    import sklearn.datasets

    data: Any = sklearn.datasets.load_digits()
    x = np.kron(data.images, np.ones((1, 3, 3))).astype(np.float32)[:, None] / 16
    x, y = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2))), data.target.astype(labels)
    mixed = np.random.default_rng(0).permutation(len(x))
    train, test = ((x[part], y[part]) for part in (mixed[360:], mixed[:360]))
    return Images("scikit-learn's digits", train, test, 32)


def _read(folder: pathlib.Path, name: str) -> np.ndarray:
    """The array in one IDX file of unsigned bytes, plain or gzip."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise UsageError(
            f"{folder} has no {name} or {name}.gz; put the four files of {ADDRESS} there, give another folder with "
            "--data DIR, or use --digits, which needs none"
        )
    content = path.read_bytes()
    try:
        data = gzip.decompress(content) if path.suffix == ".gz" else content
        axes = data[3]
        start, *shape = np.frombuffer(data[: 4 + 4 * axes], ">u4").tolist()
        if start != UNSIGNED_BYTES + axes:
            raise ValueError("its first bytes are other ones")
        return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        raise UsageError(f"{path} is not a whole IDX file of bytes ({error}); delete it, and get it anew") from error
