"""User code that fails at a marked sample, and what engines make of that.

One sample is marked; the plan says in which step and replica it comes up first.
"""

import contextlib
import functools
import math
import os
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

import phalanx
from tests.families import TrappedNet

SAMPLES, STEPS, FAILING, MARK, REPLICAS = 96, 6, 3, 50.0, 4
SOON = 30  # seconds within which nothing may hang, on a busy machine
X = np.random.default_rng(0).standard_normal((SAMPLES, 3)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((SAMPLES, 1)).astype(np.float32)


def recipe(**changes):
    """A recipe of six steps, one epoch, that goes well but for the changes."""
    fields = {
        "make_model": TrappedNet,
        "data": (X, Y),
        "loss_fn": F.mse_loss,
        "replicas": REPLICAS,
        "batch_size": 16,
        "steps": STEPS,
        "optimizer": functools.partial(torch.optim.Adam, lr=0.01),
    }
    return phalanx.Recipe(**{**fields, **changes})


SHARES = recipe().plan.shares(FAILING)


def marked(*replicas, x=MARK, y=MARK):
    """The data, where one sample of each of these replicas of step FAILING is marked."""
    inputs, targets = X.copy(), Y.copy()
    for replica in replicas:
        if x is not None:
            inputs[SHARES[replica][1], 0] = x
        if y is not None:
            targets[SHARES[replica][1]] = y
    return inputs, targets


def has_mark(values):
    return bool((torch.as_tensor(values) == MARK).any())


class Rows:
    """A map-style dataset that calls ``fail`` at a marked sample."""

    def __init__(self, columns, fail):
        self.columns = columns
        self.fail = fail

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, index):
        x, y = (column[index] for column in self.columns)
        if has_mark(x):
            self.fail()
        return x, y


PLACES = ["model", "loss", "dataset", "collate", "target"]


def failing_at(place, fail, *replicas):
    """Changes that make user code at ``place`` call ``fail`` where it meets a marked sample."""
    return failing_with(place, fail, marked(*(replicas or (2,))))


def failing_with(place, fail, columns):
    """The same for data that is marked already."""

    def guarded(function, look):
        def call(*arguments):
            if has_mark(look(*arguments)):
                fail()
            return function(*arguments)

        return call

    changes = {
        "model": {"make_model": lambda: TrappedNet(guarded(lambda x, hidden: hidden, lambda x, hidden: x))},
        "loss": {"loss_fn": guarded(F.mse_loss, lambda output, target: target)},
        "dataset": {"data": Rows(columns, fail)},
        "collate": {"collate_fn": guarded(default_collate, lambda samples: default_collate(samples)[0])},
        "target": {"target_fn": guarded(lambda batch: batch[1], lambda batch: batch[0])},
    }
    return {"data": columns, **changes[place]}


class PoisonedGradient(torch.autograd.Function):
    """The identity, whose gradient is NaN where ``bad``."""

    @staticmethod
    def forward(ctx, hidden, bad):
        ctx.bad = bad
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad * math.nan if ctx.bad else grad), None


def poisoned():
    return TrappedNet(lambda x, hidden: PoisonedGradient.apply(hidden, has_mark(x)))


@contextlib.contextmanager
def beside(work):
    """A thread that does ``work()``; its end is waited for, however often Ctrl-C is pressed."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        while thread.is_alive():
            with contextlib.suppress(KeyboardInterrupt):
                thread.join()


class Planted:
    """Makes the model; in a worker it plants a fault first, before the worker makes its link to the others."""

    def __init__(self, make_model, plant):
        self.make_model, self.plant, self.here = make_model, plant, os.getpid()

    def __call__(self):
        if os.getpid() != self.here:
            self.plant()
        return self.make_model()


def first(path):
    """Whether no process was here before this one."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def raising(make_error):
    """A function that raises a new error."""

    def explode():
        raise make_error()

    return explode


def inline_error(**changes):
    """What engine="inline" makes of the same fault."""
    with pytest.raises(phalanx.PhalanxError) as caught:
        recipe(**changes).train(engine="inline")
    return caught.value


def workers_error(workers=2, **changes):
    """What worker processes make of it."""
    with pytest.raises(phalanx.PhalanxError) as caught:
        recipe(**changes).train(workers=workers, engine="processes")
    return caught.value


def assert_same(several, alone):
    """Same kind of error, words, address and state."""
    assert type(several) is type(alone)
    assert str(several) == str(alone)
    for fact in ("step", "replica", "samples"):
        assert getattr(several, fact, None) == getattr(alone, fact, None)
    assert (several.result is None) == (alone.result is None)
    if alone.result is not None:
        assert (several.result.steps, several.result.digest) == (alone.result.steps, alone.result.digest)
        assert several.result.loss_history == alone.result.loss_history
    cause, expected = several.__cause__, alone.__cause__
    assert (type(cause), str(cause)) == (type(expected), str(expected))


def notes(error):
    """All notes of an error and its cause."""
    return "\n".join(getattr(error, "__notes__", []) + getattr(error.__cause__, "__notes__", []))


def children():
    """Zygotes of this process, and what is below them; not what other tests keep warm."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "phalanx.engines.processes.zygote" in " ".join(child.cmdline()):
                found |= {child.pid, *(process.pid for process in child.children(recursive=True))}
    return found


def assert_no_workers(before=()):
    """All that is left below this process is the zygote, or what was there before."""
    zygotes = {process.pid for process in psutil.Process().children()}
    deadline = time.monotonic() + SOON
    while (left := children() - zygotes - set(before)) and time.monotonic() < deadline:
        time.sleep(0.02)  # a zygote that imports something has a short-lived child, too
    assert not left
