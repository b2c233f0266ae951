"""A jax run is saved and goes on from there, to the digest of an uninterrupted one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx
from tests.jax.families import FAMILIES

MLP = FAMILIES["mlp"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["dropout", "bfloat16"])
def test_resuming(name, tmp_path):
    """A run that goes on from its directory ends in the bits of one that was never interrupted."""
    family = dataclasses.replace(FAMILIES[name], optimizer=optax.adam(optax.linear_schedule(0.1, 0.0, 6)))
    whole = family.recipe(2, steps=6).train(engine="inline")
    family.recipe(2, steps=3).train(engine="inline", run_dir=tmp_path)
    resumed = family.recipe(2, steps=6).train(engine="inline", run_dir=tmp_path)
    assert resumed.resumed_from == 3
    assert (resumed.digest, resumed.loss_history) == (whole.digest, whole.loss_history)


@pytest.mark.long
def test_an_optimizer_with_a_random_key_resumes(tmp_path):
    """Random keys in the optimizer's state, old and new ones, are saved too."""

    def noise(key):
        def update(gradient, state, params=None):
            now, then = jax.random.split(state)
            return jax.tree.map(lambda g: -0.1 * g * jax.random.uniform(now), gradient), then

        return optax.GradientTransformation(lambda params: key, update)

    for number, key in enumerate((jax.random.key(3), jax.random.PRNGKey(3))):
        place = tmp_path / str(number)
        whole = MLP.recipe(2, steps=4, optimizer=noise(key)).train(engine="inline")
        MLP.recipe(2, steps=2, optimizer=noise(key)).train(engine="inline", run_dir=place)
        assert MLP.recipe(2, steps=4, optimizer=noise(key)).train(engine="inline", run_dir=place).digest == whole.digest


@pytest.mark.long
def test_saving_and_loading(tmp_path):
    """A saved state is read back as numpy arrays, bit for bit, with the digest of the result; and can be begun from."""
    with FAMILIES["bfloat16"].recipe(2).start(engine="inline") as run:
        for _ in run:
            pass
        run.save(tmp_path / "a")
        result = run.result()
    found = phalanx.load(tmp_path / "a")
    assert (found.digest, found.step, found.loss_history) == (result.digest, 4, result.loss_history)
    assert list(found.weights) == list(result.params)
    for name, array in found.weights.items():
        assert isinstance(array, np.ndarray)
        assert array.dtype == jnp.bfloat16
        assert array.tobytes() == np.asarray(result.params[name]).tobytes()
    with FAMILIES["bfloat16"].recipe(2).start(engine="inline", warm_start=tmp_path / "a") as run:
        begun = run.result()
    assert phalanx.digest(begun.model) == phalanx.digest(result.model)


@pytest.mark.long
def test_what_does_not_fit_is_refused(tmp_path):
    """A snapshot of other parameters or of another optimizer is refused by name; another rate is another recipe's."""
    MLP.recipe(2, steps=2).train(engine="inline", run_dir=tmp_path)
    with pytest.raises(phalanx.UsageError, match="warm_start does not fit the model: missing: embedding"):
        FAMILIES["masked_tokens"].recipe(2).train(engine="inline", warm_start=tmp_path)
    for name, changes in (("seed", {"seed": 1}), ("optimizer", {"optimizer": optax.sgd(0.2, momentum=0.9)})):
        with pytest.raises(phalanx.UsageError, match=rf"another recipe: {name}\b[^;]* is "):
            MLP.recipe(2, **changes).train(engine="inline", run_dir=tmp_path)
    again = MLP.recipe(2, optimizer=optax.sgd(0.1, momentum=0.9)).train(engine="inline", run_dir=tmp_path)
    assert again.resumed_from == 2


@pytest.mark.long
def test_another_environment_warns(tmp_path):
    """Going on with another precision of products warns that bits may differ."""
    MLP.recipe(2, steps=2).train(engine="inline", run_dir=tmp_path)
    with jax.default_matmul_precision("highest"), pytest.warns(UserWarning, match="jax_default_matmul_precision"):
        MLP.recipe(2).train(engine="inline", run_dir=tmp_path)
