"""Proofs of steps with phases: audits of each of their updates."""

import dataclasses

import pytest

import phalanx
from tests.exactness.test_phases import KINDS, recipe
from tests.proof.faults import in_workers

SEEN = {"gradient": "replica", "batch": "replica", "fold": "was folded", "update": "was updated",
        "state": "was updated"}  # fmt: skip


def changed(job, **fields):
    """The same recipe with other fields."""
    given = {field.name: getattr(job, field.name) for field in dataclasses.fields(job) if field.init}
    return phalanx.Recipe(**given | fields)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [{"engine": "inline"}, {"engine": "processes", "workers": 2}], ids=str)
def test_an_audit_changes_no_bit(kind, place):
    """Every update of every phase is audited, and a run ends in the digest of one that audits nothing."""
    right = recipe(kind).train(engine="inline")
    result = recipe(kind).train(audit=1.0, **place)
    assert (result.digest, list(result.incidents)) == (right.digest, [])


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", SEEN)
def test_a_single_bit_is_found(tmp_path, kind, workers):
    """In a gradient, batch, fold, update or optimizer state of one worker: it is named; without an audit it is not."""
    job = recipe("actor_critic", steps=12)
    right = job.train(engine="inline")
    options = {"engine": "processes", "workers": workers}
    make_model, fault = in_workers(job.make_model, kind, tmp_path / "pid", 3, 1 << 30)
    with changed(job, make_model=make_model).start(audit=1.0, **options) as run:
        pids = run.worker_pids
        run.finish()
        result = run.result()
    found = [incident for incident in result.incidents if incident.kind == "corruption"]
    assert SEEN[kind] in found[0].why
    assert pids[found[0].worker] == fault.culprit
    make_model, _ = in_workers(job.make_model, kind, tmp_path / "other", 3, 1 << 30)
    silent = changed(job, make_model=make_model).train(**options)
    assert silent.digest != right.digest
    assert not silent.incidents
