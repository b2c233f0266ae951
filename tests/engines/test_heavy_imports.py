"""Packages that recipes need are imported once, by the process that starts workers, if it may fork after that."""

import os
import pathlib
import subprocess
import sys
import textwrap

import psutil
import pytest

import phalanx
from phalanx.engines.processes.starter import WARM, packaged
from phalanx.surroundings import sources
from tests.families import FAMILIES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what an import leaves behind is told by Linux only")
NOTED = "import os\nwith open(os.environ['NOTES'], 'a') as notes:\n    print({name!r}, os.getpid(), file=notes)\n"
JOB = """
import os, torch, phalanx
from torch.nn.functional import mse_loss
{imports}
x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
recipe = phalanx.Recipe(lambda: {model}, (x, x), {loss}, replicas=2, batch_size=12, steps=3)
alone = recipe.train(engine="inline").digest
def train():
    assert recipe.train(workers=2, engine="processes").digest == alone
def notes():
    lines = [line.split() for line in open(os.environ["NOTES"])]
    return [name for name, pid in lines if int(pid) != os.getpid()]
"""


class Packages:
    """Makes packages that note each import in a file, installed where nobody else looks; runs programs with them."""

    def __init__(self, folder):
        self.folder, self.site = folder, folder / "site-packages"
        self.site.mkdir()

    def add(self, name, text="", **modules):
        package = self.site / name
        package.mkdir()
        for module, content in {"__init__": text, **modules}.items():
            full = name if module == "__init__" else f"{name}.{module}"
            (package / f"{module}.py").write_text(NOTED.format(name=full) + textwrap.dedent(content))

    def run(self, program, *, imports="", model="torch.nn.Linear(3, 3)", loss="mse_loss"):
        path = os.pathsep.join([str(self.site), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "NOTES": str(self.folder / "notes"), "OMP_NUM_THREADS": "1"}
        job = JOB.format(imports=imports, model=model, loss=loss) + textwrap.dedent(program)
        (self.folder / "job.py").write_text(job)
        done = subprocess.run(
            [sys.executable, str(self.folder / "job.py")],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.splitlines()


@pytest.fixture
def packages(tmp_path):
    """See ``Packages``."""
    return Packages(tmp_path)


MODEL = "import torch\nprint('made of heavy things')\nclass Net(torch.nn.Linear):\n    pass\n"


@pytest.mark.long
def test_a_package_is_imported_once_for_all_workers_and_runs(packages):
    """What the recipe's code names one process imports for all workers, also for those that take others' places."""
    packages.add("heavy", "from heavy import layers\n", layers=MODEL)
    shown = packages.run(
        """
        import signal
        with recipe.start(workers=2, engine="processes") as run:
            for report in run:
                if report.step == 0:
                    os.kill(run.worker_pids[0], signal.SIGKILL)
        train()
        print(notes())
        """,
        imports="from heavy.layers import Net",
        model="Net(3, 3)",
    )
    assert shown == ["made of heavy things", "['heavy', 'heavy.layers']"]


@pytest.mark.long
def test_workers_do_not_import_the_compiler(packages):
    """An optimizer that is built would import torch's compiler in each worker, which takes longer than all else."""
    shown = packages.run(
        """
        import sys
        def noting(output, target):
            with open(os.environ["NOTES"], "a") as file:
                print("torch._dynamo" in sys.modules, os.getpid(), file=file)
            return mse_loss(output, target)
        recipe.replace(loss_fn=noting).train(workers=2, engine="processes")
        print(set(notes()))
        """
    )
    assert shown == ["{'False'}"]


HARMFUL = {
    "starts a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()",
    "opens /dev/zero": "device = open('/dev/zero')",
    "opens a file": "kept = open(__file__)",  # its place would be that of all workers, so each would move the others'
    "opens socket:": "import socket\nkept = socket.socket()",
    "starts a process": "import atexit, subprocess\nnull = {'stdout': -3, 'stderr': -3}\n"
    "sleeps = subprocess.Popen(['sleep', '1000'], **null)\natexit.register(sleeps.kill)",
    "cannot be imported there": "import sys\nassert sys.argv != ['-c']",  # as in the process that starts workers
}


@pytest.mark.long
@pytest.mark.parametrize("why", HARMFUL)
def test_what_cannot_be_forked_after_is_left_to_the_workers(packages, why):
    """A package that starts a thread, say, is imported by each worker, others once."""
    packages.add("light", "def scaled(output, target):\n    return ((output - target) ** 2).mean()\n")
    packages.add("harm", HARMFUL[why] + "\ndef scaled(output, target):\n    return ((output - target) ** 2).mean()\n")
    shown = packages.run(
        """
        train()
        train()
        print([name for name in notes() if name == "harm"], "light" in notes())
        """,
        imports="import light, harm\ndef loss(output, target):\n"
        "    return light.scaled(output, target) + harm.scaled(output, target)",
        loss="loss",
    )
    assert shown == ["['harm', 'harm', 'harm', 'harm', 'harm'] True"]


@pytest.mark.long
def test_a_program_that_ends_does_not_wait_for_an_import(packages):
    """What workers need may take as long as it likes to import: the program ends, and so does that."""
    packages.add("heavy", lazy="""
        import pathlib, sys, time
        if sys.argv == ["-c"]:  # as in the process that starts workers
            pathlib.Path(os.environ["NOTES"] + ".draft").write_text(str(os.getpid()))
            os.rename(os.environ["NOTES"] + ".draft", os.environ["NOTES"] + ".waits")
            time.sleep(1e6)
        scale = 1.0
        """)  # fmt: skip
    packages.run(
        """
        import time
        from phalanx.engines.processes.starter import WARM
        WARM.prepare(recipe)
        while not os.path.exists(os.environ["NOTES"] + ".waits"):
            time.sleep(0.01)
        """,
        imports="import heavy.lazy",
        loss="lambda output, target: mse_loss(output, target) * heavy.lazy.scale",
    )
    pid = int((packages.folder / "notes.waits").read_text())
    assert not pathlib.Path(f"/proc/{pid}").exists()


def test_modules_of_packages_are_prepared():
    """Those of installed packages are; not what every process has anyhow, nor the user's own."""
    assert packaged(["torch", "psutil", "numpy", "json", __name__, "sys", "no_such_module"]) == ["psutil"]


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "metric", [lambda output, target: psutil.cpu_count() * output.mean(), {"mean": psutil.Process}]
)
def test_modules_of_metrics_are_prepared(monkeypatch, metric):
    """What an evaluation's functions come from is imported once for all workers, as what a recipe's come from."""
    monkeypatch.setattr(WARM, "_modules", [])
    recipe = FAMILIES["mlp"].recipe(2, steps=1)
    with recipe.start(workers=2, engine="processes", evaluation=phalanx.Evaluation(metric, recipe.data)):
        assert any(sources.package_of(name) == "psutil" for name in WARM._modules)
