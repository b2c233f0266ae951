"""Who is blamed: a process that is alone, or the worker that was wrong long before anybody looked."""

import functools

import pytest
import torch

import phalanx
from phalanx.plan.audit import Audit
from tests.families import terms
from tests.proof.faults import Fault, in_workers
from tests.proof.jobs import recipe
from tests.proof.test_audit import Plain, done


def test_an_addition_in_another_order_is_found(tmp_path):
    """Eight replicas' gradients are added from left to right in one step, and no bit is flipped: that step's fold."""
    right = done(terms(8, steps=8), engine="inline")
    with Fault("order", str(tmp_path / "pid"), 7).planted():
        result = done(terms(8, steps=8), engine="inline", audit=1.0)
    assert [(found.kind, found.worker, found.step) for found in result.incidents] == [("corruption", 0, 6)]
    assert "a slice of parameter 0 was folded" in result.incidents[0].why
    assert result.digest == right.digest


@pytest.mark.parametrize("call", [6, 7])
@pytest.mark.parametrize("kind", ["sum", "update", "state"])
def test_a_single_bit_is_found_in_the_calling_process(tmp_path, kind, call):
    """A fold or an update that is wrong once, the first or the second time: it is done again, and no bit is lost."""
    options = {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), "replicas": 3, "steps": 8}
    right = done(recipe(make_model=Plain, **options), engine="inline")
    with Fault(kind, str(tmp_path / "pid"), call).planted():
        result = done(recipe(make_model=Plain, **options), engine="inline", audit=1.0)
    (found,) = result.incidents
    what = "a slice of parameter 0 was folded" if kind == "sum" else "parameter 0 was updated"
    assert (found.kind, found.worker) == ("corruption", 0)
    assert what in found.why
    assert result.digest == right.digest


def test_an_update_that_was_wrong_may_stop_the_run(tmp_path):
    """In the calling process the state is the one before the update: the error has it, and a run goes on from it."""
    right = recipe(make_model=Plain, steps=3).train(engine="inline", progress=False)
    options = {"engine": "inline", "progress": False, "audit": 1.0, "on_corruption": "stop"}
    with (
        Fault("update", str(tmp_path / "pid"), 6).planted(),
        pytest.raises(phalanx.CorruptionError, match="the update of parameter 0 of step 3") as caught,
    ):
        recipe(make_model=Plain, steps=8).train(run_dir=tmp_path / "run", **options)
    assert (caught.value.result.steps, caught.value.result.digest) == (3, right.digest)
    whole = recipe(make_model=Plain, steps=8).train(run_dir=tmp_path / "run", engine="inline", progress=False)
    assert whole.digest == recipe(make_model=Plain, steps=8).train(engine="inline", progress=False).digest


def test_what_is_wrong_twice_in_the_same_way_is_not_found_by_the_process_itself(tmp_path):
    """Every update of the calling process has the same bit wrong: both times alike, so no audit tells."""
    right = recipe(make_model=Plain, steps=4).train(engine="inline", progress=False)
    with Fault("update", str(tmp_path / "pid"), 2, 1 << 30).planted():
        result = recipe(make_model=Plain, steps=4).train(engine="inline", progress=False, audit=1.0)
    assert result.digest != right.digest
    assert not result.incidents


class Two(torch.nn.Module):
    """Two parameters, so that any worker of two may own what is audited."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 8, bias=False)
        self.last = torch.nn.Linear(8, 3, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def late(share, steps, first):
    """A seed of which no step before ``first`` is audited, and several later ones are."""
    drawn = ((seed, [step for step in range(steps) if Audit(share, seed).due(step)]) for seed in range(10_000))
    return next(seed for seed, due in drawn if len(due) > 5 and due[0] >= first)


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", ["gradient", "fold", "update", "state", "rehearsal"])
def test_who_was_wrong_before_it_was_found_is_named_rightly(tmp_path, kind, workers):
    """Nobody looks for eight steps, and a worker is wrong in all of them; then it is named, and nobody else."""
    make_model, fault = in_workers(Two, kind, tmp_path / "pid", 1, 1 << 30)
    seed = late(0.2, 40, 8)
    job = recipe(make_model=make_model, steps=40, seed=seed, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    if kind == "state":
        job = recipe(make_model=make_model, steps=40, seed=seed)
    result, pids = done(job, engine="processes", workers=workers, audit=0.2, every=True)
    found = [incident for incident in result.incidents if incident.kind == "corruption"]
    assert found[0].step >= 8
    assert [pids[incident.worker] for incident in found] == [fault.culprit]
