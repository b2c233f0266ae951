"""What a step asks of each device: kernels, copies and waits of the host, on the fake accelerator of the tests.

    python benchmarks/operations.py                # two minutes; --devices 1 2 4, --models resnet gpt, --names

Counts say nothing of time. They are those of one step of the first worker, from its beginning to that of the next. An
operation over a list of tensors counts once for each tensor, where a GPU needs a few kernels for all. Waits and copies
include those of the fake collectives, which go through host memory. A step in which a snapshot happens to be taken
has more of both: then run it again.
"""

import argparse
import collections
import functools
import json
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import step
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.engines.alone import Folded
from phalanx.engines.devices.exchanged import Exchanged
from tests import accelerator

REPLICAS, STEP = 8, 3


class Counted:
    """A ``make_model`` that counts what a device does in a step of the process that computes; writes it to ``file``."""

    def __init__(self, make_model, file):
        self.make_model, self.file = make_model, file

    def __call__(self):
        for sums in (Folded, Exchanged):
            sums.begin = counting(getattr(sums.begin, "plain", sums.begin), self.file)
        return self.make_model()


def counting(begin, file):
    """``begin`` of sums that also notes what was done since it was called for step ``STEP``."""

    def begun(sums, number, shares, **more):
        if number == STEP:
            torch.fake.trace(True)
        elif number == STEP + 1 and (not hasattr(sums, "_station") or sums._station.worker == 0):
            trace = torch.fake.take_trace()
            torch.fake.trace(False)
            names = collections.Counter("wait" if event[0] == "host" else event[2] for event in trace)
            pathlib.Path(file).write_text(json.dumps(names))
        return begin(sums, number, shares, **more)

    begun.plain = begin
    return begun


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inner)))


def resnet(blocks=8, width=8):
    """Convolutions with BatchNorm: 18 of each."""
    stem = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    return nn.Sequential(*stem, *(Block(width) for _ in range(blocks)), nn.Flatten(), nn.Linear(width * 16, 10))


class GPT(nn.Module):
    """Attention without dropout."""

    def __init__(self, layers=6, width=32, words=64):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(16, width))
        layer = functools.partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, batch_first=True)
        self.layers, self.head = nn.ModuleList(layer() for _ in range(layers)), nn.Linear(width, words)

    def forward(self, tokens):
        x = self.words(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


def images():
    """A recipe for the ResNet."""
    drawn = torch.Generator().manual_seed(0)
    data = torch.randn(128, 3, 4, 4, generator=drawn), torch.arange(128) % 10
    return {"make_model": resnet, "data": data, "loss_fn": F.cross_entropy}


def texts():
    """A recipe for the GPT."""
    tokens = torch.randint(0, 64, (128, 16), generator=torch.Generator().manual_seed(0))
    return {"make_model": GPT, "data": (tokens, tokens), "loss_fn": loss_of_words}


def loss_of_words(output, target):
    return F.cross_entropy(output, target.flatten())


MODELS = {"resnet": images, "gpt": texts}


def counts(model, devices):
    """Kernels, copies and waits of a step, by name."""
    given = MODELS[model]()
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3, foreach=True)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "counts")
        given["make_model"] = Counted(given["make_model"], file)
        recipe = phalanx.Recipe(
            **given, replicas=REPLICAS, batch_size=32, optimizer=optimizer, max_norm=1.0, steps=STEP + 2
        )
        recipe.train(devices=[f"fake:{number}" for number in range(devices)], progress=False)
        return collections.Counter(json.loads(pathlib.Path(file).read_text()))


def row(model, devices):
    """A row of the table."""
    names = counts(model, devices)
    waits = names.pop("wait", 0)
    copies = sum(count for name, count in names.items() if "copy" in name)
    return [model, str(devices), str(names.total() - copies), str(copies), str(waits)], names


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--names", action="store_true", help="list them by name, too")
    given = parser.parse_args()
    os.environ.setdefault("FAKE_DEVICES", str(max(given.devices)))
    accelerator.accelerator()
    rows = []
    for model in given.models:
        for devices in given.devices:
            cells, names = row(model, devices)
            rows.append(cells)
            if given.names:
                print(cells, names.most_common(40))
    print(step.markdown(["model", "devices", "kernels", "copies", "waits of the host"], rows))


if __name__ == "__main__":
    main()
