"""A worker that somebody stops (SIGSTOP) goes on or is replaced in seconds, not after ``deadline_seconds``."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from phalanx.engines.hosts import beacon
from phalanx.engines.processes import pool
from tests.engines.deaths import Trapped, sprung
from tests.engines.test_falls import LATER, assert_same, norm_recipe
from tests.families import conv_norm
from tests.sampling import sample

pytestmark = pytest.mark.timeout(50)  # less than the default of deadline_seconds


@pytest.fixture(scope="module")
def wanted():
    """What the run would have been."""
    return norm_recipe().train(engine="inline")


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Look for stopped workers after half a second."""
    monkeypatch.setattr(pool, "QUIET_POLLS", 10)


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("place", sample("stopped at", ["COMPUTING", "FOLDING", "UPDATING", "UPDATED"], 2))
def test_once_it_is_woken_and_then_it_is_replaced(tmp_path, wanted, place, times):
    """Stopped at a named point: it goes on, or, if it is stopped again, another does, to the same digest."""
    result = norm_recipe(Trapped(conv_norm, tmp_path, 1, LATER, place, signal.SIGSTOP, times)).train(workers=3)
    assert_same(result, wanted)
    assert sprung(tmp_path) == times
    assert [each.kind for each in result.incidents][:1] == ["death"] * (times - 1)
    assert all("stopped again" in each.why for each in result.incidents if each.kind == "death")


@pytest.mark.long
@pytest.mark.parametrize("asks", ["result", "step"])
def test_it_is_stopped_while_nothing_is_done(asks, capfd):
    """Between two steps: ``result()`` and the next step wait for it, and say that it was woken."""
    with norm_recipe().start(workers=2, engine="processes") as run:
        next(run)
        os.kill(run.worker_pids[1], signal.SIGSTOP)
        if asks == "step":
            run.step()
        assert_same(run.result(), norm_recipe(steps=run.steps).train(engine="inline"))
        assert run.incidents == ()
    assert "worker 1 was stopped" in capfd.readouterr().err


def test_ctrl_c_comes_meanwhile(wanted):
    """One Ctrl-C while a worker is stopped is there in seconds, and the run can go on."""
    with norm_recipe().start(workers=2, engine="processes") as run:
        next(run)
        os.kill(run.worker_pids[1], signal.SIGSTOP)
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run.finish()
        timer.join()
        run.finish()
        assert_same(run.result(), wanted)


JOB = """
import sys
from phalanx.engines.processes import pool
from tests.engines.test_falls import norm_recipe
pool.QUIET_POLLS = 20
with norm_recipe().start(workers=2, engine="processes") as run:
    next(run)
    print(run.worker_pids[1], flush=True)
    input()
    run.step()
    input()
    run.finish()
    print(run.result().digest, [each.kind for each in run.incidents])
"""


@pytest.mark.longest
@pytest.mark.parametrize("caller", [True, False])
def test_whoever_stops_the_caller_too_strikes_nobody(wanted, caller):
    """A scheduler stops a job twice, the caller last, and lets it go on first: nobody is replaced. Else one is."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", JOB], **pipes) as job:
        worker = int(job.stdout.readline())
        for _ in range(2):
            os.kill(worker, signal.SIGSTOP)
            job.stdin.write("\n")
            job.stdin.flush()
            time.sleep(0.1)
            if caller:
                job.send_signal(signal.SIGSTOP)
            time.sleep(2.0)
            job.send_signal(signal.SIGCONT)
            time.sleep(0.1)
            with contextlib.suppress(ProcessLookupError):  # replaced
                os.kill(worker, signal.SIGCONT)
        digest, incidents = job.communicate()[0].split(" ", 1)
    assert digest == wanted.digest
    assert ("death" in incidents) == (not caller)


@pytest.mark.long
def test_who_is_in_a_debugger_is_left_alone(monkeypatch):
    """The kernel's letter is t, not T: it stays stopped until the debugger lets it go on."""
    found = []

    def debugged(pid):
        if len(found) < 6:
            found.append(beacon.state(worker))
        else:
            os.kill(worker, signal.SIGCONT)
        return b"t"

    with norm_recipe().start(workers=2, engine="processes") as run:
        next(run)
        worker = run.worker_pids[1]
        os.kill(worker, signal.SIGSTOP)
        monkeypatch.setattr(pool, "state", debugged)
        run.step()
        assert run.incidents == ()
    assert found == [b"T"] * 6
