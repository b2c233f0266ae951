"""A step that was done is told whole: what an exception or Ctrl-C left of it is done before anything else."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading

import pytest
from torch import nn

import phalanx
from tests.broken_off import PLACES, Job, X, Y, press, refuse, undisturbed

WAYS = {"inline": {"engine": "inline"}, "W2": {"workers": 2}, "auto": {"workers": "auto"}}


def no_metric(output, target):
    raise ValueError("no metric today")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("whole"), engine="inline")


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 7])
@pytest.mark.parametrize("act", [refuse, press], ids=["raises", "Ctrl-C"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_whoever_goes_on_is_told_every_step_once(way, place, act, number, whole, tmp_path):
    """A run that is broken off once anywhere, and goes on, ends and is told of like an undisturbed one."""
    job, breaks = Job(tmp_path, place, act, number), 0
    with job.begin(**WAYS[way]) as run:
        for _ in range(3):
            try:
                run.finish()
                break
            except (OSError, KeyboardInterrupt, phalanx.WorkerError):
                breaks += 1
        assert breaks == 1, "it was broken off"
    assert (job.end(run), job.told()) == whole


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("act", [refuse, press], ids=["raises", "Ctrl-C"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_call_again_ends_as_if_nothing_had_been(way, place, act, number, whole, tmp_path):
    """A run that is broken off once anywhere, and called for again in its directory, ends like an undisturbed one."""
    job = Job(tmp_path, place, act, number)
    with (
        contextlib.suppress(KeyboardInterrupt, OSError, phalanx.WorkerError),
        job.begin(**WAYS[way]) as run,
    ):
        run.finish()
        # Its third call in a worker is a chunk measured again, to watch it; what it raises there breaks nothing off.
        assert (way, place, act, number) == ("W2", "metric", refuse, 3), "nothing was broken off"
    again = Job(tmp_path, place, act, number)  # all calls that it counts are over
    with again.begin(**WAYS[way]) as run:
        run.finish()
    assert again.end(run) == whole[0]


def test_an_evaluation_that_is_left_out_would_be_seen(whole, tmp_path):
    """Negative twin: a schedule that misses one evaluation, and a callback that misses one step, end otherwise."""
    job = Job(tmp_path)
    with job.begin(engine="inline") as run:
        for report in run:
            if report.step == 1:
                run._loop._observers[1].advanced = lambda report: None  # planted
            if report.step == 2:
                run._engine.schedule = lambda value, epoch: None  # planted
    ended, told = job.end(run), job.told()
    assert ended["digest"] != whole[0]["digest"] or ended["losses"] != whole[0]["losses"]
    assert told["steps"] != whole[1]["steps"]
    assert hashlib.sha256(str(ended).encode()).digest() != hashlib.sha256(str(whole[0]).encode()).digest()


@pytest.mark.parametrize("way", WAYS)
def test_no_snapshot_is_written_of_a_step_whose_evaluation_is_due(way, tmp_path):
    """While an evaluation fails every verb that goes on fails, and neither ``save`` nor the end writes the step."""
    job = Job(tmp_path / "run")
    job.metric = no_metric
    with contextlib.suppress(phalanx.WorkerError), job.begin(**WAYS[way]) as run:
        for ask in (run.finish, run.step, run.finish, lambda: run.save(tmp_path / "apart"), lambda: next(run)):
            with pytest.raises(phalanx.WorkerError, match="no metric today"):
                ask()
            assert run.steps == 2
    assert not (tmp_path / "apart").exists()
    assert [path.name for path in sorted((tmp_path / "run" / "snapshots").iterdir())] == ["step-000000000000"]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_may_be_used_in_begin(way):
    """An object that looks at the run in ``begin`` leaves it as usable as before, from other threads too."""

    class Looks:
        def begin(self, run):
            self.value = run.evaluate(nn.functional.l1_loss, (X, Y))

    looks, found = Looks(), []
    recipe = phalanx.Recipe(functools.partial(nn.Linear, 6, 1), (X, Y), nn.functional.mse_loss, replicas=2, steps=3)
    with recipe.start(callbacks=[looks], **WAYS[way]) as run:
        assert not run.turn.mine
        thread = threading.Thread(target=lambda: found.append(run.evaluate(nn.functional.l1_loss, (X, Y))))
        thread.start()
        thread.join(60)
        assert found == [looks.value]
        run.finish()
        assert run.result().digest == recipe.train(engine="inline").digest
