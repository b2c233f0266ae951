"""R = 1 has the bits of the plain optax loop; R = k those of k shares folded in the fixed order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import phalanx
from tests.jax.by_hand import answer, folded
from tests.jax.families import FAMILIES, FEATURES, OPTIMIZERS, cross_entropy, normal, terms
from tests.sampling import sample

MLP = FAMILIES["mlp"]


def trained(recipe):
    """Digest and loss history of a run."""
    result = recipe.train(engine="inline")
    assert result.steps == len(result.loss_history) == recipe.plan.steps
    return result.digest, result.loss_history


LARGE = [pytest.param(name, marks=pytest.mark.campaign) for name in ("lenet", "transformer")]  # to compile


@pytest.mark.long
@pytest.mark.parametrize("name", [*sample("one jax replica", ["mlp", "whole_loss"], 1), *LARGE])
def test_one_replica(name):
    """A recipe ends in the bits and losses of the plain loop."""
    recipe = FAMILIES[name].recipe(1)
    assert trained(recipe) == answer(recipe)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        *sample("jax replicas", [(name, 3) for name in ("dropout", "masked_tokens", "bfloat16", "no_key")], 1),
        *sample("counts of jax replicas", [("mlp", 4), ("mlp", 7)], 1),
    ],
)
def test_several_replicas(name, replicas):
    """A recipe ends in the bits of its even, uneven or empty shares, weighted and folded by hand."""
    recipe = FAMILIES[name].recipe(replicas)
    assert trained(recipe) == answer(recipe)


@pytest.mark.long
@pytest.mark.parametrize("name", sample("jax optimizers", OPTIMIZERS, 3))
def test_optimizers(name):
    """Optimizers, schedules and what draws random numbers end in the bits of the loop by hand, state included."""
    recipe = MLP.recipe(2, steps=5, batch_size=10, optimizer=OPTIMIZERS[name]())
    assert trained(recipe) == answer(recipe)


@pytest.mark.long
def test_a_factory_of_an_optimizer():
    """A function that returns the transformation gives the same as the transformation."""
    made = MLP.recipe(2, optimizer=functools.partial(optax.sgd, 0.1))
    assert trained(made) == trained(MLP.recipe(2, optimizer=optax.sgd(0.1)))


@pytest.mark.long
@pytest.mark.parametrize("replicas", sample("jax clipping", [1, 2], 1))
def test_clipping(replicas):
    """``max_norm`` is optax.clip_by_global_norm before the optimizer, in one compiled function; it does change bits."""
    recipe = MLP.recipe(replicas, max_norm=0.05)
    assert trained(recipe) == answer(recipe) != trained(MLP.recipe(replicas))


@pytest.mark.long
@pytest.mark.parametrize("fault", sample("jax faults", ["left_to_right", "one_key"], 1))
def test_faults_in_the_loop(fault):
    """Adding in another order, or one random key for all replicas, ends in another digest."""
    recipe = terms(4) if fault == "left_to_right" else FAMILIES["dropout"].recipe(4)
    right, wrong = answer(recipe)[0], answer(recipe, fault)[0]
    assert trained(recipe)[0] == right != wrong


@pytest.mark.long
@pytest.mark.parametrize("convert", sample("jax columns", [jnp.asarray, torch.from_numpy], 1))
def test_columns_of_other_kinds(convert):
    """Columns of jax or torch give the bits of the same numbers in numpy."""
    assert trained(MLP.recipe(2, data=tuple(map(convert, FEATURES)))) == trained(MLP.recipe(2))


@pytest.mark.long
def test_samples_one_by_one():
    """A list of samples, and samples handed over as they are, have the bits of columns and of shares of one."""
    samples = list(zip(*FEATURES, strict=True))
    assert trained(MLP.recipe(2, data=samples)) == trained(MLP.recipe(2))
    alone = MLP.recipe(2, batch_size=None, data=samples)
    assert trained(alone)[1] == pytest.approx(trained(MLP.recipe(2, batch_size=2))[1], rel=1e-5)


class Jittered:
    """A data set that draws random numbers."""

    def __len__(self):
        return len(FEATURES[0])

    def __getitem__(self, index):
        x = FEATURES[0][index] + np.random.standard_normal(5).astype(np.float32)
        return {"x": x, "y": int(FEATURES[1][index])}


@pytest.mark.long
def test_a_data_set_that_draws():
    """Samples that draw have one answer for every seed, and dicts go to forward_fn and target_fn as they are."""

    def forward(params, batch):
        return MLP.forward_fn(params, batch["x"])

    def run(seed):
        return trained(MLP.recipe(2, data=Jittered(), forward_fn=forward, target_fn=lambda b: b["y"], seed=seed))

    assert run(0) == run(0)
    assert run(0) != run(1)


@pytest.mark.long
def test_results_stay_as_they_are():
    """The state that a run hands out in the middle is that of a shorter run, and does not change as it goes on."""
    with MLP.recipe(2).start(engine="inline") as run:
        for report in run:
            if report.step == 1:
                middle = run.result()
        end = run.result()
    assert middle.digest == trained(MLP.recipe(2, steps=2))[0] != end.digest
    assert phalanx.digest(middle.model) != phalanx.digest(end.model)
    assert list(end.params) == ["first.b", "first.w", "last.b", "last.w"]
    assert end.params["last.w"] is end.model["last"]["w"]


@pytest.mark.long
@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}, {}])
def test_what_is_looked_at_is_the_callers_own(options):
    """Dicts that run.model and run.params give may be changed: the next step, and the next look, know nothing of it."""
    with MLP.recipe(2).start(**options) as run:
        for _ in run:
            run.model["last"]["w"] = jnp.zeros_like(run.model["last"]["w"])
            run.params.clear()
            assert run.params["last.w"].any()
        assert run.result().digest == trained(MLP.recipe(2))[0]


@pytest.mark.long
def test_one_bit_changes_the_digest():
    """One bit of a parameter or of the optimizer's state, or the step, changes the digest."""
    params, state, _ = folded(MLP.recipe(2, optimizer=optax.adam(0.1)), 2)
    before = phalanx.digest(params, state, 2)
    flipped = jax.tree.map(lambda leaf: leaf, params)
    flipped["last"]["b"] = jnp.nextafter(params["last"]["b"], jnp.inf)
    counted = (state[0]._replace(count=state[0].count + 1), state[1])
    assert len({before, phalanx.digest(flipped, state, 2), phalanx.digest(params, counted, 2),
                phalanx.digest(params, state, 3), phalanx.digest(params)}) == 5  # fmt: skip
    assert phalanx.digest(params, state, 2) == before


@pytest.mark.long
def test_it_is_compiled_once_per_shape():
    """Three steps with shares of one shape trace the model once, whatever the schedule's rate."""
    traced = []

    def forward(params, x):
        traced.append(x.shape)
        return MLP.forward_fn(params, x)

    schedule = optax.adam(optax.linear_schedule(0.1, 0.0, 3))
    MLP.recipe(2, forward_fn=forward, optimizer=schedule, steps=2).train(engine="inline")
    assert traced == [(4, 5)]


@pytest.mark.long
def test_the_caller_s_modes_change_nothing():
    """Inside jax.disable_jit, and with another kind of random keys, the answer is the same."""
    recipe = FAMILIES["dropout"].recipe(2, steps=1)
    expected = trained(recipe)
    with jax.disable_jit(), jax.default_prng_impl("rbg"):
        assert trained(recipe) == expected


@pytest.mark.long
def test_parameters_of_64_bits():
    """Where 64 bits are allowed and parameters have them, float64 data is used as it is."""
    with jax.enable_x64(True):
        x, y = normal(12, 3).astype(np.float64), normal(12, 1).astype(np.float64)
        recipe = phalanx.Recipe(
            lambda key: {"w": jax.random.normal(key, (3, 1), jnp.float64)}, (x, y), lambda o, t: ((o - t) ** 2).mean(),
            lambda params, x: x @ params["w"], replicas=2, batch_size=6, steps=3, optimizer=optax.adam(0.1),
        )  # fmt: skip
        result = recipe.train(engine="inline")
        assert result.params["w"].dtype == jnp.float64
        assert (result.digest, result.loss_history) == answer(recipe)


def test_names_are_never_equal():
    """Keys with dots in them do not make two arrays one."""
    made = {"a.b": jnp.zeros(3), "a": {"b": jnp.ones(3)}}
    recipe = phalanx.Recipe(
        lambda: made, (normal(4, 3),), lambda o, t: o, lambda p, x: (x[0] * p["a.b"] * p["a"]["b"]).mean(), steps=1
    )
    assert list(recipe.train(engine="inline").params) == ["['a']['b']", "['a.b']"]


@pytest.mark.long
@pytest.mark.parametrize("replicas", sample("jax evaluation", [1, 3], 1))
def test_evaluation(replicas):
    """Every sample counts once, nothing is padded, dropout is off, and the state is as it was."""
    recipe = FAMILIES["dropout"].recipe(replicas)
    x, y = recipe.data

    def accuracy(output, target):
        return (output.argmax(-1) == target).mean()

    with recipe.start(engine="inline") as run:
        for _ in run:
            pass
        result = run.result()
        values = [run.evaluate(accuracy, (x, y), batch_size=size) for size in (20, 7, 7)]
        assert run.result().digest == result.digest
    whole = recipe.forward_fn(result.model, x, key=None)
    assert values[1] == values[2] == pytest.approx(values[0], abs=1e-6)
    assert values[0] == pytest.approx(float((np.asarray(whole).argmax(-1) == y).mean()), abs=1e-6)


@pytest.mark.long
def test_the_reported_numbers():
    """A report has the norm of the mean gradient before clipping, and the rate of the default optimizer."""
    seen = []
    MLP.recipe(1, optimizer=None, lr=0.01, max_norm=0.1, steps=1).train(engine="inline", callbacks=[seen.append])
    MLP.recipe(1, steps=1).train(engine="inline", callbacks=[seen.append])
    recipe = MLP.recipe(1)
    params = recipe.make_model(jax.random.key(0))
    x, y = (column[recipe.plan.indices(0)] for column in FEATURES)
    gradient = jax.grad(lambda p: cross_entropy(recipe.forward_fn(p, x), y))(params)
    assert seen[0].grad_norm == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-6)
    assert seen[1].grad_norm == seen[0].grad_norm
    assert seen[0].lr == 0.01
    assert np.isnan(seen[1].lr)


def test_regression_on_a_single_array():
    """A tree that is one array is trained, and called params."""
    x = normal(12, 3)
    recipe = phalanx.Recipe(
        lambda: jnp.zeros(3), (x, x @ np.array([1, -2, 3], np.float32)), lambda o, t: ((o - t) ** 2).mean(),
        lambda w, x: x @ w, replicas=2, batch_size=12, steps=300, optimizer=optax.sgd(0.1),
    )  # fmt: skip
    result = recipe.train(engine="inline")
    assert np.allclose(result.params["params"], [1, -2, 3], atol=1e-3)
