"""What a worker takes over from the caller's process, and what nobody takes over from a worker."""

import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.engines import selection
from phalanx.frameworks.torch import environment
from tests.engines.moving import hurry, moves

GONE_SECONDS = 100


def recipe(**changes):
    """Four steps of two replicas."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 3, generator=generator), torch.randn(24, 1, generator=generator)
    fields = {"make_model": lambda: nn.Linear(3, 1), "data": (x, y), "loss_fn": F.mse_loss}
    return phalanx.Recipe(**{**fields, "replicas": 2, "batch_size": 12, "steps": 4, **changes})


def in_workers(job):
    """Trained in two workers."""
    return job.train(engine="processes", workers=2)


# How deep functions may call each other.


def deep_loss(depth):
    """A loss that calls itself, and holds lists within lists."""
    nested = []
    for _ in range(depth):
        nested = [nested]

    def down(left, held):
        return 0.0 if left == 0 else down(left - 1, held[0])

    return lambda output, target: F.mse_loss(output, target) + down(depth, nested)


@pytest.fixture
def limit(request):
    """How deep functions may call each other here. Python's own limit is 1,000, and importing tinygrad raises it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(request.param)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("limit", [20_000], indirect=True)
def test_calls_may_be_as_deep_in_workers(limit):
    """With a raised recursion limit a loss that calls itself 5,000 times has the bits of one process."""
    job = recipe(loss_fn=deep_loss(5_000))
    assert in_workers(job).digest == job.train(engine="inline").digest


@pytest.mark.parametrize("limit", [1_000], indirect=True)
def test_calls_that_are_too_deep_fail_in_workers_as_they_do_here(limit):
    """With the limit as it is, the same loss fails in both engines."""
    job = recipe(loss_fn=deep_loss(5_000))
    for train in (in_workers, functools.partial(phalanx.Recipe.train, engine="inline")):
        with pytest.raises((phalanx.PhalanxError, RecursionError)) as caught:
            train(job)
        assert "recursion" in str(caught.value)


# torch's newer settings of precision.

SETTINGS = (
    "backends.fp32_precision = 'ieee'",
    "backends.fp32_precision = 'tf32'",
    "backends.fp32_precision = 'bf16'",
    "backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "backends.mkldnn.conv.fp32_precision = 'tf32'",
    "backends.cuda.matmul.fp32_precision = 'tf32'",
    "backends.cudnn.fp32_precision = 'ieee'",
    "backends.cudnn.rnn.fp32_precision = 'ieee'",
    "backends.cudnn.allow_tf32 = False",
    "torch.set_float32_matmul_precision('medium')",
    "torch.set_float32_matmul_precision('high'); backends.mkldnn.matmul.fp32_precision = 'ieee'",
)
newer = pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch has no such setting yet")


@pytest.fixture
def precision():
    """Sets torch's precision by a statement; it is as before afterwards."""
    before = environment.numeric_environment()
    yield lambda setting: exec(setting, {"torch": torch, "backends": torch.backends})
    environment.adopt(before)
    assert environment.numeric_environment() == before


@newer
@pytest.mark.parametrize("setting", SETTINGS)
def test_newer_settings_of_precision_are_copied(precision, setting):
    """Whatever mix of older and newer settings: another process that adopts them reads the same, and it is recorded."""
    before, recorded = environment.numeric_environment(), environment.recorded_environment()
    precision(setting)
    wanted = environment.numeric_environment()
    assert wanted != before
    assert environment.recorded_environment() != recorded
    environment.adopt(before)
    assert environment.numeric_environment() == before
    environment.adopt(wanted)
    assert environment.numeric_environment() == wanted


@newer
@pytest.mark.parametrize("backend", ["cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul"])
def test_precisions_are_read_where_torch_keeps_them(precision, backend):
    """What torch's attributes say is among what is copied."""
    place = functools.reduce(getattr, backend.split("."), torch.backends)
    before = environment.numeric_environment()["precisions"]
    other = "tf32" if place.fp32_precision == "ieee" else "ieee"
    place.fp32_precision = other
    assert environment.numeric_environment()["precisions"] != before
    assert other in environment.numeric_environment()["precisions"]


def precision_loss(output, target):
    """Fails unless it runs under the newer setting."""
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    return F.mse_loss(output, target)


@newer
def test_a_run_under_newer_settings(precision, tmp_path):
    """Two workers and snapshots work under a mix that torch's older getters refuse to describe."""
    precision("backends.mkldnn.matmul.fp32_precision = 'bf16'")
    with pytest.raises(RuntimeError, match="mix of the legacy and new"):
        torch.get_float32_matmul_precision()
    job = recipe(loss_fn=precision_loss)
    alone = job.train(engine="inline", run_dir=tmp_path)
    assert in_workers(job).digest == alone.digest
    assert job.train(run_dir=tmp_path, engine="inline").digest == alone.digest
    precision("backends.mkldnn.matmul.fp32_precision = 'ieee'")
    with pytest.warns(UserWarning, match="bits may differ.*precisions"):
        job.train(run_dir=tmp_path, engine="inline")


def test_staying_in_one_process_is_explained(monkeypatch):
    """A run that meant to move to workers and cannot says why, once, and goes on to the same digest."""
    hurry(monkeypatch, recipe())

    def refuse(*arguments, **options):
        raise OSError("no more descriptors")

    monkeypatch.setattr(selection, "Processes", refuse)
    job = recipe(steps=12)
    with pytest.warns(UserWarning, match=r"goes on in this process \(same answer\).*no more descriptors") as caught:
        counts, result = moves(job)
    assert len(caught) == 1
    assert set(counts) == {1}
    assert result.digest == job.train(engine="inline").digest


# Programs and processes that user code starts.


def test_programs_inherit_nothing_but_the_standard_streams(tmp_path):
    """A program that a loss starts has no descriptor of the memories, the channel or the zygote's socket."""

    def loss_fn(output, target):
        listing = tmp_path / str(os.getpid())
        code = f"ls -l /proc/self/fd > {listing}"
        os.waitpid(os.posix_spawnp("sh", ["sh", "-c", code], os.environ), 0)
        return F.mse_loss(output, target)

    in_workers(recipe(loss_fn=loss_fn))
    listings = list(tmp_path.iterdir())
    assert len(listings) == 2
    for listing in listings:
        lines = [line for line in listing.read_text().splitlines() if "->" in line and "/proc/" not in line]
        assert sorted(int(line.split(" -> ")[0].split()[-1]) for line in lines) == [0, 1, 2], lines


STARTED = """
import os, time  # a tagged program
os.fork()
time.sleep(1000)
"""


@pytest.fixture
def tag(monkeypatch):
    """A mark in the environment of all that is started; what carries it at the end is ended."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PHALANX_TEST", mark)
    yield mark
    for started in tagged(mark):
        started.kill()


def tagged(mark):
    """Programs that user code started."""
    found = []
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if candidate.environ().get("PHALANX_TEST") == mark and "a tagged program" in " ".join(candidate.cmdline()):
                found.append(candidate)
    return found


def wait_until(condition):
    """Wait for it, and fail if it does not come about."""
    deadline = time.monotonic() + GONE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def starting_loss(folder):
    """A loss that starts, once in each worker, a program with a child."""
    started = []

    def loss_fn(output, target):
        if not started:
            started.append(os.posix_spawnp(sys.executable, [sys.executable, "-c", STARTED], os.environ))
            (folder / str(os.getpid())).write_text(str(started[0]))
        return F.mse_loss(output, target)

    return loss_fn


@pytest.mark.long
def test_programs_end_with_the_run(tag, tmp_path):
    """What user code started in workers is gone after the run; a program of the caller's own is not."""
    own = subprocess.Popen([sys.executable, "-c", STARTED])
    try:
        with recipe(loss_fn=starting_loss(tmp_path)).start(engine="processes", workers=2) as run:
            run.step()
            wait_until(lambda: len(tagged(tag)) == 6)
        wait_until(lambda: len(tagged(tag)) == 2)
        time.sleep(0.2)
        assert {found.pid for found in tagged(tag)} == {own.pid, *(c.pid for c in psutil.Process(own.pid).children())}
    finally:
        own.kill()
        own.wait()


@pytest.mark.long
def test_programs_of_a_worker_that_is_killed_end_with_it(tag, tmp_path):
    """Its own are gone, those of the other worker live on, and so does the run."""
    job = recipe(loss_fn=starting_loss(tmp_path))
    with job.start(engine="processes", workers=2) as run:
        run.step()
        wait_until(lambda: len(tagged(tag)) == 4)
        killed, spared = run.worker_pids
        of_killed, of_spared = (int((tmp_path / str(pid)).read_text()) for pid in (killed, spared))
        grandchildren = psutil.Process(of_killed).children()
        os.kill(killed, signal.SIGKILL)
        run.finish()
        wait_until(lambda: not psutil.pid_exists(of_killed) and not any(child.is_running() for child in grandchildren))
        assert psutil.Process(of_spared).status() != psutil.STATUS_ZOMBIE
        assert run.result().digest == recipe().train(engine="inline").digest


# Where the zygote imports from.

SHADOWS = [
    "ctypes",
    "json",
    "socket",
    "torch",
    "phalanx",
    "numpy",
    "select",
    "signal",
    "gc",
    "cloudpickle",
    "rlcompleter",
]
SHADOW = """
import os
open(os.path.join({folder!r}, "ran " + __name__), "w").close()
raise ImportError("a file that only has the name of a module")
"""
SHADOWED = """
import os, sys, torch, phalanx
from phalanx.engines import selection
folder = {folder!r}
{entering}
from job_of_a_test import recipe
recipe = recipe()
print(recipe.train(engine="processes", workers=2).digest == recipe.train(engine="inline").digest)
"""
JOB = """
import torch, phalanx
def recipe():
    x, y = torch.randn(24, 3), torch.randn(24, 1)
    mse = torch.nn.functional.mse_loss
    return phalanx.Recipe(lambda: torch.nn.Linear(3, 1), (x, y), mse, replicas=2, batch_size=12, steps=2)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "entering",
    [
        "os.chdir(folder)",
        pytest.param("sys.path.insert(0, folder)", marks=pytest.mark.campaign),
        pytest.param("os.chdir(folder); os.environ['PYTHONINSPECT'] = '1'", marks=pytest.mark.campaign),
    ],
)
def test_files_that_have_the_names_of_modules_are_not_run(tmp_path, entering):
    """A ctypes.py in the working directory is not taken for a module, nor a torch.py; the caller's own modules are."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(SHADOW.format(folder=str(tmp_path)))
    (tmp_path / "job_of_a_test.py").write_text(JOB)
    program = textwrap.dedent(SHADOWED.format(folder=str(tmp_path), entering=entering))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd="/", capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert not [path.name for path in tmp_path.glob("ran *")]


WHICH = "import torch\n\n\ndef loss(output, target):\n    return ((output - target) ** {power}).mean()\n"


def test_modules_come_from_where_the_caller_has_them(tmp_path, monkeypatch):
    """What this process loaded from a folder that is first no more is found there, whatever else has its name."""
    for power, folder in enumerate(["one", "other"], 2):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twice_of_a_test.py").write_text(WHICH.format(power=2 * power))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), "", "relative", *sys.path])
    job = recipe(loss_fn=importlib.import_module("twice_of_a_test").loss)
    sys.path.insert(0, str(tmp_path / "other"))
    try:
        assert in_workers(job).digest == job.train(engine="inline").digest
        assert importlib.reload(sys.modules["twice_of_a_test"]).__file__ == str(tmp_path / "other/twice_of_a_test.py")
        job = recipe(loss_fn=sys.modules["twice_of_a_test"].loss)
        assert in_workers(job).digest == job.train(engine="inline").digest
    finally:
        del sys.modules["twice_of_a_test"]


def test_libraries_come_before_files_of_their_names(tmp_path, monkeypatch):
    """The process that starts workers looks in the standard library, by phalanx and among packages, then elsewhere."""
    from phalanx.engines.processes import starter

    packages = str(tmp_path / "site-packages")
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", "relative", *sys.path, packages])
    path = starter._path()
    assert not [entry for entry in path if not os.path.isabs(entry)]
    assert path[0] == os.path.dirname(os.__file__)
    homes = [os.path.dirname(os.path.dirname(module.__file__)) for module in (phalanx, torch)]
    assert max(map(path.index, [*homes, packages])) < path.index(str(tmp_path))


def test_what_is_used_of_torch_is_imported(monkeypatch):
    """Where ``import torch`` alone does not import ``torch.backends.opt_einsum`` (torch 2.6), its settings are read."""
    monkeypatch.delitem(sys.modules, "torch.backends.opt_einsum")
    for holder in (torch.backends, getattr(torch.backends, "m", torch.backends)):
        if "opt_einsum" in vars(holder):
            monkeypatch.delitem(vars(holder), "opt_einsum")
    assert not hasattr(torch.backends, "opt_einsum")
    spec = importlib.util.spec_from_file_location("process_of_a_test", environment.__file__)
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    assert anew.numeric_environment() == environment.numeric_environment()
