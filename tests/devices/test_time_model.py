"""The model of time in benchmarks/model.py: its bytes, its buckets, and what may not make a step shorter. No clock."""

import importlib.util
import itertools
import pathlib

import pytest

from phalanx.engines.devices import buckets

FILE = pathlib.Path(__file__).parents[2] / "benchmarks" / "model.py"


@pytest.fixture(scope="module")
def model():
    """benchmarks/model.py."""
    spec = importlib.util.spec_from_file_location("time_model", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bytes_of_hosts(model):
    """A ring sends what phalanx sends; a tree sends two whole sums at inner hosts."""
    for hosts in (2, 3, 8):
        assert model.traffic("phalanx", 100, hosts) == model.traffic("ring", 100, hosts) == 800 * (hosts - 1) / hosts
        assert model.traffic("tree", 100, hosts) == 800


@pytest.mark.parametrize("devices", [2, 3, 8, 64])
def test_bytes_of_devices(model, devices):
    """A device keeps its own slice, and sends the others once in each of two collectives."""
    assert model.sent(1000, devices) == (1000 * (devices - 1) / devices, 0)


@pytest.mark.parametrize(("nodes", "per"), [(2, 8), (4, 8), (3, 2)])
def test_bytes_over_a_network(model, nodes, per):
    """Flat: a slice for each device elsewhere. Folded first: N (H - 1) / H of a node, dealt to its devices."""
    within, across = model.sent(1000, nodes * per, nodes)
    assert across == pytest.approx(1000 * (nodes - 1) / nodes)
    assert within + across == pytest.approx(1000 * (nodes * per - 1) / (nodes * per))
    within, across = model.sent(1000, nodes * per, nodes, folded=True)
    assert per * across == pytest.approx(1000 * (nodes - 1) / nodes)
    assert within == pytest.approx(1000 * (per - 1) / per)


def test_networks_are_the_real_ones(model):
    """Parameters are those of the models, and the shares of the backward pass make a whole one."""
    assert {network.bytes // 4 for network in model.NETWORKS.values()} == {25_557_032, 124_439_808}
    for network in model.NETWORKS.values():
        assert sum(share for _, _, share in network.parts) == pytest.approx(1, abs=0.001)


def test_buckets(model):
    """They hold everything, in order; only a parameter that is larger than a bucket has a larger one, to itself."""
    assert model.BUCKET == buckets.BUCKET
    for network in model.NETWORKS.values():
        filled = model.buckets(network)
        assert sum(size for size, _ in filled) == pytest.approx(network.bytes)
        assert [share for _, share in filled] == sorted(share for _, share in filled)
        assert filled[-1][1] == 1
    sizes = [size for size, _ in model.buckets(model.NETWORKS["GPT-2 124M, 16k tokens"])]
    assert [size for size in sizes if size > model.BUCKET] == [4 * 50257 * 768] == sizes[-1:]


def test_more_devices_and_less_bandwidth_take_longer(model, monkeypatch):
    """No step is faster with more devices, over a network, or with slower links; and none beats the plain loop."""
    for network in model.NETWORKS.values():
        steps = [model.step(network, devices) for devices in (1, 2, 4, 8)]
        steps.append(model.step(network, 16, 2))
        for shorter, longer in itertools.pairwise(steps):
            assert shorter.alone <= shorter.whole <= longer.whole + 1e-12
            assert shorter.exposed <= shorter.exchange <= longer.exchange
    network = model.NETWORKS["GPT-2 124M, 16k tokens"]
    before = model.step(network, 8).whole, model.step(network, 16, 2).whole
    monkeypatch.setattr(model, "NVLINK", model.NVLINK / 4)
    assert model.step(network, 8).whole > before[0]
    monkeypatch.setattr(model, "NETWORK", model.NETWORK / 4)
    assert model.step(network, 16, 2).whole > before[1]
