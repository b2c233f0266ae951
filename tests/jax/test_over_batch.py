"""Losses over the whole batch in jax: the loop by hand, the big batch's numbers, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx
from tests.jax import by_hand
from tests.jax.families import FAMILIES, apply, dropout
from tests.sampling import sample

MLP = FAMILIES["mlp"]
STEP = optax.sgd(1.0)


def views(params, x, key=None):
    """Two views of each sample, and a number of its own."""
    hidden = jax.nn.relu(apply(params["first"], x))
    one, two = (apply(params["last"], each) for each in (hidden, dropout(hidden, key)))
    return {"one": one, "two": two, "most": hidden.argmax(1)}


def contrast(output, target):
    one, two = (z / jnp.linalg.norm(z, axis=1, keepdims=True) for z in (output["one"], output["two"]))
    logits = jnp.where(target[:, None] == target, 2.0, 0.5) * (one @ two.T)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits))).mean()


def recipe(replicas, **changes):
    return MLP.recipe(replicas, **{"forward_fn": views, "loss_fn": contrast, "loss_over": "batch"} | changes)


def trained(recipe, **options):
    result = recipe.train(progress=False, **(options or {"engine": "inline"}))
    return result.digest, result.loss_history


def back_of(forward, x, key, params):
    """The output of a share, and what goes back from it."""
    return jax.vjp(lambda own: forward(own, x, key), params)


def answer(recipe, fault=None):
    """Outputs of each share, one loss, and back from each share's rows; gradients are folded, nothing is divided."""
    params, state, _, update = by_hand.start(recipe)
    forward = jax.jit(recipe.forward_fn)
    loss_and_seeds = jax.jit(jax.value_and_grad(recipe.loss_fn, allow_int=True))
    losses, structure = [], jax.tree.structure(params)
    for step in range(recipe.plan.steps):
        shares = recipe.plan.shares(step)
        keys = [by_hand.random_key(recipe, step, replica) for replica in range(len(shares))]
        begun = [
            functools.partial(back_of, forward, by_hand.rows(recipe, share)[0], key)
            for share, key in zip(shares, keys, strict=True)
            if len(share)
        ]
        passed = [begin(params) for begin in begun]
        output = {name: np.concatenate([np.asarray(one[name]) for one, _ in passed]) for name in passed[0][0]}
        target = np.concatenate([by_hand.rows(recipe, share)[1] for share in shares if len(share)])
        loss, seeds = loss_and_seeds(output, target)
        ends = np.cumsum([len(share) for share in shares if len(share)])[:-1]
        cut = {name: np.split(np.asarray(seed), ends) for name, seed in seeds.items()}
        if fault == "wrong slice":
            cut = {name: parts[1:] + parts[:1] for name, parts in cut.items()}
        gradients = [
            jax.tree.leaves(back({name: parts[at] for name, parts in cut.items()})[0])
            for at, (_, back) in enumerate(passed)
        ]
        folded = [by_hand.fold([np.asarray(leaf) for leaf in column]) for column in zip(*gradients, strict=True)]
        params, state = update(jax.tree.unflatten(structure, folded), state, params)
        losses.append(float(loss))
    return phalanx.digest(params, state, recipe.plan.steps), losses


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:batch_size is")
@pytest.mark.parametrize("replicas", sample("jax over the batch", [2, 3, 4, 10], 1))
def test_by_hand(replicas):
    """Even, uneven and empty shares have the bits of the loop by hand; other rows have others."""
    assert trained(recipe(replicas)) == answer(recipe(replicas))
    even = recipe(2)
    assert answer(even)[0] != answer(even, "wrong slice")[0]


@pytest.mark.long
def test_the_big_batch():
    """Loss and weights after a step are the big batch's up to rounding, for any R and in parts; a share's are not."""

    def moved(replicas, **changes):
        given = {"forward_fn": lambda params, x: views(params, x), "batch_size": 20, "steps": 1, "optimizer": STEP}
        result = recipe(replicas, **given | changes).train(engine="inline", progress=False)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.params)] + [[result.loss]])

    wanted = moved(1)
    for replicas, parts in ((2, 1), (3, 2), (8, 1), (1, 4)):
        assert np.abs(moved(replicas, micro_batches=parts) - wanted).max() < 1e-5
    assert np.abs(moved(4, loss_over="share") - wanted).max() > 1e-3


@pytest.mark.long
def test_one_replica_and_resumes(tmp_path):
    """R = 1 is the plain loop; a run that stops and goes on is the one that did not, and is verified and replayed."""
    assert trained(recipe(1)) == by_hand.answer(recipe(1))
    trained(recipe(3, steps=2), engine="inline", run_dir=tmp_path)
    wanted = trained(recipe(3))
    assert trained(recipe(3), engine="inline", run_dir=tmp_path) == wanted
    assert phalanx.verify(recipe(3), tmp_path, progress=False).status == 0
    assert phalanx.replay(recipe(3), tmp_path, step=3, replica=1).loss == wanted[1][3]


class Keeping:
    """A loss that counts its calls in Python, where compiled code cannot see it."""

    calls = 0

    def count(self):
        self.calls += 1
        return np.float32(self.calls)

    def __call__(self, output, target):
        return output["one"].std() * jax.pure_callback(self.count, jax.ShapeDtypeStruct((), np.float32))


def weighed(output, target):
    return contrast(output, target), 2.0


def mean(params, x):
    return {"one": views(params, x)["one"].mean(0)}


REFUSED = {
    "weighed": ({"loss_fn": weighed}, phalanx.UsageError, "return the loss alone"),
    "rows": ({"forward_fn": mean}, phalanx.UsageError, r"output\['one'\] is float32\[3\].*one row for each"),
    "model": ({"loss_takes": "model"}, phalanx.UsageError, "loss_takes"),
    "state": ({"loss_fn": Keeping()}, phalanx.StateError, "the loss over the whole batch of step 0"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """A weight, an output without rows, a loss of the model, and one that keeps state are refused."""
    changes, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        trained(recipe(2, **changes))
