"""Outputs and targets that are lists with an item for each sample, and outputs that chunks cannot be joined to."""

import collections
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import phalanx
from phalanx.definition.checks import outline
from phalanx.definition.joining import joined

X = torch.arange(24.0)[:, None].repeat(1, 3)
Named = collections.namedtuple("Named", "loss logits")


def boxes(rows):
    """As many boxes as fit the sample, and a name."""
    return [{"boxes": row.new_full((1 + int(row[0]) % 9, 4), float(row[0])), "name": f"n{int(row[0])}"} for row in rows]


class Detector(nn.Linear):
    """In evaluation mode it returns a dict for each sample."""

    def forward(self, inputs):
        output = super().forward(inputs)
        return output if self.training else boxes(inputs)


def started(make_model=lambda: Detector(3, 3), **options):
    recipe = phalanx.Recipe(make_model, (X, X), F.mse_loss, replicas=2, batch_size=8, steps=1)
    return recipe.start(**options)


def check(items, count):
    """Item n is that of sample n."""
    assert type(items) is list
    assert len(items) == count
    for number, item in enumerate(items):
        assert item["name"] == f"n{number}"
        assert torch.equal(item["boxes"], torch.full((1 + number % 9, 4), float(number)))


@pytest.mark.long
@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}, {"workers": "auto"}], ids=str)
def test_outputs_and_targets_of_detection(options):
    """Predictions and whole metrics have an item for each sample, in order, however data is cut."""
    seen = []
    with started(**options) as run:
        for count, size in itertools.product((24, 21, 9, 1), (256, 8, 1)):
            check(run.predict(X[:count], batch_size=size), count)
            run.evaluate(
                phalanx.whole(lambda output, target: seen.append((output, target)) or 0.0),
                (X[:count], X[:count]),
                batch_size=size,
                target_fn=lambda batch: boxes(batch[1]),
            )
            for items in seen.pop():
                check(items, count)
        result = run.result()
    check(result.predict(X, batch_size=5), 24)
    with pytest.raises(AssertionError):
        check(result.predict(X.flip(0), batch_size=5), 24)


def rows(*shape):
    return torch.arange(float(np.prod(shape))).reshape(shape)


def packed(*lengths, enforce_sorted=True):
    return pack_sequence([rows(length, 2) for length in lengths], enforce_sorted=enforce_sorted)


HEADS, LAST = (rows(8, 3), rows(8, 4)), (rows(2, 3), rows(2, 4))
UNLIKE = {"a": [rows(1), rows(5)], "b": rows(2), "loss": rows(1)[0]}
ONCE = [{"a": rows(3), "kept": rows(4)}, {"a": rows(4), "kept": rows(4)}]
NAMED = [Named(rows(1)[0], rows(2, 3)), Named(rows(1)[0], rows(1, 3))]
LISTED = "a list(float32[1], float32[5], float32[1], float32[5])"
JOINED = {
    "two heads": ([HEADS, LAST], [8, 2], "tuple(float32[10, 3], float32[10, 4])"),
    "two heads, two samples": ([LAST], [2], "tuple(float32[2, 3], float32[2, 4])"),
    "two heads, chunks of two": ([LAST] * 3, [2] * 3, "tuple(float32[6, 3], float32[6, 4])"),
    "maps of features": ([list(HEADS), list(LAST)], [8, 2], "list(float32[10, 3], float32[10, 4])"),
    "a list in a dict": ([UNLIKE] * 2, [2, 2], f"dict({LISTED}, b float32[4])"),
    "as many rows as samples once": (ONCE, [3, 4], "dict(a float32[7])"),
    "strings": ([["a", "b"], ["c"]], [2, 1], "list(str, str, str)"),
    "a named tuple": (NAMED, [2, 1], "Named(loss NoneType, logits float32[3, 3])"),
    "numpy": ([np.ones((2, 3)), np.ones((1, 3))], [2, 1], "float64[3, 3]"),
}
REFUSED = {
    "items or outputs": (
        [[rows(8, 4)] * 8] * 2,
        [8, 8],
        "a list of 8 items for chunks of 8 samples, and each item has 8 rows.*tuple or dict",
    ),
    "squeezed": ([rows(8), rows(1)[0]], [8, 1], r"float32\[8\] for 8, float32\[\] for 1 samples.*axis of squeeze"),
    "squeezed in a dict": ([{"a": rows(8)}, {"a": rows(1)[0]}], [8, 1], r"output\['a'\] is float32\[8\] for 8"),
    "padded": ([rows(8, 5), rows(8, 6)], [8, 8], r"float32\[8, 5\] for 8, float32\[8, 6\].*unlike rows.*pad to one"),
    "two dtypes": ([rows(8).long(), rows(8)], [8, 8], r"int64\[8\] for 8, float32\[8\] for 8.*one shape and dtype"),
    "tuples of unlike lengths": ([HEADS, (*HEADS, rows(8))], [8, 8], "unlike rows"),
    "a list and a tuple": ([[rows(8)] * 3, (rows(8),) * 2], [8, 8], "unlike rows|no row"),
    "packed": ([packed(3, 2), packed(1)], [2, 1], "PackedSequence.*unpack_sequence"),
    "packed, unsorted": ([packed(2, 3, enforce_sorted=False)], [2], "PackedSequence.*unpack_sequence"),
    "lists and tensors": ([[rows(3)] * 8, rows(8, 3)], [8, 8], "unlike rows; pass forward_fn"),
    "tensors and lists": ([rows(8, 3), [rows(3)] * 8], [8, 8], "unlike rows; pass forward_fn"),
    "a list of another length": ([[rows(2)] * 3], [8], r"output\[0\] is float32\[2\] for 8 samples"),
    "nothing with rows": ([{"loss": rows(1)[0]}], [8], "no row for each; pass forward_fn"),
    "None": ([None], [8], "no row for each"),
}


@pytest.mark.parametrize("name", JOINED)
def test_what_is_joined(name):
    """All chunks together tell what an output is."""
    outputs, samples, expected = JOINED[name]
    assert outline(joined(outputs, samples, "output")) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    """The shapes of chunks are told, and a way out."""
    outputs, samples, words = REFUSED[name]
    with pytest.raises(phalanx.UsageError, match=words):
        joined(outputs, samples, "output")


def pack(model, batch):
    """Sequences of unlike lengths."""
    return pack_sequence([row[: 1 + int(row[0]) % 3] for row in batch[0]], enforce_sorted=False)


def test_ways_out_work():
    """What a refusal advises is accepted."""

    class Padded(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            return output if self.training else x.new_ones(len(x), int(x[-1, 0]) % 7 + 9)

    with started(lambda: Padded(3, 3)) as run:
        with pytest.raises(phalanx.UsageError, match=r"list\(output\)"):
            run.predict(X, batch_size=8)
        items = run.predict(X, batch_size=8, forward_fn=lambda model, batch: list(model(batch)))
        assert [len(item) for item in items] == [9] * 8 + [10] * 8 + [11] * 8
        with pytest.raises(phalanx.UsageError, match="unpack_sequence"):
            run.predict((X, X), batch_size=8, forward_fn=pack)
        items = run.predict((X, X), batch_size=8, forward_fn=lambda model, batch: unpack_sequence(pack(model, batch)))
        assert [len(item) for item in items] == [1 + n % 3 for n in range(24)]
        with pytest.raises(phalanx.UsageError, match="or take another batch_size"):
            run.predict((X, X), batch_size=3, forward_fn=lambda model, batch: list(batch[0][:, :, None]))
        assert len(run.predict((X, X), batch_size=8, forward_fn=lambda model, batch: list(batch[0][:, :, None]))) == 24
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with started() as run:
            check(run.predict(X, batch_size=8), 24)
