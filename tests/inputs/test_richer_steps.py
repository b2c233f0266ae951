"""Steps with phases and micro-batches over streams, and with readers: the bits that columns have."""

import collections
import copy
import dataclasses
import functools
import os
import signal

import numpy as np
import pytest
import torch

import phalanx
from phalanx.definition.data import own
from phalanx.definition.plain import hashed
from tests.exactness import test_phases as phases
from tests.state.runs import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:readers is")  # streams have none

KINDS = {
    "phases": lambda **changes: phases.recipe("gan", shuffle=False, **changes),
    "micro-batches": lambda **changes: phases.recipe("actor_critic", shuffle=False, micro_batches=2, **changes),
}
PLACES = [
    {"engine": "inline"},
    {"engine": "processes", "workers": 2},
    {"engine": "inline", "readers": 1},
    {"engine": "processes", "workers": 2, "readers": 1},
]


class Rows(torch.utils.data.Dataset):
    """The rows of columns."""

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, number):
        return tuple(column[number] for column in self.columns)


def over(recipe, data, **changes):
    """The same recipe over other data."""
    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe) if field.init}
    return phalanx.Recipe(**fields | {"data": data} | changes)


def streamed(recipe):
    rows = Rows(recipe.data)
    return over(recipe, phalanx.Stream(lambda: (rows[number] for number in range(len(rows)))))


@pytest.mark.cases(1)
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_and_readers(kind, replicas):
    """Over a stream, and over a dataset that readers read, a run ends in the bits of the same rows as columns."""
    expected = KINDS[kind](replicas=replicas).train(engine="inline").digest
    for place in PLACES:
        if place.get("workers", 1) <= replicas:
            assert streamed(KINDS[kind](replicas=replicas)).train(**place).digest == expected
            dataset = over(KINDS[kind](replicas=replicas), Rows(KINDS[kind]().data))
            assert dataset.train(**place).digest == expected


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_resumes_and_kills(kind, tmp_path):
    """Interrupted after any step, also the last of an epoch, and with a worker killed, a run ends in the same bits."""
    made = streamed(KINDS[kind](replicas=2))
    expected = made.train(engine="inline")
    for step in range(1, expected.steps):
        folder = tmp_path / str(step)
        with made.start(engine="processes", workers=2, run_dir=folder, readers=step % 2) as run:
            for report in run:
                if report.step == step // 2:
                    os.kill(run.worker_pids[step % 2], signal.SIGKILL)
                if report.step + 1 == step:
                    break
        assert_same(made.train(engine="inline", run_dir=folder, readers=(step + 1) % 2), expected)


def moved(samples):
    """A batch of dicts that are changed in place, as are the arrays in them."""
    for sample in samples:
        sample["x"].add_(1)
        sample["noise"] *= 2
        sample["x"] = sample["x"] + torch.from_numpy(sample.pop("noise"))
    batch = torch.utils.data.default_collate(samples)
    return batch["x"], batch["y"]


class Writing(torch.nn.Linear):
    """Changes what it is given in place."""

    def forward(self, x):
        return super().forward(x.mul_(1.5))


HELD = [{"x": torch.randn(5), "y": torch.tensor(number % 3), "noise": torch.randn(5).numpy()} for number in range(20)]


class Held(torch.utils.data.Dataset):
    """Keeps its samples, as a dataset in memory does."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        return self.samples[number]


SOURCES = {
    "stream": lambda samples: phalanx.Stream(lambda: samples),
    "list": lambda samples: samples,
    "dataset": Held,
}


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("alone", [False, True], ids=["collate_fn", "batch_size=None"])
def test_samples_that_are_changed(source, alone):
    """What collate_fn or the model writes into samples is gone when they are read again: in a phase, by anybody."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    phases = [phalanx.Phase(torch.nn.functional.cross_entropy, name=name, optimizer=optimizer) for name in "ab"]
    changes = {"batch_size": 4, "collate_fn": moved}
    held = copy.deepcopy(HELD)
    if alone:
        held, changes = [(sample["x"], sample["y"]) for sample in held], {"batch_size": None}
    before = copy.deepcopy(held)
    made = phalanx.Recipe(
        lambda: Writing(5, 3), SOURCES[source](held), phases=phases, shuffle=False, replicas=2, epochs=2, **changes
    )
    expected = made.train(engine="inline")
    assert list(map(hashed, held)) == list(map(hashed, before))
    for place in PLACES:
        assert_same(made.train(**place), expected)
    once = phalanx.Recipe(
        lambda: Writing(5, 3), SOURCES[source](held), phases=phases[:1], shuffle=False, replicas=2, epochs=2, **changes
    )
    assert once.train(engine="inline").digest != expected.digest


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


def test_copies_are_as_what_they_are_copies_of():
    """Dtypes, strides, classes and bytes are the same, in memory of their own."""
    wide, grid = torch.randn(6, 4), np.arange(24, dtype=np.int16).reshape(6, 4)
    point = collections.namedtuple("Point", "x y")
    tensors = [
        wide[:, 1], wide.t(), wide[2, 3], wide[:0], wide.bfloat16(), wide[:1].expand(3, 4), wide > 0, wide.to_sparse(),
    ]  # fmt: skip
    arrays = [grid[:, 1], grid[::-1, ::2], grid.T, grid[:0], np.broadcast_to(grid[0], (3, 4))]
    for given in [*tensors, *arrays]:
        copied = own(given)
        assert (type(copied), copied.dtype, copied.shape) == (type(given), given.dtype, given.shape)
    for tensor in tensors[:3]:
        assert own(tensor).stride() == tensor.stride()
        assert own(tensor).data_ptr() != tensor.data_ptr()
        assert torch.equal(own(tensor), tensor)
    for array in arrays:
        assert own(array).strides == array.strides or not array.size
        assert np.array_equal(own(array), array)
        assert not np.shares_memory(own(array), array)
    tree = collections.OrderedDict(a=[1, "two", {"b": (grid, point(grid, None))}])
    copied = own(tree)
    assert type(copied) is collections.OrderedDict
    assert hashed(copied) == hashed(tree)
    assert copied["a"][2]["b"][1].x is not grid
    assert copied["a"] is not tree["a"]
    marked = torch.randn(2).as_subclass(Marked)
    assert type(own(marked)) is Marked
    marked.mark = 1
    for stranger in (torch.randn(2, requires_grad=True), object(), marked, "text", None):
        assert own(stranger) is stranger
