"""Workers run the code that the caller has imported, whatever its files say by the time that a worker starts."""

import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from importlib.machinery import SourceFileLoader

import pytest
import torch
from torch import nn

import phalanx
from phalanx.surroundings import sources
from phalanx.surroundings.sources import Finder, NotedLoader

LOSS = """
FACTOR = {factor}

def loss(output, target):
    return FACTOR * ((output - target) ** {power}).mean()
"""
OUTER = """
from inner_of_these import loss as inner

def loss(output, target):
    return inner(output, target)
"""
PACKAGE = "from .part import loss  # of {power}\n"


def recipe(loss_fn, **changes):
    """Six steps of two replicas with this loss."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 3, generator=generator), torch.randn(24, 1, generator=generator)
    return phalanx.Recipe(
        **{"make_model": lambda: nn.Linear(3, 1), "data": (x, y), "loss_fn": loss_fn, "replicas": 2,
           "batch_size": 12, "steps": 6, **changes}
    )  # fmt: skip


def digests(loss_fn):
    """What one process and two workers end in."""
    job = recipe(loss_fn)
    return job.train(engine="inline").digest, job.train(engine="processes", workers=2).digest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the path; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith("_of_these") or ".part" in name:
            del sys.modules[name]


def write(file, text, **values):
    """A module; its length differs from one version to the next, which Python's cache looks at."""
    old = len(file.read_text()) if file.exists() else 0
    file.parent.mkdir(exist_ok=True)
    file.write_text(text.format(**values) + "#" * (old + 1))


@pytest.mark.long
def test_an_edit_after_a_recipe_was_made_does_not_reach_workers(folder):
    """A constant and a function are edited: workers use the old code, also in later runs, new code once reloaded."""
    write(folder / "loss_of_these.py", LOSS, factor=1.0, power=2)
    module = importlib.import_module("loss_of_these")
    job = recipe(module.loss)
    old = job.train(engine="inline").digest
    for values in ({"factor": 3.0, "power": 2}, {"factor": 1.0, "power": 4}):
        write(folder / "loss_of_these.py", LOSS, **values)
        assert job.train(engine="processes", workers=2).digest == old
        assert digests(module.loss) == (old, old)
    alone, several = digests(importlib.reload(module).loss)
    assert alone == several != old


@pytest.mark.long
@pytest.mark.parametrize("edit", [{"factor": 1.0, "power": 4}, "def loss(", None])
def test_an_edit_before_the_first_run_is_refused(folder, edit):
    """A file that no longer compiles to the functions in memory is named; changed back, or reloaded, it is run."""
    write(folder / "loss_of_these.py", LOSS, factor=1.0, power=2)
    text = (folder / "loss_of_these.py").read_text()
    module = importlib.import_module("loss_of_these")
    if edit is not None:
        write(
            folder / "loss_of_these.py",
            LOSS if isinstance(edit, dict) else edit,
            **(edit if isinstance(edit, dict) else {}),
        )
        file = re.escape(str(folder / "loss_of_these.py"))
        job = recipe(module.loss)
        for _ in range(2):
            with pytest.raises(phalanx.UsageError, match=rf"{file} was changed.*imported it as loss_of_these.*reload"):
                job.train(engine="processes", workers=2)
        assert job.train(engine="inline").digest
    if isinstance(edit, dict):
        alone, several = digests(importlib.reload(module).loss)
        assert alone == several
    else:
        (folder / "loss_of_these.py").write_text(text)
    alone, several = digests(module.loss)
    assert alone == several


def test_an_edited_module_that_another_imports(folder):
    """What travels names one module, which imports another, and that one was edited: the old code is used."""
    write(folder / "inner_of_these.py", LOSS, factor=1.0, power=2)
    write(folder / "outer_of_these.py", OUTER)
    module = importlib.import_module("outer_of_these")
    job = recipe(module.loss)
    write(folder / "inner_of_these.py", LOSS, factor=3.0, power=2)
    alone, several = digests(module.loss)
    assert job.train(engine="processes", workers=2).digest == alone == several
    importlib.reload(sys.modules["inner_of_these"])
    alone, other = digests(importlib.reload(module).loss)
    assert alone == other != several


@pytest.mark.long
def test_a_package_that_was_edited_or_removed(folder):
    """Submodules and relative imports are found in the old package, also when its files are gone."""
    write(folder / "package_of_these" / "part.py", LOSS, factor=1.0, power=2)
    write(folder / "package_of_these" / "__init__.py", PACKAGE, power=2)
    module = importlib.import_module("package_of_these")
    old = digests(lambda output, target: module.loss(output, target))
    write(folder / "package_of_these" / "part.py", LOSS, factor=3.0, power=2)
    write(folder / "package_of_these" / "__init__.py", "raise ImportError")
    assert digests(module.loss) == old
    (folder / "package_of_these" / "part.py").unlink()
    assert digests(module.loss) == old


def fallen_in_between(loss_fn, edit):
    """The digest of a run in which a file is edited after two steps, and then all workers are killed."""
    with recipe(loss_fn).start(engine="processes", workers=2) as run:
        run.step()
        run.step()
        edit()
        for pid in run.worker_pids:
            os.kill(pid, signal.SIGKILL)
        run.finish()
        assert "replaced" in [incident.kind for incident in run.result().incidents]
        return run.result().digest


def test_an_edit_in_mid_run_does_not_reach_those_who_take_over(folder):
    """A worker that takes another's place has the code that the run began with; other code has another digest."""
    write(folder / "inner_of_these.py", LOSS, factor=1.0, power=2)
    write(folder / "outer_of_these.py", OUTER)
    module = importlib.import_module("outer_of_these")
    fallen = fallen_in_between(module.loss, lambda: write(folder / "inner_of_these.py", LOSS, factor=3.0, power=2))
    write(folder / "inner_of_these.py", LOSS, factor=1.0, power=2)
    sys.modules.pop("inner_of_these")
    assert recipe(importlib.reload(module).loss).train(engine="inline").digest == fallen
    write(folder / "inner_of_these.py", LOSS, factor=3.0, power=2)
    sys.modules.pop("inner_of_these")
    assert recipe(importlib.reload(module).loss).train(engine="inline").digest != fallen


def test_a_file_that_is_as_it_was_is_loaded_as_ever(folder):
    """Nothing is compiled anew, and nothing travels by value, unless the file says something else."""
    write(folder / "loss_of_these.py", LOSS, factor=1.0, power=2)
    importlib.import_module("loss_of_these")
    source = sources.note()["loss_of_these"]
    finder = Finder({"loss_of_these": source})
    assert type(finder.find_spec("loss_of_these").loader) is SourceFileLoader
    write(folder / "loss_of_these.py", LOSS, factor=3.0, power=2)
    assert type(finder.find_spec("loss_of_these").loader) is NotedLoader
    assert finder.find_spec("json") is finder.find_spec("torch") is Finder({}).find_spec("loss_of_these") is None


def test_installed_packages_are_left_to_python(folder):
    """Neither the standard library is noted nor what an installer put anywhere, unlike a module beside it."""
    for place in ("installed", "own"):
        write(folder / place / f"{place}_of_these.py", LOSS, factor=1.0, power=2)
        sys.path.insert(0, str(folder / place))
    (folder / "installed" / "something-1.0.dist-info").mkdir()
    importlib.import_module("installed_of_these")
    importlib.import_module("own_of_these")
    noted = sources.proven()
    assert not {"json", "torch", "numpy", "pytest", "__main__", "installed_of_these"} & set(noted)
    assert "own_of_these" in noted


def test_tracebacks_and_inspect_show_the_code_that_runs(folder):
    """What a worker loads instead of a file that was edited is what a traceback from there shows."""
    text = "def fail():\n    raise LookupError('one')  # as it was\n"
    (folder / "loss_of_these.py").write_text(text)
    module = importlib.import_module("loss_of_these")
    job = recipe(lambda output, target: module.fail())
    (folder / "loss_of_these.py").write_text("# a line more\n" + text.replace("as it was", "as it is"))
    with pytest.raises(phalanx.WorkerError) as caught:
        job.train(engine="processes", workers=2)
    told = "".join(getattr(caught.value, "__notes__", []) + getattr(caught.value.__cause__, "__notes__", []))
    assert "# as it was" in told
    assert "# as it is" not in told


EARLY = """
import importlib, pathlib, sys
import loss_of_these
if {edit!r}:
    pathlib.Path(loss_of_these.__file__).write_text({edit!r})
import torch, phalanx
from torch import nn
x, y = torch.randn(24, 3), torch.randn(24, 1)
recipe = phalanx.Recipe(lambda: nn.Linear(3, 1), (x, y), loss_of_these.loss, replicas=2, batch_size=12, steps=2)
def attempt():
    try:
        print(recipe.train(engine="processes", workers=2).digest == recipe.train(engine="inline").digest)
    except phalanx.UsageError as error:
        print(error)
attempt()
importlib.reload(loss_of_these)
attempt()
"""


@pytest.mark.long
@pytest.mark.parametrize("edited", [True, False])
def test_an_edit_before_phalanx_was_imported(folder, edited):
    """What was edited before phalanx was imported is refused by name; reloading it is a way out."""
    write(folder / "loss_of_these.py", LOSS, factor=1.0, power=2)
    edit = LOSS.format(factor=1.0, power=4) if edited else ""
    program = textwrap.dedent(EARLY.format(edit=edit))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert last == "True"
    if edited:
        assert f"{folder / 'loss_of_these.py'} was changed after this process had imported it" in first
    else:
        assert first == "True"
