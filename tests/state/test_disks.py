"""Disks that lose power, are killed at any operation, or fail: the same call then ends as if nothing had been."""

import collections
import errno
import functools
import hashlib
import itertools
import os
import shutil
import warnings

import pytest
import torch

import phalanx
from phalanx.callbacks import EMA, Log, SaveBest
from phalanx.checkpoint import files
from tests.sampling import sample
from tests.state.disks import KINDS, Disk, States, found_in, lay_out
from tests.state.runs import accuracy

STEPS, PARTS = 8, 16
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (16,), generator=torch.Generator().manual_seed(1))


def net():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))


def train(run_dir):
    """A run with an average, the best, a log, a chain and a schedule on a metric: all that a user can see of it."""
    recipe = phalanx.Recipe(
        net, (X, Y), torch.nn.functional.cross_entropy, replicas=2, batch_size=8, steps=STEPS,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.05), schedule_on="accuracy", schedule_every="epoch",
        scheduler=functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0),
    )  # fmt: skip
    result = recipe.train(
        run_dir=run_dir, snapshot_every=2, engine="inline", progress=False,
        evaluation=phalanx.Evaluation(accuracy, (X, Y)), callbacks=[EMA(0.9), SaveBest("accuracy"), Log("csv")],
    )  # fmt: skip
    return facts(run_dir, result)


def facts(run_dir, result):
    """What a user can see of a run that has ended."""
    return {
        "digest": result.digest,
        "root": result.chain,
        "losses": repr(result.loss_history),
        "metrics": repr([(each.name, each.steps, each.value) for each in result.metric_history]),
        "average": {name: value.numpy().tobytes() for name, value in (result.averaged or {}).items()},
        "best": (
            str(result.best),
            result.best and result.best.path.read_bytes(),
        ),  # an older file may stay until the run goes on
        "log.csv": (run_dir / "log.csv").read_bytes(),
        "chain.jsonl": (run_dir / "chain.jsonl").read_bytes(),
        "left": [path.name for path in run_dir.rglob(".tmp-*")],
    }


def differs(found, wanted):
    return [name for name, value in wanted.items() if found[name] != value]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The operations of a run, its folder, and what is to be seen of it."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    folder.mkdir(mode=0o700)
    with Disk(folder) as disk:
        wanted = train(folder)
    return disk.log, folder, wanted


def test_nothing_passes_by_the_disk(recorded):
    """What was written down is all that was done: done again, it is the folder, byte for byte."""
    log, folder, _ = recorded
    states = States(str(folder))
    for operation in log:
        states.do(operation)
    assert states.files("killed") == found_in(folder)
    assert len(log) > 150


def left_over(log, folder, kind):
    """Every state of this kind that a disk may be left in, once each."""
    states, seen = States(str(folder)), set()
    for operation in log:
        states.do(operation)
        left = states.files(kind)
        mark = hashlib.sha256(repr(left).encode()).digest()
        if mark not in seen:
            seen.add(mark)
            yield left


def gone_on(log, folder, wanted, kind, part, tmp_path):
    """How many states of a disk were tried, and what is wrong after the same call on each."""
    bad = collections.Counter()
    tried = list(left_over(log, folder, kind))[part::PARTS]
    for number, left in enumerate(tried):
        place = tmp_path / str(number)
        lay_out(left, place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bad.update(differs(train(place), wanted))
        shutil.rmtree(place)
    return len(tried), bad


CASES = list(itertools.product(KINDS, range(PARTS)))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "part"), sample("disks that lost power", CASES, 3))
def test_what_a_kill_or_a_power_loss_leaves(recorded, tmp_path, kind, part):
    """Whatever is left on the disk, the same call ends with all that the whole run has, and nothing lies about."""
    tried, bad = gone_on(*recorded, kind, part, tmp_path)
    assert tried
    assert not bad


@pytest.mark.long
def test_a_file_that_is_never_synced_is_found(recorded, tmp_path):
    """The negative twin: without the syncs of the log, a power loss takes lines that nobody writes again."""
    log, folder, wanted = recorded
    planted = [each for each in log if (each.name, each.path) != ("fsync", str(folder / "log.csv"))]
    assert sum((gone_on(planted, folder, wanted, "ahead", part, tmp_path)[1]["log.csv"]) for part in range(4))


def failing(number, for_good, code):
    """The error of one operation, or of all from there on."""
    return lambda at, _: code if at == number or (for_good and at > number) else 0


def attempt(run_dir, wanted, fails):
    """What is wrong with a run on a disk that fails, and with the same call after that on one that is well."""
    bad, said = [], []
    try:
        with warnings.catch_warnings(record=True) as told, Disk(run_dir, fails):
            warnings.simplefilter("always")
            first = train(run_dir)
        said = [str(each.message) for each in told]
        bad += [
            f"{name} of a run that ended" for name in differs(first, wanted) if name in ANSWER or untold(name, said)
        ]
    except phalanx.PhalanxError as error:
        said = [str(error)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = train(run_dir)
    return bad + [f"{name} of the next call" for name in differs(again, wanted) if name in ANSWER or untold(name, said)]


def untold(name, said):
    """Whether a file is not what it should be, and nobody was told; what a run leaves goes with the next one."""
    return name != "left" and not any(FILES[name] in text for text in said)


ANSWER = ("digest", "root", "losses", "metrics", "average")
FILES = {"log.csv": "log.csv", "chain.jsonl": "chain.jsonl", "best": "SaveBest"}
# benchmarks/storage.py tries EROFS, and each of them once and for good.
FAULTS = [(*fault, part) for fault in ((errno.EIO, False), (errno.ENOSPC, True)) for part in range(PARTS)]


@pytest.mark.long
@pytest.mark.parametrize(("code", "for_good", "part"), sample("disks that fail", FAULTS, 1))
def test_an_operation_that_fails(recorded, tmp_path, code, for_good, part):
    """Once, or with all that follow: the run ends right or with an error of ours, and then the same call ends right.

    A line, the best weights or the chain may lack what the disk did not take; a warning names the file.
    """
    bad = collections.Counter()
    for number in range(part + 1, len(recorded[0]) + 10, PARTS):
        place = tmp_path / str(number)
        place.mkdir(mode=0o700)
        bad.update(attempt(place, recorded[2], failing(number, for_good, code)))
        shutil.rmtree(place)
    assert not bad


def test_an_error_that_is_not_told_is_found(recorded, tmp_path, monkeypatch):
    """The negative twin: a log that loses its lines without a word."""
    monkeypatch.setattr(files.LineFile, "add", silent)  # planted
    assert attempt(tmp_path, recorded[2], lambda at, name: 0) == [
        "log.csv of a run that ended",
        "log.csv of the next call",
    ]


def silent(self, line):
    """Add no line of a log, without a word."""
    if self._path.name == "events.jsonl":
        os.write(self._descriptor, line)
