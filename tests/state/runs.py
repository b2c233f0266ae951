"""Runs in directories: a recipe with everything that has to be put back right, what it left, and drivers that die."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import torch

from phalanx.checkpoint import snapshot
from phalanx.checkpoint.chained import NEXT
from phalanx.checkpoint.directory import SNAPSHOTS, snapshot_folders
from phalanx.checkpoint.saver import LINK
from phalanx.definition.plain import decoded
from tests.families import ADAMW, FAMILIES, conv_norm

OLDER, NEWER = 2, 4  # steps of the snapshots in a directory that tests damage
ROOT = pathlib.Path(__file__).parents[2]
COSINE = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)


def norm_recipe(steps, make_model=conv_norm, **changes):
    """Buffers, clipping, a schedule and uneven shares."""
    given = {"optimizer": ADAMW, "scheduler": COSINE, "max_norm": 0.5, "steps": steps}
    return FAMILIES["conv_norm"].recipe(4, make_model=make_model, **(given | changes))


def accuracy(output, target):
    return (output.argmax(-1) == target).float().mean()


def assert_same(one, other):
    assert (one.digest, repr(one.loss_history), one.samples) == (other.digest, repr(other.loss_history), other.samples)


def engine_of(workers):
    """Options for so many workers; one is this process."""
    return {"engine": "inline"} if workers == 1 else {"engine": "processes", "workers": workers}


def steps_in(run_dir):
    """Steps of the snapshots in a directory, oldest first."""
    return sorted(snapshot_folders(pathlib.Path(run_dir)))


def bytes_of(run_dir):
    """All files of a run but its lock."""
    files = [path for path in sorted(run_dir.rglob("*")) if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


def killed(run_dir, step=2):
    """A run as a SIGKILL leaves it: the chain is ahead of the newest snapshot, and nothing was kept at an end."""
    for path in (run_dir / "snapshots").iterdir():
        if path != folder_of(run_dir, step):
            shutil.rmtree(path)
    (run_dir / NEXT).unlink(missing_ok=True)


def folder_of(run_dir, step):
    """The snapshot of a step."""
    return pathlib.Path(run_dir) / SNAPSHOTS / f"step-{step:012d}"


def listed(folder):
    """Everything in a folder with its bytes, but for the lock, the log and the chain."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(pathlib.Path(folder).rglob("*"))
        if path.name not in ("lock", "events.jsonl", "chain.jsonl", "chain.records.jsonl")
    }


def contents(found):
    """A snapshot as values that can be compared; in which order an optimizer holds its state is no matter."""
    own = {name: value for name, value in found.facts.items() if name != LINK}  # of the chain of its directory
    facts = {name: decoded(value, lambda kept, path: repr(kept), "") for name, value in own.items()}
    tensors = [
        {name: (tensor.dtype, tensor.shape, bytes(tensor.content)) for name, tensor in part.items()}
        for part in (found.weights, found.training)
    ]
    recipe = {part: told for part, told in found.recipe.items() if part not in ("made", "beside")}  # a run's own
    return [found.step, found.samples, facts, found.metrics, recipe, found.environment, tensors]


def sealed(folder, change):
    """Change state.json in place by ``change(state)``, and make the manifest agree with it."""
    path = folder / snapshot.FACTS
    state = json.loads(path.read_bytes())
    state = change(state) or state
    path.write_bytes(json.dumps(state).encode())
    seal = {"schema": snapshot.SCHEMA, snapshot.FACTS: snapshot.hashlib.sha256(path.read_bytes()).hexdigest()}
    (folder / snapshot.MANIFEST).write_bytes(json.dumps(seal).encode())


def reheaded(path, change):
    """Change the header of a file of tensors by ``change(header)``; their bytes stay."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header = change(header) or header
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def train_and_die(step, workers, run_dir, *, settled):
    """Train, and be killed after a step: before it is saved, or as soon as its snapshot is on disk."""

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    options = {"run_dir": run_dir, "snapshot_every": 1, **engine_of(workers)}
    if not settled:
        norm_recipe(30).train(callbacks=[lambda report: die() if report.step == step else None], **options)
    with norm_recipe(30).start(**options) as run:
        for report in run:
            if report.step == step:
                run.result()  # waits for the snapshot
                die()


def serve():
    """Read orders from stdin, and have a child carry out each: torch is imported once."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        step, workers, run_dir, settled = json.loads(line)
        child = os.fork()
        if not child:
            try:
                train_and_die(step, workers, run_dir, settled=settled)
            finally:
                os._exit(1)
        print(os.waitpid(child, 0)[1], flush=True)


@contextlib.contextmanager
def drivers():
    """A function that starts a driver, which is to die, and returns how it ended."""
    command = [sys.executable, "-c", "from tests.state.runs import serve; serve()"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as server:

        def drive(step, workers, run_dir, *, settled):
            server.stdin.write(json.dumps([step, workers, str(run_dir), settled]) + "\n")
            server.stdin.flush()
            return os.waitstatus_to_exitcode(int(server.stdout.readline()))

        yield drive
        server.stdin.close()
