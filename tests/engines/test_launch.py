"""Wherever train() is called from, workers start, find themselves at home there, and end in the digest of one process.

The ways that need an interpreter of their own run one program, each in a subprocess; the program compares the digests
of both engines itself, and the test compares them with that of this process.
"""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.engines.small import in_workers, small

JOB = """
import torch
import phalanx
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(24, 3, generator=generator), torch.randn(24, 1, generator=generator)
scale = 0.5
class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(3, width)
    def forward(self, x):
        return self.inner(x) * scale

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(Block(4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

def powered(power):
    return lambda output, target: ((output - target).abs() ** power).mean()

adam = lambda named: torch.optim.Adam(named, lr=0.01)
recipe = phalanx.Recipe(lambda: Net(), (x, y), powered(2), replicas=3, batch_size=12, steps=4, optimizer=adam)
"""
VERDICT = """
alone = recipe.train(engine="inline")
several = recipe.train(workers=2, engine="processes")
print("verdict", several.digest == alone.digest, several.workers, several.digest)
"""
SECONDS = 300


@pytest.fixture(scope="module")
def verdict():
    """The line that ``JOB + VERDICT`` prints when all is well."""
    namespace: dict = {"__name__": "job"}
    exec(JOB, namespace)
    return f"verdict True 2 {namespace['recipe'].train(engine='inline').digest}"


def python(*arguments, text=None, cwd=None, before=(), **environment):
    """Run a fresh interpreter to its end."""
    return subprocess.run(
        [*before, sys.executable, *map(str, arguments)],
        input=text,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def assert_says(done, *lines):
    """It ended well and said exactly this."""
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.splitlines() == list(lines)


# Ways of calling: each needs an interpreter or two


@pytest.mark.long
def test_a_command_that_stands_in_the_arguments(verdict):
    """`python -c` works."""
    assert_says(python("-c", JOB + VERDICT), verdict)


@pytest.mark.long
def test_a_file_that_the_command_line_trains(tmp_path, verdict):
    """`phalanx train FILE --workers 2` trains in two workers, to the digest of the library."""
    (tmp_path / "job.py").write_text(JOB)
    done = python("-m", "phalanx", "train", "job.py", "--workers", "2", "--quiet", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert f"verdict True {facts['workers']} {facts['digest']}" == verdict


def answer(terminal, endings, seconds=SECONDS):
    """What a terminal shows until it ends in one of ``endings``."""
    shown, deadline = "", time.monotonic() + seconds
    while not shown.endswith(endings):
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65536).decode()
    return shown


@pytest.mark.long
def test_an_interactive_prompt(verdict):
    """Typed line by line at a terminal, where no source is kept, the same program works."""
    terminal, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PYTHON_BASIC_REPL": "1", "PYTHONSTARTUP": "", "OMP_NUM_THREADS": "1"}
    prompt = subprocess.Popen(
        [sys.executable, "-q", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    )
    os.close(theirs)
    try:
        shown = answer(terminal, (">>> ",))
        for line in (JOB.strip() + "\n" + VERDICT).splitlines():
            os.write(terminal, line.encode() + b"\n")
            shown += answer(terminal, (">>> ", "... "))
        assert verdict in shown.replace("\r", "").splitlines(), shown
        assert "Traceback" not in shown
        os.write(terminal, b"raise SystemExit(7)\n")
        assert prompt.wait(SECONDS) == 7
    finally:
        if prompt.poll() is None:
            prompt.kill()
            prompt.wait()
        os.close(terminal)


PART = """
import torch
class {name}(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()
"""
PLACES = """
import os, pathlib, sys
import torch, phalanx
here = pathlib.Path(__file__).parent
x, y = torch.linspace(-1, 1, 24).reshape(8, 3), torch.linspace(1, -1, 8).reshape(8, 1)
def check(make_layer):
    recipe = phalanx.Recipe(make_layer, (x, y), torch.nn.functional.mse_loss, replicas=2, batch_size=4, steps=3)
    print(recipe.train(engine="inline").digest == recipe.train(workers=2, engine="processes").digest)
from near import Near
check(lambda: Near(3, 1))
sys.path.append(str(here / "added"))
from far import Far
check(lambda: Far(3, 1))
os.chdir(here / "changed")
sys.path.insert(0, "")
from there import There
check(lambda: There(3, 1))
from package.inner import Inner
check(lambda: Inner(3, 1))
os.chdir(here / "gone")
(here / "gone").rmdir()
check(lambda: Near(3, 1))
"""


@pytest.mark.campaign
def test_modules_from_wherever_the_caller_finds_them(tmp_path):
    """A module of the script's folder, of one added to sys.path after a run, of the working directory after chdir."""
    for folder, file, name in [
        ("", "near", "Near"),
        ("added", "far", "Far"),
        ("changed", "there", "There"),
        ("changed/package", "inner", "Inner"),
    ]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{file}.py").write_text(PART.format(name=name))
    (tmp_path / "gone").mkdir()
    (tmp_path / "places.py").write_text(PLACES)
    assert_says(python(tmp_path / "places.py", cwd="/"), *["True"] * 5)


NOTEBOOK = """
import asyncio, json, sys, warnings
import nbformat
from nbclient import NotebookClient
from nbformat import v4
cells = json.load(sys.stdin)
notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
NotebookClient(notebook, timeout=500, kernel_name="python3", allow_errors=True).execute()
print(json.dumps([[dict(output) for output in cell.outputs] for cell in notebook.cells]))
"""
LOUD = """
class Loud(Net):
    def forward(self, x):
        print(f"forward of {len(x)} samples")
        return super().forward(x)
loud = phalanx.Recipe(Loud, (x, y), powered(2), replicas=3, batch_size=12, steps=2)
digest = loud.train(workers=2, engine="processes").digest
"""
FAILING = """
def refuse(output, target):
    raise LookupError("no such image")
phalanx.Recipe(Net, (x, y), refuse, replicas=3, batch_size=12, steps=2).train(workers=2, engine="processes")
"""


@pytest.mark.long
def test_a_notebook(tmp_path, verdict):
    """Classes and functions of cells work in workers; what they print, and what they raise, comes out of the cell."""
    cells = [*JOB.split("\n\n"), VERDICT, LOUD, "print(loud.train(engine='inline').digest == digest)", FAILING, VERDICT]
    folders = {name: str(tmp_path) for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    done = python("-c", NOTEBOOK, text=json.dumps(cells), cwd=tmp_path, **folders)
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)
    streams = [
        [line for item in cell if item.get("name") == "stdout" for line in item["text"].splitlines()]  # no bars
        for cell in outputs
    ]
    assert streams[:-5] == [[]] * (len(cells) - 5), outputs
    assert streams[-5] == [verdict]
    twice = 2 * 2 + 1  # each of two workers its first replica in steps 0 and 1, and one that of the other in step 0
    assert streams[-4] == ["forward of 4 samples"] * (6 + twice)
    assert streams[-3][-1] == "True"
    (failure,) = outputs[-2]
    assert (failure["output_type"], failure["ename"]) == ("error", "WorkerError")
    assert "no such image" in "".join(failure["traceback"])
    assert streams[-1] == [verdict]


# Ways of calling from this process, which is pytest's


def test_local_classes_and_closures_of_a_function():
    """What is defined in a function, in several layers, travels too."""
    width, seen = 4, []

    class Inner(nn.Linear):
        def __init__(self):
            super().__init__(3, width)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Inner(), nn.Linear(width, 1)])

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    def loss_fn(output, target):
        seen.append(len(output))
        return F.mse_loss(output, target)

    recipe = small(make_model=Outer, loss_fn=loss_fn)
    several = in_workers(recipe)
    assert seen == []
    assert several.digest == recipe.train(engine="inline").digest
    assert type(several.model) is Outer


@pytest.mark.long
def test_two_runs_open_at_once():
    """Two runs of one process, their steps interleaved, do not meet."""
    one, other = small(seed=1), small(seed=2)
    with one.start(workers=2, engine="processes") as first, other.start(workers=3, engine="processes") as second:
        for _ in range(4):
            first.step()
            second.step()
        assert not set(first.worker_pids) & set(second.worker_pids)
        assert first.result().digest == one.train(engine="inline").digest
        assert second.result().digest == other.train(engine="inline").digest


def in_threads(*calls):
    """What each call returned, all made at once in threads of their own."""
    results = [None] * len(calls)

    def run(position):
        results[position] = calls[position]()

    threads = [threading.Thread(target=run, args=(position,)) for position in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return results


@pytest.mark.long
def test_a_thread_that_ends_before_the_next_run():
    """The first run may be in a thread: what it started does not end with the thread."""
    recipe = small()
    phalanx.close()
    (first,) = in_threads(lambda: in_workers(recipe).digest)
    time.sleep(0.2)
    assert {first, in_workers(recipe).digest} == {recipe.train(engine="inline").digest}


@pytest.mark.long
def test_a_run_that_outlives_the_thread_it_was_started_in():
    """Started in one thread, stepped in another, finished here: the workers live until the run is closed."""
    recipe = small()
    phalanx.close()
    (run,) = in_threads(lambda: recipe.start(workers=2, engine="processes"))
    with run:
        in_threads(run.step)
        for _ in run:
            pass
        assert run.result().digest == recipe.train(engine="inline").digest


@pytest.mark.long
@pytest.mark.parametrize("warm", [True, False])
def test_two_threads_at_once(warm):
    """Two threads train at once, also when both find no zygote."""
    recipes = [small(seed=1, steps=30), small(seed=2, steps=30)]
    if warm:
        in_workers(small())
    else:
        phalanx.close()
    found = in_threads(*[lambda recipe=recipe: in_workers(recipe).digest for recipe in recipes])
    assert found == [recipe.train(engine="inline").digest for recipe in recipes]


# Settings of the caller


class Seen(Exception):
    """Brings home what user code saw."""


def look():
    """What user code may see of its process."""
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "arguments": list(sys.argv),
        "dtype": str(torch.get_default_dtype()),
        "made": str(torch.zeros(1).dtype),
        "matmul": torch.get_float32_matmul_precision(),
        "flush": not torch.tensor([1e-310], dtype=torch.float64).mul(1.0).item(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "threads": torch.get_num_threads(),
        "anomaly": torch.is_anomaly_enabled(),
        "filters": [
            (action, str(message), kind.__name__, line)
            for action, message, kind, _, line in warnings.filters
            if kind.__module__ == "builtins"
        ],
        "main": __import__("__main__").__dict__.get("__name__"),
    }


def seen_by(engine, place, **options):
    """What the model's factory, the dataset or the loss sees."""

    def tell():
        raise Seen(look())

    class Rows:
        def __len__(self):
            return 24

        def __getitem__(self, index):
            tell()

    changes = {
        "loss": {"loss_fn": lambda output, target: tell()},
        "dataset": {"data": Rows()},
        "forward": {"forward_fn": lambda model, batch: tell()},
    }
    with pytest.raises(phalanx.WorkerError) as caught:
        small(**changes[place]).train(engine=engine, **options)
    assert isinstance(caught.value.__cause__, Seen)
    return caught.value.__cause__.args[0]


@pytest.fixture
def changed_settings(place, monkeypatch, tmp_path):
    """Other settings of this process, changed after a zygote was started."""
    in_workers(small())
    before = (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled)
    monkeypatch.setenv("PHALANX_TEST_SETTING", "né\nw")
    monkeypatch.delenv("PATH")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", "--flag", "an argument"])
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "nowhere"), ""])
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    torch.set_flush_denormal(True)
    torch.use_deterministic_algorithms(place == "loss", warn_only=place == "loss")  # slow: a worker imports for it
    torch.backends.mkldnn.enabled = False
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.filterwarnings("ignore", message="an old.*way", category=DeprecationWarning, lineno=3)
        yield
    torch.use_deterministic_algorithms(False)
    torch.set_flush_denormal(False)
    torch.set_default_dtype(before[0])
    torch.set_float32_matmul_precision(before[1])
    torch.backends.mkldnn.enabled = before[2]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("place", ["loss", "dataset", "forward"])
def test_user_code_sees_the_callers_settings(place, changed_settings):
    """Environment, folder, path, arguments, filters and torch's settings are in a worker as in the caller's process."""
    several = seen_by("processes", place, workers=2)
    assert several == seen_by("inline", place)
    assert several["environment"]["PHALANX_TEST_SETTING"] == "né\nw"
    assert "PATH" not in several["environment"]
    assert several["arguments"] == ["program", "--flag", "an argument"]
    assert (several["dtype"], several["made"]) == ("torch.float64", "torch.float64")
    assert (several["matmul"], several["mkldnn"]) == ("medium", False)
    assert several["flush"]
    assert several["deterministic"] == several["warn_only"] == (place == "loss")
    assert several["anomaly"]
    assert "GLIBC_TUNABLES" not in several["environment"] or "GLIBC_TUNABLES" in os.environ


def test_settings_go_back_with_the_next_run():
    """A later run sees the settings of its own time, not those of an earlier one."""
    torch.set_default_dtype(torch.float64)
    try:
        assert seen_by("processes", "loss", workers=2)["dtype"] == "torch.float64"
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen_by("processes", "loss", workers=2) == seen_by("inline", "loss")


WARNING_JOB = """
import warnings
def loss_fn(output, target):
    warnings.warn("an odd target")
    return torch.nn.functional.mse_loss(output, target)
recipe = phalanx.Recipe(Net, (x, y), loss_fn, replicas=3, batch_size=12, steps=4)
try:
    recipe.train(workers=2, engine="processes")
except phalanx.WorkerError as error:
    print(type(error.__cause__).__name__, error.replica)
"""


@pytest.mark.campaign
def test_interpreter_flags_reach_workers():
    """`python -W error` turns a worker's warning into a WorkerError; without it the warning is on stderr, once."""
    assert_says(python("-W", "error", "-c", JOB + WARNING_JOB), "UserWarning 0")
    done = python("-c", JOB + WARNING_JOB)
    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(r"<string>:\d+: UserWarning: an odd target\n", done.stderr), done.stderr


# Little room


def mounting(mount):
    """A command prefix with which a program has something mounted, or None where that is not permitted."""
    for flags in (["-m"], ["-Urm"]):
        prefix = ["unshare", *flags, "sh", "-c", f'{mount} && exec "$@"', "sh"]
        if (
            shutil.which("unshare")
            and not subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode
        ):
            return prefix
    return None


@pytest.mark.long
def test_a_container_with_little_shared_memory(verdict):
    """With a /dev/shm of 64 KB, as in containers, and a model that is larger, training goes as everywhere."""
    prefix = mounting("mount -t tmpfs -o size=64k tmpfs /dev/shm")
    if prefix is None:
        pytest.skip("this sandbox permits no mounts of its own")
    larger = textwrap.dedent("""
        import shutil
        print(shutil.disk_usage("/dev/shm").total)
        scale = 1.0
        recipe = phalanx.Recipe(
            lambda: torch.nn.Sequential(torch.nn.Linear(3, 200_000), torch.nn.Linear(200_000, 1)), (x, y), powered(2),
            replicas=3, batch_size=12, steps=2,
        )
        print(recipe.train(engine="inline").digest == recipe.train(workers=2, engine="processes").digest)
        import os
        print(os.listdir("/dev/shm"))
    """)
    assert_says(python("-c", JOB + VERDICT + larger, before=prefix), verdict, "65536", "True", "[]")


@pytest.mark.longest
def test_a_system_without_proc():
    """Where /proc tells nothing, workers start all the same; torch may see another processor there, and other bits."""
    prefix = mounting("mount -t tmpfs tmpfs /proc")
    if prefix is None:
        pytest.skip("this sandbox permits no mounts of its own")
    done = python("-c", JOB + VERDICT, before=prefix)
    assert done.returncode == 0, done
    assert done.stdout.startswith("verdict True 2 ")


TAKING = """
import os, sys
taken = open(sys.argv[1], "x") if sys.argv[2:] else None  # it gets the first number that is free
"""
WRITTEN = """
with open(sys.argv[1], "a") as told:
    print(several.digest == alone.digest, several.workers, several.digest, file=told)
"""


@pytest.mark.longest
@pytest.mark.parametrize(
    ("closed", "taken"), [("1>&-", []), ("1>&-", ["taken"]), ("2>&-", []), ("0<&- 1>&- 2>&-", []), ("2>&-", ["taken"])]
)
def test_standard_streams_that_are_closed(closed, taken, verdict, tmp_path):
    """A job may be started with any of them closed, and have opened another file in its place."""
    (tmp_path / "job.py").write_text(TAKING + JOB + VERDICT + WRITTEN)
    command = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    done = python(tmp_path / "job.py", tmp_path / "told", *taken, before=command)
    assert done.returncode == 0, done
    assert (tmp_path / "told").read_text().splitlines() == [verdict.removeprefix("verdict ")]


LIMITED = """
import resource
def tried(**options):
    try:
        print(recipe.train(**options).digest == recipe.train(engine="inline").digest)
    except phalanx.UsageError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
"""
TOO_LARGE = r"shared memory cannot be had \(.*File too large\); raise the limit on files \(ulimit -f\)"


@pytest.mark.long
def test_a_limit_on_files():
    """Shared memory that a limit on the length of files forbids is told in words."""
    ways = "tried(engine='processes', workers=2)\ntried(workers='auto')\ntried(engine='inline')"
    done = python("-c", JOB + LIMITED + ways)
    assert done.returncode == 0, done
    refused, *same = done.stdout.splitlines()
    assert re.search(TOO_LARGE, refused)
    assert same == ["True", "True"]


TRAINED = """
import json, sys, torch, phalanx
def loss_fn(output, target):
    open("modules", "w").write(json.dumps(sorted(sys.modules)))
    return torch.nn.functional.mse_loss(output, target)
x = torch.ones(8, 3)
phalanx.train(lambda: torch.nn.Linear(3, 1), (x, x[:, :1]), loss_fn, replicas=1, steps=1, workers=1, engine="processes")
"""
PREPARED = """
import json, sys
import phalanx.engines.processes.zygote
from phalanx.frameworks.registry import prepare_process
prepare_process("")
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.longest
def test_workers_import_nothing_of_their_own(tmp_path):
    """What a worker of torch needs was imported before it was forked: each start and replacement would pay for it."""
    subprocess.run([sys.executable, "-c", TRAINED], cwd=tmp_path, check=True)
    done = subprocess.run([sys.executable, "-c", PREPARED], capture_output=True, text=True, check=True)
    later = set(json.loads((tmp_path / "modules").read_text())) - set(json.loads(done.stdout))
    assert [name for name in later if name.split(".")[0] in ("phalanx", "torch", "numpy")] == []
