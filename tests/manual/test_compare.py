"""The comparison in examples/compare.py: what is right differs by rounding only, and planted faults by far more."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from phalanx import manual

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "compare.py"


@pytest.fixture(scope="module")
def compare():
    """The example as a module, with no devices named on its command line."""
    spec = importlib.util.spec_from_file_location("compare_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [str(EXAMPLE)])
        yield module


def excess(compare, found):
    """The largest difference from one big batch, over what the example tolerates, of all parameters."""
    reference = compare.plain(torch.nn.Sequential)
    begun = compare.MODEL.state_dict()
    return max(
        ((found[name] - right).abs().max() / compare.tolerance(begun[name], right)).item()
        for name, right in reference.items()
    )


def loop(compare, weigh, factor=1.0):
    """Training by hand, where a fault can be planted: in the weights of the shards, or in the mean."""
    replicas = manual.replicate(compare.MODEL, ["cpu"] * 4)
    for batch in zip(compare.X, compare.Y, strict=True):
        shards = manual.shard_batch(batch, 4)
        for replica, (x, y) in zip(replicas, shards, strict=True):
            replica.zero_grad()
            F.cross_entropy(replica(x), y).backward()
        manual.sync_gradients(replicas, weigh(shards))
        for replica in replicas:
            for parameter in replica.parameters():
                parameter.data.sub_(parameter.grad * factor, alpha=compare.LR)
    return replicas[0].state_dict()


def sizes(shards):
    return [len(x) for x, _ in shards]


@pytest.mark.longest
def test_the_comparison_passes():
    """Run as a script, it compares with DDP over Gloo, prints every parameter, and ends with 0."""
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    ways = [re.split(r"\s{2,}| 0\.", line)[0] for line in done.stdout.splitlines()]
    assert ways[:4] == ["ordered", "ring", "naive", "DDP"]
    assert ways[-1] == "may differ by"
    assert all(line.count("weight") == line.count("bias") == 2 for line in done.stdout.splitlines())


@pytest.mark.parametrize("algorithm", ["ordered", "ring", "naive"])
def test_by_hand_is_one_big_batch(compare, algorithm):
    """Each algorithm, and the loop in parts, stays within the tolerance."""
    assert excess(compare, compare.by_hand(algorithm)) < 1
    assert excess(compare, loop(compare, sizes)) < 1


def test_a_mean_of_means_is_seen(compare):
    """Negative twin: uneven shards that all weigh the same are off by more than a hundred times the tolerance."""
    assert excess(compare, loop(compare, lambda shards: None)) > 100


def test_a_sum_is_seen(compare):
    """Negative twin: a summed gradient, or one that is a thousandth too large, exceeds the tolerance."""
    assert excess(compare, loop(compare, sizes, factor=4.0)) > 1000
    assert excess(compare, loop(compare, sizes, factor=1.001)) > 10


def test_an_untrained_model_is_seen(compare):
    """Negative twin: weights that were never updated exceed it too."""
    assert excess(compare, compare.MODEL.state_dict()) > 1000
