"""Proofs of steps with phases: audits of each of their updates."""

import dataclasses
import json

import pytest
import torch

import phalanx
from phalanx.proof.difference import parted
from tests.exactness.test_phases import KINDS, actor_loss, critic_loss, recipe, walks
from tests.proof.faults import Fault, in_workers


def changed(job, **fields):
    """The same recipe with other fields."""
    given = {field.name: getattr(job, field.name) for field in dataclasses.fields(job) if field.init}
    return phalanx.Recipe(**given | fields)


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [{"engine": "inline"}, {"engine": "processes", "workers": 2}], ids=str)
def test_an_audit_changes_no_bit(kind, place):
    """Every update of every phase is audited, and a run ends in the digest of one that audits nothing."""
    right = recipe(kind).train(engine="inline")
    result = recipe(kind).train(audit=1.0, **place)
    assert (result.digest, list(result.incidents)) == (right.digest, [])


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", ["gradient", "batch"])
def test_a_single_bit_is_found(tmp_path, kind, workers):
    """In a gradient or batch of one worker: it is named, with the phase; without an audit it is not."""
    job = recipe("actor_critic", steps=12)
    right = job.train(engine="inline")
    options = {"engine": "processes", "workers": workers}
    given = {"after": 0, "times": 1 << 30, "since": 4}
    make_model, fault = in_workers(job.make_model, kind, tmp_path / "pid", **given)
    spoiled = changed(job, make_model=make_model)
    with spoiled.start(audit=1.0, run_dir=tmp_path / "run", **options) as run:
        pids = run.worker_pids
        with pytest.raises(phalanx.CorruptionError, match="phase '") as caught:
            run.finish()
    culprit = pids.index(fault.culprit)
    assert culprit in caught.value.workers
    if workers == 2:  # both compute what is audited, so that it is found at once
        assert f"worker {culprit} had the wrong one" in phalanx.verify(spoiled, tmp_path / "run").text
    make_model, _ = in_workers(job.make_model, kind, tmp_path / "other", **given)
    silent = changed(job, make_model=make_model).train(**options)
    assert silent.digest != right.digest
    assert not silent.incidents


def failing_loss(output, target):
    """The actor's loss, but for one sample."""
    if (target[:, 1] == TARGET).any():
        raise ArithmeticError("no such action")
    return actor_loss(output, target)


TARGET = walks()[1][17, 1]
GIVEN = {"engine": "inline", "snapshot_every": 4, "chain": "every"}


def failing():
    """Actor and critic, whose actor fails when sample 17 comes."""
    job = recipe("actor_critic")
    critic, actor = job.phases
    return changed(job, phases=[critic, dataclasses.replace(actor, loss_fn=failing_loss)])


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_verified(tmp_path, kind):
    """A run with phases is computed again, from its beginning and from snapshots, and has the same links."""
    job = recipe(kind, steps=10)
    job.train(run_dir=tmp_path, **GIVEN)
    for options in ({}, {"steps": (5, 9)}, {"workers": 2}):
        found = phalanx.verify(job, tmp_path, **options)
        assert found.status == 0, found
    with Fault("gradient", str(tmp_path / "pid"), 20).planted():
        job.train(run_dir=tmp_path / "wrong", **GIVEN)
    found = phalanx.verify(job, tmp_path / "wrong")
    assert found.status == 1, found


@pytest.mark.long
@pytest.mark.parametrize("phase", [None, "critic", "actor"])
def test_a_phase_is_replayed(tmp_path, phase):
    """Gradients of any phase, from a snapshot or from the beginning, are those that its update took: the mean of all.

    What a phase does not train has none.
    """
    job = recipe("actor_critic", replicas=1, steps=10)
    job.train(run_dir=tmp_path, **GIVEN)
    found = phalanx.replay(job, tmp_path, step=6, replica=0, phase=phase)
    again = phalanx.replay(job, step=6, replica=0, phase=phase)
    assert {name.partition(".")[0] for name in found.gradients} == {"body", phase or "critic"}
    assert all(torch.equal(found.gradients[name], value) for name, value in again.gradients.items())
    with job.start(engine="inline") as run:
        report = next(report for report in run if report.step == 6)
    assert found.loss == again.loss == report.phases[phase or "critic"].loss
    with pytest.raises(phalanx.UsageError, match=r"phase is 'none'.*has the phases"):
        phalanx.replay(job, step=6, replica=0, phase="none")


@pytest.mark.parametrize("place", [{"engine": "inline"}, {"engine": "processes", "workers": 2}], ids=str)
def test_a_failure_is_raised_again(tmp_path, place):
    """In the phase in which it was raised, from the run's directory and from the error."""
    job = failing()
    with pytest.raises(phalanx.WorkerError, match="phase 'actor'") as caught:
        job.train(run_dir=tmp_path, **place)
    assert caught.value.phase == "actor"
    for given in ((job, tmp_path), (caught.value,)):
        with pytest.raises(phalanx.WorkerError) as again:
            phalanx.replay(*given)
        assert (again.value.step, again.value.replica) == (caught.value.step, caught.value.replica)
        assert isinstance(again.value.__cause__, ArithmeticError)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["critic", "actor"])
def test_two_runs_that_differ_in_a_phase(tmp_path, phase):
    """``diff`` names the step, the phase, the replica and what differs first in it; two runs alike are the same."""
    job = recipe("actor_critic", steps=10)
    number = ["critic", "actor"].index(phase)
    phases = list(job.phases)
    phases[number] = dataclasses.replace(phases[number], loss_fn=OTHER[phase])
    jobs = job, changed(job, phases=phases), recipe("actor_critic", steps=10)
    for name, one in zip("abc", jobs, strict=True):
        one.train(run_dir=tmp_path / name, **GIVEN)
    found = phalanx.diff(tmp_path / "a", tmp_path / "b", recipes=jobs[:2])
    assert (found.step, found.part, found.phase) == (0, phase, "loss"), found
    assert f"in step 0, phase {phase!r}" in str(found)
    assert phalanx.diff(tmp_path / "a", tmp_path / "c", recipes=jobs[::2]) is None
    links = [json.loads((tmp_path / name / "chain.jsonl").read_text().splitlines()[1]) for name in "ab"]
    told = parted(0, *links)
    assert (told.part, told.replica) == (phase, 0)  # what the files say by themselves


def other_critic(output, target):
    return critic_loss(output, target) * 1.5


def other_actor(output, target):
    return actor_loss(output, target) * 1.5


OTHER = {"critic": other_critic, "actor": other_actor}
