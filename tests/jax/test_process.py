"""XLA's threads are the recipe's; who uses torch never imports jax."""

import os
import subprocess
import sys

import pytest

import phalanx
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
    inherited = {name: value for name, value in os.environ.items() if name not in ("NPROC", "PJRT_NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=500, env=inherited | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def run_here(threads):
    """The wide recipe's digest in this process, whose XLA has one thread."""
    names: dict = {}
    exec(WIDE, names)
    return names["run"](threads)


@pytest.mark.long
def test_threads_are_the_recipe_s(tmp_path):
    """A run starts XLA with its own threads, whatever NPROC says and after a snapshot was read; NPROC stays."""
    FAMILIES["mlp"].recipe(2, steps=1).train(engine="inline", run_dir=tmp_path)
    told = f"phalanx.load({str(tmp_path)!r}); print(run(1), os.environ.get('NPROC'), os.environ.get('PJRT_NPROC'))"
    assert ran(WIDE + told, PJRT_NPROC="3") == [run_here(1), "None", "3"]


@pytest.mark.long
def test_two_threads_are_two():
    """XLA has as many threads as the recipe says; whether they change bits is up to the processor."""
    counted = "from phalanx.frameworks.jax.environment import running_threads\nrun(2)\nprint(running_threads())"
    assert ran(WIDE + counted) == ["2"]


@pytest.mark.long
def test_a_backend_that_was_started_before_is_refused():
    """A backend with other threads is refused with the way out."""
    refused = "jnp.ones(3).block_until_ready()\ntry:\n    run(1)\nexcept phalanx.UsageError as error:\n    print(error)"
    message = " ".join(ran(WIDE + refused, NPROC="3"))
    assert "threads is 1" in message
    assert "with 3 threads" in message
    assert "NPROC=1" in message
    with pytest.raises(phalanx.UsageError, match="threads is 2, but jax's CPU backend"):
        run_here(2)


@pytest.mark.long
def test_torch_users_need_no_jax():
    """Where jax cannot be imported all of a torch run works, and a factory with a key is told what to install."""
    told = """
import sys, tempfile, numpy as np
sys.modules["jax"] = sys.modules["optax"] = None
import torch, phalanx
x, y = np.zeros((8, 3), np.float32), np.arange(8) % 2
recipe = phalanx.Recipe(lambda: torch.nn.Linear(3, 2), (x, y), torch.nn.functional.cross_entropy, replicas=2, steps=2)
with tempfile.TemporaryDirectory() as place:
    result = recipe.train(engine="inline", run_dir=place)
    with recipe.start(engine="inline") as run:
        run.evaluate(lambda output, target: 1.0, (x, y))
    phalanx.load(place)
phalanx.digest(result.model)
try:
    phalanx.train(lambda key: {}, (x, y), steps=1, engine="inline")
except phalanx.UsageError as error:
    print(error)
"""
    assert "'phalanx[jax]'" in ran(told)


@pytest.mark.long
def test_torch_users_never_import_jax():
    """Where jax can be imported a torch recipe does not."""
    told = """
import sys, numpy as np, torch, phalanx
x, y = np.zeros((8, 3), np.float32), np.arange(8) % 2
phalanx.train(lambda: torch.nn.Linear(3, 2), (x, y), torch.nn.functional.cross_entropy, steps=2, engine="inline")
print(sorted({"jax", "optax"} & {name.split(".")[0] for name in sys.modules}))
"""
    assert ran(told) == ["[]"]


@pytest.mark.longest
def test_compiled_programs_are_cleared_away(tmp_path):
    """However the process that starts workers ends, its folder goes with it, and it says nothing."""
    told = f"""
import os, tempfile, jax, phalanx
from phalanx.engines.processes.starter import WARM
tempfile.tempdir = {str(tmp_path)!r}
seen = []
def count():
    phalanx.close()
    seen.append(len(os.listdir(tempfile.tempdir)))
WARM.zygote()
while not os.listdir(tempfile.tempdir):
    pass
seen.append(len(os.listdir(tempfile.tempdir)))
count()  # not awake yet
WARM.zygote()._ask({{"end": 0}})
WARM.zygote()._process.kill()
WARM.zygote()._process.wait()
count()
WARM.zygote()
while not WARM.awake:
    pass
count()  # nobody took its greeting
print(*seen)
"""
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=500)
    assert (done.stdout.split(), done.stderr) == (["1", "0", "0", "0"], "")


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp", "dropout"])
def test_a_run_leaves_generators_alone(name):
    """The caller's generators are afterwards as they were."""
    import random

    import numpy as np

    np.random.seed(1), random.seed(1)
    before = np.random.get_state()[1].tolist(), random.getstate()
    FAMILIES[name].recipe(2, steps=1).train(engine="inline")
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
