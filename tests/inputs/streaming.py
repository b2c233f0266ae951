"""Streams that tests read: samples that are drawn at random, iterables that know their place, and recipes over them."""

import copy
import itertools
import os
import random

import numpy as np
import torch

import phalanx

COUNT, BATCH = 29, 8  # samples of an epoch, which does not end with a batch
YIELDED = "PHALANX_TEST_YIELDED"


def sample(number, label=None):
    """A row that follows from its number, moved by what every global generator draws."""
    row = np.random.RandomState(number).randn(5).astype(np.float32)
    moved = row + 0.1 * random.random() + 0.1 * np.random.rand() + 0.1 * torch.rand(()).item()
    return torch.tensor(moved, dtype=torch.float32), torch.tensor(number % 3 if label is None else label)


def generate():
    """All samples, in order."""
    for number in range(COUNT):
        yield sample(number)


def shuffled():
    """All samples, in an order that is drawn for each epoch."""
    numbers = list(range(COUNT))
    random.shuffle(numbers)
    return map(sample, numbers)


def endless():
    """Samples without an end."""
    return map(sample, itertools.count())


def count():
    """Count a sample that was yielded: where recipes are not compared by it."""
    os.environ[YIELDED] = str(yielded() + 1)


def yielded(again=None):
    """How many samples were yielded; ``again``: count from there."""
    if again is not None:
        os.environ[YIELDED] = str(again)
    return int(os.environ.get(YIELDED, "0"))


class InOrder:
    """The same samples by index."""

    def __len__(self):
        return COUNT

    def __getitem__(self, number):
        return sample(number)


class Knows:
    """Tells its place as Hugging Face's and torchdata's iterables do."""

    def __init__(self):
        self.place, self.epoch = 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"place": self.place, "epoch": self.epoch, "nested": [{"weights": torch.ones(2)}, (1, None)]}

    def load_state_dict(self, state):
        assert torch.equal(state["nested"][0]["weights"], torch.ones(2))
        self.place, self.epoch = state["place"], state["epoch"]

    def __iter__(self):
        while self.place < COUNT:
            self.place += 1
            count()
            yield sample((self.place * (self.epoch + 1)) % COUNT)
        self.place = 0


class Forgets(Knows):
    """Has a shuffle buffer of its own, which its state leaves out, so that it does not come back to its place."""

    def __iter__(self):
        held = []
        for item in super().__iter__():
            held.append(item)
            if len(held) > 6:
                yield held.pop(3)
        yield from held


class Walker:
    """An iterator that tells its place, as Grain's do."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == COUNT:
            raise StopIteration
        self.place += 1
        count()
        return sample(self.place)

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = copy.copy(state["place"])


def model():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))


def recipe(make_iterable=generate, *, buffer=0, size=None, replicas=3, **changes):
    """A recipe over a stream; three epochs where nothing else is said."""
    given = {"batch_size": BATCH, "replicas": replicas, "loss_fn": torch.nn.functional.cross_entropy}
    if "steps" not in changes:
        given["epochs"] = 3
    return phalanx.Recipe(model, phalanx.Stream(make_iterable, buffer, size), **(given | changes))


SIZES = (7, 3, 9, 4, 5, 8)  # samples of each shard


def rows_of(shard, shards):
    """The samples of one of several readers, each moved by what global generators draw."""
    for number in range(SIZES[shard]):
        yield sample(100 * shard + number + 1000 * shard.epoch)


def mixed_rows_of(shard, shards):
    """The same in an order that is drawn for each epoch and shard."""
    numbers = list(range(SIZES[shard]))
    random.shuffle(numbers)
    return (sample(100 * shard + number) for number in numbers)


class KnowsShard:
    """One of several readers, which tells its place."""

    def __init__(self, shard, shards):
        self.shard, self.place = int(shard), 0

    def state_dict(self):
        return {"place": self.place, "ones": torch.ones(2)}

    def load_state_dict(self, state):
        assert torch.equal(state["ones"], torch.ones(2))
        self.place = state["place"]

    def __iter__(self):
        while self.place < SIZES[self.shard]:
            self.place += 1
            count()
            yield sample(100 * self.shard + self.place - 1)


def sharded(make_iterable=rows_of, shards=5, *, buffer=0, size=None, replicas=4, **changes):
    """A recipe over shards; three epochs where nothing else is said."""
    given = {"batch_size": BATCH, "replicas": replicas, "loss_fn": torch.nn.functional.cross_entropy}
    if "steps" not in changes:
        given["epochs"] = 3
    return phalanx.Recipe(model, phalanx.Stream(make_iterable, buffer, size, shards), **(given | changes))
