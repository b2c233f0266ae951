"""State beside the parameters: running statistics as flax and equinox keep them, settled by the rule of buffers."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx
from tests.jax.by_hand import fold, mean, random_key, rows
from tests.jax.families import FEATURES, cross_entropy, dense

RATE = 0.9


def normalised(params, x, state, key=None):
    """BatchNorm with running statistics, a counter and a constant between two layers; dropout where there is a key."""
    h = x @ params["first"]["w"] + params["first"]["b"]
    now = {"mean": h.mean(0), "var": h.var(0)}
    used = state if key is None else now
    after = {name: RATE * state[name] + (1 - RATE) * value for name, value in now.items()}
    after |= {"count": state["count"] + 1, "table": state["table"]}
    h = jax.nn.relu((h - used["mean"]) / jnp.sqrt(used["var"] + 1e-5)) * state["table"]
    if key is not None:
        h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0)
    return h @ params["last"]["w"] + params["last"]["b"], after


def made(key):
    first, last = jax.random.split(key)
    state = {"mean": jnp.zeros(16), "var": jnp.ones(16), "count": 0, "table": jnp.linspace(0.5, 1.5, 16)}
    return {"first": dense(first, 5, 16), "last": dense(last, 16, 3)}, state


def second_place(params, state, x, key=None):
    return normalised(params, x, state, key)


def recipe(replicas=3, make_model=made, forward_fn=normalised, **changes):
    options = {"batch_size": 9, "steps": 5, "optimizer": optax.adam(0.01)} | changes
    return phalanx.Recipe(make_model, FEATURES, cross_entropy, forward_fn, replicas=replicas, **options)


def answer(recipe, fault=None):
    """The loop by hand: each replica from the step's state; what they leave is settled as buffers are."""
    params, state = recipe.make_model(jax.random.key(recipe.seed))
    state = jax.tree.map(np.asarray, jax.tree.map(jnp.asarray, state))
    opt_state, structure = recipe.optimizer.init(params), jax.tree.structure(params)

    def loss(params, batch, key, state):
        output, after = recipe.forward_fn(params, batch[0], state=state, key=key)
        return cross_entropy(output, batch[1]), after

    value_and_grad = jax.jit(jax.value_and_grad(loss, has_aux=True))

    @jax.jit
    def update(gradient, opt_state, params):
        updates, opt_state = recipe.optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    losses = []
    for step in range(recipe.plan.steps):
        shares, found = [share for share in recipe.plan.shares(step) if len(share)], []
        for replica, indices in enumerate(shares):
            (value, after), gradient = value_and_grad(
                params, rows(recipe, indices), random_key(recipe, step, replica), state
            )
            found.append((float(value), jax.tree.map(np.asarray, gradient), jax.tree.map(np.asarray, after)))
        weights = [len(indices) / max(map(len, shares)) for indices in shares]
        losses.append(mean([value for value, _, _ in found], weights))
        columns = zip(*(jax.tree.leaves(gradient) for _, gradient, _ in found), strict=True)
        leaves = [mean(list(column), weights) for column in columns]
        params, opt_state = update(jax.tree.unflatten(structure, leaves), opt_state, params)
        kept = jax.tree.structure(state)
        pieces = zip(*(jax.tree.leaves(after) for _, _, after in found), strict=True)
        state = jax.tree.unflatten(kept, [settle(list(piece), weights, fault) for piece in pieces])
    return phalanx.digest(params, opt_state, recipe.plan.steps, state), losses


def settle(values, weights, fault):
    if fault == "first" or values[0].dtype.kind != "f" or all(v.tobytes() == values[0].tobytes() for v in values):
        return values[0]
    summed = fold([v if c == 1 else v * v.dtype.type(c) for v, c in zip(values, weights, strict=True)])
    return np.asarray(summed / summed.dtype.type(fold(weights)))


def trained(recipe, workers=1, **options):
    result = recipe.train(workers=workers, engine="inline" if workers == 1 else "processes", **options)
    return result.digest, result.loss_history


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 3])
def test_by_hand(replicas):
    """One replica has the bits of the plain loop; several, of unlike shares too, settle the state as buffers."""
    assert trained(recipe(replicas)) == answer(recipe(replicas))


@pytest.mark.long
def test_a_fault_is_noticed():
    """Statistics of the first replica alone end in other bits."""
    assert trained(recipe())[0] != answer(recipe(), "first")[0]


@pytest.mark.long
def test_where_the_state_stands_in_the_call_is_the_same():
    """``forward_fn(params, state, x)`` and ``forward_fn(params, x, state)`` are understood."""
    assert trained(recipe(forward_fn=second_place))[0] == trained(recipe())[0]


@pytest.mark.long
def test_workers_and_resumes(tmp_path):
    """Two and three workers, and a resumed run, end in one digest; micro-batches hand the state on."""
    wanted = trained(recipe())
    assert trained(recipe(), 2) == trained(recipe(), 3) == wanted
    recipe(steps=2).train(run_dir=tmp_path / "run", engine="inline")
    assert trained(recipe(), 2, run_dir=tmp_path / "run") == wanted
    parts = recipe(batch_size=12, micro_batches=2)
    assert trained(parts, 2) == trained(parts) != trained(recipe(batch_size=12))


def test_what_a_result_has():
    """The model is what ``make_model`` returns; evaluations and predictions use its state, and leave it."""
    with recipe().start(workers=1, engine="inline") as run:
        list(run)
        before = run.result()
        run.evaluate(lambda output, target: (np.argmax(output, 1) == target).mean(), FEATURES)
        result = run.result()
    params, state = result.model
    assert before.digest == result.digest
    assert state["count"] == 5
    expected = normalised(params, FEATURES[0], state)[0]
    assert np.allclose(result.predict(FEATURES), expected, atol=1e-5)


@pytest.mark.long
def test_the_best_and_what_is_saved_have_the_state(tmp_path):
    """``SaveBest``, ``result.save`` and a warm start have the running statistics, too."""
    x, y = FEATURES
    due = phalanx.Evaluation(lambda output, target: jnp.mean(output.argmax(1) == target), (x, y), name="right")
    result = recipe().train(
        engine="inline", evaluation=due, callbacks=[phalanx.callbacks.SaveBest("right/metric", mode="max")]
    )
    names = {"state.mean", "state.var", "state.count", "state.table"}
    assert names < set(result.best.weights)
    result.save(tmp_path / "weights.safetensors")
    begun = recipe(steps=0).train(engine="inline", warm_start=tmp_path / "weights.safetensors")
    for name, leaf in result.model[1].items():
        assert np.array_equal(begun.model[1][name], leaf), name
    assert recipe(steps=0).train(engine="inline", warm_start=result.best).digest


@pytest.mark.long
def test_refused():
    """A model without a state, an output without one, another form, and several devices are told by name."""
    with pytest.raises(phalanx.UsageError, match=r"return \(params, state\)"):
        recipe(make_model=lambda key: made(key)[0]).train(engine="inline")
    with pytest.raises(phalanx.UsageError, match=r"it must return \(output, state\)"):
        recipe(forward_fn=lambda params, x, state: normalised(params, x, state)[0]).train(engine="inline")
    with pytest.raises(phalanx.UsageError, match="a state keeps its form"):
        recipe(forward_fn=lambda params, x, state: (normalised(params, x, state)[0], {})).train(engine="inline")
    with pytest.raises(phalanx.UsageError, match="'mean' is"):
        recipe(make_model=lambda key: (made(key)[0], {"mean": jax.random.key(0)})).train(engine="inline")


def as_by_hand(make_model, forward_fn, tmp_path):
    """The loop's bits for one replica, in workers, and where those are killed and the run is resumed with others."""
    changes = {"make_model": make_model, "forward_fn": forward_fn}
    same, alone = recipe(**changes), recipe(1, **changes)
    wanted = answer(same)
    assert trained(same) == trained(same, 3) == wanted
    assert trained(alone) == answer(alone)
    assert answer(same, "first")[0] != wanted[0]
    for steps, workers in ((2, 2), (5, 3)):
        with recipe(steps=steps, **changes).start(workers=workers, engine="processes", run_dir=tmp_path) as run:
            for report in run:
                if report.step in (0, 3):
                    os.kill(run.worker_pids[0], signal.SIGKILL)
            result = run.result()
    assert (result.digest, result.loss_history) == wanted
    assert (result.resumed_from, {incident.kind for incident in result.incidents}) == (2, {"death", "replaced"})


@pytest.mark.longest
def test_flax(tmp_path):
    """BatchNorm of flax keeps its statistics in ``batch_stats``."""
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(linen.Dense(16)(x))
            return linen.Dense(3)(linen.relu(x))

    net = Net()

    def make_model(key):
        made = net.init(key, FEATURES[0][:2], False)
        return made["params"], made["batch_stats"]

    def forward(params, x, state, key=None):
        if key is None:
            return net.apply({"params": params, "batch_stats": state}, x, False), state
        output, after = net.apply({"params": params, "batch_stats": state}, x, True, mutable=["batch_stats"])
        return output, after["batch_stats"]

    as_by_hand(make_model, forward, tmp_path)


@pytest.mark.longest
def test_flax_nnx(tmp_path):
    """BatchNorm of nnx writes into variables of its own, where ``merge`` copies them; without that flax refuses."""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(5, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.last = nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.norm(self.first(x))))

    def make_model(key):
        return nnx.split(Net(nnx.Rngs(key)), nnx.Param, nnx.BatchStat)[1:]

    def forward(params, x, state, key=None, copy=True):
        model = nnx.merge(graph, params, state, copy=copy)
        if key is None:
            model.eval()
            return model(x), state
        return model(x), nnx.state(model, nnx.BatchStat)

    graph = nnx.graphdef(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    as_by_hand(make_model, forward, tmp_path)
    uncopied = recipe(
        make_model=make_model, forward_fn=lambda params, x, state, key: forward(params, x, state, key, False)
    )
    with pytest.raises(phalanx.WorkerError, match="Cannot mutate BatchStat"):
        uncopied.train(engine="inline")


@pytest.mark.longest
def test_equinox(tmp_path):
    """BatchNorm of equinox keeps its statistics in a ``State``; its classes are in a module that workers import."""
    pytest.importorskip("equinox")
    from tests.jax import equinox_models

    as_by_hand(equinox_models.make_model, equinox_models.forward, tmp_path)
