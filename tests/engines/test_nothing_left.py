"""However a run ends, nothing of it is left: no process, no shared memory, no file, no descriptor, no map, no zombie.

Ways that end an interpreter run in one of their own. Everything that it starts inherits a tag in its environment, by
which what is left is found; temporary files go to a folder of its own. PHALANX_REPEATS repeats each way so many times.
"""

import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import uuid

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.sampling import sample

REPEATS = int(os.environ.get("PHALANX_REPEATS", "1"))
GONE_SECONDS = 100  # on a busy machine
PATIENCE = 300  # for a start on a busy machine

JOB = """
import multiprocessing, os, signal, sys, time
import torch, phalanx
x, y = torch.randn(24, 3), torch.randn(24, 1)
helped = []
def loss_fn(output, target):
    if HELPER and not helped:
        helped.append(os.posix_spawnp("sleep", ["sleep", "1000"], os.environ))
    if WAITING:
        time.sleep(0.01)
    if FAILING:
        raise LookupError("no such image")
    return torch.nn.functional.mse_loss(output, target)
def recipe(steps=100_000):
    return phalanx.Recipe(lambda: torch.nn.Linear(3, 1), (x, y), loss_fn, replicas=2, batch_size=12, steps=steps)
def start():
    return recipe().start(workers=2, engine="processes")
def ready():
    print("ready", flush=True)
HELPER = WAITING = FAILING = False
"""
ENDLESS = """
WAITING = True
recipe().train(workers=2, engine="processes", callbacks=[lambda report: ready() if report.step == 2 else None])
"""
# way: (program after JOB, signal that is sent once it says that it is ready, its exit status)
WAYS = {
    "normal": ("recipe(5).train(workers=2, engine='processes')", None, 0),
    "normal, with a helper": ("HELPER = True; recipe(5).train(workers=2, engine='processes')", None, 0),
    "closed by hand": (
        "run = start(); run.step(); run.close(); phalanx.close(); ready(); time.sleep(60)",
        "check",
        -signal.SIGKILL,
    ),
    "break": ("with start() as run:\n    for report in run:\n        if report.step == 2: break", None, 0),
    "never closed": ("run = start(); run.step()", None, 0),
    "never closed, with a helper": ("HELPER = True; run = start(); run.step()", None, 0),
    "error in user code": ("FAILING = True; recipe().train(workers=2, engine='processes')", None, 1),
    "error in a callback": (
        "recipe().train(workers=2, engine='processes', callbacks=[lambda report: 1 / 0])",
        None,
        1,
    ),
    "sys.exit": ("with start() as run:\n    run.step()\n    sys.exit(3)", None, 3),
    "os._exit": ("run = start(); run.step(); os._exit(3)", None, 3),
    "error at exit": (
        "import atexit; atexit.register(lambda: 1 / 0); run = start(); run.step(); atexit.register(lambda: 1 / 0)",
        None,
        0,
    ),
    "run again at exit": (
        "import atexit; run = start(); run.step()\n"
        "atexit.register(lambda: recipe(3).train(workers=2, engine='processes'))",
        None,
        0,
    ),
    "SIGINT": (ENDLESS, signal.SIGINT, -signal.SIGINT),
    "SIGTERM": (ENDLESS, signal.SIGTERM, -signal.SIGTERM),
    "SIGKILL": (ENDLESS, signal.SIGKILL, -signal.SIGKILL),
    "SIGKILL, with a helper": ("HELPER = True" + ENDLESS, signal.SIGKILL, -signal.SIGKILL),
    "SIGKILL, all stopped": (
        "import psutil; run = start(); run.step(); run.step()\n"
        "[child.suspend() for child in psutil.Process().children(recursive=True)]; ready(); time.sleep(60)",
        signal.SIGKILL,
        -signal.SIGKILL,
    ),
    "SIGKILL at the start": ("ready(); recipe().train(workers=2, engine='processes')", signal.SIGKILL, -signal.SIGKILL),
    "SIGKILL of the group": (ENDLESS, "group", -signal.SIGKILL),
    "SIGKILL after a fork": (
        "run = start(); run.step()\nif os.fork() == 0: time.sleep(20); os._exit(0)\nready(); time.sleep(60)",
        signal.SIGKILL,
        -signal.SIGKILL,
    ),
    "exit after a fork": (
        "run = start(); run.step()\nif os.fork() == 0: time.sleep(20); os._exit(0)\nsys.exit(0)",
        None,
        0,
    ),
    "multiprocessing": (
        "context = multiprocessing.get_context('fork')\n"
        "with start() as run:\n"
        "    run.step(); child = context.Process(target=time.sleep, args=(20,)); child.start(); run.step()\n"
        "ready(); os._exit(0)",
        None,
        0,
    ),
    "a forked child that exits": (
        "run = start(); run.step()\n"
        "if os.fork() == 0: sys.exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
        "for _ in range(3): run.step()\n"
        "pids = run.worker_pids; assert len(pids) == 2\n"
        "run.close(); assert run.result().steps == 4",
        None,
        0,
    ),
    "a forked child that trains": (
        "recipe(3).train(workers=2, engine='processes')\n"
        "if os.fork() == 0: recipe(3).train(workers=2, engine='processes'); sys.exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
        "recipe(3).train(workers=2, engine='processes')",
        None,
        0,
    ),
}
KINDS = pytest.mark.parametrize("repeat", range(REPEATS))


def processes_of(tag):
    """Processes that were started with this tag, but those that the program forked itself: they have its command."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PHALANX_TEST") == tag and "JOB_OF_A_TEST" not in " ".join(process.cmdline()):
                found.append(process)
    return found


def told(processes):
    """Processes in words, for a failed test."""
    words = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            words.append(f"{process.pid} of {process.ppid()} {process.status()}: {' '.join(process.cmdline())[:150]}")
    return words


def shared_memory():
    """Entries of /dev/shm that nobody uses, but for multiprocessing's semaphores: others at work here have them."""
    found = {path.name for path in pathlib.Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}
    for maps in pathlib.Path("/proc").glob("[0-9]*/maps") if found else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            found = {name for name in found if f"/dev/shm/{name}" not in text}
    return found


def assert_soon(nothing, what, seconds=GONE_SECONDS):
    """``nothing()`` is empty within a few seconds."""
    deadline = time.monotonic() + seconds
    while (left := nothing()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"{what} left: {told(left) if what == 'processes' else left}"


@contextlib.contextmanager
def cleared_away(tag):
    """What a failed test leaves is ended all the same: only processes that carry its own tag."""
    try:
        yield
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PHALANX_TEST") == tag:
                    process.kill()


@pytest.mark.long
@KINDS
@pytest.mark.parametrize("way", sample("ways to end", WAYS, 3))
def test_nothing_is_left_when_an_interpreter_ends(way, repeat, tmp_path):
    """Whatever ends the caller's process: within seconds no process, shared memory or file of the run is left."""
    code, send, status = WAYS[way]
    tag, before = uuid.uuid4().hex, shared_memory()
    (tmp_path / "files").mkdir()
    environment = {
        **os.environ,
        "PHALANX_TEST": tag,
        "TMPDIR": str(tmp_path / "files"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),  # torch's own, kept on purpose
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", "JOB_OF_A_TEST = True\n" + JOB + code]
    with (
        open(tmp_path / "errors", "w+") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, start_new_session=True, text=True
        ) as script,
        cleared_away(tag),
    ):
        if send is not None:
            assert script.stdout.readline() == "ready\n", (tmp_path / "errors").read_text()
        if way == "SIGKILL at the start":
            time.sleep(0.1 + repeat % 20 / 10)
        if send == "check":
            assert_soon(lambda: processes_of(tag), "processes")
            assert psutil.Process(script.pid).children() == []
            script.kill()
        elif send == "group":
            os.killpg(script.pid, signal.SIGKILL)
        elif send is not None:
            script.send_signal(send)
        script.wait(PATIENCE)
        importing = way == "SIGKILL at the start"  # what imports a large library looks up only then
        assert_soon(lambda: processes_of(tag), "processes", PATIENCE if importing else GONE_SECONDS)
    written = (tmp_path / "errors").read_text()
    assert script.returncode == status, written
    assert written == "" or status != 0 or way == "error at exit"
    assert_soon(lambda: list((tmp_path / "files").iterdir()), "files")
    assert_soon(lambda: shared_memory() - before, "shared memory")


# Ways that this process lives on after


def small(**changes):
    fields = {
        "make_model": lambda: nn.Linear(3, 1),
        "data": (torch.randn(24, 3), torch.randn(24, 1)),
        "loss_fn": F.mse_loss,
        "replicas": 3,
        "batch_size": 12,
        "steps": 6,
    }
    return phalanx.Recipe(**{**fields, **changes})


def start(**changes):
    return small(**changes).start(workers=2, engine="processes")


def refuse(*_):
    raise LookupError("no such image")


def finished():
    small().train(workers=2, engine="processes")


def broken_off():
    with start() as run:
        for report in run:
            if report.step == 1:
                break


def dropped():
    start().step()


def dropped_in_a_cycle():
    run = start()
    cycle = [run]
    cycle.append(cycle)


def dropped_with_the_state():
    run = start()
    run.step()
    assert run.result().steps == 1


def failed():
    with contextlib.suppress(phalanx.WorkerError):
        small(loss_fn=refuse).train(workers=2, engine="processes")


def failed_in_a_callback():
    with contextlib.suppress(LookupError):
        small().train(workers=2, engine="processes", callbacks=[refuse])


def failed_to_start():
    home = os.getpid()
    with contextlib.suppress(Exception):
        start(make_model=lambda: nn.Linear(3, 1) if os.getpid() == home else refuse())


def refused():
    with contextlib.suppress(phalanx.UsageError):
        start(data=[(torch.randn(3), sys._getframe())] * 24)


def interrupted():
    with contextlib.suppress(KeyboardInterrupt):
        small().train(workers=2, engine="processes", callbacks=[lambda report: signal.raise_signal(signal.SIGINT)])


def killed():
    with contextlib.suppress(phalanx.RunError), start() as run:
        os.kill(run.worker_pids[1], signal.SIGKILL)
        for _ in run:
            pass


def evaluated():
    with start() as run:
        run.step()
        run.evaluate(F.mse_loss, (torch.randn(24, 3), torch.randn(24, 1)))


def helped_loss(output, target):
    """Starts a program that does not end."""
    os.posix_spawnp("sleep", ["sleep", "1000"], os.environ)
    return F.mse_loss(output, target)


def helped():
    small(loss_fn=helped_loss, steps=2).train(workers=2, engine="processes")


def helped_and_dropped():
    start(loss_fn=helped_loss).step()


def helped_and_killed():
    with contextlib.suppress(phalanx.RunError), start(loss_fn=helped_loss) as run:
        run.step()
        os.kill(run.worker_pids[0], signal.SIGKILL)
        run.step()


ENDINGS = [
    finished,
    broken_off,
    dropped,
    dropped_in_a_cycle,
    dropped_with_the_state,
    failed,
    failed_in_a_callback,
    failed_to_start,
    refused,
    interrupted,
    killed,
    evaluated,
    helped,
    helped_and_dropped,
    helped_and_killed,
]


def descriptors():
    """Open descriptors of this process, and what they are."""
    found = {}
    for path in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[path.name] = os.readlink(path)
    return {(name, target) for name, target in found.items() if not target.startswith("/proc/")}


def maps():
    """Maps of shared memory of phalanx in this process."""
    return [
        line
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
        if "phalanx" in line and "memfd" in line
    ]


def below():
    """Processes below this one, as (pid, when it was started); zombies too."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.add((process.pid, process.create_time()))
    return found


@pytest.mark.long
@KINDS
@pytest.mark.parametrize("ending", sample("endings", ENDINGS, 8), ids=lambda ending: ending.__name__)
def test_nothing_is_left_in_a_process_that_goes_on(ending, repeat, monkeypatch, tmp_path):
    """Closed, dropped, failed or killed: no descriptor, map, child, zombie, file or shared memory stays."""
    finished()  # a zygote stays warm between runs
    gc.collect()
    tag = uuid.uuid4().hex
    monkeypatch.setenv("PHALANX_TEST", tag)  # for what user code starts
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held, children, shared = descriptors(), below(), shared_memory()
    assert maps() == []
    with cleared_away(tag):
        ending()
        gc.collect()
        assert_soon(lambda: processes_of(tag), "processes")
        assert_soon(lambda: below() - children, "children")
    assert not descriptors() - held
    assert maps() == []
    assert list(tmp_path.iterdir()) == []
    assert_soon(lambda: shared_memory() - shared, "shared memory")


@pytest.mark.long
def test_close_ends_the_zygote():
    """After phalanx.close() no process of ours is left, not even a zombie, and none of its descriptors."""
    phalanx.close()
    held, children = descriptors(), below()
    finished()
    assert len(below() - children) == 1
    phalanx.close()
    assert below() <= children
    gc.collect()  # importing torch's compiler may leave a circle of tracebacks, which reach up to here
    assert not descriptors() - held


@pytest.mark.long
def test_a_result_outlives_its_run():
    """What a closed run returned holds no shared memory: model and parameters are the caller's own."""
    result = small().train(workers=2, engine="processes")
    gc.collect()
    assert maps() == []
    with torch.no_grad():
        for parameter in result.model.parameters():
            parameter.add_(1)
    assert all(parameter.isfinite().all() for parameter in result.params.values())
