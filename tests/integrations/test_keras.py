"""Models of Keras on torch. Programs for both of its backends are in docs/cookbook.md, and run as documents."""

import importlib.util
import os
import subprocess
import sys

import pytest

MADE = """
import functools, sys
import keras, torch, phalanx
def make_model():
    keras.utils.clear_session()
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
x = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()
recipe = functools.partial(phalanx.Recipe, data=(x, y), loss_fn=torch.nn.functional.cross_entropy, epochs=2)
"""
COUNTED = """
one = recipe(make_model)
print({one.train(engine="inline").digest for _ in range(2)} == {one.train(workers=2, engine="processes").digest})
"""
FIT = """
fitted = make_model()
sgd = functools.partial(torch.optim.SGD, lr=float(sys.argv[1]))
trained = recipe(fitted, replicas=1, shuffle=False, optimizer=sgd).train(engine="inline").model
fitted.compile(optimizer=keras.optimizers.SGD(0.1), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
fitted.fit(x.numpy(), y.numpy(), batch_size=32, epochs=2, shuffle=False, verbose=0)
pairs = zip(fitted.trainable_variables, trained.trainable_variables)
print(all(torch.equal(one.value, other.value) for one, other in pairs))
"""


def printed(script, folder, *arguments):
    """The last line that a program prints, in a process whose Keras computes by torch."""
    if importlib.util.find_spec("keras") is None:
        pytest.skip("needs keras")
    environment = {**os.environ, "KERAS_BACKEND": "torch", "KERAS_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MADE + script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.long
def test_layers_are_counted_from_the_beginning(tmp_path):
    """With the line that docs/trouble.md names, models have one digest, whichever is made first."""
    assert printed(COUNTED, tmp_path) == "True"


@pytest.mark.long
@pytest.mark.parametrize(("lr", "same"), [("0.1", "True"), ("0.2", "False")])
def test_one_replica_has_the_bits_of_fit(lr, same, tmp_path):
    """With SGD and samples in order, R = 1 ends in the weights of ``fit``; with another rate it does not."""
    assert printed(FIT, tmp_path, lr) == same
