"""``diff`` of jax recipes down to the first equation whose output differs, with the line of user code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx

X = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
Y = (np.arange(32) % 3).astype(np.int32)


def make():
    """Two layers."""
    return {"v": jax.random.normal(jax.random.key(1), (8, 3)), "w": jax.random.normal(jax.random.key(0), (5, 8))}


def forward(params, x, factor=1.5):
    """A net that scales what is in the middle."""
    hidden = jnp.tanh(x @ params["w"])
    hidden = hidden * factor  # here
    return jax.nn.relu(hidden) @ params["v"]


def scaled(params, x):
    """The same with another factor."""
    return forward(params, x, 1.75)


def drawn(params, x, key):
    """The same with noise, where a key is given."""
    noise = 0.0 if key is None else jax.random.normal(key, x.shape)
    return forward(params, x + noise)


def loss(output, target):
    """The usual one."""
    return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()


def doubled(output, target):
    """One of twice the output."""
    return loss(output * 2, target)


@jax.custom_vjp
def bent(x):
    """The same forward as ``forward``'s output, with another gradient."""
    return x


bent.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * 0.5,))


def job(forward_fn=forward, loss_fn=loss):
    """A recipe."""
    return phalanx.Recipe(
        make, (X, Y), loss_fn, forward_fn=forward_fn, replicas=2, batch_size=8, steps=2, optimizer=optax.sgd(0.1)
    )


def difference(tmp_path, one, other):
    """What two runs differ in, by equations."""
    for name, recipe in (("a", one), ("b", other)):
        recipe.train(engine="inline", run_dir=tmp_path / name, progress=False)
    return phalanx.diff(tmp_path / "a", tmp_path / "b", recipes=(one, other), operations=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "phase", "name", "line"),
    [
        ({"forward_fn": scaled}, "forward", "mul[0]", "hidden = hidden * factor  # here"),
        ({"loss_fn": doubled}, "loss", " against ", "return loss(output * 2, target)"),
        ({"forward_fn": lambda params, x: bent(forward(params, x))}, "gradient", " against ", ""),
    ],
)
def test_the_first_equation_is_named(tmp_path, changes, phase, name, line):
    """In forward, loss and the backward pass: the phase, the primitive and, where there is one, the line."""
    found = difference(tmp_path, job(), job(**changes))
    assert (found.step, found.replica) == (0, 0)
    assert found.phase == phase, str(found)
    assert name in found.name
    assert line in found.line


@pytest.mark.long
def test_equations_with_a_key_are_done_as_in_a_step():
    """What is told as the output of a forward pass that draws is that of the step, not that of an evaluation."""
    from phalanx.proof.diff import computed
    from phalanx.proof.instant import Instant

    with Instant(job(drawn)) as instant:
        told = computed(instant, 1, operations=True)
        replayed = phalanx.replay(job(drawn), step=0, replica=1)
    names = [item.name for item in told]
    assert "exception" not in names
    assert {"tanh", "dot_general"} <= set(names)
    expected = loss(replayed.output, replayed.batch[1])
    assert np.isclose(expected, replayed.loss, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("nondiff", [(), (1,)])
@pytest.mark.parametrize("options", [{"engine": "processes", "workers": 2}, {"workers": "auto"}])
def test_gradients_of_ones_own_travel(nondiff, options):
    """A function with a gradient of its own that a closure holds goes to workers, and is used there."""

    def made(factor):
        @functools.partial(jax.custom_vjp, nondiff_argnums=nondiff)
        def own(x, by):
            return x

        def backward(*given):
            return (given[-1] * factor, None)[: 2 - len(nondiff)]

        own.defvjp(lambda x, by: (x, None), backward)
        return job(forward_fn=lambda params, x: own(forward(params, x), 1.0))

    expected = made(0.5).train(engine="inline").digest
    assert made(0.5).train(**options).digest == expected
    assert job().train(engine="inline").digest != expected
