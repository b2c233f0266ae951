"""Datasets and streams that write to what they hand out: as if they handed out new samples, or refused."""

import dataclasses

import numpy as np
import pytest
import torch

import phalanx
from tests.inputs.streaming import BATCH, COUNT, model
from tests.state.runs import assert_same

ROWS = np.random.default_rng(0).normal(3, 2, (COUNT, 5)).astype(np.float32)
LABELS = torch.arange(COUNT) % 3
LOSS = torch.nn.functional.cross_entropy
WAYS = {
    "inline": {"engine": "inline"},
    "auto": {"workers": "auto"},
    "workers": {"engine": "processes", "workers": 2},
    "readers": {"engine": "processes", "workers": 2, "readers": 2},
}
BY_INDEX = pytest.mark.parametrize("way", WAYS)


class Dataset:
    """Rows of its own."""

    def __init__(self, kind=torch.tensor):
        self.rows = kind(ROWS.copy())

    def __len__(self):
        return COUNT

    def __getitem__(self, number):
        return self.rows[number], LABELS[number]


class NewBuffers(Dataset):
    """A new array for each sample, in a container."""

    def __getitem__(self, number):
        return [{"x": self.rows[number] + 1}], LABELS[number]


class OneBuffer(Dataset):
    """The same samples in one array, which is filled anew for each."""

    def __init__(self, kind=torch.tensor):
        super().__init__(kind)
        self.buffer = self.rows[0] * 0

    def __getitem__(self, number):
        self.buffer[:] = self.rows[number] + 1
        return [{"x": self.buffer}], LABELS[number]


class Normalising(Dataset):
    """Writes to the rows that it keeps."""

    def __getitem__(self, number):
        row = self.rows[number]
        row -= 1
        return row, LABELS[number]


class NormalisingCopies(Normalising):
    """Writes to the rows that it keeps, and hands out others."""

    def __getitem__(self, number):
        row, label = super().__getitem__(number)
        return row * 1, label


class Caching(Dataset):
    """Keeps the samples that it has moved at random."""

    def __init__(self, draw=torch.rand):
        super().__init__()
        self.draw, self.kept = draw, {}

    def __getitem__(self, number):
        if number not in self.kept:
            self.kept[number] = self.rows[number] + self.draw(5)
        return self.kept[number], LABELS[number]


class CachingParts(Caching):
    """Keeps samples that it has moved at random, and moves them again."""

    def __getitem__(self, number):
        row, label = super().__getitem__(number)
        return row + torch.rand(5), label


class CachingRows(Caching):
    """Keeps rows, and moves them at random each time."""

    def __getitem__(self, number):
        if number not in self.kept:
            self.kept[number] = self.rows[number] * 1
        return self.kept[number] + self.draw(5), LABELS[number]


def nested(net, batch):
    return net(batch[0][0]["x"])


def recipe(data, **changes):
    given = {"batch_size": BATCH, "replicas": 3, "epochs": 2, "target_fn": lambda batch: batch[1]}
    return phalanx.Recipe(model, data, LOSS, **(given | changes))


def trained(data, way, **changes):
    return recipe(data, **changes).train(**WAYS[way])


@pytest.mark.cases(1)
@BY_INDEX
@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_one_buffer_filled_anew(way, kind):
    """The samples of a share are as they were when each was read, though all of them lay in one array."""
    expected = trained(NewBuffers(kind), "inline", forward_fn=nested)
    assert_same(trained(OneBuffer(kind), way, forward_fn=nested), expected)
    assert trained(Dataset(kind), "inline").digest != expected.digest


@pytest.mark.cases(1)
@BY_INDEX
@pytest.mark.parametrize("dataset", [Normalising, NormalisingCopies])
@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_writing_to_the_datasets_own_arrays(way, dataset, kind):
    """It is refused, with the name of the array; so it is in evaluation data."""
    with pytest.raises(phalanx.UsageError, match=r"\d+ of data was another .* writes to data\.rows; change a copy"):
        trained(dataset(kind), way)
    with pytest.raises(phalanx.UsageError, match=r"writes to evaluation data\.rows"):
        recipe(Dataset(kind)).train(evaluation=phalanx.Evaluation(LOSS, dataset(kind)), **WAYS[way])


def by_numpy(count):
    return torch.tensor(np.random.rand(count))


@pytest.mark.long
@pytest.mark.cases(2)
@BY_INDEX
@pytest.mark.parametrize("dataset", [Caching, CachingParts, lambda: Caching(by_numpy)])
def test_a_cache_of_what_was_drawn(way, dataset):
    """It is refused, also when the sample that comes first was looked at before."""
    made = dataset()
    with pytest.raises(phalanx.UsageError, match=r"sample \d+ of data drew other random numbers when"):
        trained(made, way)
    made[0]
    with pytest.raises(phalanx.UsageError, match=r"sample 1 of data drew other random numbers"):
        trained(made, way, shuffle=False)


@pytest.mark.cases(1)
@BY_INDEX
def test_a_cache_of_what_was_not_drawn(way):
    """Rows that are kept as they were before random numbers were drawn for them are no harm."""
    expected = trained(CachingRows(), "inline")
    assert_same(trained(CachingRows(), way), expected)
    assert trained(Dataset(), way).digest != expected.digest


@dataclasses.dataclass
class Sample:
    """A sample with a name for each part."""

    x: torch.Tensor
    y: torch.Tensor


class Named(OneBuffer):
    """Samples of a class of their own, in one buffer."""

    def __getitem__(self, number):
        return Sample(super().__getitem__(number)[0][0]["x"], LABELS[number])


def stacked(samples):
    return torch.stack([each.x for each in samples]), torch.stack([each.y for each in samples])


@pytest.mark.cases(1)
@BY_INDEX
def test_samples_that_are_dataclasses(way):
    """They are copied as dicts are."""
    expected = trained(NewBuffers(), "inline", forward_fn=nested)
    assert_same(trained(Named(), way, collate_fn=stacked), expected)


@pytest.mark.cases(2)
@pytest.mark.parametrize("buffer", [0, 4])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "readers"])  # streams have none
def test_a_stream_that_fills_one_buffer(way, buffer):
    """Each sample of a stream is what it was when it was yielded."""

    def anew():
        return (NewBuffers()[number] for number in range(COUNT))

    def one():
        return map(OneBuffer().__getitem__, range(COUNT))

    expected = recipe(phalanx.Stream(anew, buffer), forward_fn=nested).train(engine="inline")
    assert_same(recipe(phalanx.Stream(one, buffer), forward_fn=nested).train(**WAYS[way]), expected)
