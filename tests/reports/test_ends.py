"""However a run ends, it ends in bounded time, and leaves neither processes nor memory, ports or files."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory

import psutil
import pytest

import phalanx
from tests.reports.hand import X, Y, batches, entropy, net, plain, recipe
from tests.reports.report import ROUNDING, differences, here, in_workers, report, wrong

pytestmark = pytest.mark.long
SECONDS = 100  # on a busy machine
LOSSES = plain(net(), entropy, batches(X, Y))["losses"]
JOB = """
import os, time
from tests.reports.hand import recipe
with recipe(steps=10_000).start(workers=2, engine="processes") as run:
    run.step()
    print(*run.worker_pids, flush=True)
    time.sleep(1000)
"""


def gone(pids, seconds=SECONDS):
    """Whether none of these processes is left in this time."""
    alive = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
            alive.append(psutil.Process(pid))
    return not psutil.wait_procs(alive, timeout=seconds)[1]


def named(pids):
    """Shared memory with a name that these processes map."""
    return {each.path for pid in pids for each in psutil.Process(pid).memory_maps() if each.path.startswith("/dev/shm")}


def test_what_is_left_is_seen():
    """Negative twins: a process that lives is noticed, and so is memory that has a name."""
    with subprocess.Popen(["sleep", "1000"]) as left:
        lived = not gone([left.pid], 0.1)
        left.kill()
    assert lived
    memory = shared_memory.SharedMemory(create=True, size=1)
    assert memory.name in "".join(named([os.getpid()]))
    memory.close()
    memory.unlink()


@report("Ends", None, "ultralytics/ultralytics#8232 WatChMaL/WatChMaL#15")
@wrong("After an error, or Ctrl-C, processes of the run were left, and held memory.")
@here("Workers end with the run, whatever it ends with.")
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_leaves_no_process(error):
    """An exception in a callback, and Ctrl-C."""
    pids = []

    def fail(told):
        pids.extend(run.worker_pids)
        raise error

    with pytest.raises(error), recipe().start(**in_workers(2), callbacks=[fail]) as run:
        run.finish()
    phalanx.close()
    assert len(pids) >= 2
    assert gone(pids)


@report("Ends", None, "pytorch/pytorch#5736 pytorch/pytorch#1223 GaTech-RL2/EgoVerse#682")
@wrong("When the main process was killed, its workers lived on.")
@here("The kernel ends workers when the process that started them is gone.")
def test_the_main_process_is_killed():
    """SIGKILL of a process with two workers."""
    with subprocess.Popen([sys.executable, "-c", JOB], stdout=subprocess.PIPE, text=True) as job:
        pids = [int(pid) for pid in job.stdout.readline().split()]
        lived = len(pids) == 2 and not gone(pids, 0.1)
        job.kill()
    assert lived
    assert gone(pids)


@report("Ends", None, "mosaicml/streaming#781 mosaicml/streaming#717 mosaicml/streaming#429")
@wrong("Shared memory of a run that was killed stood in the way of the next run.")
@here("Shared memory has no name. Nothing is left, and the next run starts.")
def test_nothing_stands_in_the_way():
    """No process of a run maps memory that has a name; all workers are killed, and the next run is right."""
    before = named([os.getpid()])
    with recipe().start(**in_workers(2)) as run:
        run.step()
        assert named([os.getpid(), *run.worker_pids]) <= before
        for pid in run.worker_pids:
            os.kill(pid, signal.SIGKILL)
    assert differences(recipe().train(**in_workers(2)).loss_history, LOSSES, ROUNDING) == []


@report("Ends", None, "k2-fsa/snowfall#152")
@wrong("A second run on the same machine failed, as its port was in use.")
@here("On one host no ports are opened. Any number of runs go side by side.")
def test_two_runs_at_once():
    """Two runs in turns: both are right, and no process listens."""
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(recipe().start(**in_workers(2))) for _ in range(2)]
        for _ in range(6):
            for run in runs:
                run.step()
        for pid in [os.getpid(), *runs[0].worker_pids, *runs[1].worker_pids]:
            assert not [each for each in psutil.Process(pid).net_connections() if each.status == psutil.CONN_LISTEN]
        for run in runs:
            assert differences(run.result().loss_history, LOSSES, ROUNDING) == []


@report("Ends", None, "pytorch/pytorch#137268 pytorch/pytorch#22834")
@wrong("A process stood still, and the others waited until a time-out of many minutes.")
@here("A worker that is silent for longer than `deadline_seconds` is replaced within the step.")
def test_a_worker_that_stands_still():
    """SIGSTOP of a worker between two steps: the run goes on, to the right losses."""
    with recipe().start(**in_workers(2), deadline_seconds=1.0) as run:
        for told in run:
            if told.step == 2:
                os.kill(run.worker_pids[0], signal.SIGSTOP)
        result = run.result()
    assert "hung" in result.incidents[0].why
    assert differences(result.loss_history, LOSSES, ROUNDING) == []


@report("Ends", None, "instructlab/training#566 mosaicml/llm-foundry#733")
@wrong("The first process saved for long, and the others ran into a time-out.")
@here("Saving and other work between steps may take its time. Nobody waits with a time-out for it.")
def test_a_callback_that_takes_long(tmp_path):
    """A callback works for longer than the deadline of workers, and saves."""

    def save(told):
        time.sleep(3.5 if told.step == 2 else 0)
        run.save(tmp_path / f"{told.step}")

    with recipe().start(**in_workers(2), deadline_seconds=3.0, callbacks=[save]) as run:
        run.finish()
        result = run.result()
    assert result.incidents in ((), [])
    assert differences(result.loss_history, LOSSES, ROUNDING) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(step) for step in range(6)]
