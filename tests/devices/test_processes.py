"""Several processes that each drive devices of their own end in the digest of one process with one device."""

import pytest

from tests import accelerator
from tests.by_hand import answer
from tests.families import FAMILIES, OPTIMIZERS
from tests.hosts.worlds import world

PROGRAM = """
from tests.families import FAMILIES, OPTIMIZERS
family = FAMILIES[{family!r}]
options = dict(devices=["cpu"] * {devices}, deadline_seconds=30)
recipe = family.recipe({replicas}, optimizer=OPTIMIZERS["adamw"], max_norm=0.1, batch_size=13)
tried(lambda: (lambda result: (result.digest, result.loss_history))(recipe.train(**options)))
"""


@pytest.mark.longest
@pytest.mark.parametrize(
    ("family", "replicas", "devices"), [("mlp", 4, 2), ("conv_norm", 6, 2), ("partly_unused", 5, 2), ("mlp", 7, 3)]
)
def test_two_processes(family, replicas, devices):
    """Blocks of one node of the tree or of several, gradients that are absent, buffers: the bits of one process."""
    found = world(PROGRAM.format(family=family, replicas=replicas, devices=devices))
    recipe = FAMILIES[family].recipe(replicas, optimizer=OPTIMIZERS["adamw"], max_norm=0.1, batch_size=13)
    digest, losses = answer(recipe)
    assert [[tuple(one) for one in told] for told in found] == [[(digest, losses)]] * 2


@pytest.mark.long
@pytest.mark.accelerator
def test_a_device_for_each_process():
    """Torchrun's way: each process drives the accelerator with its LOCAL_RANK, or one process drives two."""
    accelerator.accelerator()
    program = """
from tests import accelerator
accelerator.accelerator()
os.environ["LOCAL_RANK"] = str(rank)
for devices in ("local", ["fake:0", "fake:1"]):
    tried(lambda: family.recipe(4).train(devices=devices, deadline_seconds=30).digest)
"""
    wanted = [FAMILIES["mlp"].recipe(4).train(devices=names).digest for names in (["fake:0"], ["fake:0", "fake:1"])]
    assert wanted[0] == wanted[1]
    assert world(program) == [wanted, wanted]


@pytest.mark.longest
def test_what_one_process_raises_ends_all():
    """The error of user code reaches its own process, and the others hear who left and why."""
    found = world("""
def loss(output, target):
    if rank == 1:
        raise KeyError("seven")
    return family.loss_fn(output, target)
tried(lambda: family.recipe(4, loss_fn=loss).train(devices=["cpu", "cpu"], deadline_seconds=20).digest)
""")
    assert "KeyError in user code at step 0, replica 2" in found[1][0]
    assert "process 1" in found[0][0]
    assert "KeyError" in found[0][0]


@pytest.mark.longest
def test_resumed_by_one_process(tmp_path):
    """What two processes with two devices each began, one goes on with, to the digest of one that never stopped."""
    program = f"""
tried(lambda: family.recipe(4, steps=3).train(devices=["cpu", "cpu"], run_dir={str(tmp_path)!r}).steps)
"""
    assert world(program) == [[3], [3]]
    recipe = FAMILIES["mlp"].recipe(4, steps=6)
    assert recipe.train(devices=["cpu"] * 3, run_dir=tmp_path).digest == answer(recipe)[0]


@pytest.mark.longest
def test_a_sum_that_is_not_exchanged_is_seen():
    """These tests can fail: with the sum of its own block alone, each process ends in another digest."""
    found = world("""
from phalanx.engines.hosts.link import HostLaneLink
HostLaneLink.mean = lambda link, weight: link._framework.arithmetic.divide(link.sums()[0], weight)  # planted
tried(lambda: family.recipe(4).train(devices=["cpu", "cpu"], deadline_seconds=20).digest)
""")
    wanted = answer(FAMILIES["mlp"].recipe(4))[0]
    assert all(told != [wanted] for told in found)
