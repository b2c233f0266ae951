"""Functions that a library has wrapped travel to workers: its code by name or by value, its globals as it has them."""

import contextlib
import functools
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx

LIBRARY = '''
import functools
import threading

LOCK = threading.Lock()  # cannot be pickled
CALLS = {"count": 0, "factor": 1.0}


def checked(function):
    """As beartype and jaxtyping wrap: with the name and module of what is wrapped."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with LOCK:
            CALLS["count"] += 1
        return CALLS["factor"] * function(*args, **kwargs)

    return wrapper


def recursive(function):
    @functools.wraps(function)
    def wrapper(*args, depth=2, **kwargs):
        return wrapper(*args, depth=depth - 1, **kwargs) if depth and LOCK else function(*args, **kwargs)

    wrapper.note = [wrapper]
    return wrapper
'''
SCALE = 2.0


def loss(output, target):
    return SCALE * F.cross_entropy(output, target)


@functools.singledispatch
def dispatched(output, target):
    raise TypeError(type(output))


@dispatched.register
def _(output: torch.Tensor, target):
    return loss(output, target)


@contextlib.contextmanager
def scaled(factor):
    """A generator function that contextlib wraps, which a loss enters."""
    yield factor * SCALE


def inside(output, target):
    with scaled(0.5) as factor:
        return factor * F.cross_entropy(output, target)


@torch.no_grad()
def constant(target):
    return (target.float() * SCALE).mean()


def beside(output, target):
    return loss(output, target) + constant(target)


@functools.lru_cache
def factor_of(size):
    return SCALE / size


def cached(output, target):
    return factor_of(len(output)) * F.cross_entropy(output, target)


def of_the_user(function):
    """A decorator of this very file, which is the user's."""

    @functools.wraps(function)
    def wrapper(*args):
        return SCALE * function(*args)

    return wrapper


def columns():
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def recipe(loss_fn, **fields):
    made = {"make_model": functools.partial(nn.Linear, 4, 2), "data": columns(), "replicas": 2, "batch_size": 8}
    return phalanx.Recipe(**{**made, "loss_fn": loss_fn, "steps": 4, **fields})


@pytest.fixture
def library(tmp_path, monkeypatch):
    """An installed package, as far as anybody can see."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "wraps_for_these.py").write_text(textwrap.dedent(LIBRARY))
    monkeypatch.syspath_prepend(folder)
    import wraps_for_these

    yield wraps_for_these
    del sys.modules["wraps_for_these"]


WRAPPED = {
    "torch.compile": lambda library: torch.compile(loss, backend="eager"),
    "checked": lambda library: library.checked(loss),
    "checked lambda": lambda library: library.checked(lambda output, target: loss(output, target)),
    "recursive": lambda library: library.recursive(loss),
    "twice": lambda library: library.checked(library.recursive(loss)),
    "singledispatch": lambda library: dispatched,
    "contextmanager": lambda library: inside,
    "no_grad": lambda library: beside,
    "lru_cache": lambda library: cached,
    "enable_grad": lambda library: torch.enable_grad()(loss),
    "the user's": lambda library: of_the_user(loss),
    "weighted": lambda library: phalanx.weighted(loss, lambda output, target: len(target)),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.longest] if name == "torch.compile" else []) for name in WRAPPED]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo asks for it
@pytest.mark.filterwarnings("ignore:loss_fn comes to something else")  # one depends on the size of the share
def test_wrappers_travel(name, library):
    """A loss that a library has wrapped ends in the same digest in workers as in one process."""
    job = recipe(WRAPPED[name](library))
    assert job.train(workers=2, progress=False).digest == job.train(engine="inline", progress=False).digest


def test_what_is_wrapped_decides_the_digest(library):
    """The negative twin: the wrapper calls the very function, with its globals as they are."""
    digests = {recipe(library.checked(function)).train(workers=2, progress=False).digest for function in (loss, inside)}
    assert len(digests) == 2


@pytest.mark.longest
def test_jax_checkpoint_travels():
    """Wrappers of jax, of forward_fn and of the loss inside a jitted function."""
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")

    def forward(params, inputs):
        return inputs @ params["w"]

    def mean(output, target):
        return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()

    x, y = columns()
    for wrap in (jax.checkpoint, jax.jit):
        job = recipe(
            wrap(mean), make_model=lambda key: {"w": jax.random.normal(key, (4, 2))}, forward_fn=wrap(forward),
            data=(x.numpy(), y.numpy().astype("i4")), optimizer=optax.sgd(0.1),
        )  # fmt: skip
        assert job.train(workers=2, progress=False).digest == job.train(engine="inline", progress=False).digest
