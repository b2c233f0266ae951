"""Several devices of one process: the same bits as one, whichever replicas they compute."""

import contextlib
import functools
import json
import os
import subprocess
import sys

import pytest

from tests.state.runs import ROOT

pytestmark = pytest.mark.long  # a process of its own, and programs for every device

SCRIPT = """
import collections, json, sys, tempfile
import jax, numpy, optax
from phalanx.errors import PhalanxError
from phalanx.frameworks.jax import adapter
from phalanx.frameworks.jax.environment import DeviceArithmetic
from phalanx.frameworks.jax.forward import Forward
from phalanx.frameworks.jax.optimizer import Update
from tests.jax.families import FAMILIES

used = collections.Counter()
begun = Forward.begun
def noted(self, params, *others, **named):
    (device,) = jax.tree.leaves(params)[0].devices()
    used[str(device)] += 1
    return begun(self, params, *others, **named)
Forward.begun = noted

lies = {}
step = Update.step
def seen(self, state, gradient):
    step(self, state, gradient)
    for kind, tree in (("params", state.params), ("state", state.optimizer)):
        lies[kind] = sorted({str(device.id) for leaf in jax.tree.leaves(tree) for device in leaf.devices()})
Update.step = seen

def forward(params, x, key):
    hidden = jax.nn.relu(x @ params["first"]["w"])
    if key is not None:
        hidden = jax.numpy.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0)
    return hidden @ params["last"]["w"]

def loss(output, target):
    counted = (target < 2).sum()
    return jax.numpy.where(counted > 0, mlp.loss_fn(output, target), 0), counted

def pairs(output, target):
    return (output @ output.T).std()

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
    given = {"forward_fn": forward, "loss_fn": loss, "batch_size": 4, "steps": 7, "optimizer": optax.adamw(0.05)}
    return mlp.recipe(5, threads=6, **(given | changes))

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

ONE, TWO, THREE = ["cpu:0"], ["cpu:1", "cpu:0"], ["cpu:0", "cpu:1", "cpu:2"]
FIVE = [f"cpu:{number}" for number in range(5)]

def there(devices):
    # Where the parameters and the optimizer's state lie after a step.
    recipe().train(engine="inline", devices=devices)
    return dict(lies)

def on_device():
    # With arithmetic as on accelerators.
    before, adapter.arithmetic_on = adapter.arithmetic_on, lambda device: DeviceArithmetic()
    found = answers(ONE, TWO, THREE)
    adapter.arithmetic_on = before
    return found

def made_with_state(key):
    return mlp.make_model(key), {"mean": jax.numpy.zeros(5), "count": jax.numpy.asarray(0)}

def running(params, x, state):
    state = {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0), "count": state["count"] + 1}
    return (x - state["mean"]) @ params["first"]["w"] @ params["last"]["w"], state

def kept_copies(right):
    # Devices but the first go on with the parameters that they had first.
    return lambda self: None if hasattr(self, "_copies") else right(self)

def accuracy(output, target):
    return (output.argmax(-1) == target).mean()

def resumed(before, after):
    # three steps on some devices, the others on others, with an evaluation in between
    with tempfile.TemporaryDirectory() as folder:
        recipe(steps=3).train(engine="inline", devices=before, run_dir=folder)
        with recipe().start(engine="inline", devices=after, run_dir=folder) as run:
            measured = [run.evaluate(accuracy, mlp.data) for _ in range(2)]
            for _ in run:
                measured.append(run.evaluate(accuracy, mlp.data))
            result = run.result()
        (device,) = set().union(*(leaf.devices() for leaf in jax.tree.leaves(result.params)))
        return result.digest, result.resumed_from, measured, str(device)

def planted(owner, name, fault):
    # The digests on one device and on three with a fault.
    right = getattr(owner, name)
    setattr(owner, name, fault(right))
    found = answers(ONE, THREE)
    setattr(owner, name, right)
    return found

coupled = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
asked = {
    "three": lambda: answers(ONE, THREE, FIVE, batch_size=8),
    "coupled": lambda: answers(ONE, THREE, optimizer=coupled),
    "lion": lambda: answers(ONE, THREE, optimizer=optax.lion(0.01)),
    "clipped": lambda: answers(ONE, THREE, max_norm=0.1),
    "beside": lambda: answers(ONE, THREE, TWO, make_model=made_with_state, forward_fn=running),
    "there": lambda: [there(ONE), there(TWO)],
    "on device": on_device,
    "stale": lambda: planted(adapter.Jax, "_spread", kept_copies),
    "shifted": lambda: planted(adapter.Jax, "_moved", lambda right: lambda self, vector: [-entry for entry in vector]),
    "resumed": lambda: [resumed(ONE, ONE), resumed(ONE, THREE), resumed(THREE, TWO)],
    "many": lambda: answers([*FIVE, "cpu:5"]),
    "equal": lambda: answers(ONE, TWO, ["cpu:0", "cpu:1"]),
    "one": lambda: answers(ONE),
    "other": lambda: answers(ONE, seed=9),
    "over batch": lambda: answers(ONE, TWO, THREE, loss_fn=pairs, loss_over="batch"),
    "refilled": lambda: answers(ONE, TWO, TWO, data=Rows(), collate_fn=refilled),
    "errors": lambda: answers(ONE, TWO, data=Broken()),
    "refused": lambda: answers(
        ["cpu:0", "cpu"], ["cpu:1", "cpu:1"], ["cpu:-1"], ["cpu:"], ["cpu:6"], ["CPU:1"], ["cpu: 1"]
    ),
}
for line in sys.stdin:
    print(json.dumps(asked[line.strip()]()), flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """``answers(name)``: digests, losses and the number of devices that computed; a process with six CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=6"
    cache = {  # what two runs compile alike is compiled once
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    environment = os.environ | cache | {"XLA_FLAGS": flags, "NPROC": "6"}
    errors = tmp_path_factory.mktemp("told") / "errors"
    with errors.open("w") as file:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file, "text": True}
        server = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, **pipes)

    @functools.cache
    def answer(name):
        with contextlib.suppress(BrokenPipeError):
            server.stdin.write(f"{name}\n")
            server.stdin.flush()
        line = server.stdout.readline()
        assert line, errors.read_text()
        return json.loads(line)

    with server:
        yield answer
        server.stdin.close()


def test_any_devices(answers):
    """One device or two in any order, with dropout, empty shares and weights, some 0: the same digest and losses."""
    one, *others = answers("equal")
    assert [found[:2] for found in others] == [one[:2]] * 2
    assert [found[2] for found in answers("equal")] == [1, 2, 2]


def test_losses_over_the_batch(answers):
    """Outputs of replicas on one device, two or three are joined to one loss, and go back to the same digest."""
    one, *others = answers("over batch")
    assert [found[:2] for found in others] == [one[:2]] * 2
    assert len(one[0]) == len(answers("one")[0][0])


def test_a_batch_in_memory_that_is_used_again(answers):
    """A collate_fn may put every batch into the same array, though a device still reads the one before."""
    one, *others = answers("refilled")
    assert [found[:2] for found in others] == [one[:2]] * 2


def test_another_seed(answers):
    """Another seed is another digest: equal ones mean something."""
    assert answers("other")[0][0] != answers("one")[0][0]


def test_errors_come_in_turn(answers):
    """What user code raises has the address of its replica, though a device began with it before its turn."""
    one, other = answers("errors")
    assert one[0] == "WorkerError"
    assert "step 1, replica 1" in one[1]
    assert "a broken sample" in one[1]
    assert other[:2] == one[:2]


def test_devices_that_cannot_be_are_refused(answers):
    """A device twice, one that is not there, and what is no name: nothing is computed on another one instead."""
    for kind, told, used in answers("refused"):
        assert (kind, used) == ("UsageError", 0)
        assert told.startswith("devices ")


def test_up_to_one_device_per_replica(answers):
    """One, three and five devices for five replicas, whole and short blocks: the same digest and losses."""
    one, *others = answers("three")
    assert [found[:2] for found in others] == [one[:2]] * 2
    assert [found[2] for found in answers("three")] == [1, 3, 5]


@pytest.mark.parametrize("optimizer", ["coupled", "lion", "clipped"])
def test_any_optimizer(optimizer, answers):
    """Optimizers that treat each parameter alone, and those that do not, end alike on one device and on three."""
    one, three = answers(optimizer)
    assert one[:2] == three[:2]


def test_the_state_lies_on_the_first_device(answers):
    """The device that is named first has the parameters and the optimizer's state; others get copies for each step."""
    assert answers("there") == [{"params": [number], "state": [number]} for number in ("0", "1")]


def test_a_state_beside_the_parameters(answers):
    """Running statistics are settled over the replicas of all devices: one, three and two end alike."""
    one, *others = answers("beside")
    assert one[0] != "UsageError"
    assert [found[:2] for found in others] == [one[:2]] * 2
    assert one[0] != answers("one")[0][0]


def test_sums_on_devices(answers):
    """Added, weighed and divided on the devices, as on accelerators, gradients end alike for one, two and three."""
    one, *others = answers("on device")
    assert [found[:2] for found in others] == [one[:2]] * 2


@pytest.mark.parametrize("fault", ["stale", "shifted"])
def test_a_fault_on_several_devices_is_noticed(fault, answers):
    """Negative twin: a device with old parameters, or whose sums come as others, ends in another digest than one."""
    one, three = answers(fault)
    assert one[0] == answers("one")[0][0] != three[0]


def test_more_devices_than_replicas_are_refused(answers):
    """The way out is named."""
    ((kind, told, used),) = answers("many")
    assert (kind, used) == ("UsageError", 0)
    assert "raise replicas=" in told


def test_resuming_on_other_devices(answers):
    """A run goes on on other devices to the same digest and evaluations, and all its parameters end on the first."""
    one, *others = answers("resumed")
    assert one[:2] == [answers("one")[0][0], 3]
    assert [found[:3] for found in others] == [one[:3]] * 2
    assert [found[3][-1] for found in answers("resumed")] == ["0", "0", "1"]
