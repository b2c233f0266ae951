"""Audits: which steps, that nothing changes where nothing is wrong, and what is told where something is."""

import functools

import pytest
import torch

import phalanx
from phalanx.engines.twice import Twice, checksum
from phalanx.frameworks.torch import arithmetic
from phalanx.plan.audit import Audit, joined
from phalanx.seams.records import Computed
from tests.engines.deaths import Trapped, sprung
from tests.families import FAMILIES
from tests.proof.faults import Fault, in_workers
from tests.proof.jobs import Net, X, Y, mlp, recipe
from tests.sampling import sample


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_about_the_share_of_steps_is_audited(share):
    """Of 10,000 steps about the share is drawn, the same ones every time, others for another seed."""
    drawn = [step for step in range(10_000) if Audit(share, 3).due(step)]
    assert abs(len(drawn) - 10_000 * share) <= 4 * (10_000 * share) ** 0.5
    assert drawn == [step for step in range(10_000) if Audit(share, 3).due(step)]
    if share < 1:
        assert drawn != [step for step in range(10_000) if Audit(share, 4).due(step)]


def test_every_replica_comes_to_be_audited():
    """Of those that have samples, each is drawn; which one follows from the step."""
    audit = Audit(1.0, 0)
    assert {audit.replica(step, [1, 4, 7]) for step in range(100)} == {1, 4, 7}
    assert audit.replica(3, range(8)) == Audit(0.5, 0).replica(3, range(8))


@pytest.mark.parametrize(
    ("replica", "block", "ran", "work"),
    [
        (2, range(4), range(4), [2]),
        (3, range(4), range(4), [2, 3]),
        (3, range(3, 5), range(5), [3]),
        (3, range(4), [3], [3]),
    ],
)
def test_what_is_added_up_while_it_is_computed_is_audited_together(replica, block, ran, work):
    """An odd replica comes after the one before, where the same worker hosts that and it has samples."""
    assert joined(replica, block, ran) == work


def test_any_bit_changes_the_sum():
    """Each bit of a gradient, a buffer, the loss and the weight changes the checksum; so does a missing gradient."""
    gradient, buffers = [torch.randn(3), None, torch.zeros(2)], [torch.tensor(3)]
    one = functools.partial(checksum, arithmetic)
    known = Computed(0.5, 2.0, gradient, buffers)
    sums = {one(known), one(known)}
    assert len(sums) == 1
    sums |= {one(Computed(0.25, 2.0, gradient, buffers)), one(Computed(0.5, 1.0, gradient, buffers))}
    sums |= {
        one(Computed(0.5, 2.0, [*gradient[:2], None], buffers)),
        one(Computed(0.5, 2.0, gradient, [torch.tensor(4)])),
    }
    for bit in range(32):
        gradient[2].view(torch.int32)[1] ^= (1 << bit) if bit < 31 else -(1 << 31)
        sums.add(one(known))
        gradient[2].zero_()
    assert len(sums) == 5 + 32


@pytest.mark.parametrize("name", sample("audited families", sorted(FAMILIES), 3))
def test_an_audit_changes_no_bit(name):
    """Every family ends in the digest of an undisturbed run while every step is audited, inline and on two devices."""
    one = FAMILIES[name].recipe(FAMILIES[name].replicas[-1])
    right = one.train(engine="inline", progress=False)
    for options in ({"engine": "inline"}, {"devices": ["cpu", "cpu"]}):
        result = one.train(progress=False, audit=1.0, **options)
        assert (result.digest, result.audited) == (right.digest, result.steps)


@pytest.mark.long
@pytest.mark.parametrize("name", sample("audited families in workers", sorted(FAMILIES), 3))
def test_an_audit_changes_no_bit_in_workers(name):
    """The same in two and three worker processes; one worker for each replica has no memory to spare, either."""
    replicas = FAMILIES[name].replicas[0]
    one = FAMILIES[name].recipe(replicas)
    right = one.train(engine="inline", progress=False)
    for workers in {2, min(3, replicas), replicas}:
        result = one.train(workers=workers, engine="processes", progress=False, audit=1.0)
        assert (result.digest, list(result.incidents)) == (right.digest, [])


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 4])
def test_replicas_without_samples_audit_and_are_not_audited(workers):
    """The last batch of an epoch has one sample: workers without any compute that one again, and nothing differs."""
    plain = functools.partial(torch.nn.Linear, 5, 3)
    job = recipe(make_model=plain, data=(X[:9], Y[:9]), steps=None, epochs=6)
    right = done(job, engine="inline")
    engine = "inline" if workers == 1 else "processes"
    assert done(job, workers=workers, engine=engine, audit=1.0).digest == right.digest


@pytest.mark.parametrize("writes", [False, True])
def test_a_lone_replica_that_writes_its_weights_is_computed_once(writes):
    """In an audited step, too, as in a plain loop; one that writes nothing is computed twice."""
    calls = []

    class Writing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(5, 3)

        def forward(self, x):
            calls.append(phalanx.current_step())
            if writes:
                with torch.no_grad():
                    self.body.weight.mul_(0.99)
            return self.body(x)

    job = recipe(make_model=Writing, replicas=1, steps=4)
    right = job.train(engine="inline", progress=False)
    calls.clear()
    assert job.train(engine="inline", progress=False, audit=1.0).digest == right.digest
    assert calls.count(3) == (1 if writes else 2)


def found(job, folder=None, **options):
    """The error of a run in which audits of every step find something."""
    with pytest.raises(phalanx.CorruptionError) as caught:
        job.train(progress=False, audit=1.0, run_dir=folder, **options)
    return caught.value


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", ["gradient", "batch"])
def test_a_single_bit_is_found_before_the_step_is_committed(tmp_path, kind, workers):
    """In what one worker computes or reads: step, replica and both workers are named, and the step is not done.

    Verification names the worker that was wrong, or the earlier step in which that showed first.
    """
    make_model, fault = in_workers(Net, kind, tmp_path / "pid", 0, 1 << 30, since=5)
    job, options = recipe(make_model=make_model, steps=20), {"engine": "processes", "workers": workers}
    with job.start(progress=False, audit=1.0, run_dir=tmp_path / "run", **options) as run:
        pids = run.worker_pids
        with pytest.raises(phalanx.CorruptionError) as caught:
            run.finish()
    error, culprit = caught.value, pids.index(fault.culprit)
    assert culprit in error.workers
    assert (error.workers[0] + 1) % workers == error.workers[1]
    assert all(f"worker {worker}" in str(error) for worker in error.workers)
    assert f"replica {error.replica} of step {error.step}" in str(error)
    assert (error.result.steps, len(error.samples)) == (error.step, 2)
    told = phalanx.verify(job, tmp_path / "run", progress=False)
    if error.step == 5:  # with two workers always, as both compute what is audited
        assert told.text.endswith(f"worker {culprit} had the wrong one")
    else:
        assert (told.status, workers) == (1, 3)


@pytest.mark.parametrize("call", [10, 11])  # five calls a step
def test_a_process_that_is_alone_computes_again_by_itself(tmp_path, call):
    """A bit that flips in step 2, the first or the second time that replica 0 is computed: found before the update."""
    one = recipe(steps=20)
    with Fault("gradient", str(tmp_path / "pid"), call).planted():
        error = found(one, tmp_path / "run", engine="inline")
    assert (error.step, error.replica) == (2, 0)
    assert error.workers == (0, 0)
    assert "which is alone" in str(error)
    known = recipe(steps=error.step).train(engine="inline", progress=False)
    assert (error.result.steps, error.result.digest) == (error.step, known.digest)
    assert "worker 0 had the wrong one" in phalanx.verify(one, tmp_path / "run", progress=False).text
    assert one.train(run_dir=tmp_path / "run", engine="inline").digest == one.train(engine="inline").digest


@pytest.mark.long
def test_batches_that_are_brought_are_audited(tmp_path):
    """A bit in a gradient of one of two workers is found in steps on batches of the caller's, too."""
    make_model, fault = in_workers(Net, "gradient", tmp_path / "pid", 0, 1 << 30, since=3)
    job = recipe(make_model=make_model, data=None, steps=None)
    with job.start(workers=2, engine="processes", progress=False, audit=1.0) as run:
        pids = run.worker_pids
        for _ in range(3):
            run.step((X[:8], Y[:8]))
        with pytest.raises(phalanx.CorruptionError) as caught:
            run.step((X[:8], Y[:8]))
    assert pids.index(fault.culprit) in caught.value.workers


def test_a_single_bit_is_not_found_without_an_audit(tmp_path):
    """The same fault in a run that audits nothing: another digest, and no error."""
    right = recipe(steps=8).train(engine="inline", progress=False)
    with Fault("gradient", str(tmp_path / "pid"), 20).planted():
        result = recipe(steps=8).train(engine="inline", progress=False)
    assert result.digest != right.digest


def test_what_is_wrong_twice_in_the_same_way_is_not_found_by_the_process_itself(tmp_path):
    """Every gradient of the calling process has the same bit wrong: both times alike, so no audit tells."""
    right = recipe(steps=4).train(engine="inline", progress=False)
    with Fault("gradient", str(tmp_path / "pid"), 0, 1 << 30).planted():
        result = recipe(steps=4).train(engine="inline", progress=False, audit=1.0)
    assert result.digest != right.digest


class Counting(torch.nn.Module):
    """Scales by how often it was called, in some step, where a test can see that or not."""

    def __init__(self, step, seen):
        super().__init__()
        self.body = torch.nn.Linear(5, 3)
        self.step, self.calls, self.seen = step, 0, seen

    def forward(self, x):
        if phalanx.current_step() != self.step:
            return self.body(x)
        generator = torch.Generator()
        generator.seed()
        self.calls += self.seen
        return self.body(x) * (1 + self.calls if self.seen else torch.rand(1, generator=generator))


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize(("step", "engine"), [(0, "inline"), (5, "inline")])
def test_state_of_user_code_is_told_from_what_nobody_can_see(step, engine, seen):
    """What user code keeps is named wherever that can be seen; a generator of the system's is taken for a fault."""
    job = recipe(make_model=functools.partial(Counting, step, seen), steps=8)
    told = step == 5 and not seen
    with pytest.raises(phalanx.CorruptionError if told else phalanx.StateError) as caught:
        job.train(engine=engine, progress=False, audit=1.0)
    assert caught.value.step == step
    assert "phalanx check" in str(caught.value) if told else ("calls" in str(caught.value)) is seen


def failing_loss(sample_value, output, target):
    """Cross entropy that one label of a share makes fail."""
    if phalanx.current_step() > 1 and (target == sample_value).any():
        raise ArithmeticError("no such label")
    return torch.nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_names_the_replica_that_is_computed_again(workers, monkeypatch):
    """User code raises in a replica that is audited: that one is named, not the first of whoever computes it again."""
    monkeypatch.setattr(Audit, "replica", lambda audit, step, ran: 3)
    y = Y.clone() % 2
    y[2 * 8 + 6] = 2  # of replica 3 in step 2
    job = recipe(data=(X, y), steps=4, shuffle=False, loss_fn=functools.partial(failing_loss, 2))
    with pytest.raises(phalanx.WorkerError, match="no such label") as caught:
        job.train(workers=workers, engine="inline" if workers == 1 else "processes", progress=False, audit=1.0)
    assert (caught.value.step, caught.value.replica) == (2, 3)


@pytest.mark.long
@pytest.mark.parametrize("place", ["COMPUTING", "COMPUTED", "UPDATING"])
@pytest.mark.parametrize("worker", [0, 1])
def test_workers_that_die_in_audited_steps_are_replaced(tmp_path, worker, place):
    """Nothing is found wrong, and the digest is that of a quiet run, whoever falls."""
    right = recipe(steps=8).train(engine="inline", progress=False)
    job = recipe(make_model=Trapped(Net, tmp_path, worker, 4, place), steps=8)
    result = job.train(workers=2, engine="processes", progress=False, audit=1.0)
    assert (result.digest, sprung(tmp_path)) == (right.digest, 1)


@pytest.mark.parametrize("value", [-0.1, 1.5, True, "often"])
def test_shares_that_are_none(value):
    """A share outside of 0 to 1 is refused, with an example; so is an option for what follows a corruption."""
    with pytest.raises(phalanx.UsageError, match="a share of steps from 0 to 1"):
        mlp().train(audit=value)
    with pytest.raises(phalanx.UsageError, match="on_corruption is not an argument"):
        mlp().train(audit=1.0, on_corruption="stop")


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2, "auto"])
def test_a_result_says_how_many_steps_were_audited(tmp_path, workers):
    """As many as the seed draws of those that were done since a resume; none without an audit."""
    due = Audit(0.3, recipe().seed).due
    assert done(recipe(steps=8), workers=workers).audited == 0
    first = done(recipe(steps=8), workers=workers, audit=0.3, run_dir=tmp_path)
    again = done(recipe(steps=20), workers=workers, audit=0.3, run_dir=tmp_path)
    assert [first.audited, again.audited] == [sum(map(due, range(8))), sum(map(due, range(8, 20)))]
    assert first.audited != again.audited


def done(job, **options):
    """The result of a run."""
    return job.train(progress=False, **options)


@pytest.mark.parametrize("audit", [None, Audit(0.0, 0), Audit(1.0, 0)])
def test_only_steps_in_which_something_may_be_due_are_looked_at(audit):
    """Without an audit those are the first of a process and powers of ten; with one, all."""
    due = Twice(recipe(), None, allow=False, audit=audit).due
    assert [step in due for step in (0, 1, 2, 10, 99, 100)] == (
        [True, True, False, True, False, True] if audit is None else [True] * 6
    )
