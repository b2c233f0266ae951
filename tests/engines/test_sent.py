"""What comes between while workers are sent something, what a worker needs to know of its parent, and Python's end."""

import dataclasses
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.checkpoint.directory import at_work
from phalanx.engines.processes.serialization import needed
from tests.engines.moving import hurry, moves

X, Y = torch.arange(160.0).reshape(40, 4) / 160, torch.arange(40) % 2
WAYS = [{"engine": "inline"}, {"engine": "processes", "workers": 2}, {"workers": "auto"}]


def recipe(data):
    return phalanx.Recipe(functools.partial(nn.Linear, 4, 2), data, F.cross_entropy, replicas=2, batch_size=20, steps=6)


class Alarm(Exception):
    """What a caller's handler raises."""


def raising(number, frame):
    raise Alarm("time is up")


class Timer:
    """A handler that is an object, and one of its methods."""

    def __call__(self, number, frame):
        raise Alarm("time is up")

    def rings(self, number, frame):
        raise Alarm("time is up")


class Interrupted(torch.utils.data.Dataset):
    """While this is pickled, a signal comes; ``fails``: it cannot be pickled at all."""

    def __init__(self, fails=False):
        self.fails = fails

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]

    def __getstate__(self):
        if self.fails:
            raise Alarm("no")
        os.kill(os.getpid(), signal.SIGUSR1)
        return vars(self)


@pytest.fixture(
    params=[raising, Timer(), Timer().rings, functools.partial(raising)],
    ids=["function", "object", "method", "partial"],
)
def handled(request):
    """A handler of SIGUSR1 that raises."""
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_what_a_handler_raises_comes_through(handled):
    """The caller gets the exception of their own handler, and is not told that something cannot be sent."""
    with pytest.raises(Alarm, match="time is up"):
        recipe(Interrupted()).train(progress=False, **WAYS[1])
    with pytest.raises(Alarm):
        needed(Interrupted(), lambda _: NotImplemented)
    with pytest.raises(phalanx.UsageError, match=r"data .*cannot be sent to a worker process: no;"):
        recipe(Interrupted(fails=True)).train(progress=False, **WAYS[1])


def test_what_a_handler_raises_while_a_run_moves(monkeypatch, handled):
    """It comes through where workers are chosen during the run, too."""
    hurry(monkeypatch, recipe(Interrupted()))
    with pytest.raises(Alarm, match="time is up"):
        moves(dataclasses.replace(recipe(Interrupted()), steps=60))


def test_functions_without_a_module():
    """What exec makes in a bare namespace has no module, and travels all the same."""
    namespace: dict = {}
    exec("def model():\n    import torch\n    return torch.nn.Linear(4, 2)", namespace)
    assert namespace["model"].__module__ is None
    assert None not in needed(namespace["model"], lambda _: NotImplemented)


class Counted(torch.utils.data.Dataset):
    """Counts in a dict that a manager holds how often each sample was read."""

    def __init__(self, counts):
        self.counts = counts

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.counts[index] = self.counts.get(index, 0) + 1
        return X[index], Y[index]


def test_a_managers_proxies_work_in_workers():
    """Workers know the key of their parent's managers, as all children of multiprocessing do; bits are the same."""
    digests = set()
    for options in WAYS:
        with multiprocessing.get_context("spawn").Manager() as manager:
            counts = manager.dict()
            digests.add(recipe(Counted(counts)).train(progress=False, **options).digest)
            assert set(counts.keys()) == set(range(40))
    assert len(digests) == 1
    assert recipe((X + 1, Y)).train(progress=False, engine="inline").digest not in digests


END = """
    import sys, torch, phalanx
    from phalanx.checkpoint.files import Held
    data = torch.zeros(40, 4), torch.zeros(40, dtype=torch.int64)
    recipe = phalanx.Recipe(lambda: torch.nn.Linear(4, 2), data, torch.nn.functional.cross_entropy, replicas=2,
                            batch_size=20, steps=6)
    run = recipe.start(run_dir=sys.argv[1], engine=sys.argv[2], progress=False)
    next(run)
    sys._run, sys._held = run, Held()  # what sys has goes last
"""


@pytest.mark.long
@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_python_ends_while_a_run_is_open(tmp_path, engine):
    """A run that is kept until the very end prints nothing then, and its directory can be used again."""
    command = [sys.executable, "-c", textwrap.dedent(END), str(tmp_path), engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not at_work(tmp_path)
