"""XLA's threads are the recipe's; who uses torch never imports jax; the automatic engine stays in this process."""

import subprocess
import sys

import pytest

from tests.jax.families import FAMILIES

WIDE = """
import os, sys
import numpy as np
import jax, jax.numpy as jnp, optax
import phalanx

def make_model(key):
    return {"w": jax.random.normal(key, (3, 40_000)), "b": jnp.zeros(40_000)}

def forward(params, x):
    return (x @ params["w"] + params["b"]) ** 2

x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)

def run(threads):
    recipe = phalanx.Recipe(make_model, (x, x), lambda output, target: jnp.sin(output).mean(), forward, replicas=1,
                            batch_size=64, steps=2, optimizer=optax.sgd(0.1), threads=threads)
    return recipe.train(engine="inline").digest
"""


def ran(text, **environment):
    """What a script prints in an interpreter of its own, where NPROC is not set."""
    import os

    inherited = {name: value for name, value in os.environ.items() if name not in ("NPROC", "PJRT_NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=100, env=inherited | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_threads_are_the_recipe_s():
    """A run starts XLA with its own number of threads; two do change the bits of a wide layer, so that matters."""
    one, again, two = (ran(WIDE + f"print(run({threads}))") for threads in (1, 1, 2))
    assert one == again != two


def test_a_backend_that_was_started_before_is_refused():
    """A backend with other threads is refused with the way out; one with as many is fine."""
    before = WIDE + "jnp.ones(3).block_until_ready()\n"
    refused = before + "try:\n    run(1)\nexcept phalanx.UsageError as error:\n    print(error)"
    message = " ".join(ran(refused, NPROC="3"))
    assert "threads is 1" in message
    assert "with 3 threads" in message
    assert "NPROC=1" in message
    assert ran(before + "print(run(1))", NPROC="1") == ran(WIDE + "print(run(1))")


def test_the_environment_is_left_as_it_was():
    """What a run sets for XLA to read is gone afterwards."""
    told = "run(1); print(os.environ.get('NPROC'), os.environ.get('PJRT_NPROC'))"
    assert ran(WIDE + told, PJRT_NPROC="7") == ["None", "7"]


def test_torch_users_never_import_jax():
    """A torch recipe is trained, evaluated, saved and digested without importing jax."""
    told = """
import sys, tempfile, numpy as np, torch, phalanx
x, y = np.zeros((8, 3), np.float32), np.arange(8) % 2
recipe = phalanx.Recipe(lambda: torch.nn.Linear(3, 2), (x, y), torch.nn.functional.cross_entropy, replicas=2, steps=2)
with tempfile.TemporaryDirectory() as place:
    result = recipe.train(engine="inline", run_dir=place)
    with recipe.start(engine="inline") as run:
        run.evaluate(lambda output, target: 1.0, (x, y))
    phalanx.load(place)
phalanx.digest(result.model)
print(sorted({"jax", "optax"} & {name.split(".")[0] for name in sys.modules}))
"""
    assert ran(told) == ["[]"]


def test_without_jax_it_is_named():
    """A factory that asks for a key is told what to install where there is no jax."""
    told = """
import sys
sys.modules["jax"] = None
import phalanx
try:
    phalanx.train(lambda key: {}, [(1.0, 2.0)], steps=1, engine="inline")
except phalanx.UsageError as error:
    print(error)
"""
    assert "'phalanx[jax]'" in ran(told)


def test_loading_starts_nothing(tmp_path):
    """A snapshot can be looked at before a run in the same process: XLA is not started by it."""
    FAMILIES["mlp"].recipe(2, steps=1).train(engine="inline", run_dir=tmp_path)
    told = f"phalanx.load({str(tmp_path)!r}); print(run(1))"
    assert ran(WIDE + told, PJRT_NPROC="3") == ran(WIDE + "print(run(1))")


def test_the_automatic_engine_stays_here():
    """Without an engine a jax recipe runs in this process, to the same digest."""
    recipe = FAMILIES["mlp"].recipe(2)
    result = recipe.train()
    assert result.workers == 1
    assert result.digest == recipe.train(engine="inline").digest


@pytest.mark.parametrize("name", ["mlp", "dropout"])
def test_a_run_leaves_generators_alone(name):
    """The caller's generators are afterwards as they were."""
    import random

    import numpy as np

    np.random.seed(1), random.seed(1)
    before = np.random.get_state()[1].tolist(), random.getstate()
    FAMILIES[name].recipe(2, steps=1).train(engine="inline")
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
