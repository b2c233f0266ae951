"""What cannot be read is never taken for absent: diff says so, with status 2, whatever else is the same."""

import os
import pathlib
import shutil

import pytest
from typer.testing import CliRunner

import phalanx
from phalanx.checkpoint.chain import CHAIN, records_of
from phalanx.cli.app import app
from phalanx.lab import pages, sweeps
from phalanx.proof.instant import whole
from tests.proof.jobs import ran, recipe

NEWEST, OLDER = (f"snapshots/step-{step:012d}" for step in (6, 4))
RECORDS = records_of(pathlib.Path(CHAIN)).name
CHAINS = ("auto", "every", "off", "removed")


def flip(path):
    """One bit of the last byte but two is another one."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def no_json(path):
    path.write_text("{")


def another_hash(path):
    """Still JSON, with another digit in the hash of a tensor."""
    text = path.read_text()
    at = text.index('": "', text.index('"hashes"')) + 4
    path.write_text(text[:at] + ("1" if text[at] == "0" else "0") + text[at + 1 :])


def into_folder(path):
    path.unlink()
    path.mkdir()


def into_file(path):
    shutil.rmtree(path)
    path.write_text("")


def into_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGED = [
    (flip, "weights.safetensors"), (flip, "training.safetensors"), (cut, "weights.safetensors"), (cut, "state.json"),
    (no_json, "state.json"), (another_hash, "state.json"), (into_folder, "state.json"), (into_link, "state.json"),
    (no_json, "manifest.json"), (pathlib.Path.unlink, "manifest.json"), (pathlib.Path.unlink, "weights.safetensors"),
    (into_folder, "weights.safetensors"), (into_file, ""),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Directories of a run of six steps with snapshots after each two, by how its chain was kept; its recipe."""
    folder, job = tmp_path_factory.mktemp("runs"), recipe(steps=6)
    for chain in CHAINS[:3]:
        ran(folder / chain, job, snapshot_every=2, chain=chain)
    shutil.copytree(folder / "off", folder / "removed")
    for name in (CHAIN, RECORDS):
        (folder / "removed" / name).unlink()
    return folder, job


@pytest.fixture
def pair(tmp_path, runs):
    """Two copies of such a run, as ``pair(chain)``."""
    return lambda chain: [shutil.copytree(runs[0] / chain, tmp_path / chain / name) for name in ("a", "b")]


def assert_untold(one, other, path, **options):
    """In either order diff names the file, and the command ends with 2."""
    for sides in ((one, other), (other, one)):
        with pytest.raises(phalanx.SnapshotError, match=str(path)):
            phalanx.diff(*sides, **options)
        done = CliRunner().invoke(app, ["diff", *map(str, sides)])
        assert (done.exit_code, done.stdout) == (2, "")


@pytest.mark.cases(16)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("folder", [NEWEST, OLDER])
@pytest.mark.parametrize(("damage", "name"), DAMAGED)
def test_a_damaged_snapshot_is_not_the_same(pair, chain, folder, damage, name):
    """A run and its copy with a damaged snapshot cannot be told to be the same; undamaged they are."""
    one, other = pair(chain)
    assert phalanx.diff(one, other) is None
    damage(other / folder / name)
    assert_untold(one, other, other / folder)


@pytest.mark.parametrize(
    ("damage", "name"), [(into_file, "snapshots"), (into_folder, CHAIN), (into_folder, RECORDS), (into_link, RECORDS)]
)
def test_what_lies_beside_snapshots_is_not_absent_either(pair, damage, name):
    """Something that is there in place of snapshots, the chain or its records."""
    one, other = pair("every")
    damage(other / name)
    assert_untold(one, other, other / name)


def test_what_may_not_be_read(pair):
    """A directory without permission is an error that names it, not Python's own."""
    one, other = pair("every")
    other.chmod(0)
    others = [folder for folder in one.parents if not folder.stat().st_mode & 1]
    for folder in others:
        folder.chmod(folder.stat().st_mode | 0o111)
    user = os.geteuid()
    try:
        if not user:
            one.chmod(0o755)
            os.seteuid(65534)
        with pytest.raises(phalanx.SnapshotError, match=f"{other}.*Permission denied"):
            phalanx.diff(other, one)
    finally:
        os.seteuid(user)
        other.chmod(0o755)
        for folder in others:
            folder.chmod(0o700)


def test_what_was_removed_is_absent(pair):
    """A snapshot that somebody removed, or the run itself while it is read, is none: what is left is compared."""
    one, other = pair("every")
    shutil.rmtree(other / OLDER)
    assert phalanx.diff(one, other) is None
    assert whole(other / OLDER) is None
    assert whole(other / NEWEST).step == 6


@pytest.mark.parametrize("damage", [flip, another_hash])
def test_runs_that_differ_do_so_with_damage_too(tmp_path, pair, damage):
    """Another step before it is told as ever; where only the damaged snapshot has a difference, it is none."""
    one, _ = pair("every")
    third = ran(tmp_path / "third", recipe(steps=6, seed=1), snapshot_every=2)
    damage(third / NEWEST / "state.json")
    assert phalanx.diff(one, third, recipes=(None, None)).step == 0
    assert CliRunner().invoke(app, ["diff", str(one), str(third)]).exit_code == 1


def test_another_number_of_steps_is_not_told_from_damage(tmp_path, pair):
    """Without chains a damaged newest snapshot is no missing step."""
    one, other = pair("removed")
    shutil.copytree(other, tmp_path / "short")
    shutil.rmtree(tmp_path / "short" / NEWEST)
    assert phalanx.diff(one, tmp_path / "short").phase == "end"
    no_json(other / NEWEST / "state.json")
    assert_untold(one, other, other / NEWEST)


def test_tensors_are_compared_with_the_newest_snapshot(pair, runs):
    """A damaged newest snapshot is no reason to take an older one for the end of the run."""
    result = runs[1].train(engine="inline", progress=False)
    one, _ = pair("auto")
    assert phalanx.diff(one, result) is None
    flip(one / NEWEST / "weights.safetensors")
    for sides in ((one, result), (result, one)):
        with pytest.raises(phalanx.SnapshotError, match=NEWEST):
            phalanx.diff(*sides)


def test_a_cut_chain_is_seen_beside_a_damaged_snapshot(pair, runs):
    """A snapshot that cannot be read counts, too, where verify asks whether the chain has all steps."""
    folder, _ = pair("every")
    lines = (folder / CHAIN).read_text().splitlines(keepends=True)
    (folder / CHAIN).write_text("".join(lines[:4]))
    for step in (2, 4):
        shutil.rmtree(folder / f"snapshots/step-{step:012d}", ignore_errors=True)
    no_json(folder / NEWEST / "state.json")
    records = folder / RECORDS
    records.write_text("".join(line for line in records.read_text().splitlines(True) if '"state"' not in line))
    found = phalanx.verify(runs[1], folder, progress=False)
    assert (found.status, found.steps) == (2, 0)


def test_replay_needs_a_chain_that_can_be_read(pair, runs):
    """What was frozen stands in the records: a step is not computed without them. A missing chain has none."""
    for name, damage in ((RECORDS, into_folder), (CHAIN, no_json)):
        folder, _ = pair("every")
        assert phalanx.replay(runs[1], folder, step=5, replica=0).loss
        damage(folder / name)
        with pytest.raises(phalanx.SnapshotError, match=str(folder / name)):
            phalanx.replay(runs[1], folder, step=5, replica=0)
        shutil.rmtree(folder.parent)
    folder, _ = pair("removed")
    assert phalanx.replay(runs[1], folder, step=5, replica=0).loss


def test_a_page_says_what_it_lacks(pair):
    """Where what a run noted of itself cannot be read a page has no recipe, and says why; it needs no snapshot."""
    folder, _ = pair("every")
    shutil.rmtree(folder / "snapshots")
    known = pages.read(folder)
    assert known.recipe
    assert known.facts
    into_folder(folder / RECORDS)
    with pytest.warns(UserWarning, match=f"{RECORDS} cannot be used.*recipe and environment of a are not shown"):
        assert not pages.read(folder).recipe
    (folder / RECORDS).rmdir()
    assert not pages.read(folder).recipe


def test_one_damaged_run_does_not_hide_the_others(pair):
    """The list of runs has both, and says of which the arguments are unknown."""
    one, other = pair("every")
    into_folder(other / RECORDS)
    with pytest.warns(UserWarning, match=f"{other / RECORDS} cannot be used.*arguments, recipe and environment of b"):
        assert [row["run"] for row in sweeps.rows_of(one.parent)] == ["a", "b"]


def test_an_error_of_a_file_is_no_difference(tmp_path, pair):
    """Python's own status after an exception is 1, which means that runs differ: these commands end with 2."""
    folder, _ = pair("every")
    (tmp_path / "job.py").write_text("raise ValueError('mine')")
    for words in (["verify", str(folder), str(tmp_path / "job.py")], ["check", str(tmp_path / "job.py")]):
        assert CliRunner().invoke(app, words).exit_code == 2
