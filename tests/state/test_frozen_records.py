"""What was frozen and thawed is on the disk before the snapshot that follows, so that steps can be computed again."""

import pytest

import phalanx
from phalanx.checkpoint.chained import retrained_in
from tests.state import fuzz
from tests.state.disks import KINDS, Disk, States, lay_out
from tests.state.runs import NEWER, steps_in


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The operations of a run that freezes and thaws, and its folder."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    folder.mkdir(mode=0o700)
    with Disk(folder) as disk:
        fuzz.train(folder, NEWER)
    return disk.log, folder


def left(log, folder, kind):
    """What the disk has in the end."""
    states = States(str(folder))
    for operation in log:
        states.do(operation)
    return states.files(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_power_loss_after_a_run(recorded, tmp_path, kind):
    """After a power loss verify computes all steps of the chain again, with what was frozen in them."""
    lay_out(left(*recorded, kind), tmp_path / "left")
    assert steps_in(tmp_path / "left")[-2:] == [2, NEWER]
    assert retrained_in(tmp_path / "left") == retrained_in(recorded[1]) != {}
    found = phalanx.verify(fuzz.recipe(), tmp_path / "left", progress=False)
    assert (found.status, found.steps) == (0, NEWER)


def test_records_that_are_never_synced_are_found(recorded, tmp_path):
    """The negative twin: without the syncs of the records, verify takes a right run for a wrong one, or cannot tell."""
    log, folder = recorded
    planted = [each for each in log if each.name != "fsync" or not each.path.endswith(".records.jsonl")]
    lay_out(left(planted, folder, "ahead"), tmp_path / "left")
    assert phalanx.verify(fuzz.recipe(), tmp_path / "left", progress=False).status != 0
