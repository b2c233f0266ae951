"""The process that starts workers may be killed, stopped or interrupted at any moment: another takes its place."""

import contextlib
import os
import pathlib
import signal
import threading
import time

import pytest

import phalanx
from phalanx.engines.processes import starter
from phalanx.engines.processes.handle import WorkerHandle
from phalanx.engines.processes.starter import WARM
from phalanx.surroundings import interrupts
from tests.engines.deaths import hunted
from tests.families import ADAMW, FAMILIES
from tests.sampling import sample

WHYS = {"was killed by SIGKILL", "ended with the process that started it"}


def recipe(**changes):
    return FAMILIES["mlp"].recipe(4, **{"steps": 6, "optimizer": ADAMW, **changes})


def assert_same(one, other):
    assert (one.digest, one.loss_history) == (other.digest, other.loss_history)


def zygote():
    """The process that starts workers, and has started."""
    WARM.zygote()._ask({"end": 0})
    return WARM.zygote()._process


def strike(run, whom):
    """SIGKILL of the zygote and, before or after it, of workers."""
    pids = {"zygote": [zygote().pid], "worker": list(run.worker_pids[:1]), "workers": list(run.worker_pids)}
    for name in whom:
        for pid in pids[name]:
            with contextlib.suppress(ProcessLookupError):  # it ended with its zygote
                os.kill(pid, signal.SIGKILL)


def await_end(pids):
    """Wait until none of these processes runs any more."""
    for pid in pids:
        while running(pid):
            time.sleep(0.005)


def running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.mark.long
@pytest.mark.parametrize("whom", sample("struck", [["zygote"], ["worker", "zygote"], ["zygote", "workers"]], 1))
def test_it_may_be_killed_together_with_workers(whom):
    """As a cgroup's OOM killer does: the run goes on; each worker died once, of what it died of, and was replaced."""
    with recipe().start(workers=2, engine="processes") as run:
        for report in run:
            if report.step == 2:
                pids = run.worker_pids
                strike(run, whom)
                await_end(pids)  # or one may still come to the next step's update, and that would be rolled back
        result = run.result()
    assert_same(result, recipe().train(engine="inline"))
    assert [(one.kind, one.worker) for one in sorted(run.incidents, key=lambda one: (one.kind, one.worker))] == [
        ("death", 0),
        ("death", 1),
        ("replaced", 0),
        ("replaced", 1),
    ]
    assert {one.why for one in run.incidents if one.kind == "death"} <= WHYS


class Mortal(starter.Zygote):
    """Zygotes of which the first few are killed as soon as they are started."""

    left = 0

    def __init__(self, *needed):
        super().__init__(*needed)
        if Mortal.left:
            Mortal.left -= 1
            os.kill(self._process.pid, signal.SIGKILL)


@pytest.fixture
def mortal(monkeypatch):
    """None is there, and the next two are killed while they import."""
    phalanx.close()
    monkeypatch.setattr(starter, "Zygote", Mortal)
    monkeypatch.setattr(Mortal, "left", 2)
    yield
    phalanx.close()


@pytest.mark.long
def test_it_may_be_killed_while_it_starts(mortal):
    """Those that are killed before they have said anything are replaced; no death of a worker is told, as none died."""
    with recipe().start(workers=2, engine="processes") as run:
        run.finish()
        assert run.incidents == ()
        assert Mortal.left == 0
        result = run.result()
    assert_same(result, recipe().train(engine="inline"))


@pytest.mark.long
def test_it_may_be_killed_again_while_it_starts_again(mortal, monkeypatch):
    """It dies in the middle of a run, and so do the next two."""
    monkeypatch.setattr(Mortal, "left", 0)
    with recipe().start(workers=2, engine="processes") as run:
        for report in run:
            if report.step == 2:
                Mortal.left = 2
                strike(run, ["worker", "zygote"])
        result = run.result()
    assert Mortal.left == 0
    assert_same(result, recipe().train(engine="inline"))
    assert sum(one.kind == "death" for one in run.incidents) == 2


def test_one_that_never_starts_ends_the_run_and_says_why(monkeypatch, capfd):
    """It exits by itself: after five of them an error names the status and points to what it wrote."""
    phalanx.close()
    monkeypatch.setattr(starter, "START", "raise SystemExit('no such library')  # {path} {arguments}")
    with pytest.raises(phalanx.RunError, match=r"5 times in a row.*exited with status 1.*stderr says why"):
        recipe().train(workers=2, engine="processes")
    assert capfd.readouterr().err.count("no such library") >= 2  # one more if an earlier test was about to start one
    phalanx.close()


FAILING = """
import sys
sys.path[:] = {path!r}
from phalanx.engines.processes import zygote
def fail(*_):
    raise ValueError("no such thing as /proc")
zygote.ForkServer._answer = fail
zygote.main({arguments})
"""


@pytest.mark.longest
def test_one_that_fails_at_work_ends_the_run_and_says_why(monkeypatch, capfd):
    """It raises when it is asked for something: after five of them an error names the status, and nobody was killed."""
    phalanx.close()
    monkeypatch.setattr(starter, "START", FAILING)
    with pytest.raises(phalanx.RunError, match=r"5 times in a row.*exited with status 1.*stderr says why"):
        recipe().train(workers=2, engine="processes")
    assert capfd.readouterr().err.count("no such thing") >= 2
    phalanx.close()


@pytest.mark.long
@pytest.mark.parametrize("moment", sample("stopped", ["start", "death", "close"], 2))
def test_it_may_be_stopped(moment):
    """SIGSTOP before it is asked for something: it is woken, and the run goes on, or ends, within seconds."""
    process = zygote()
    if moment == "start":
        process.send_signal(signal.SIGSTOP)
    with recipe().start(workers=2, engine="processes", deadline_seconds=5) as run:
        for report in run:
            if moment == "death" and report.step == 2:
                process.send_signal(signal.SIGSTOP)
                os.kill(run.worker_pids[0], signal.SIGKILL)
        result = run.result()
        if moment == "close":
            process.send_signal(signal.SIGSTOP)
    if moment == "close":
        process.send_signal(signal.SIGSTOP)
        phalanx.close()
    assert_same(result, recipe().train(engine="inline"))


@pytest.mark.long
def test_one_that_stays_stopped_is_replaced(monkeypatch):
    """Whoever stopped it does not let it be woken: it is killed, and another does its work."""
    process = zygote()
    fresh = starter.Zygote

    def patient(*needed):
        starter.SILENT_SECONDS = 600.0
        return fresh(*needed)

    monkeypatch.setattr(starter, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(starter, "Zygote", patient)
    real = process.send_signal
    monkeypatch.setattr(process, "send_signal", lambda number: number == signal.SIGCONT or real(number))  # planted
    os.kill(process.pid, signal.SIGSTOP)
    assert_same(recipe().train(workers=2, engine="processes"), recipe().train(engine="inline"))
    assert process.poll() == -signal.SIGKILL
    assert zygote() is not process


def interrupted_request(timer):
    with interrupts.guarded():
        timer.start()
        WARM.zygote()._ask({"end": 0})


@pytest.mark.long
def test_ctrl_c_while_it_does_not_answer(monkeypatch):
    """The wait ends at once, and so does the zygote, as its next answer would be an old one; another does the work."""
    process = zygote()
    real = process.send_signal
    monkeypatch.setattr(process, "send_signal", lambda number: number == signal.SIGCONT or real(number))  # planted
    os.kill(process.pid, signal.SIGSTOP)
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        interrupted_request(timer)
    timer.join()
    assert process.poll() == -signal.SIGKILL
    assert_same(recipe().train(workers=2, engine="processes"), recipe().train(engine="inline"))
    assert zygote() is not process


@pytest.mark.long
def test_a_worker_whose_start_was_interrupted_is_ended(monkeypatch):
    """Nobody waits for it any more: it ends with its zygote, and nothing is left."""
    phalanx.close()
    before = set(os.listdir("/proc/self/fd"))
    process = zygote()
    receive, started = starter.Zygote._receive, []

    def interrupted(self):
        answer, handles = receive(self)
        started.append(answer["pid"])
        os.close(*handles)
        raise KeyboardInterrupt

    monkeypatch.setattr(starter.Zygote, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        WorkerHandle(0, [])
    monkeypatch.undo()
    await_end([process.pid, *started])
    assert len(started) == 1
    phalanx.close()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.longest
def test_a_storm_over_everybody(monkeypatch):
    """Workers are ended all the time, and twice the zygote as well: the same digest, and only deaths that happened."""
    with recipe(steps=40).start(workers=2, engine="processes") as run:
        with hunted(run, lambda: 0.03, most=15) as ended:
            for report in run:
                if report.step in (10, 25):
                    zygote().kill()
        result = run.result()
    assert_same(result, recipe(steps=40).train(engine="inline"))
    deaths = [one for one in run.incidents if one.kind == "death"]
    assert {one.why for one in deaths} <= WHYS
    assert len(deaths) <= len(ended) + 4
