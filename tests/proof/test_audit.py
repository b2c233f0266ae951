"""Audits: which steps, by whom, who was wrong; and what becomes of a worker that computes wrongly."""

import functools
import os

import pytest
import torch

import phalanx
from phalanx.engines.auditing import summed
from phalanx.plan.audit import Audit, wrong
from phalanx.shared.audit_room import ELEMENTS
from tests.families import FAMILIES
from tests.proof.faults import Fault, in_workers
from tests.proof.jobs import X, Y, mlp, recipe
from tests.sampling import sample


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_about_the_share_of_steps_is_audited(share):
    """Of 10,000 steps about the share is drawn, the same ones every time, others for another seed."""
    drawn = [step for step in range(10_000) if Audit(share, 3).due(step)]
    assert abs(len(drawn) - 10_000 * share) <= 4 * (10_000 * share) ** 0.5
    assert drawn == [step for step in range(10_000) if Audit(share, 3).due(step)]
    if share < 1:
        assert drawn != [step for step in range(10_000) if Audit(share, 4).due(step)]


@pytest.mark.parametrize("workers", range(1, 6))
def test_somebody_else_audits(workers):
    """Every other worker comes to audit every host, and nobody itself unless it is alone."""
    audit = Audit(1.0, 0)
    for host in range(workers):
        auditors = {audit.auditor(step, host, workers) for step in range(200)}
        assert auditors == ({0} if workers == 1 else set(range(workers)) - {host})
    assert {audit.replica(step, [1, 4, 7]) for step in range(100)} == {1, 4, 7}


@pytest.mark.parametrize(
    ("first", "again", "outsider", "who"),
    [
        ({0: 9, 1: 5}, {0: 5, 1: 5}, None, [0]),  # it was wrong once
        ({0: 9, 1: 5}, {0: 9, 1: 5}, None, None),  # it is wrong again, and there are two
        ({0: 9, 1: 5}, {0: 9, 1: 5}, 5, [0]),
        ({0: 9, 1: 5}, {0: 9, 1: 5}, 9, [1]),
        ({0: 9, 1: 5}, {0: 9, 1: 5, 2: 5}, None, [0]),  # the auditor and a third agree
        ({2: 5, 1: 9}, {0: 5, 1: 9, 2: 5}, None, [1]),  # the auditor was wrong
        ({0: 9, 1: 7}, {0: 5, 1: 5, 2: 5}, None, [0, 1]),
        ({0: 9, 1: 7}, {0: 9, 1: 7}, 5, None),  # three opinions
    ],
)
def test_who_was_wrong(first, again, outsider, who):
    """Whoever first came to something else than most votes say; nobody where they are even."""
    assert wrong(first, again, outsider) == who


def test_any_bit_changes_the_sum():
    """Each bit of a gradient and of a buffer changes the checksum; so does a gradient that is missing."""
    gradient, buffers = [torch.randn(3), None, torch.zeros(2)], [torch.tensor(3)]
    sums = {summed(gradient, buffers), summed([*gradient[:2], None], buffers)}
    for bit in range(32):
        gradient[2].view(torch.int32)[1] ^= (1 << bit) if bit < 31 else -(1 << 31)
        sums.add(summed(gradient, buffers))
        gradient[2].zero_()
    assert len(sums) == 34


@pytest.mark.parametrize("name", sample("audited families", sorted(FAMILIES), 3))
def test_an_audit_changes_no_bit(name):
    """Every family ends in the digest of an undisturbed run while every step is audited, inline and on two lanes."""
    one = FAMILIES[name].recipe(FAMILIES[name].replicas[-1])
    right = one.train(engine="inline", progress=False)
    for options in ({}, {"devices": ["cpu", "cpu"]}):
        result = one.train(engine="inline", progress=False, audit=1.0, **options)
        assert (result.digest, list(result.incidents)) == (right.digest, [])


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


class Faulty(torch.nn.Module):
    """A layer whose gradient comes out wrong ``times`` times, in the first process that comes to step 2."""

    def __init__(self, path, times):
        super().__init__()
        self.body = torch.nn.Linear(5, 3)
        self.path, self.times, self.calls = path, times, 0
        self.body.weight.register_hook(self.spoiled)

    def forward(self, x):
        return self.body(x)

    def spoiled(self, gradient):
        """Double the gradient if this process is the faulty one."""
        if phalanx.current_step() < 2:  # before, replicas are computed twice
            return gradient
        self.calls += 1
        try:
            with open(self.path, "x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            pass
        with open(self.path) as file:
            mine = file.read() == str(os.getpid())
        return 2 * gradient if mine and self.calls <= self.times else gradient


def job(path, times):
    """A recipe with such a layer."""
    return recipe(make_model=functools.partial(Faulty, str(path), times), steps=12)


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_that_goes_on_being_wrong_is_replaced(tmp_path, workers, monkeypatch):
    """It is named and replaced, before anything wrong was done; with two workers the caller's process decides."""
    (tmp_path / "nobody").write_text("0")
    right = job(tmp_path / "nobody", 0).train(engine="inline", progress=False)
    monkeypatch.setattr(Audit, "replica", lambda audit, step, ran: ran[step % len(ran)])
    pids = []
    with job(tmp_path / "pid", 10**6).start(workers=workers, engine="processes", progress=False, audit=1.0) as run:
        for _ in run:
            pids.append(run.worker_pids)
    found = [incident for incident in run.incidents if incident.kind == "corruption"]
    assert found
    faulty = int((tmp_path / "pid").read_text())
    assert pids[0][found[0].worker] == faulty
    assert faulty not in pids[-1]
    assert run.result().steps == right.steps


@pytest.mark.long
def test_the_run_may_be_stopped(tmp_path):
    """With ``on_corruption="stop"`` the error names worker, step and replica, and has the state before that step."""
    with pytest.raises(phalanx.CorruptionError, match="came out as one thing in worker") as caught:
        job(tmp_path / "pid", 10**6).train(
            workers=3, engine="processes", progress=False, audit=1.0, on_corruption="stop", run_dir=tmp_path / "run"
        )
    error = caught.value
    assert error.worker in (0, 1, 2)
    assert error.result.steps == error.step
    assert len(error.samples) == 2
    assert '"event": "corruption"' in (tmp_path / "run" / "events.jsonl").read_text()


def test_a_model_that_never_computes_the_same_ends_the_run():
    """Where the replica comes out differently every time, no step can be done; the error says what to do."""

    class Drawn(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(5, 3)

        def forward(self, x):
            generator = torch.Generator()
            generator.seed()
            return self.body(x * torch.rand(1, generator=generator))

    job = recipe(make_model=Drawn, steps=3)
    with pytest.raises(phalanx.StateError, match="nothing in sight"):
        job.train(engine="inline", progress=False, audit=1.0)
    with (
        pytest.warns(UserWarning, match="when it was computed again"),
        pytest.raises(phalanx.RunError, match="5 times in a row") as caught,
    ):
        job.train(engine="inline", progress=False, audit=1.0, nondeterministic="allow")
    assert caught.value.result.steps == 0


@pytest.mark.parametrize("value", [-0.1, 1.5, True, "often"])
def test_shares_that_are_none(value):
    """A share outside of 0 to 1 is refused, with an example; so is what follows a corruption but the two words."""
    with pytest.raises(phalanx.UsageError, match="a share of steps from 0 to 1"):
        mlp().train(audit=value)
    with pytest.raises(phalanx.UsageError, match="on_corruption is 'cry'"):
        mlp().train(on_corruption="cry")


class Plain(torch.nn.Module):
    """One parameter, so that every audited fold and update is of it; its owner is the first worker."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.body(x)


SEEN = {"gradient": "replica", "batch": "replica", "fold": "a slice of parameter 0 was folded",
        "update": "parameter 0 was updated", "state": "parameter 0 was updated"}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("workers", "brought"), [(1, False), (2, False), (3, False), (2, True)])
@pytest.mark.parametrize("kind", SEEN)
def test_a_single_bit_is_found_before_the_step_is_committed(tmp_path, kind, workers, brought):
    """In a gradient, batch, fold, update or optimizer state of one worker: it is named, and what is wrong not done."""
    if workers == 1 and kind in ("gradient", "batch"):
        pytest.skip("a worker that is alone goes on computing the same")
    options = {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), "replicas": 3, "steps": 8}
    options |= {"data": None, "steps": None} if brought else {}
    right = done(recipe(make_model=Plain, **options), engine="inline")
    make_model, fault = in_workers(Plain, kind, tmp_path / "pid", 3, 1 << 30)
    options |= {"make_model": make_model}
    result, pids = done(recipe(**options), engine="processes", workers=workers, audit=1.0, every=True)
    found = [incident for incident in result.incidents if incident.kind == "corruption"]
    assert SEEN[kind] in found[0].why
    assert pids[found[0].worker] == fault.culprit
    if kind in ("fold", "update", "state"):  # of gradients only one is audited, and others may have been wrong before
        assert result.digest == right.digest


def test_a_single_bit_is_not_found_without_an_audit(tmp_path):
    """The same fault in an update of a run that audits nothing: another digest, and no incident."""
    right = recipe(make_model=Plain, steps=8).train(engine="inline", progress=False)
    with Fault("update", str(tmp_path / "pid"), 3).planted():
        result = recipe(make_model=Plain, steps=8).train(engine="inline", progress=False)
    assert result.digest != right.digest
    assert not result.incidents


@pytest.mark.parametrize("workers", [1, 2, "auto"])
def test_a_result_says_how_many_steps_were_audited(tmp_path, workers):
    """As many as the seed draws of those that were done since a resume; none without an audit."""
    due = Audit(0.3, recipe().seed).due
    assert done(recipe(steps=8), workers=workers).audited == 0
    first = done(recipe(steps=8), workers=workers, audit=0.3, run_dir=tmp_path)
    again = done(recipe(steps=20), workers=workers, audit=0.3, run_dir=tmp_path)
    assert [first.audited, again.audited] == [sum(map(due, range(8))), sum(map(due, range(8, 20)))]
    assert first.audited != again.audited


def done(job, *, every=False, **options):
    """The result of a run, on planned steps or eight brought batches; with ``every``, its first processes, too."""
    with job.start(progress=False, **options) as run:
        pids = run.worker_pids
        if job.data is None:
            for step in range(8):
                run.step((X[step * 5 : step * 5 + 5], Y[step * 5 : step * 5 + 5]))
        else:
            for _ in run:
                pass
        return (run.result(), pids) if every else run.result()


@pytest.mark.parametrize("sizes", [[5], [40, 3, ELEMENTS + 1], [0, 7, 0, 3 * ELEMENTS]])
def test_every_slice_comes_to_be_audited(sizes):
    """All slices of all parameters are drawn, and nothing that is outside of one."""
    drawn = {Audit(1.0, 5).piece(step, sizes, ELEMENTS) for step in range(300)}
    slices = {(number, start) for number, size in enumerate(sizes) for start in range(0, size, ELEMENTS)}
    assert drawn == slices
