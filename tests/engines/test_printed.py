"""What user code prints or warns of in workers comes out of the caller: once, whole and in its order."""

import collections
import contextlib
import io
import itertools
import os
import pathlib
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.engines.small import in_workers, small
from tests.sampling import sample

# Output


class Speaking(nn.Linear):
    """Prints which samples each forward is given; their first column is their number."""

    def __init__(self, length=0):
        super().__init__(3, 1)
        self.length = length

    def forward(self, x):
        print("saw", *x[:, 0].int().tolist(), "-" * self.length)
        return super().forward(x)


def speaking(length=0, **changes):
    x = torch.randn(24, 3)
    x[:, 0] = torch.arange(24)
    return small(make_model=lambda: Speaking(length), data=(x, x[:, 1:2]), **changes)


def lines_of(train):
    """How often each line was printed while ``train()`` ran."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train()
    assert out.getvalue().endswith("\n")
    return collections.Counter(out.getvalue().splitlines())


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("workers", "length", "callbacks"),
    sample("lines", itertools.product([1, 2, 3], [0, 20_000, 200_000], [[], [lambda report: None]]), 2),
)
def test_each_line_that_user_code_prints_arrives_once(workers, length, callbacks):
    """Whole lines, one per replica-step, also long ones from several workers at once, also when nobody watches.

    In the first two steps each worker computes its first replica twice, and one that of another in the first.
    """
    recipe = speaking(length, steps=8)
    expected = lines_of(lambda: recipe.train(engine="inline"))
    assert expected.total() == 8 * 3 + 2
    found = lines_of(lambda: recipe.train(workers=workers, engine="processes", callbacks=callbacks))
    assert found.keys() == expected.keys()
    assert found.total() == 8 * 3 + 2 * workers + (workers > 1)


def test_lines_have_arrived_when_the_step_is_reported(capsys):
    """While the caller holds report k, all lines of step k have been printed, and none of step k + 1."""
    recipe = speaking()
    with recipe.start(workers=3, engine="processes") as run:
        for report in run:
            lines = capsys.readouterr().out.splitlines()
            expected = ["saw " + " ".join(map(str, share.tolist())) + " " for share in recipe.plan.shares(report.step)]
            again = {0: [*expected, expected[-1]], 1: expected}.get(report.step, [])  # what is computed once more
            assert sorted(lines) == sorted(expected + again)


def test_lines_are_in_the_order_of_their_replica_and_step(capsys):
    """What one worker prints keeps its order."""
    recipe = speaking()
    recipe.train(workers=1, engine="processes")
    several = capsys.readouterr().out
    recipe.train(engine="inline")
    assert several == capsys.readouterr().out


def test_everything_that_writes_to_the_standard_streams_is_carried(capsys):
    """stderr, descriptors, programs that user code starts, text without an end of line, and text that is not UTF-8."""

    def loss_fn(output, target):
        print("through sys.stderr", file=sys.stderr)
        os.write(1, b"through a descriptor \xff\n")
        subprocess.run(["echo", "through a program"], check=True)
        print("unfinished: é", end="")
        return F.mse_loss(output, target)

    small(loss_fn=loss_fn, steps=1).train(workers=3, engine="processes")
    out, err = capsys.readouterr()
    # Each of three its replica twice in the first step, and one that of another; the loss is asked three times more.
    assert err.splitlines() == ["through sys.stderr"] * 10
    for text in ("through a descriptor \\xff\n", "through a program\n", "unfinished: é"):
        assert out.count(text) == 10, out


def test_a_worker_that_fails_has_printed_before(capsys):
    """Lines printed before an exception, with and without their end, are there when it arrives."""

    def loss_fn(output, target):
        print("a whole line")
        print("half a line", end="")
        raise LookupError("boom")

    with pytest.raises(phalanx.WorkerError):
        in_workers(small(loss_fn=loss_fn))
    out = capsys.readouterr().out
    assert out.count("a whole line\n") in (2, 1)
    assert "half a line" in out


# Warnings


def warning_loss(output, target):
    """Warns in every replica-step."""
    warnings.warn("an odd target", UserWarning, stacklevel=1)
    return F.mse_loss(output, target)


@pytest.mark.long
def test_a_warning_of_all_workers_is_shown_once():
    """The caller's process shows it as its own, once, with the line of user code, and pytest.warns sees it."""
    with pytest.warns(UserWarning, match="an odd target") as seen:
        small(loss_fn=warning_loss).train(workers=3, engine="processes")
    assert [(str(item.message), item.category) for item in seen] == [("an odd target", UserWarning)]
    assert pathlib.Path(seen[0].filename).name == "test_printed.py"


@pytest.mark.parametrize("changes", [{}, {"batch_size": 9}, {"drop_last": True}, {"epochs": None, "steps": 2}, None])
def test_what_a_recipe_is_warned_of_is_shown_once(changes):
    """Workers open it, too. Here a share of an epoch's last batch is one row, as BatchNorm finds out only then."""
    front = [nn.Conv1d(1, 1, 1)] if changes is None else []  # behind one, a row has values enough
    model = nn.Sequential(nn.Unflatten(1, (1, 3)), *front, nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(3, 1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        in_workers(small(**{"make_model": model, "batch_size": 10, "steps": None, "epochs": 1, **(changes or {})}))
    assert ["BatchNorm1d cannot" in str(item.message) for item in seen] == [True] * (changes == {})


class OddWarning(UserWarning):
    """A category of the caller's own."""


@pytest.mark.long
def test_a_warning_of_a_category_of_ones_own_keeps_it():
    """The category is the caller's class, also one that is defined in a function."""

    class Local(OddWarning):
        pass

    def loss_fn(output, target):
        warnings.warn("of the module", OddWarning, stacklevel=1)
        warnings.warn(Local("of a function"), stacklevel=1)
        return F.mse_loss(output, target)

    with pytest.warns(OddWarning) as seen:
        in_workers(small(loss_fn=loss_fn))
    assert {(str(item.message), item.category) for item in seen} == {
        ("of the module", OddWarning),
        ("of a function", Local),
    }


def test_a_warning_that_is_an_error_here_is_one_there():
    """Under a filter that makes warnings errors, a worker's warning is a WorkerError with its address, as inline's."""
    errors = []
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": 2}):
        with pytest.raises(phalanx.WorkerError, match="an odd target") as caught:
            small(loss_fn=warning_loss).train(**options)
        assert type(caught.value.__cause__) is UserWarning
        errors.append((caught.value.step, caught.value.replica, caught.value.samples))
    assert errors[0] == errors[1]


@pytest.mark.long
def test_a_warning_that_is_ignored_here_is_ignored_there(capsys):
    """A filter that ignores a warning does so in workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        in_workers(small(loss_fn=warning_loss))
    assert capsys.readouterr() == ("", "")


def talkative(forward):
    """A small recipe with a forward of the test's own, which prints."""
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
    return phalanx.Recipe(
        lambda: torch.nn.Linear(4, 2), (x, y), torch.nn.functional.cross_entropy, forward_fn=forward, replicas=2,
        batch_size=8, steps=4,
    )  # fmt: skip


class Unreadable(io.StringIO):
    """A stream whose reader has gone, or whose disk is full."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error

    encoding = "utf-8"


@pytest.mark.long
@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left"), ValueError("closed")]
)
def test_what_workers_print_ends_no_run(monkeypatch, capsys, error):
    """Where it cannot be written, the run goes on to the same digest, and one line on stderr says so."""

    def forward(model, batch):
        print("from a worker", flush=True)
        return model(batch[0])

    recipe = talkative(forward)
    expected = recipe.train(engine="inline").digest
    monkeypatch.setattr(sys, "stdout", Unreadable(error))  # planted
    assert recipe.train(workers=2, progress=False).digest == expected
    assert capsys.readouterr().err.count("what workers print cannot be written") == 1


def test_what_an_ascii_terminal_lacks_is_spelled(monkeypatch):
    """Letters that the caller's stream does not have are shown by their numbers."""

    def forward(model, batch):
        print("sch\u00f6n", flush=True)
        return model(batch[0])

    recipe = talkative(forward)
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)  # planted
    recipe.train(workers=2, progress=False)
    stream.flush()
    assert b"sch\\xf6n\n" in stream.buffer.getvalue()
