"""Faults that flip single bits: planted into one process of a run, in what it computes or in what it remembers."""

import contextlib
import functools
import os
import pathlib
from dataclasses import dataclass

import torch

from phalanx.engines.alone import Folded
from phalanx.engines.processes.arena import Buckets
from phalanx.frameworks.torch.adapter import Torch
from phalanx.frameworks.torch.optimizer import Update
from phalanx.frameworks.torch.replica.feed import Feed
from phalanx.frameworks.torch.replica.lane import Lane
from phalanx.shared.state import Shard

PLANTED = contextlib.ExitStack()  # for as long as this process lives
TWICE = (0, 1, 10)  # steps in which replicas are computed twice
BIT = 14  # of 23 in the mantissa of a float32


def flip(tensor, bit=BIT):
    """Flip a bit of the largest element."""
    flat = tensor.detach().view(-1)
    flat[flat.abs().argmax()].view(torch.int32).bitwise_xor_(1 << bit)


def _owned(update):
    """The parameters that a process updates, each with its optimizer."""
    groups = [(optimizer, group) for optimizer in update.optimizers for group in optimizer.param_groups]
    return [(optimizer, parameter) for optimizer, group in groups for parameter in group["params"]]


def _idle(this):
    """Whether a process has nothing to fold or to update."""
    return not (this._owned if isinstance(this, Buckets) else _owned(this))  # planted


def _flip_gradient(lane, arguments, computed):
    there = [entry for entry in computed.gradient if entry is not None]
    flip(there[arguments[0].replica % len(there)])


def _flip_sums(buckets, arguments, total):
    for entry in total:
        if entry is not None:
            flip(entry)


class InTurn:
    """Adds gradients one after the other, where a fold adds pairs."""

    def __init__(self, add):
        self._add = add
        self._vectors = []

    def push(self, replica, vector):
        """Keep a gradient; one that was added to its left neighbour's already is that one."""
        if not any(vector[0] is known[0] for known in self._vectors):
            self._vectors.append(vector)

    def total(self):
        """Their sum."""
        return functools.reduce(self._add, self._vectors)


def add_in_turn(sums, arguments=(), _=None):
    """Have a process that is alone add in another order, in this step."""
    sums._fold = InTurn(sums._framework.arithmetic.add)  # planted


def _flip_weights(update, arguments, _):
    for _, parameter in _owned(update):
        flip(parameter)


def _flip_state(update, arguments, _):
    for optimizer, parameter in _owned(update):
        flip(next(value for value in optimizer.state[parameter].values() if value.dim()))


def _flip_batch(feed, arguments, batch):
    flip(batch[0])


def _flip_parameter(framework, arguments, _):
    flip(framework._lane.parameters[0])  # planted


def _flip_moment(framework, arguments, _):
    _flip_state(framework._updates, arguments, None)  # planted


def _flip_copy(shard, arguments, _):
    pieces = shard._kept()  # planted
    next(pieces)[1][0] ^= 1 << BIT


def _die(update, arguments, _):
    os._exit(1)


# What is spoiled, by whom, in which method, and whether before it is called.
KINDS = {
    "gradient": (Lane, "gradient", _flip_gradient, False),  # while a replica is computed
    "fold": (Buckets, "fold", _flip_sums, False),  # while owners add
    "order": (Folded, "begin", add_in_turn, False),  # no bit is flipped, but all is added from left to right
    "update": (Update, "apply", _flip_weights, False),  # while owners write weights
    "state": (Update, "apply", _flip_state, False),  # while owners write optimizer state
    "batch": (Feed, "batch", _flip_batch, False),  # as one process reads it
    "weight in memory": (Torch, "gradients", _flip_parameter, True),  # before a step, where all processes read it
    "state in memory": (Torch, "gradients", _flip_moment, True),
    "snapshot": (Shard, "save", _flip_copy, False),  # in memory, after it was saved
    "death": (Update, "apply", _die, False),  # after weights were written
}


@dataclass(frozen=True)
class Fault:
    """A fault of the first process, but for ``innocent``, that comes to call number ``after``; in ``times`` calls.

    Attributes
    ----------
    kind : str
    path : path-like
        A file that is not there yet: the process notes its number in it.
    since : int
        The step before which nothing is wrong, where replicas are computed.
    """

    kind: str
    path: str
    after: int
    times: int = 1
    innocent: int = 0
    since: int = 0

    @property
    def culprit(self):
        """The number of the process, or None."""
        with contextlib.suppress(OSError, ValueError):
            return int(pathlib.Path(self.path).read_text())
        return None

    def strikes(self, calls):
        """Whether this process is the one, and its call with this number is to be spoiled."""
        if calls < self.after:
            return False
        with contextlib.suppress(FileExistsError), open(self.path, "x") as file:
            file.write(str(os.getpid()))
        return self.culprit == os.getpid() and calls < self.after + self.times

    @contextlib.contextmanager
    def planted(self):
        """Inside, this process has the fault."""
        from phalanx.surroundings.presence import CURRENT  # as a global it would be described with the recipe

        owner, name, spoil, first = KINDS[self.kind]
        real, calls = getattr(owner, name), iter(range(1 << 62))

        @functools.wraps(real)
        def faulty(this, *arguments, **named):
            idle = owner in (Buckets, Update) and _idle(this)
            call = -1 if idle else next(calls)
            computing = owner in (Lane, Feed)
            # where replicas are computed twice it would be found, as what it is not
            early = computing and (CURRENT.step in TWICE or (CURRENT.step or 0) < self.since)
            struck = not idle and not early and self.strikes(call)
            if struck and first:
                spoil(this, arguments, None)
            result = real(this, *arguments, **named)
            if struck and not first:
                spoil(this, arguments, result)
            return result

        setattr(owner, name, faulty)
        try:
            yield self
        finally:
            setattr(owner, name, real)


def made(make_model, fault):
    """A model, made in a process that gets the fault, unless it is the innocent one: that of the test."""
    if os.getpid() != fault.innocent:
        PLANTED.enter_context(fault.planted())
    return make_model()


def in_workers(make_model, kind, path, after, times=1, since=0):
    """A ``make_model`` whose worker processes have a fault, and the fault."""
    fault = Fault(kind, str(path), after, times, os.getpid(), since)
    return functools.partial(made, make_model, fault), fault
