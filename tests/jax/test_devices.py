"""Several devices of one process: the same bits as one, whichever replicas they compute."""

import json
import os
import subprocess
import sys

import pytest

from tests.state.runs import ROOT

SCRIPT = """
import collections, json
import jax, numpy, optax
from phalanx.errors import PhalanxError
from phalanx.frameworks.jax.forward import Forward
from tests.jax.families import FAMILIES

used = collections.Counter()
begun = Forward.begun
def noted(self, params, batch, key):
    (device,) = jax.tree.leaves(params)[0].devices()
    used[str(device)] += 1
    return begun(self, params, batch, key)
Forward.begun = noted

def forward(params, x, key):
    hidden = jax.nn.relu(x @ params["first"]["w"])
    if key is not None:
        hidden = jax.numpy.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0)
    return hidden @ params["last"]["w"]

def loss(output, target):
    counted = (target < 2).sum()
    return jax.numpy.where(counted > 0, mlp.loss_fn(output, target), 0), counted

room = numpy.empty(64 + 4 * 5, numpy.uint8)
room = room[-room.ctypes.data % 64 :][: 4 * 5].view(numpy.float32).reshape(1, 5)  # jax uses it as it lies

def refilled(samples):
    room[0] = samples[0][0]
    return room, numpy.array([samples[0][1]])

class Rows:
    def __len__(self):
        return 20
    def __getitem__(self, sample):
        return tuple(column[sample] for column in mlp.data)

class Broken(Rows):
    def __getitem__(self, sample):
        if sample == recipe().plan.indices(1)[1]:
            raise ValueError("a broken sample")
        return super().__getitem__(sample)

mlp = FAMILIES["mlp"]

def recipe(**changes):
    given = {"forward_fn": forward, "loss_fn": loss, "batch_size": 3, "steps": 7, "optimizer": optax.adamw(0.05)}
    return mlp.recipe(5, threads=2, **(given | changes))

def answers(*orders, **changes):
    found = []
    for devices in orders:
        used.clear()
        try:
            result = recipe(**changes).train(engine="inline", devices=devices)
            found.append([result.digest, result.loss_history, len(used)])
        except PhalanxError as error:
            found.append([type(error).__name__, str(error), len(used)])
    return found

ONE, TWO = ["cpu:0"], ["cpu:1", "cpu:0"]
print(json.dumps({
    "equal": answers(ONE, TWO, ["cpu:0", "cpu:1"]),
    "other": answers(ONE, seed=9),
    "refilled": answers(ONE, TWO, TWO, data=Rows(), collate_fn=refilled),
    "errors": answers(ONE, TWO, data=Broken()),
    "refused": answers(["cpu:0", "cpu"], ["cpu:1", "cpu:1"], ["cpu:-1"], ["cpu:"], ["cpu:2"], ["CPU:1"], ["cpu: 1"]),
}))
"""


@pytest.fixture(scope="module")
def answers():
    """Digests, losses and the number of devices that computed, from a process with two CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "NPROC": "2"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_any_devices(answers):
    """One device or two in any order, with dropout, empty shares and weights, some 0: the same digest and losses."""
    one, *others = answers["equal"]
    assert [found[:2] for found in others] == [one[:2]] * 2
    assert [found[2] for found in answers["equal"]] == [1, 2, 2]


def test_a_batch_in_memory_that_is_used_again(answers):
    """A collate_fn may put every batch into the same array, though a device still reads the one before."""
    one, *others = answers["refilled"]
    assert [found[:2] for found in others] == [one[:2]] * 2


def test_another_seed(answers):
    """Another seed is another digest: equal ones mean something."""
    assert answers["other"][0][0] != answers["equal"][0][0]


def test_errors_come_in_turn(answers):
    """What user code raises has the address of its replica, though a device began with it before its turn."""
    one, other = answers["errors"]
    assert one[0] == "WorkerError"
    assert "step 1, replica 1" in one[1]
    assert "a broken sample" in one[1]
    assert other[:2] == one[:2]


def test_devices_that_cannot_be_are_refused(answers):
    """A device twice, one that is not there, and what is no name: nothing is computed on another one instead."""
    for kind, told, used in answers["refused"]:
        assert (kind, used) == ("UsageError", 0)
        assert told.startswith("devices ")
