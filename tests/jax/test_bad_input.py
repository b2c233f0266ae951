"""Wrong calls with jax are refused with a message that names the argument, its value and the way out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import phalanx
from tests.jax.families import FAMILIES, FEATURES, cross_entropy

MLP = FAMILIES["mlp"]
X, Y = FEATURES


def go(**changes):
    """Train a recipe that is right but for the changes."""
    return MLP.recipe(**{"replicas": 2, "steps": 2} | changes).train(engine="inline")


def with_leaf(leaf):
    return lambda key: MLP.make_model(key) | {"odd": leaf}


def returning(value):
    return lambda output, target: value(cross_entropy(output, target))


def bare(params, batch):
    return {"a": 1}


CASES = {
    "no-forward": (lambda: go(forward_fn=None), "forward_fn=lambda params"),
    "phases": (
        lambda: go(forward_fn=None, loss_fn=None, optimizer=None, phases=[phalanx.Phase(bare, optimizer=optax.sgd(1))]),
        "phases is given",
        "optax.multi_transform",
    ),
    "loss-of-the-model": (
        lambda: go(loss_takes="model", loss_fn=lambda params, batch: 0),
        "loss_takes is 'model'",
        "let forward_fn return the loss itself",
    ),
    "buffers": (lambda: go(buffers={"queue": "first"}), "buffers is given, which is for torch", "leave it out"),
    "precision": (lambda: go(precision="bfloat16"), "precision is 'bfloat16'", "forward_fn"),
    "scheduler": (lambda: go(scheduler=lambda optimizer: None), "scheduler", "cosine_decay_schedule"),
    "numpy-leaf": (lambda: go(make_model=with_leaf(np.ones(3))), "'odd' is a ndarray", "jnp.asarray"),
    "integer-leaf": (lambda: go(make_model=with_leaf(jnp.arange(3))), "'odd' is a int32[3]", "floating"),
    "function-leaf": (lambda: go(make_model=with_leaf(jax.nn.relu)), "'odd'", "forward_fn"),
    "all-numpy": (lambda: go(make_model=lambda: {"w": X}), "make_model returned a dict", "jax arrays"),
    "make-model-raises": (lambda: go(make_model=lambda key: jax.random.split(key, -1)), "make_model raised"),
    "optimizer-torch": (
        lambda: go(optimizer=functools.partial(torch.optim.SGD, lr=0.1)),
        "optimizer raised TypeError",
        "optax.adamw(1e-3)",
    ),
    "optimizer-other": (lambda: go(optimizer=lambda: 3), "optimizer returned a int", "optax.adamw(1e-3)"),
    "optimizer-string": (lambda: go(optimizer="adam"), "optimizer is 'adam'"),
    "optimizer-needs-more": (
        lambda: go(optimizer=optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())),
        "optimizer raised TypeError",
        "value",
    ),
    "double": (lambda: go(data=(X.astype(np.float64), Y)), "data[0] is float64", ".astype(numpy.float32)"),
    "double-target": (lambda: go(data=(X, Y.astype(np.float64))), "data[1] is float64"),
    "wide-integers": (lambda: go(data=(X, Y + 2**40)), "data[1] is int64", "32 bits", "jax_enable_x64"),
    "text": (lambda: go(data=[(row, "a") for row in X]), "data[1] is a ", "numbers"),
    "loss-vector": (lambda: go(loss_fn=lambda output, target: output[:, 0]), "loss_fn returned", "loss.mean()"),
    "loss-number": (lambda: go(loss_fn=lambda output, target: 1.0), "loss_fn returned a float"),
    "loss-dict": (
        lambda: go(loss_fn=None, forward_fn=bare),
        "forward_fn returned dict(a int); named losses are for torch",
    ),
    "weight-negative": (lambda: go(loss_fn=returning(lambda loss: (loss, -1))), "loss_fn returned the weight"),
    "weight-vector": (lambda: go(loss_fn=returning(lambda loss: (loss, jnp.ones(2)))), "of shape (2,)"),
    "device": (lambda: MLP.recipe(2).train(devices=["npu:3"]), "devices names 'npu:3'", "['cpu']"),
    "digest-optimizer-missing-jax": (lambda: phalanx.digest({"a": 1}), "digest takes"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    """The message has everything that the case asks for."""
    call, *wanted = CASES[name]
    with pytest.raises(phalanx.UsageError) as caught:
        call()
    assert [text for text in wanted if text not in str(caught.value)] == []


POISONED = (np.where(np.arange(20)[:, None] == 7, np.nan, X).astype(np.float32), Y)


@pytest.mark.long
def test_a_nonfinite_value_stops_the_run():
    """The replica with the sample that is not finite is named, and nothing was updated."""
    with pytest.raises(phalanx.NonFiniteError, match="the loss is nan") as caught:
        go(data=POISONED, shuffle=False)
    assert (caught.value.step, caught.value.replica) == (0, 1)
    assert 7 in caught.value.samples
    assert caught.value.result.digest == MLP.recipe(2, data=FEATURES, steps=0).train(engine="inline").digest


@pytest.mark.long
def test_a_nonfinite_step_is_skipped():
    """A skipped step leaves parameters and optimizer as they were; ignored, it does not."""
    skipped, ignored = (go(data=POISONED, shuffle=False, steps=1, on_nonfinite=way) for way in ("skip", "ignore"))
    before = MLP.recipe(2, steps=0).train(engine="inline")
    assert phalanx.digest(skipped.model) == phalanx.digest(before.model)
    assert np.isnan(ignored.params["last.b"]).any()


@pytest.mark.long
def test_a_large_norm_is_no_nonfinite_value():
    """Gradients whose norm overflows are finite all the same."""
    recipe = MLP.recipe(2, steps=1, loss_fn=returning(lambda loss: loss * 1e25), optimizer=optax.sgd(1e-30))
    seen = []
    recipe.train(engine="inline", callbacks=[seen.append])
    assert np.isinf(seen[0].grad_norm)
