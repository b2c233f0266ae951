"""Many recipes at once: each in a process of its own, to the bits of one after another, whatever dies meanwhile."""

import copy
import gc
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.callbacks import EMA, EarlyStopping, Log, SaveBest, Thaw
from phalanx.checkpoint.directory import LOG
from phalanx.cli.common import load_recipes
from phalanx.engines.processes.handle import WorkerHandle
from phalanx.engines.processes.serialization import pack_each, unpack_one
from phalanx.engines.processes.starter import WARM
from phalanx.frameworks.registry import reduced
from phalanx.lab import many
from phalanx.run.run import Run
from phalanx.shared.memory import Memory
from tests.callbacks.jobs import HELD_OUT, TARGETS, X, Y, accuracy, make_model

JOB = """
import time
import types
import torch, phalanx
from torch.nn import functional as F
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()
def recipe(lr=1e-2, seed=0):
    def forward(model, batch):
        time.sleep({pause})
        return model(batch[0])
    return phalanx.Recipe(lambda: torch.nn.Linear(4, 2), (x, y), F.cross_entropy, forward, epochs=3, lr=lr, seed=seed)
"""


def job(seed=0, **changes):
    given = {"make_model": make_model, "replicas": 3, "epochs": 2, "lr": 1e-2, "seed": seed}
    return phalanx.Recipe(data=(X, Y), loss_fn=F.cross_entropy, **(given | changes))


def due():
    return phalanx.Evaluation({"accuracy": accuracy, "loss": "loss"}, (HELD_OUT, TARGETS))


def callbacks():
    return [EMA(0.9), SaveBest("accuracy"), EarlyStopping("accuracy", patience=2, mode="max")]


def told(result):
    """All that a user sees of a result, but how long it took."""
    best = result.best and (str(result.best), {name: one.tolist() for name, one in result.best.weights.items()})
    averaged = result.averaged and {name: one.tolist() for name, one in result.averaged.items()}
    history = [(item.steps, item.name, item.value) for item in result.metric_history]
    facts = result.digest, result.loss_history, history, result.stopped_early, result.workers, result.chain
    return *facts, best, averaged, {name: one.tolist() for name, one in result.model.state_dict().items()}


@pytest.mark.long
def test_results_are_those_of_one_after_another(tmp_path):
    """Weights, losses, metrics, best, averages and who stopped it; in a list, and in a dict with folders."""
    jobs = [(job(seed, epochs=12), due(), callbacks()) for seed in range(3)]
    found = phalanx.train_all(jobs, workers=2)
    alone = [one.train(workers=1, evaluation=evaluation, callbacks=callbacks()) for one, evaluation, _ in jobs]
    assert list(map(told, found)) == list(map(told, alone))
    assert told(found[0]) != told(found[1])
    assert type(found[0].model) is type(make_model())
    assert found[0].seconds > 0
    named = phalanx.train_all({"a": job(0), "b": (job(1), due())}, run_dir=tmp_path)
    assert list(named) == ["a", "b"]
    kept = job(1).train(workers=1, run_dir=tmp_path / "alone", evaluation=due())
    assert told(named["b"]) == told(kept)
    again = phalanx.train_all({"a": job(0), "b": (job(1), due())}, run_dir=tmp_path)
    assert told(again["b"]) == told(kept)
    assert again["b"].resumed_from == kept.steps


@pytest.mark.long
@pytest.mark.parametrize("number", range(5))
def test_callbacks_that_were_in_a_run_before(number, tmp_path, monkeypatch):
    """They keep nothing of it that a job cannot be sent, so the same call goes on in the same process."""
    monkeypatch.chdir(tmp_path)  # a log without a run_dir is written here
    with job().start(engine="inline") as run, pytest.raises(TypeError, match="stays in its process"):
        copy.deepcopy(run)
    assert copy.deepcopy(run) is None
    used = [*callbacks(), Log("csv"), Thaw("0", epoch=1)][number]
    given = {"one": (job(), due(), [used]), "other": (job(1), due(), [used])}
    first, again = (phalanx.train_all(given, run_dir="runs", progress=False) for _ in range(2))
    assert [again[name].digest for name in given] == [first[name].digest for name in given]
    assert job().train(evaluation=due(), callbacks=[used], engine="inline").digest == first["one"].digest
    assert phalanx.train_all([given["one"]], progress=False)[0].digest == first["one"].digest


@pytest.mark.long
def test_settings_of_the_caller_hold_in_jobs():
    """A job of jax in float64 has its bits, beside one of torch; in float32 they are others."""
    program = """
import sys
import jax, jax.numpy as jnp, numpy, phalanx, optax
jax.config.update("jax_enable_x64", sys.argv[1] == "True")
from tests.shell.test_many import job
x = numpy.linspace(0, 1, 64).reshape(16, 4)
def loss(output, target):
    return ((output - target) ** 2).mean()
def make():
    return {"w": jnp.full((4, 1), 0.1, dtype=float)}
one = phalanx.Recipe(make, (x.astype(jnp.zeros(()).dtype), x[:, :1].astype(jnp.zeros(()).dtype)), loss,
                     lambda params, x: x @ params["w"], epochs=2, batch_size=8, optimizer=optax.sgd(0.1))
found = [result.digest for result in phalanx.train_all([one, job()])]
assert found == [one.train(engine="inline").digest, job().train(engine="inline").digest]
print(found[0])
"""
    names = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    line = [sys.executable, "-W", "ignore", "-c", program]
    told = [subprocess.check_output([*line, str(wide)], env=names, text=True) for wide in (True, False)]
    assert told[0] != told[1]


class Patience:
    """Stops a run at the third step whose loss is above the mean so far; notes the steps that this process did."""

    def __init__(self):
        self.loaded, self.here = (0, 0.0), []

    def begin(self, run):
        self.run, (self.high, self.total), self.loaded = run, self.loaded, (0, 0.0)

    def step(self, report):
        self.here.append(report.step)
        self.total += report.loss
        self.high += report.loss > self.total / (report.step + 1)
        if self.high == 3:
            self.run.stop()

    def state(self):
        return {"high": self.high, "total": self.total}

    def load(self, state):
        self.loaded = state["high"], state["total"]


@pytest.mark.long
def test_a_job_that_was_stopped_is_not_gone_on_with():
    """A callback of one's own need not remember that it stopped its run: the caller does no step after that."""
    patience = Patience()
    (result,) = phalanx.train_all([(job(epochs=30), None, [patience])])
    assert told(result) == told(job(epochs=30).train(workers=1, callbacks=[Patience()]))
    assert (patience.here, patience.high) == ([], 3)
    assert result.stopped_early == f"at step {result.steps} of 150 by run.stop()"


def broken(model, batch):
    raise ZeroDivisionError("of this one alone")


@pytest.mark.long
def test_a_failure_ends_one_and_not_all(tmp_path, capsys):
    """Its place has the error, from the user's own; a folder of another recipe is refused as in ``train``."""
    jobs = {"good": job(0), "bad": job(1, forward_fn=broken), "other": job(2)}
    job(3).train(workers=1, run_dir=tmp_path / "other")
    with pytest.raises(
        phalanx.RunError, match=r"2 of 3 recipes failed \(bad: WorkerError: .*of this one alone"
    ) as raised:
        phalanx.train_all(jobs, workers=2, run_dir=tmp_path, progress=True)
    results = raised.value.results
    assert results["good"].digest == job(0).train(workers=1).digest
    assert isinstance(results["bad"].__cause__, ZeroDivisionError)
    assert isinstance(results["other"], phalanx.UsageError)
    assert "seed" in str(results["other"])
    lines = sorted(line.partition(" (")[0] for line in capsys.readouterr().err.splitlines())
    assert lines == [f"phalanx: recipe {name}" for name in sorted(jobs)]


def leaving(model, batch):
    raise SystemExit(3)


def interrupted(model, batch):
    raise KeyboardInterrupt


class Ending:
    """Raises in the caller's process, at the end of the run."""

    def __init__(self):
        self.caller = os.getpid()

    def end(self, result):
        if os.getpid() == self.caller:
            raise ZeroDivisionError("at the end")


@pytest.mark.long
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (job(1, forward_fn=leaving), r"ended its process, by SystemExit\(3\)"),
        (job(1, forward_fn=interrupted), "its process was interrupted"),
        ((job(1), None, [Ending()]), "ZeroDivisionError: at the end"),
    ],
    ids=["SystemExit", "KeyboardInterrupt", "an error in the caller"],
)
def test_whatever_ends_a_job_is_told(bad, words):
    """No place of a recipe that failed is empty, and the others have their results."""
    with pytest.raises(phalanx.RunError, match=words) as raised:
        phalanx.train_all([bad, job(0)], workers=1)
    assert raised.value.results[1].digest == job(0).train(workers=1).digest


@pytest.mark.long
def test_a_model_on_an_accelerator_is_refused_at_once(tmp_path):
    """Several processes would share it: nothing is computed there before that is said."""
    caller, there = os.getpid(), types.SimpleNamespace(device=torch.device("cuda:1"))

    def make_far():
        if os.getpid() != caller:
            Run.params = property(lambda run: {"weight": there})  # planted
        return make_model()

    def stepping(model, batch):
        (tmp_path / "stepped").touch()
        return model(batch[0])

    with pytest.raises(phalanx.RunError, match="UsageError: its model is on cuda:1, and several would share that"):
        phalanx.train_all([job(make_model=make_far, forward_fn=stepping)])
    assert not (tmp_path / "stepped").exists()


class Dying(nn.Module):
    """Kills its process at a step, as often as there are files to take away."""

    def __init__(self, folder, how):
        super().__init__()
        self.layer, self.folder, self.how = nn.Linear(6, 2), folder, how

    def forward(self, x):
        if self.training and phalanx.current_step() >= 3:
            for left in list(self.folder.glob("*"))[:1]:
                left.unlink()
                os.kill(os.getpid(), self.how)
        return self.layer(x)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "deaths", "ends"),
    [(signal.SIGKILL, 2, True), (signal.SIGKILL, 3, False), (signal.SIGTERM, 8, True)],
)
def test_a_job_that_is_killed_goes_on(tmp_path, deaths, ends, how):
    """Two deaths change nothing; after three in a row its place says so. After SIGTERM a job has saved, each time."""
    (tmp_path / "a").mkdir()
    for number in range(deaths):
        (tmp_path / "a" / str(number)).touch()
    (tmp_path / "b").mkdir()
    jobs = [_dying(tmp_path / name, how) for name in ("a", "b")]
    if ends:
        first, second = phalanx.train_all(jobs, workers=2)
        assert first.digest == second.digest
        return
    with pytest.raises(phalanx.RunError, match=f"its process was killed by {how.name}, 3 times in a row") as raised:
        phalanx.train_all(jobs, workers=2)
    assert raised.value.results[1].digest == _dying(tmp_path / "b", how).train(workers=1).digest


def _dying(folder, how):
    return phalanx.Recipe(lambda: Dying(folder, how), (X, Y), F.cross_entropy, replicas=2, epochs=2)


def slow(model, batch):
    time.sleep(0.05)
    return model(batch[0])


@pytest.fixture
def terms():
    """The SIGTERMs that a handler of the caller's has had."""
    numbers = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, phalanx.Preempted)], ids=["INT", "TERM"]
)
def test_a_signal_lets_steps_end_and_the_same_call_goes_on(tmp_path, terms, number, error):
    """What has not ended has None, and was saved; afterwards all digests are those of runs that nobody interrupted."""
    jobs = [job(seed, forward_fn=slow, epochs=8) for seed in range(3)]
    begun = tmp_path / "0" / LOG

    def press():
        while not begun.exists():
            time.sleep(0.05)
        time.sleep(1.5)
        signal.raise_signal(number)

    threading.Thread(target=press).start()
    with pytest.raises(error) as raised:
        phalanx.train_all(jobs, workers=2, run_dir=tmp_path)
    assert None in raised.value.results
    assert len(terms) == (number == signal.SIGTERM)
    found = phalanx.train_all(jobs, workers=2, run_dir=tmp_path)
    assert any(result.resumed_from for result in found)
    assert [result.digest for result in found] == [job(seed, epochs=8).train(workers=1).digest for seed in range(3)]


@pytest.mark.long
def test_sigterm_to_all_processes_at_once(tmp_path):
    """As from a scheduler or a container: jobs save, too, though the caller was not the first that it reached."""
    jobs = [job(seed, forward_fn=slow, epochs=8) for seed in range(2)]

    def end():
        while not all((tmp_path / name / LOG).exists() for name in "01"):
            time.sleep(0.05)
        time.sleep(1.0)
        ours = [int(pid) for pid in below(os.getpid())]
        for pid in [*ours, os.getpid()]:
            os.kill(pid, signal.SIGTERM)

    threading.Thread(target=end).start()
    with pytest.raises(phalanx.Preempted):
        phalanx.train_all(jobs, workers=2, run_dir=tmp_path)
    ends = [json.loads((tmp_path / name / LOG).read_text().splitlines()[-1]) for name in "01"]
    assert [each["event"] for each in ends] == ["end", "end"]
    found = phalanx.train_all(jobs, workers=2, run_dir=tmp_path)
    assert [result.resumed_from for result in found] == [each["step"] for each in ends]


def below(pid):
    """All processes below one, the nearest first."""
    found = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in found for each in (child, *below(child))]


@pytest.mark.long
def test_ctrl_c_before_a_job_can_hear_it(monkeypatch):
    """Its process has begun nothing, so it is ended, and nobody waits for all of its training."""

    class Pressed(WorkerHandle):
        def __init__(self, number, memories, lives):
            super().__init__(number, memories, "tests.shell.late")
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(many, "WorkerHandle", Pressed)  # planted
    with pytest.raises(KeyboardInterrupt) as raised:
        phalanx.train_all([job()])
    assert raised.value.results == [None]


@pytest.mark.long
def test_ctrl_c_while_a_result_is_taken(tmp_path):
    """It waits for that, and jobs that are under way end their steps: the next call goes on there."""
    caller, third, pressed = os.getpid(), tmp_path / "third", tmp_path / "pressed"

    def make_pressing():
        if os.getpid() == caller and (tmp_path / "0").exists() and not pressed.exists():
            while not third.exists():
                time.sleep(0.05)
            pressed.touch()
            signal.raise_signal(signal.SIGINT)
        return make_model()

    def telling(model, batch):
        if phalanx.current_step() == 3:
            third.touch()
        return slow(model, batch)

    jobs = [job(make_model=make_pressing), job(1, forward_fn=telling, epochs=8)]
    with pytest.raises(KeyboardInterrupt) as raised:
        phalanx.train_all(jobs, workers=2, run_dir=tmp_path)
    assert raised.value.results[0].digest == job().train(workers=1).digest
    assert phalanx.train_all(jobs, run_dir=tmp_path)[1].resumed_from >= 3


@pytest.mark.long
def test_a_process_that_dies_as_it_is_started(monkeypatch):
    """Another one takes its place."""
    handles = []

    class Dead(WorkerHandle):
        def __init__(self, *given):
            super().__init__(*given)
            if not handles:
                self.send(signal.SIGKILL)
                select.select([self.pidfd], [], [])
            handles.append(self)

    monkeypatch.setattr(many, "WorkerHandle", Dead)  # planted
    assert phalanx.train_all([job()])[0].digest == job().train(workers=1).digest
    assert len(handles) == 2


@pytest.mark.long
def test_a_job_may_leave_a_process_behind(tmp_path):
    """One in a session of its own, which holds what it inherited, is not waited for."""

    def forking(model, batch):
        if not list(tmp_path.iterdir()) and os.fork() == 0:
            os.setsid()
            (tmp_path / str(os.getpid())).touch()
            time.sleep(20)
            (tmp_path / "waited").touch()
            os._exit(0)
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
        return model(batch[0])

    (result,) = phalanx.train_all([job(forward_fn=forking)])
    (pid,) = (path.name for path in tmp_path.iterdir())  # and not "waited"
    os.kill(int(pid), signal.SIGKILL)
    assert result.digest == job().train(workers=1).digest


@pytest.mark.long
def test_a_job_may_give_its_output_away(tmp_path):
    """One that writes into a file from now on goes on, and so do the others: the next is started meanwhile."""

    def redirected(model, batch):
        os.dup2(os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY), 1)
        for _ in range(200):
            if (tmp_path / "third").exists():
                return model(batch[0])
            time.sleep(0.1)
        raise TimeoutError

    def third(model, batch):
        (tmp_path / "third").touch()
        return model(batch[0])

    jobs = [job(forward_fn=redirected), job(1, forward_fn=slow), job(2, forward_fn=third)]
    found = phalanx.train_all(jobs, workers=2)
    assert [result.digest for result in found] == [job(seed).train(workers=1).digest for seed in range(3)]


class Imports:
    """Notes which modules of phalanx this process has imported itself: what its parent had lies frozen."""

    def __init__(self, file):
        self.file = file

    def step(self, report):
        own = {id(one) for one in gc.get_objects()}
        ours = {name: vars(module) for name, module in sys.modules.items() if name.startswith("phalanx.")}
        late = sorted(
            name for name, space in ours.items() if id(space) in own and "phalanx.cli" not in name
        )  # which this file imports
        self.file.write_text(" ".join([str(len(ours)), *late]))


@pytest.mark.long
def test_a_job_imports_nothing_of_ours(tmp_path):
    """The process that starts jobs has imported what they need. Each did it, which took 40 ms for each job."""
    WARM.close()
    phalanx.train_all([(job(), due(), [Imports(tmp_path / "imports")])], run_dir=tmp_path / "runs")
    count, *late = (tmp_path / "imports").read_text().split()
    assert int(count) > 50
    assert late == []


def test_shared_arrays_are_written_once():
    """Five recipes over one array take its bytes once; over copies of it, five times."""
    shared, sizes = torch.zeros(1 << 18), list[int]()
    for data in ([shared] * 5, [shared.clone() for _ in range(5)]):
        memory = Memory(0)
        pack_each([{"data": one, "number": number} for number, one in enumerate(data)], memory, reduced)
        assert unpack_one(memory, 3)["number"] == 3
        assert torch.equal(unpack_one(memory, 3)["data"], shared)
        sizes.append(memory.size)
        memory.close()
    size = shared.numel() * 4
    assert sizes[0] < 1.1 * size
    assert sizes[1] > 5 * size


@pytest.mark.parametrize(
    ("recipes", "options", "words"),
    [
        ([], {}, "recipes is empty"),
        ([3], {}, r"recipes\['0'\] is 3; it must be a Recipe, or \(recipe, evaluation\)"),
        ({"a/b": job()}, {}, "'a/b', which is that of a folder"),
        ([phalanx.Recipe(make_model, None, F.cross_entropy)], {}, "has no data"),
        ({1: job(), "1": job()}, {}, "'1' twice"),
        (job(), {}, "must be a list of recipes"),
        ([job()], {"workers": 0}, "workers is 0"),
        ([job()], {"devices": [3]}, "devices is"),
        ([(job(), None, [Log("csv", "x.csv")]) for _ in "01"], {}, "'0' and '1' both log to 'x.csv'; leave out where="),
    ],
)
def test_bad_input(recipes, options, words):
    """Names the argument, the value, and the way out."""
    with pytest.raises(phalanx.UsageError, match=words):
        phalanx.train_all(recipes, **options)


def command(folder, *arguments):
    return [sys.executable, "-m", "phalanx", "train", str(folder / "job.py"), *arguments]


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75)], ids=["KILL", "TERM"])
def test_the_shell_trains_all_combinations(tmp_path, number, code):
    """Runs are called after their arguments; a table has them; after kill -9 of all, or SIGTERM, it goes on."""
    (tmp_path / "job.py").write_text(JOB.format(pause=0.05))
    line = command(tmp_path, "lr=0.1,0.01", "seed=0..1", "--jobs", "2", "--run-dir", str(tmp_path / "runs"), "--json")
    first = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.DEVNULL)
    while not (tmp_path / "runs" / "lr=0.1,seed=0" / LOG).exists():
        time.sleep(0.05)
        assert first.poll() is None
    first.send_signal(number)
    assert first.wait() == code
    rows = json.loads(subprocess.run(line, cwd=tmp_path, check=True, capture_output=True, text=True).stdout)
    assert [row["run"] for row in rows] == [f"lr={lr},seed={seed}" for lr in (0.01, 0.1) for seed in (0, 1)]
    assert {row["state"] for row in rows} == {"finished"}
    assert rows[0]["arguments"] == {"lr": 0.01, "seed": 0}


DRAWN = """
import random, numpy, phalanx, torch
torch.manual_seed(0)
def recipe(lr=1e-2):
    x = torch.tensor([[random.random(), numpy.random.rand(), torch.rand(()).item()]])
    return phalanx.Recipe(torch.nn.Linear(3, 1), (x, x[:, :1]), torch.nn.functional.mse_loss, epochs=1, replicas=1)
"""


def test_recipes_of_a_sweep_differ_by_their_arguments_alone(tmp_path, monkeypatch):
    """A function that draws finds all generators as the file left them, whatever was made before."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "drawn.py").write_text(DRAWN)
    recipes = load_recipes(str(tmp_path / "drawn.py"), [[f"lr={lr}"] for lr in (0.1, 0.2)])
    first, second = (recipe.data[0] for recipe, *_ in recipes)
    assert torch.equal(first, second)


@pytest.mark.long
def test_the_shell_says_why_no_job_has_begun(here, tmp_path):
    """Where all are refused there is no table, and their error is told."""
    waiting = "from phalanx.callbacks import SaveBest\ncallbacks = [SaveBest('accuracy')]\n"
    (tmp_path / "job.py").write_text(JOB.format(pause=0) + waiting)
    done = here("train", "job.py", "lr=0.1,0.01", "--jobs", "2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "2 of 2 recipes failed (lr=0.1: UsageError: callbacks has SaveBest('accuracy'), but nothing" in done.stderr


@pytest.mark.long
def test_the_shell_refuses_what_does_not_go_with_jobs(tmp_path):
    """Several values without --jobs, and options that each run would need of its own."""
    (pathlib.Path(tmp_path) / "job.py").write_text(JOB.format(pause=0))
    for arguments, words in (
        (["lr=0.1,0.01"], "several values are for --jobs"),
        (["seed=0..1", "--jobs", "2", "--workers", "2"], "--workers is given beside --jobs"),
        (["seed=3..1", "--jobs", "2"], "counts upwards"),
        (["--jobs", "2"], "no arguments"),
        (["name=a/b,a%b", "--jobs", "2"], "would have the folder 'name=a%b': name=a/b and name=a%b"),
        (["lr=0.1,0.1", "--jobs", "2"], "would have the folder 'lr=0.1': lr=0.1; leave one out"),
        (["seed=0..1", "--jobs", "2"], "srun has started 4 tasks"),
    ):
        tasks = {"SLURM_STEP_NUM_TASKS": "4" if "srun" in words else ""}
        line, names = command(tmp_path, *arguments), os.environ | tasks
        done = subprocess.run(line, cwd=tmp_path, env=names, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert words in done.stderr
