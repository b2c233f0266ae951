"""Any replica of any step, computed again: as values, after a failure, under a debugger, in a notebook."""

import os
import pty
import re
import select
import subprocess
import sys
import textwrap

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from torch.nn import functional as F

import phalanx
from tests.families import FAMILIES
from tests.proof.jobs import Net, X, Y, ran, recipe


@pytest.mark.parametrize("step", [0, 5, 11])
def test_it_is_what_a_loop_by_hand_computes(tmp_path, step):
    """Batch, output, loss, gradients and buffers of a replica are, bit for bit, those of a hand-written loop."""
    job = recipe(steps=12, make_model=lambda: Net(dropout=0.5))
    folder = ran(tmp_path, job, snapshot_every=4)
    found = phalanx.replay(job, folder, step=step, replica=2)
    model = Net(dropout=0.5)
    model.load_state_dict(_before(job, step))
    indices = job.plan.shares(step)[2]
    x, y = X[indices], Y[indices]
    with job.plan.seeded(step, 2):
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
    assert found.samples == tuple(indices.tolist())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.batch, (x, y), strict=True))
    assert torch.equal(found.output, output)
    assert found.loss == loss.item()
    assert set(found.gradients) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(found.gradients[name], value.grad) for name, value in model.named_parameters())
    assert all(torch.equal(found.buffers[name], value) for name, value in model.named_buffers())
    other = phalanx.replay(job, folder, step=step, replica=1)
    assert other.loss != found.loss


def _before(job, step):
    """The weights before a step of an undisturbed run."""
    with job.start(engine="inline", progress=False) as run:
        for _ in range(step):
            next(run)
        return run.result().model.state_dict()


def test_a_step_without_snapshots_is_computed_from_the_first():
    """Without a directory the state is computed from the beginning; the run of a jax recipe is replayed alike."""
    job = recipe(steps=6)
    found = phalanx.replay(job, step=4, replica=0)
    with job.start(engine="inline", progress=False) as run:
        reports = [next(run) for _ in range(5)]
    assert reports[4].parts[0] == found.loss


def test_wrong_calls(tmp_path):
    """A step or replica that does not exist, no directory, and a recipe without data are refused by name."""
    job = recipe(steps=3)
    with pytest.raises(phalanx.UsageError, match="step is 3"):
        phalanx.replay(job, step=3, replica=0)
    with pytest.raises(phalanx.UsageError, match="replica is 4"):
        phalanx.replay(job, step=0, replica=4)
    with pytest.raises(phalanx.UsageError, match="no directory"):
        phalanx.replay(job, tmp_path / "nothing", step=0, replica=0)
    with pytest.raises(phalanx.UsageError, match="data=None"):
        phalanx.replay(phalanx.Recipe(Net, None, F.cross_entropy), step=0, replica=0)
    with pytest.raises(phalanx.UsageError, match="no samples"):
        phalanx.replay(recipe(replicas=7, batch_size=3, steps=2), step=0, replica=5)


JOB = """
import torch, phalanx
x, y = torch.arange(80.0).reshape(40, 2) / 80, torch.arange(40) % 3
y[21] = 7
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(2, 3)
    def forward(self, x):
        scaled = 2 * x
        return self.body(scaled)
def loss(output, target):
    if (target == 7).any():
        raise RuntimeError("a seven")
    return torch.nn.functional.cross_entropy(output, target)
recipe = phalanx.Recipe(Net, (x, y), loss, replicas=4, batch_size=8, epochs=1)
if __name__ == "__main__":
    recipe.train(run_dir="run", workers=2, engine="processes", progress=False)
"""


def command(tmp_path, *arguments):
    """Run phalanx there."""
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )


def failed(tmp_path, job=JOB):
    """A run that failed in a worker process; step and replica."""
    (tmp_path / "job.py").write_text(job)
    done = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "a seven" in done.stderr
    return done


@pytest.mark.long
def test_values_are_told(tmp_path):
    """The shell tells samples and loss of a replica, with exit status 0; step and replica, or --failure, are needed."""
    (tmp_path / "job.py").write_text(JOB.replace("y[21] = 7", ""))
    assert command(tmp_path, "train", "job.py", "--run-dir", "run", "--quiet").returncode == 0
    done = command(tmp_path, "replay", "run", "--recipe", "job.py", "--step", "3", "--replica", "1")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["step", "replica", "samples", "loss"]
    assert "--failure" in command(tmp_path, "replay", "run").stderr


@pytest.mark.longest
def test_a_failure_is_raised_again_in_a_terminal(tmp_path):
    """In a pseudo-terminal the debugger stops in forward, in the loss, and where a worker's exception was raised."""
    failed(tmp_path)
    told = _typed(
        tmp_path,
        ["replay", "run", "--recipe", "job.py", "--failure", "--pdb"],
        ["p scaled.shape", "c", "p target", "c", "p target", "q"],
    )
    assert "scaled = 2 * x" in told
    assert "NameError" in told  # the first line is not done yet
    assert "tensor([" in told
    assert told.count("RuntimeError: a seven") >= 2  # at the prompt, and as the end
    assert "if (target == 7).any():" in told


def _typed(folder, arguments, lines):
    """What a terminal shows while these lines are typed at the debugger's prompts."""
    terminal, other = pty.openpty()
    command = [sys.executable, "-m", "phalanx", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdin=other, stdout=other, stderr=other, start_new_session=True)
    os.close(other)
    shown, typed = "", 0
    while select.select([terminal], [], [], 60)[0]:
        try:
            piece = os.read(terminal, 4096).decode(errors="replace")
        except OSError:
            break
        if not piece:
            break
        shown += piece
        while shown.count("(Pdb) ") > typed and typed < len(lines):
            os.write(terminal, lines[typed].encode() + b"\n")
            typed += 1
    os.close(terminal)
    process.wait(100)
    return shown


@pytest.mark.long
def test_a_failure_from_the_shell(tmp_path):
    """Without a debugger the same exception is raised, from the same samples, with exit status 1."""
    failed(tmp_path)
    done = command(tmp_path, "replay", "run", "--recipe", "job.py", "--failure")
    assert done.returncode == 1
    assert 'raise RuntimeError("a seven")' in done.stderr
    assert "21" in done.stderr.partition("phalanx: RuntimeError in user code")[2].split("samples")[1]


@pytest.mark.long
def test_a_failure_that_does_not_come_again(tmp_path):
    """Where something beside the recipe made it fail, the shell says that nothing was raised."""
    (tmp_path / "rain").touch()
    always = JOB.replace("y[21] = 7", "import os").replace("if (target == 7).any()", "if os.path.exists('rain')")
    failed(tmp_path, always)
    (tmp_path / "rain").unlink()
    done = command(tmp_path, "replay", "run", "--recipe", "job.py", "--failure")
    assert (done.returncode, "raised nothing here" in done.stderr) == (0, True)


def test_a_run_that_did_not_fail(tmp_path):
    """It has no failure to replay."""
    from phalanx.proof.replay import failure_of

    with pytest.raises(phalanx.UsageError, match="no step of the run"):
        failure_of(ran(tmp_path / "a", recipe(steps=2)))


def test_a_loss_that_is_not_finite_is_noted(tmp_path):
    """NonFiniteError leaves step and replica in the run's directory, and the state before that step."""
    from phalanx.proof.replay import failure_of

    data = (torch.where(torch.arange(40)[:, None] == 9, torch.nan, X), Y)
    job = FAMILIES["mlp"].recipe(4, data=data, steps=5)
    with pytest.raises(phalanx.NonFiniteError) as caught:
        job.train(run_dir=tmp_path, engine="inline", progress=False)
    assert failure_of(tmp_path)[:2] == (caught.value.step, caught.value.replica)
    found = phalanx.replay(job, tmp_path, step=caught.value.step, replica=caught.value.replica)
    assert 9 in found.samples
    assert found.loss != found.loss


@pytest.mark.long
def test_a_debugger_in_a_notebook(tmp_path):
    """In a notebook ``replay(..., debug=True)`` stops at the first line of forward and asks for input there."""
    (tmp_path / "job.py").write_text(JOB.replace("y[21] = 7", ""))
    cell = textwrap.dedent(f"""
        import builtins, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import job, phalanx
        typed = iter(["p x.shape", "c", "c"])
        builtins.input = lambda prompt="": (print(prompt), next(typed))[1]
        print(phalanx.replay(job.recipe, step=2, replica=1, debug=True).loss)
        """)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "".join(output.get("text", "") for output in book.cells[0].outputs))
    assert "scaled = 2 * x" in shown
    assert "torch.Size([2, 2])" in shown


def sevens(output, target):
    """A loss that does not take a seven."""
    if (target == 7).any():
        raise RuntimeError("a seven")
    return F.cross_entropy(output, target)


@pytest.mark.parametrize("brought", [False, True])
@pytest.mark.parametrize("engine", ["inline", pytest.param("processes", marks=pytest.mark.long)])
def test_an_error_has_all_that_is_needed(tmp_path, engine, brought):
    """Replayed from the error in memory, or from the run's directory, it is raised again from the same samples.

    So is another replica of that step, with the gradient that a loop by hand computes from ``error.result``.
    """
    y = torch.where(torch.arange(40) == 21, 7, Y)
    job = recipe(data=None if brought else (X, y), steps=None if brought else 12, loss_fn=sevens)
    error = failing(job, y, engine, tmp_path)
    for again in (lambda: phalanx.replay(error), lambda: phalanx.replay(job, tmp_path)):
        with pytest.raises(phalanx.WorkerError, match="a seven") as caught:
            again()
        assert (caught.value.step, caught.value.replica) == (error.step, error.replica)
        assert caught.value.samples == error.samples
        assert isinstance(caught.value.__cause__, RuntimeError)
    other = (error.replica + 1) % 4
    found, stored = (phalanx.replay(*where, replica=other) for where in ((error,), (job, tmp_path)))
    model = error.result.model
    model.zero_grad()
    where = list(range(16, 24))[2 * other : 2 * other + 2] if brought else job.plan.shares(error.step)[other]
    sevens(model(X[where]), y[where]).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(found.gradients[name], parameter.grad)
        assert torch.equal(stored.gradients[name], parameter.grad)


def failing(job, y, engine, folder):
    """The error of a run that comes to the seven."""
    options = {"run_dir": folder, "engine": engine, "workers": 1 if engine == "inline" else 2, "progress": False}
    try:
        with job.start(**options) as run:
            for start in 2 * [*range(0, 40, 8)]:
                run.step(None if job.data is not None else (X[start : start + 8], y[start : start + 8]))
    except phalanx.WorkerError as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_without_a_state_says_so():
    """An error that names no replica, or comes from elsewhere, is refused with the way out."""
    with pytest.raises(phalanx.UsageError, match="names no step and replica"):
        phalanx.replay(phalanx.WorkerError("it was evaluated"))
    with pytest.raises(phalanx.UsageError, match="step is not given"):
        phalanx.replay(recipe(steps=3), replica=0)
