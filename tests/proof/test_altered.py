"""What was altered after a run: lines of a chain, its header, the losses in a snapshot, a row of the data."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import phalanx
from phalanx.checkpoint import snapshot
from phalanx.checkpoint.chain import CHAIN
from phalanx.cli.app import app
from tests.exactness.test_phases import recipe as with_phases
from tests.proof.jobs import X, Y, ran, recipe

STEPS = 6
ALTERED = {
    "lr": lambda told: told.pop("lr"),
    "norm": lambda told: told.pop("norm"),
    "losses": lambda told: told.pop("losses"),
    "samples": lambda told: told.pop("samples"),
    "added": lambda told: told.update(more=1),
    "a text": lambda told: told.update(lr=str(told["lr"])),
}
WAYS = [{"engine": "inline"}, {"engine": "processes", "workers": 2}, {"engine": "auto", "workers": "auto"}]


@pytest.fixture
def job():
    """A recipe of so few steps that it is computed again in no time."""
    return recipe(steps=STEPS)


def altered(folder, step, alter):
    """Alter what a line says, with its width and its link left alone."""
    path = folder / CHAIN
    lines = path.read_text().splitlines(keepends=True)
    told = json.loads(lines[step + 1])
    alter(told)
    lines[step + 1] = json.dumps(told).ljust(len(lines[step + 1]) - 1) + "\n"
    path.write_text("".join(lines))


def linked_anew(folder, step, alter):
    """Alter what a line says, and make its link and all those after it fit again."""
    path = folder / CHAIN
    header, *lines = path.read_text().splitlines(keepends=True)
    link, anew = "0" * 64, [header]
    for number, line in enumerate(lines):
        told = json.loads(line)
        del told["link"]
        if number == step:
            alter(told)
        body = json.dumps(told)
        link = hashlib.sha256(bytes.fromhex(link) + body.encode()).hexdigest()
        anew.append(f'{{"link": "{link}", {body[1:]}'.ljust(len(line) - 1) + "\n")
    path.write_text("".join(anew))


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_verify_takes_no_line_that_says_less_or_more(tmp_path, job, way):
    """A field that was removed, added or made a text is found, however the run was trained and its link left."""
    right = ran(tmp_path / "right", job, **way)
    assert phalanx.verify(job, right, progress=False).status == 0
    cases = [(altered, 2, name) for name in ALTERED]
    for change, step, name in [*cases, (altered, STEPS - 1, "losses"), (linked_anew, 1, "norm")]:
        folder = shutil.copytree(right, tmp_path / f"{name} {change.__name__} {step}")
        change(folder, step, ALTERED[name])
        found = phalanx.verify(job, folder, progress=False)
        assert (found.status, found.steps) == (1, step), (name, change, found.text)
        assert f"step {step}" in found.text


@pytest.mark.long
def test_verify_with_workers_takes_none_either(tmp_path, job):
    """The same where steps are computed again by two workers; and a chain that was not touched is the same."""
    folder = ran(tmp_path, job)
    assert phalanx.verify(job, folder, workers=2, progress=False).status == 0
    altered(folder, 3, ALTERED["losses"])
    assert phalanx.verify(job, folder, workers=2, progress=False).status == 1


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_diff_reads_chains_whose_last_links_are_equal(tmp_path, job, way):
    """A line in the middle that was altered is named with its file; two runs that were left alone are the same."""
    right, other = ran(tmp_path / "right", job, **way), ran(tmp_path / "other", job)
    assert phalanx.diff(right, other) is None
    for name, alter in {**ALTERED, "loss": lambda told: told.update(loss=1e8)}.items():
        folder = shutil.copytree(right, tmp_path / name)
        altered(folder, 3, alter)
        for pair in ((folder, other), (other, folder)):
            with pytest.raises(phalanx.SnapshotError, match="damaged at step 3: its link is not that of what it says"):
                phalanx.diff(*pair)
            assert CliRunner().invoke(app, ["diff", *map(str, pair)]).exit_code == 2


def test_diff_names_the_first_difference_before_one_that_was_planted(tmp_path, job):
    """Where two runs part in the first step, what was altered later is of no interest; before it, it is damage."""
    one, other = ran(tmp_path / "one", job), ran(tmp_path / "other", recipe(steps=STEPS, data=(X + 1, Y)))
    altered(one, 3, ALTERED["lr"])
    assert phalanx.diff(one, other, recipes=(None, None)).step == 0
    altered(one, 0, ALTERED["norm"])
    with pytest.raises(phalanx.SnapshotError, match="damaged at step 0"):
        phalanx.diff(one, other)


def test_lines_that_one_side_only_has_are_read(tmp_path, job):
    """A longer chain is longer by lines that are whole: what was altered in one of those is no step of it."""
    short, long = ran(tmp_path / "short", recipe(steps=4)), ran(tmp_path / "long", job)
    assert phalanx.diff(short, long).phase == "end"
    altered(long, 4, ALTERED["lr"])
    with pytest.raises(phalanx.SnapshotError, match="damaged at step 4"):
        phalanx.diff(short, long)


def noted_otherwise(right, folder, leaf):
    """A copy of a run whose record of the state after two steps has another hash of a tensor."""
    shutil.copytree(right, folder)
    records = folder / "chain.records.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "state" and line["step"] == 2:
            line["leaves"][leaf] = "0" * 64
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("leaf", "phase"), [("first.weight", "update"), ("norm.running_mean", "buffer")])
def test_a_weight_is_no_buffer_though_its_optimizer_keeps_nothing(tmp_path, leaf, phase, momentum):
    """An update writes weights and a replica buffers, whatever the optimizer keeps.

    Without a recipe only what an optimizer keeps tells them apart; if it keeps nothing, the state is named.
    """
    job = recipe(steps=STEPS, optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=momentum))
    right = ran(tmp_path / "right", job, chain="every")
    other = noted_otherwise(right, tmp_path / "other", leaf)
    found = phalanx.diff(right, other, recipes=(job, job))
    assert (found.step, found.phase, found.name) == (1, phase, leaf)
    unknown = phalanx.diff(shutil.copytree(right, tmp_path / "same"), other)
    assert (unknown.step, unknown.phase, unknown.name) == (1, phase if momentum else "state", leaf)


def headed(folder, **changes):
    """Alter the header of a chain; ``wide``: lines are twice as long as they are."""
    header, _, rest = (folder / CHAIN).read_text().partition("\n")
    told = json.loads(header)
    width = 2 * told["width"] if changes.pop("wide", False) else told["width"]
    (folder / CHAIN).write_text(json.dumps(told | {"width": width} | changes) + "\n" + rest)


def grown(folder):
    """Make a chain's file a terabyte long, of which the disk holds nothing."""
    os.truncate(folder / CHAIN, 1 << 40)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("forge", "changes"),
    [
        (headed, {"first": 10**14}), (headed, {"first": 3}), (headed, {"width": 1}), (headed, {"width": 100}),
        (headed, {"wide": True}), (grown, {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("bare", [False, True])
def test_a_forged_header_counts_no_steps(tmp_path, job, forge, changes, bare):
    """Steps are those that lines tell of: a header that says otherwise, or a file without lines, is damage."""
    right, folder = ran(tmp_path / "right", job), ran(tmp_path / "forged", job)
    if bare:  # nothing but the chains
        shutil.rmtree(right / "snapshots")
        shutil.rmtree(folder / "snapshots")
    assert phalanx.diff(right, folder) is None
    assert phalanx.verify(job, folder, progress=False).status == 0
    forge(folder, **changes)
    for pair in ((right, folder), (folder, right)):
        with pytest.raises(phalanx.SnapshotError, match="damaged at step"):
            phalanx.diff(*pair)
    with contextlib.suppress(phalanx.SnapshotError):
        found = phalanx.verify(job, folder, progress=False)
        assert (found.status, found.steps) == (2, 0)  # fewer lines than the newest snapshot has steps


def test_a_header_alone_counts_no_steps(tmp_path, job):
    """A chain without a line tells of no step, whatever its header and the records beside it say."""
    right, folder = ran(tmp_path / "right", job), ran(tmp_path / "forged", job)
    header = json.loads((folder / CHAIN).read_text().partition("\n")[0])
    (folder / CHAIN).write_text(json.dumps(header | {"first": 10**14}) + "\n")
    record = {"kind": "state", "step": 10**14, "link": "0" * 64, "leaves": {}}
    with open(folder / "chain.records.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")
    assert phalanx.diff(right, folder) is None  # by their snapshots
    shutil.rmtree(folder / "snapshots")
    with pytest.raises(phalanx.UsageError, match=f"{right} has 6 steps and {folder} has 0"):
        phalanx.diff(right, folder)


def edited(folder, step, alter):
    """Alter the losses in a snapshot, with right checksums, as whoever forges one does."""
    place = folder / f"snapshots/step-{step:012d}"
    saved = snapshot.read(place)
    losses = np.frombuffer(saved.training["loss_history"].content).copy()
    alter(losses)
    stored = dataclasses.replace(saved.training["loss_history"], content=losses)
    shutil.rmtree(place)
    snapshot.write(dataclasses.replace(saved, training={**saved.training, "loss_history": stored}), place)


def phased(**changes):
    """A recipe whose steps have phases."""
    return with_phases("actor_critic", **changes)


def first_is_other(values):
    """Another loss of the first update."""
    values[0] = 1e8


def swapped(values):
    """The same losses in another order."""
    values[0], values[-1] = values[-1], values[0]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("make", "saved"), [(recipe, 6), (recipe, 4), (phased, 6)])
def test_losses_in_a_snapshot_are_those_of_the_chain(tmp_path, way, make, saved):
    """Losses in a snapshot that were edited, with right checksums, give status 2 and its step; else it is 0."""
    job = make(steps=STEPS)
    folder = ran(tmp_path / "run", job, snapshot_every=2, keep_snapshots=9, **way)
    place = folder / f"snapshots/step-{saved:012d}"
    shutil.copytree(place, tmp_path / "kept")
    edited(folder, saved, lambda losses: None)
    found = phalanx.verify(job, folder, progress=False)
    assert (found.status, found.steps) == (0, STEPS), found.text
    for alter in (first_is_other, swapped):
        edited(folder, saved, alter)
        found = phalanx.verify(job, folder, progress=False)
        assert (found.status, found.steps) == (2, STEPS)
        assert f"the snapshot of step {saved} has another loss of step 0 than the chain" in found.text
        shutil.rmtree(place)
        shutil.copytree(tmp_path / "kept", place)
    assert phalanx.verify(job, folder, progress=False).status == 0


def other_in(rows, kind):
    """The data with other values in some rows, in arrays of a kind."""
    changed = X.clone()
    changed[rows, 2] = 1e8
    return kind(changed), Y


@pytest.mark.cases(3)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", [torch.Tensor, np.asarray, lambda data: data.T.contiguous().T])
def test_a_refused_resume_names_the_column(tmp_path, way, kind):
    """Where an array has another value in any row, the first and last too, it is named."""
    ran(tmp_path, recipe(steps=2, data=other_in([], kind)), **way)
    for rows in ([17], [0], [39], [3, 4]):
        with pytest.raises(phalanx.UsageError, match=r"data: item 0 is another float32.* than there"):
            ran(tmp_path, recipe(steps=3, data=other_in(rows, kind)), **way)
    with pytest.raises(phalanx.UsageError, match=r"data: item 1 is another int64.40. here than there"):
        ran(tmp_path, recipe(steps=3, data=(kind(X), Y.index_fill(0, torch.tensor([5]), 9))), **way)
