"""Many hosts, one answer: digests over network namespaces, refusals at the start, and hosts that are lost."""

import functools
import importlib.util
import json
import os
import signal
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import phalanx
from phalanx.checkpoint.tensors import packed, unpacked
from phalanx.engines.flat import stretches
from phalanx.engines.hosts.driver import Distributed
from phalanx.engines.hosts.pieces import chunks
from phalanx.errors import SeveredError
from phalanx.plan.fold import added, hosts, remaining
from tests.families import FAMILIES
from tests.hosts.network import Network, gone, output, strike, until, why_not
from tests.hosts.worlds import BEGIN, END, Pair

WHY_NOT = why_not()
NEEDS_NAMESPACES = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
JAX = pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="needs jax and optax")

TRAIN = """
families = __import__({module!r}, fromlist=["FAMILIES"]).FAMILIES
with families[{name!r}].recipe({replicas}).start(workers={workers}) as run:
    run.finish()
    result = run.result()
told += [result.digest, result.loss_history, result.workers]
"""
SENT = """
import pathlib
steps, made = 6, lambda: torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
torch.manual_seed(0)
x, y = torch.randn(64, 300), torch.randint(10, (64,))
recipe = phalanx.Recipe(made, (x, y), torch.nn.functional.cross_entropy, replicas=8, batch_size=16, steps=steps + 2)
count = sum(parameter.numel() for parameter in made().parameters())
sent = lambda: int(pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())
with recipe.start(workers={workers}) as run:
    for report in run:
        if report.step == 1:
            before = sent()
    told.append((sent() - before) / steps / 4 / count)
"""
ENDLESS = """
import os, sys, phalanx
from tests.families import FAMILIES
folder, steps = sys.argv[1], int(sys.argv[2])
def mark(report):
    if report.step == 50:
        open(os.path.join(folder, "begun"), "w").close()
options = {"run_dir": os.path.join(folder, "run"), "snapshot_every": 20} if len(sys.argv) > 3 else {}
try:
    result = FAMILIES["conv_norm"].recipe(8, steps=steps).train(deadline_seconds=5.0, callbacks=[mark], **options)
    print("digest", result.digest, result.resumed_from)
except phalanx.RunError as error:
    print(error)
"""


def anew(network, code, each=1):
    """What every process of a run told, each started for it alone."""
    found = [output(process) for process in network.ranks(BEGIN + code + END, each=each)]
    assert [status for status, _ in found] == [0] * len(found), found
    return [json.loads(text.splitlines()[-1]) for _, text in found]


@pytest.fixture(scope="module")
def two():
    """Two hosts."""
    with Network(2) as network:
        yield network


@pytest.fixture(scope="module")
def pair(two):
    """Runs a program on both hosts, in processes that stay for all programs; see ``Pair``."""
    made = Pair(lambda code, **streams: two.ranks(code, streams=streams))
    yield made
    made.close()


@pytest.fixture(scope="module")
def three():
    """Three hosts."""
    with Network(3) as network:
        yield network


def check(run, module, name, replicas, workers):
    """Every process ends with the digest and losses of one process alone; ``run(code)`` is what they told."""
    wanted = importlib.import_module(module).FAMILIES[name].recipe(replicas).train(engine="inline")
    for told in run(TRAIN.format(module=module, name=name, replicas=replicas, workers=workers)):
        assert told == [wanted.digest, wanted.loss_history, workers]


@pytest.mark.long
@NEEDS_NAMESPACES
@pytest.mark.parametrize(
    ("name", "workers", "each"),
    [
        ("conv_norm", 4, 1),
        *(
            pytest.param(*one, marks=pytest.mark.campaign)
            for one in (("transformer", 4, 2), ("mlp", 2, 1), ("partly_unused", 4, 1), ("mixed_dtypes", 2, 1))
        ),
    ],
)
def test_two_hosts(two, pair, name, workers, each):
    """Two hosts with one worker or two, one process per host or per worker: the digest of one process."""
    run = pair if each == 1 else functools.partial(anew, two, each=each)
    check(run, "tests.families", name, 8, workers)


@pytest.mark.longest
@NEEDS_NAMESPACES
@pytest.mark.parametrize(
    ("name", "replicas"), [pytest.param("conv_norm", 8, marks=pytest.mark.campaign), ("masked_tokens", 7)]
)
def test_three_hosts(three, name, replicas):
    """Three hosts, whose blocks are no whole branches of the fold's tree: the digest of one process."""
    check(functools.partial(anew, three), "tests.families", name, replicas, 3)


@pytest.mark.longest
@JAX
@NEEDS_NAMESPACES
def test_jax(pair):
    """A jax recipe on two hosts."""
    check(pair, "tests.jax.families", "mlp", 4, 2)


@pytest.mark.longest
@NEEDS_NAMESPACES
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.campaign), 4])
def test_bytes_between_two_hosts(pair, workers):
    """Each host sends 2 N (H - 1) / H floats a step, within a tenth, however many workers it has."""
    [sent], _ = pair(SENT.format(workers=workers))
    assert sent == pytest.approx(2 * (2 - 1) / 2, rel=0.1)


@pytest.mark.longest
@NEEDS_NAMESPACES
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"STEPS": "lr=0.5"}, "recipe.lr is", marks=pytest.mark.campaign),
        ({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NUMBERS": "highest"}, "environment."),
    ],
)
def test_hosts_that_mean_something_else_are_refused(two, changes, message):
    """Another recipe or numeric environment on one host: all refuse at the start, and name the field."""
    code = """
import os, torch, phalanx
if os.environ.get("NUMBERS") == "highest":
    torch.set_float32_matmul_precision("medium")
options = eval(f"dict({os.environ.get('STEPS', '')})")
x, y = torch.ones(8, 3), torch.zeros(8, dtype=torch.long)
try:
    phalanx.train(lambda: torch.nn.Linear(3, 2), (x, y), torch.nn.functional.cross_entropy, steps=2, **options)
except phalanx.UsageError as error:
    print("refused:", error)
"""
    processes = [
        two.start(rank, sys.executable, "-c", code, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="10.77.0.1",
                  MASTER_PORT="29501", **(changes if rank else {}))
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        _, text = output(process)
        assert "refused:" in text
        assert message in text


@pytest.mark.longest
@NEEDS_NAMESPACES
def test_fewer_hosts_go_on(tmp_path):
    """After all hosts were lost, two hosts, and then one process, go on from the directory to the same digest."""
    recipe = FAMILIES["conv_norm"].recipe
    with Network(3) as network:
        processes = network.ranks(ENDLESS, str(tmp_path), "100000000", "saving")
        until((tmp_path / "begun").exists)
        pids = [pid for process in processes for pid in strike(process, signal.SIGKILL)]
        until(lambda: gone(pids))
    run_dir = tmp_path / "run"
    done = max(int(place.name.removeprefix("step-")) for place in (run_dir / "snapshots").iterdir())
    with Network(2) as network:
        found = [output(one) for one in network.ranks(ENDLESS, str(tmp_path), str(done + 10), "saving")]
    wanted = recipe(8, steps=done + 10).train(engine="inline").digest
    assert all(f"digest {wanted} {done}" in text for _, text in found), found
    assert recipe(8, steps=done + 10).train(engine="inline", run_dir=run_dir).digest == wanted


ELASTIC = """
import os, sys
from tests.families import FAMILIES
folder, steps = sys.argv[1], int(sys.argv[2])
def mark(report):
    if report.step == 50:
        open(os.path.join(folder, "begun"), "w").close()
result = FAMILIES["conv_norm"].recipe(8, steps=steps).train(
    deadline_seconds=5.0, callbacks=[mark], run_dir=os.path.join(folder, "run"), snapshot_every=20
)
print("digest", result.digest, "resumed from", result.resumed_from, "with", os.environ["WORLD_SIZE"])
"""


@pytest.mark.campaign
@pytest.mark.timeout(240)
@NEEDS_NAMESPACES
def test_torchrun_goes_on_with_the_hosts_that_are_left(tmp_path):
    """SIGKILL of an agent of torchrun with its process: two go on in the same processes, to the same digest."""
    steps, script = 4000, tmp_path / "job.py"
    script.write_text(ELASTIC)
    with Network(3) as network:
        agents = []
        for number in range(3):
            conf = f"is_host={int(number == 0)},last_call_timeout=5,keep_alive_interval=2"
            agents.append(network.start(
                number, sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1",
                "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", f"--rdzv-conf={conf}", "--max-restarts=3",
                f"--local-addr=10.77.0.{number + 1}", "--monitor-interval=0.5", str(script), str(tmp_path), str(steps),
            ))  # fmt: skip
        until((tmp_path / "begun").exists, 100)
        strike(agents[2], signal.SIGKILL)

        def said(agent):
            return os.pread(agent.file.fileno(), 1 << 20, 0).decode()

        until(lambda: all("digest" in said(agent) for agent in agents[:2]), 200)  # agents wait for the lost one, long
        told = [line for agent in agents[:2] for line in said(agent).splitlines() if line.startswith("digest")]
    wanted = FAMILIES["conv_norm"].recipe(8, steps=steps).train(engine="inline").digest
    assert told == [f"digest {wanted} resumed from None with 3"] * 2


# Without a network.


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2, 5, 8, 13])
def test_blocks_of_hosts(replicas):
    """Hosts and their workers share all replicas, each once, in order; sums of hosts fold to the sum of all."""
    for count in range(1, replicas + 1):
        blocks, placements = hosts(replicas, count, max(1, replicas // count))
        assert [replica for block in blocks for replica in block] == list(range(replicas))
        for block, placement in zip(blocks, placements, strict=True):
            assert [replica for part in placement.blocks for replica in part] == list(block)
        nodes = [node for block in blocks for node in remaining(replicas, block)]
        assert len(added(replicas, nodes, range(len(nodes)))) == len(nodes) - 1


@pytest.mark.parametrize("hosts_", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 5, 999, 100_001, 3_000_000])
def test_chunks(size, hosts_):
    """Chunks follow one another, hold everything, and less than one element per host and chunk in vain."""
    pieces = chunks(size, hosts_, 4)
    ends = [0, *(start + hosts_ * width for start, width in pieces)]
    assert [start for start, _ in pieces] == ends[:-1]
    assert size <= ends[-1] < size + hosts_


def test_stretches():
    """Neighbours with equal masks are one stretch."""
    like = [torch.empty(size) for size in (3, 4, 5)]
    masks = [bytes([1, 1, 0]), bytes([0, 0, 1])]
    assert stretches(masks, {0: 0, 1: 3, 2: 7}, like) == [((0,), 0, 7), ((1,), 7, 12)]


@pytest.mark.long
def test_a_state_travels():
    """A state arrives as it was; a flipped bit, or bytes cut off, are refused."""
    recipe = FAMILIES["conv_norm"].recipe(2, steps=2)
    with recipe.start(engine="inline") as run:
        run.finish()
        captured = run._engine.capture()
    data = packed(captured, {"losses": [1.0]})
    found, more = unpacked(data)
    assert more == {"losses": [1.0]}
    assert {name: bytes(one.content) for name, one in found.weights.items()} == {
        name: bytes(memoryview(one.content).cast("B")) for name, one in captured.weights.items()
    }
    for damaged in (data[:-1], data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], b"", data[:40]):
        with pytest.raises(phalanx.SnapshotError, match="another process"):
            unpacked(damaged)


def test_random_damage_on_the_way():
    """Whatever bytes arrive instead, they are refused as such, or leave every tensor as it was."""
    with FAMILIES["mlp"].recipe(2, steps=1).start(engine="inline") as run:
        run.finish()
        captured = run._engine.capture()
    data, rng = packed(captured, {"losses": [1.0]}), np.random.default_rng(0)
    wanted = {name: bytes(one.content) for name, one in unpacked(data)[0].weights.items()}
    refused = 0
    for attempt in range(400):
        damaged = bytearray(data)
        for place in rng.integers(len(data) if attempt % 2 else 200, size=1 + attempt % 3):
            damaged[place] = rng.integers(256)
        try:
            found, _ = unpacked(bytes(damaged))
        except phalanx.SnapshotError:
            refused += 1
        else:
            assert {name: bytes(one.content) for name, one in found.weights.items()} == wanted
    assert refused > 300


ASKED = {
    "evaluate": (None, None, 1), "peek": (), "schedule": (0.5, 0), "capture": (),
    "export": {"copy": False, "digest": False},
}  # fmt: skip


@pytest.mark.parametrize("what", ASKED)
def test_what_an_incarnation_did_not_answer_is_asked_again(what):
    """If one ends meanwhile, the next one answers. That held for all but ``peek``, which starts of runs ask for."""
    lost = SimpleNamespace(closed=False, lost=False, **{what: mock.Mock(side_effect=SeveredError("a host is lost"))})
    engine = object.__new__(Distributed)
    vars(engine).update(engine=lost, _gone=False, _owner=os.getpid())

    def go_on(error):
        assert str(error) == "a host is lost"
        engine.engine = SimpleNamespace(**{what: lambda *_, **__: "the answer"})

    engine._go_on, given = go_on, ASKED[what]
    answer = getattr(engine, what)(**given) if isinstance(given, dict) else getattr(engine, what)(*given)
    assert answer == (None if what == "schedule" else "the answer")
    assert engine.engine is not lost


@pytest.mark.long
def test_one_process_is_no_world():
    """Without a world engine="distributed" says what is missing."""
    with pytest.raises(phalanx.UsageError, match="torchrun"):
        FAMILIES["mlp"].recipe(2).train(engine="distributed")
