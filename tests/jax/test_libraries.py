"""Libraries whose parameters are plain trees of arrays; each is tried where it is installed."""

import subprocess
import sys

import jax
import optax
import pytest

from tests.jax.families import FAMILIES, FEATURES, cross_entropy

MLP = FAMILIES["mlp"]


def check(make_model, forward):
    """One process and two workers end in one digest; training lowers the loss."""
    recipe = MLP.recipe(4, make_model=make_model, forward_fn=forward, steps=6, optimizer=optax.adamw(0.05))
    one, other = recipe.train(engine="inline"), recipe.train(engine="processes", workers=2)
    assert (one.digest, one.loss_history) == (other.digest, other.loss_history)
    x, y = FEATURES
    first = make_model(jax.random.key(recipe.seed))
    assert cross_entropy(forward(one.model, x), y) < cross_entropy(forward(first, x), y)


def test_equinox():
    """The arrays of an equinox model are the parameters; the rest of it stays in forward_fn."""
    equinox = pytest.importorskip("equinox")
    rest = equinox.partition(equinox.nn.MLP(5, 3, 16, 2, key=jax.random.key(0)), equinox.is_inexact_array)[1]

    def make_model(key):
        return equinox.filter(equinox.nn.MLP(5, 3, 16, 2, key=key), equinox.is_inexact_array)

    check(make_model, lambda params, x: jax.vmap(equinox.combine(params, rest))(x))


def test_flax():
    """The params of a flax module are a dict of arrays."""
    linen = pytest.importorskip("flax.linen")
    module = linen.Sequential([linen.Dense(16), linen.relu, linen.Dense(3)])
    check(lambda key: module.init(key, FEATURES[0])["params"], lambda params, x: module.apply({"params": params}, x))


def test_flax_nnx():
    """The params that nnx splits off a model are a tree of arrays."""
    nnx = pytest.importorskip("flax.nnx")

    def made(key):
        rngs = nnx.Rngs(key)
        model = nnx.Sequential(nnx.Linear(5, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 3, rngs=rngs))
        return nnx.split(model, nnx.Param)

    rest = made(jax.random.key(0))[0]
    check(lambda key: made(key)[1], lambda params, x: nnx.merge(rest, params)(x))


SCRIPT = """
import equinox, jax, numpy, optax, phalanx
class Net(equinox.Module):
    linear: equinox.nn.Linear
    def __init__(self, key):
        self.linear = equinox.nn.Linear(5, 3, key=key)
def make_model(key):
    return equinox.filter(Net(key), equinox.is_inexact_array)
def forward(params, x):
    return x @ params.linear.weight.T
x = numpy.ones((24, 5), "float32")
recipe = phalanx.Recipe(make_model, (x, x[:, :3]), lambda output, y: ((output - y) ** 2).mean(), forward, replicas=2,
                        batch_size=12, steps=2, optimizer=optax.sgd(0.1))
print(recipe.train(engine="inline").steps)
try:
    recipe.train(workers=2, engine="processes")
except phalanx.UsageError as error:
    print(error)
"""


@pytest.mark.long
def test_equinox_classes_of_a_script_are_named():
    """A library that notes its classes does not know a worker's copy of one of ``__main__``: the message says so."""
    pytest.importorskip("equinox")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("2\n"), done.stderr
    assert "Net was made again in a worker process" in done.stdout
    assert "put them into a module of their own" in done.stdout
    assert "called without arguments" not in done.stdout
