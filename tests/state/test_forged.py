"""A snapshot whose checksums are right, and whose state.json was forged: refused by a SnapshotError, or no difference.

Nobody can notice a number in the place of another number (a rate, a count, what a metric was), nor numbers of a list in
another order: those are left out here, but for the twins that show what they do.
"""

import copy
import functools
import json
import random
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import phalanx
from phalanx.callbacks import EMA, EarlyStopping, Log, SaveBest
from phalanx.checkpoint import files
from tests.sampling import SEED
from tests.state.runs import folder_of, sealed

BEGUN, STEPS = 4, 9
X = torch.arange(96, dtype=torch.float32).reshape(24, 4) / 96
Y = X.sum(1, keepdim=True)
EVERYWHERE = [{"engine": "inline"}, {"engine": "processes", "workers": 2}, {"workers": "auto"}]
TENSOR = {"!": "tensor", "is": ["optimizer.0.0.weight.exp_avg", [4, 1], "cpu"]}
VALUES = (None, True, 3, 0.5, "x", [], {}, [0], 10**30, TENSOR, {"!": "float", "is": "inf"}, {"!": "dict", "is": []})


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


class Rows:
    """Yields the samples, and tells its place."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(X):
            raise StopIteration
        self.place += 1
        return X[self.place - 1], Y[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
RECIPES = {
    "cycle": {
        "data": (X, Y), "optimizer": ADAMW,
        "scheduler": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=30),
    },
    "stream": {
        "data": phalanx.Stream(Rows, shuffle_buffer=5),
        "optimizer": functools.partial(torch.optim.SGD, lr=1, momentum=0.9),
        "scheduler": functools.partial(lr_scheduler.StepLR, step_size=1, gamma=0.1),
    },
    "plateau": {
        "data": (X, Y), "optimizer": ADAMW, "schedule_every": "epoch", "schedule_on": "loss",
        "scheduler": functools.partial(lr_scheduler.ReduceLROnPlateau, patience=0),
    },
}  # fmt: skip


def train(kind, steps, run_dir=None, **options):
    """The recipe of this kind, with all callbacks that have a state."""
    recipe = phalanx.Recipe(make_model, loss_fn=F.mse_loss, replicas=2, batch_size=4, steps=steps, **RECIPES[kind])
    callbacks = [EMA(0.9), EarlyStopping("loss", patience=9), SaveBest("loss")]
    if run_dir is not None:
        callbacks.append(Log("csv"))
        options |= {"run_dir": run_dir, "chain": "off"}
    return recipe.train(callbacks=callbacks, evaluation=phalanx.Evaluation({"loss": F.mse_loss}, (X, Y)), **options)


@functools.cache
def wanted(kind):
    """The digest of the run that nobody forged."""
    return train(kind, STEPS, engine="inline").digest


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """A snapshot of each kind."""
    made = {}
    for kind in RECIPES:
        run_dir = tmp_path_factory.mktemp(kind) / "run"
        train(kind, BEGUN, run_dir, engine="inline")
        made[kind] = folder_of(run_dir, BEGUN)
    return made


def slots(value, path=()):
    """The path to each place in JSON values."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from slots(item, (*path, key))


def at(value, path):
    """What lies at a path."""
    return functools.reduce(lambda whole, key: whole[key], path, value)


def is_number(value):
    """Whether it is one, or stands for one that JSON has not."""
    return (type(value) in (int, float)) or (isinstance(value, dict) and value.get("!") == "float")


def told_apart(old, new):
    """Whether a value in the place of another can be noticed."""
    same_text = isinstance(old, str) and isinstance(new, str)
    return new != old and not same_text and not (is_number(old) and is_number(new))


def delete(whole, key):
    """Take it out."""
    del whole[key]


def more(whole, key):
    """A list has its last entry twice, a dict one more."""
    if isinstance(whole[key], list):
        whole[key].append(copy.deepcopy(whole[key][-1]) if whole[key] else 0)
    else:
        whole[key].update(step=None)


def swap(whole, key):
    """It and the entry before it change places."""
    whole[key - 1], whole[key] = whole[key], whole[key - 1]


def put(new):
    """Something else in its place."""

    def change(whole, key):
        whole[key] = copy.deepcopy(new)

    return change


def mutations(state):
    """All of them: a path, a word for what is done there, and a function that does it."""
    for path in slots(state):
        whole, key = at(state, path[:-1]), path[-1]
        yield path, "deleted", delete
        for new in VALUES:
            if told_apart(whole[key], new):
                yield path, f"is {new!r}", put(new)
        if isinstance(whole[key], (list, dict)):
            yield path, "has more", more
        if isinstance(whole, list) and key and told_apart(whole[key], whole[key - 1]):
            yield path, "swapped", swap


def resumed(kind, source, run_dir, path, change, **options):
    """Forge a copy, and go on from it: what came of that, in words; None where all is well."""
    folder = folder_of(run_dir, BEGUN)
    shutil.copytree(source, folder)

    def forge(state):
        change(at(state, path[:-1]), path[-1])

    sealed(folder, forge)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            digest = train(kind, STEPS, run_dir, **options).digest
        except (phalanx.SnapshotError, phalanx.UsageError):
            return None
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    anew = any("begins anew" in str(warning.message) for warning in told)  # the whole state of a callback is gone
    return None if digest == wanted(kind) or anew else "another digest, without a word"


@pytest.mark.longest
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *((kind, 0) for kind in RECIPES),
        *(pytest.param(kind, part, marks=pytest.mark.campaign) for kind in RECIPES for part in range(1, 40)),
    ],
)
def test_whatever_is_forged(tmp_path, snapshots, kind, part):
    """In each place of state.json something is taken out, replaced, added or moved: refused, or the same digest."""
    state = json.loads((snapshots[kind] / "state.json").read_bytes())
    shallow = ("recipe", "environment", "hashes")  # they are compared as a whole
    everything = [found for found in mutations(state) if found[0][0] not in shallow or len(found[0]) < 3]
    random.Random(SEED + part).shuffle(everything)
    wrong = {}
    for path, what, change in everything[:60]:
        run_dir = tmp_path / "run"
        found = resumed(kind, snapshots[kind], run_dir, path, change, engine="inline")
        if found is not None:
            wrong[path, what] = found
        shutil.rmtree(run_dir)
    assert not wrong


FORGED = {
    "no place in the stream": ("stream", ("facts", "callbacks", "data.stream"), delete),
    "samples that wait are gone": ("stream", ("facts", "callbacks", "data.stream", "is", 4, 1), put([])),
    "no hash of the stream": ("stream", ("facts", "callbacks", "data.stream", "is", 6, 1), put(3)),
    "no count of evaluations": ("cycle", ("facts", "callbacks", "EarlyStopping", "is", 1), delete),
    "a word for the best value": ("plateau", ("facts", "callbacks", "EarlyStopping", "is", 0, 1), put("x")),
    "no average": ("cycle", ("facts", "callbacks", "EMA", "is", 0, 1), put(None)),
    "an average that lacks a parameter": ("cycle", ("facts", "callbacks", "EMA", "is", 0, 1, "is", 0), delete),
    "nothing kept": ("cycle", ("facts", "callbacks", "SaveBest", "is", 0, 1), put(3)),
    "a log that keeps something": ("cycle", ("facts", "callbacks", "Log", "is"), put([["columns", []]])),
    "a moment under another name": ("cycle", ("facts", "optimizers", 0, 0, "is", 0, 1, "is", 1, 0), put("x")),
    "a moment gone": ("cycle", ("facts", "optimizers", 0, 0, "is", 0, 1, "is", 1), delete),
    "a parameter's state gone": ("cycle", ("facts", "optimizers", 0, 0, "is", 0), delete),
    "state beside": ("cycle", ("facts", "optimizers", 0, 1), swap),
    "no rate": ("stream", ("facts", "options", 0, 0, 0, "is", 0), delete),
    "a word for a rate": ("stream", ("facts", "options", 0, 0, 0, "is", 0, 1), put("x")),
    "another kind of kernel": ("cycle", ("facts", "options", 0, 0, 0, "is", 9, 1), put(True)),
    "no place of the schedule": ("plateau", ("facts", "options", 1, 0, "is", 0), delete),
    "a method of the schedule": ("cycle", ("facts", "options", 1, 0, "is", 0, 0), put("step")),
}


@pytest.mark.long
@pytest.mark.cases(6)
@pytest.mark.parametrize("options", EVERYWHERE, ids=["inline", "2 workers", "auto"])
@pytest.mark.parametrize("case", FORGED)
def test_forged_parts(tmp_path, snapshots, case, options):
    """Each is refused with a SnapshotError, before a step is done, wherever the workers are."""
    kind, path, change = FORGED[case]
    folder = folder_of(tmp_path, BEGUN)
    shutil.copytree(snapshots[kind], folder)
    sealed(folder, lambda state: change(at(state, path[:-1]), path[-1]))
    with pytest.raises(phalanx.SnapshotError, match=r"in the snapshot (does not fit|has dealt)|cannot be used"):
        train(kind, STEPS, tmp_path, **options)


@pytest.mark.long
@pytest.mark.parametrize("options", EVERYWHERE, ids=["inline", "2 workers", "auto"])
@pytest.mark.parametrize("kind", RECIPES)
def test_what_nobody_forged(tmp_path, snapshots, kind, options):
    """Twin: the same snapshots as they were lead to the digest, so what is refused above is refused for its content."""
    shutil.copytree(snapshots[kind], folder_of(tmp_path, BEGUN))
    result = train(kind, STEPS, tmp_path, **options)
    assert (result.resumed_from, result.digest) == (BEGUN, wanted(kind))


def test_another_number_is_not_noticed(tmp_path, snapshots):
    """Twin: a larger step of the schedule is a number too, and leads to another digest, which the tests above see."""
    path = ("facts", "options", 0, 0, 0, "is", 0, 1)
    state = json.loads((snapshots["plateau"] / "state.json").read_bytes())
    assert at(state, path[:-1])[0] == "lr"
    found = resumed("plateau", snapshots["plateau"], tmp_path, path, put(1e3), engine="inline")
    assert found == "another digest, without a word"


def test_a_callback_that_was_not_there(tmp_path, snapshots):
    """A callback of which the snapshot has no state begins anew, with a warning that names it."""
    folder = folder_of(tmp_path, BEGUN)
    shutil.copytree(snapshots["cycle"], folder)
    sealed(folder, lambda state: delete(state["facts"]["callbacks"], "EarlyStopping"))
    with pytest.warns(UserWarning, match=rf"step {BEGUN} has no state of EarlyStopping, which begins anew there"):
        train("cycle", STEPS, tmp_path, engine="inline")


def test_tensors_that_nothing_names(tmp_path, snapshots):
    """Tensors of a callback whose state is gone are noticed, as they are nobody's."""
    folder = folder_of(tmp_path, BEGUN)
    shutil.copytree(snapshots["cycle"], folder)
    sealed(folder, lambda state: delete(state["facts"]["callbacks"], "EMA"))
    with pytest.raises(phalanx.SnapshotError, match=r"no state names .*callbacks\.EMA"):
        train("cycle", STEPS, tmp_path, engine="inline")
    assert files.is_folder(folder)
