"""What is written to disk is the state of one step, whatever reads or digests the state meanwhile."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import phalanx
from phalanx.checkpoint import chain, files, snapshot
from phalanx.checkpoint.chained import leaves_of

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(48, 1, generator=torch.Generator().manual_seed(1))
STEPS, EVERY = 9, 3
WAYS = [{"engine": "inline"}, {"workers": 2}, {"workers": 3}]


def recipe():
    return phalanx.Recipe(lambda: torch.nn.Linear(6, 1), (X, Y), F.mse_loss, replicas=4, batch_size=12, steps=STEPS)


def states_on_disk(folder):
    """The hashes of each snapshot's tensors by its step, and those that the chain has of the same steps."""
    kept = [snapshot.read(path) for path in sorted((folder / "snapshots").iterdir())]
    chained = {record["step"]: record["leaves"] for record in chain.records(folder / chain.CHAIN, "state")}
    return {one.step: leaves_of(one) for one in kept}, {one.step: chained[one.step] for one in kept}


@pytest.fixture
def slow_disk(monkeypatch):
    """Every file of a snapshot takes longer to be written than steps take."""
    real = files.write

    def slow(path, write):
        time.sleep(0.05)
        return real(path, write)

    monkeypatch.setattr(files, "write", slow)


@pytest.mark.long
@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("options", WAYS, ids=["inline", "W2", "W3"])
def test_no_snapshot_mixes_two_steps(options, tmp_path):
    """With a digest of every step beside it, each snapshot is the state that the chain has of its step."""
    whole = recipe().train(engine="inline").digest
    kept = {"snapshot_every": EVERY, "keep_snapshots": 10, "chain": "every"}
    assert recipe().train(run_dir=tmp_path, **kept, **options).digest == whole
    written, chained = states_on_disk(tmp_path)
    assert list(written) == [0, 3, 6, 9]
    assert written == chained
    assert len({str(sorted(leaves.items())) for leaves in written.values()}) == 4, "or nothing would be seen"


@pytest.mark.long
@pytest.mark.usefixtures("slow_disk")
def test_whoever_asks_for_the_state_does_not_tear_what_is_written(tmp_path):
    """Results and snapshots by hand while the run's own is being written leave that whole."""
    kept = {"snapshot_every": EVERY, "keep_snapshots": 10, "chain": "off"}
    with recipe().start(workers=2, run_dir=tmp_path / "run", **kept) as run:
        digests = [run.result().digest for _ in run]
        run.save(tmp_path / "apart")
    with recipe().start(engine="inline", run_dir=tmp_path / "other", **kept) as other:
        assert [other.result().digest for _ in other] == digests
    for step in (0, 3, 6, 9):
        name = f"snapshots/step-{step:012d}"
        one, two = (leaves_of(snapshot.read(tmp_path / run / name)) for run in ("run", "other"))
        assert one == two
    assert leaves_of(snapshot.read(tmp_path / "apart")) == one
