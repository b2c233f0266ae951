"""``phalanx chaos --hosts``: hosts fall and come back on purpose, and each fault is seen to have happened."""

import json
from types import SimpleNamespace

import pytest

from phalanx.cli import member
from phalanx.cli.common import load_recipe
from phalanx.definition.plain import hashed
from phalanx.lab import falls
from tests.state.runs import ROOT

JOB = f"{ROOT}/tests/hosts/campaign_job.py"


def trial(steps, most, count=3, seed=0, **other):
    """A run of so many steps, struck so often; ``other``: what the undisturbed run is said to have ended in."""
    arguments = [f"steps={steps}"]
    quiet = load_recipe(JOB, arguments)[0].train(engine="inline", progress=False)
    wanted = {"digest": quiet.digest, "losses": hashed(json.dumps(quiet.loss_history)).hex(), **other}
    return falls.trial({"file": JOB, "arguments": arguments, "workers": count}, wanted, steps, seed, count, most)


@pytest.mark.long
def test_one_fault(monkeypatch):
    """Without namespaces, hosts are processes: one is killed and comes back, and the digest is right."""
    monkeypatch.setattr(falls, "why_not", lambda: "none are wanted")
    monkeypatch.setattr(falls, "ON_HOSTS", ("killed",))
    done = trial(60, 1)
    assert (done.right, done.problem, done.joined, [fault.what for fault in done.faults]) == (True, "", 1, ["killed"])


@pytest.mark.long
@pytest.mark.skipif(falls.why_not() != "", reason=falls.why_not() or "it can be done")
@pytest.mark.parametrize("what", falls.ON_HOSTS + falls.ON_LINKS)
def test_every_fault(monkeypatch, what):
    """Each kind of fault strikes, is noticed, and leaves the digest as it is."""
    monkeypatch.setattr(falls, "ON_HOSTS", (what,) if what in falls.ON_HOSTS else ())
    monkeypatch.setattr(falls, "ON_LINKS", (what,) if what in falls.ON_LINKS else ())
    done = trial(60, 1)
    assert (done.right, done.problem, [fault.what for fault in done.faults]) == (True, "", [what])


def test_the_run_waits_for_a_host_that_comes_back_late(monkeypatch, tmp_path):
    """The steps that are left when a fault strikes last as long as a host may take; they took 9 s, and it came late."""
    naps, hold = list[float](), tmp_path / falls.HOLD
    monkeypatch.setattr(member.time, "sleep", naps.append)
    told = member.StepPrinter(hold, tmp_path / falls.ENOUGH)
    told.begin(SimpleNamespace(incidents=[], worker_pids=[]))
    for step in range(falls.MARGIN):
        if step == 8:  # as late as one may strike
            hold.touch()
        told.step(SimpleNamespace(step=step))
    assert naps[:8] == [member.PACE] * 8
    assert sum(naps) >= falls.SECONDS
    hold.unlink()
    told.step(SimpleNamespace(step=falls.MARGIN))
    assert naps[-1] == member.PACE


@pytest.mark.long
def test_another_digest_is_found():
    """Negative twin: against another digest, or other losses, a campaign says that they differ."""
    assert "ended so" in trial(30, 0, count=2, digest="0" * 64).problem
    assert not trial(30, 0, count=2, losses="0" * 64).right


@pytest.mark.long
def test_a_fault_that_misses_is_found(monkeypatch):
    """Where a fault does nothing, nobody notices it, and the campaign says so."""
    monkeypatch.setattr(falls, "SECONDS", 15.0)
    monkeypatch.setattr(falls, "ON_HOSTS", ("killed",))
    monkeypatch.setattr(falls, "ON_LINKS", ())
    monkeypatch.setattr(falls.Hosts, "strike", lambda *_: bool)
    assert "killed, noticed: it did not happen within 15 s" in trial(400, 1, count=2).problem
