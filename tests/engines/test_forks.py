"""A fork in a callback: whatever its child does, the parent's workers go on; whatever the parent does, they end."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings

import psutil
import pytest

from phalanx.shared.memory import Memory
from phalanx.surroundings import presence

JOB = """
import contextlib, os, sys, time
import torch, phalanx
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(24, 3, generator=generator), torch.randn(24, 1, generator=generator)
def recipe(steps=8):
    loss_fn = torch.nn.functional.mse_loss
    return phalanx.Recipe(lambda: torch.nn.Linear(3, 1), (x, y), loss_fn, replicas=2, batch_size=12, steps=steps)
def descriptors():
    kept = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kept[name] = os.readlink(f"/proc/self/fd/{name}")
    return {name: link for name, link in kept.items() if not link.startswith("/")}
"""
CHILDREN = """
def refuse():
    raise LookupError("in the child")
def use():
    for touch in (run.result, lambda: run.evaluate(torch.nn.functional.mse_loss, (x, y))):
        try:
            touch()
        except phalanx.RunError as error:
            assert f"it belongs to process {os.getppid()}, from which this one" in str(error), error
        else:
            raise AssertionError("the parent's run was used in its child")
    try:
        run.step()  # the child is within a callback, too
    except phalanx.UsageError as error:
        assert "in the middle of another" in str(error), error
    else:
        raise AssertionError("the parent's run went on in its child")
    run.close()
    os._exit(7)
def train():
    assert recipe().train(workers=2, engine="processes").digest == alone.digest
    phalanx.close()
    os._exit(7)
def look():
    left = {name: link for name, link in descriptors().items() if before.get(name) != link}
    os._exit(7 if left == {} else 1)
CHILDREN = {1: (refuse, 1), 2: (sys.exit, 0), 3: (lambda: os._exit(5), 5), 4: (use, 7), 5: (train, 7), 6: (look, 7)}
def fork(report):
    if report.step in CHILDREN:
        child, status = CHILDREN[report.step]
        pid = os.fork()
        if pid == 0:
            child()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status, report.step
alone, before = recipe().train(engine="inline"), descriptors()
with recipe().start(workers=2, engine="processes", callbacks=[fork], progress=False) as run:
    pids = run.worker_pids
    run.finish()
    assert run.worker_pids == pids
    result = run.result()
print("verdict", result.digest == alone.digest, run.incidents)
"""
LIVES_ON = """
import psutil
def fork(report):
    if report.step == 2 and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    if report.step == 3:
        print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
        time.sleep(60)
recipe().train(workers=2, engine="processes", callbacks=[fork], progress=False)
"""


def command(code):
    return [sys.executable, "-W", "ignore::DeprecationWarning", "-c", JOB + code]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.longest
def test_children_of_a_callback_do_not_end_the_parents_run():
    """They raise, exit, use the run, train for themselves: no worker of the parent dies, and its digest is right."""
    done = subprocess.run(command(CHILDREN), env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False)
    assert done.stdout.splitlines()[-1:] == ["verdict True ()"], done.stdout + done.stderr
    assert "LookupError: in the child" in done.stderr


def living(pid):
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.long
def test_workers_end_with_the_parent_though_its_child_lives_on():
    """The parent is killed; the child that it forked holds nothing that keeps workers or the zygote alive."""
    with subprocess.Popen(command(LIVES_ON), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as script:
        pids = [int(word) for word in script.stdout.readline().split()]
        script.kill()
    try:
        assert len(pids) == 4  # zygote, workers, child
        deadline = time.monotonic() + 30
        while sum(map(living, pids)) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sum(map(living, pids)) == 1
    finally:
        for pid in filter(living, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("owned", [True, False])
def test_a_forked_child_has_no_descriptor_of_what_its_parent_owns(owned):
    """What is registered is closed in the child, what is not is still open there; the parent keeps both."""
    memory = Memory(100)
    if not owned:
        presence._OWNED.discard(memory)
    number = memory.fd
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax, where it is loaded, warns of forks
        pid = os.fork()
    if pid == 0:
        os._exit(pathlib.Path(f"/proc/self/fd/{number}").exists())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (not owned)
    assert memory.fd == number
    assert os.fstat(number).st_size >= 100
    memory.close()
