"""A tiny machine of whole numbers that stands for a framework: what it computes depends on every word it reads.

Its additions are neither commutative nor associative, so a fold in another order shows. Its state has weights, two
words each, optimizer state that the first update makes, a buffer, and an option that follows from all losses.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy

from phalanx.plan.fold import fold_values
from phalanx.seams.records import Captured, Computed
from phalanx.shared.layout import WORD, Contents, Spec, StatePiece, lay_out
from tests.simulation.memory import frombuffer

PRIME = 9973
PARAMETERS = 3
VECTOR, SCALAR = Spec((2,), (1,), "int64", WORD), Spec((1,), (1,), "int64", WORD)
CONTENTS = Contents(
    [VECTOR] * PARAMETERS, [SCALAR], [VECTOR.nbytes] * PARAMETERS, list(range(PARAMETERS)),
    [StatePiece(index, "momentum", VECTOR) for index in range(PARAMETERS)],
)  # fmt: skip


def add(left, right):
    """Add two arrays; which is the left one matters."""
    return [(3 * one + 5 * other) % PRIME for one, other in zip(left, right, strict=True)]


def computed(step, replica, weights, buffer):
    """What a replica computes: loss, gradient (None where a parameter has none), buffer (None: unchanged)."""
    words = [*itertools.chain(*weights), *buffer]
    seen = functools.reduce(lambda total, value: (total * 31 + value) % PRIME, words, step)
    absent = [index and (step + replica + index) % 4 == 0 for index in range(PARAMETERS)]
    gradient = [
        None if absent[index] else [(seen * (index + 2) + value + replica) % PRIME for value in weights[index]]
        for index in range(PARAMETERS)
    ]
    return float((seen + replica) % 97), gradient, None if (step + replica) % 3 == 0 else [(seen + replica) % PRIME]


def updated(weight, momentum, gradient, option):
    """A weight and its momentum after an update."""
    momentum = [(3 * old + new) % PRIME for old, new in zip(momentum or [0, 0], gradient, strict=True)]
    return [(5 * old + new + option) % PRIME for old, new in zip(weight, momentum, strict=True)], momentum


def settled(buffers):
    """The buffer after a step, from those that replicas left."""
    return fold_values(buffers, add)


def scheduled(option, loss):
    """The option after a step."""
    return (7 * option + int(loss * 8)) % 1009


@dataclass
class State:
    """The state before a step."""

    weights: list = field(default_factory=lambda: [[index + 1, 2 * index] for index in range(PARAMETERS)])
    momenta: dict = field(default_factory=dict)
    buffer: list = field(default_factory=lambda: [1])
    option: int = 1


@functools.cache
def sequence(replicas, steps):
    """The state before each step and after the last, and loss, norm and losses of each: one step after another."""
    state, states, reports = State(), [State()], []
    for step in range(steps):
        each = [computed(step, replica, state.weights, state.buffer) for replica in range(replicas)]
        losses = [loss for loss, _, _ in each]
        gradient = [fold_values([one[1][index] for one in each], add) for index in range(PARAMETERS)]
        loss = fold_values(losses, lambda left, right: left + right) / replicas
        norm = float(sum(sum(entry) % PRIME for entry in gradient if entry is not None))
        reports.append((loss, norm, float(state.option), tuple(value for one in losses for value in (one, 1.0))))
        weights, momenta = list(state.weights), dict(state.momenta)
        for index, entry in enumerate(gradient):
            if entry is not None:
                weights[index], momenta[index] = updated(weights[index], momenta.get(index), entry, state.option)
        buffer = settled([state.buffer if left is None else left for _, _, left in each])
        state = State(weights, momenta, buffer, scheduled(state.option, loss))
        states.append(state)
    return states, reports


def put(array, home):
    """Write an array where it belongs, if that is anywhere."""
    if array is None or home is None:
        return array
    home[:] = array
    return home


def added_into(left, right, home):
    """Add two arrays into the left one; what only the right one has moves ``home``."""
    if left is None:
        return put(right, home)
    if right is not None:
        left[:] = add(list(left), list(right))
    return left


class Machine:
    """Implements ``seams.Framework``, ``Sharing``, ``SharedState``, ``Arithmetic`` and ``Arrays`` in one."""

    name, direct, devices, opened, environment = "machine", True, (), None, contextlib.nullcontext()
    written, has_modes = (), False

    def __init__(self, host):
        self.portable, self._raises = host.portable, host.raises
        self.sharing = self.arithmetic = self.arrays = self
        self.state = State()

    starts = property(lambda self: [self.state.buffer])
    lr = property(lambda self: float(self.state.option))
    options_checksum = property(lambda self: (self.state.option, self.lr))

    def rewind(self):
        """Gradients leave nothing behind."""

    def eval_point(self):
        """The optimizer has one mode."""

    def schedule(self, loss, epoch=None):
        self.state.option = scheduled(self.state.option, loss)

    def gradients(self, todo, watch=None):
        for one in todo:
            if (one.share.step, one.replica) == self._raises:
                raise ValueError("planted")
            weights, start = list(map(list, self.state.weights)), self.state.buffer
            loss, gradient, left = computed(one.share.step, one.replica, weights, list(start))
            yield Computed(loss, None, list(map(put, gradient, self._homes)), [start if left is None else left])

    def update(self, step, gradient, buffers):
        state = self.state
        for index, entry in enumerate(gradient):
            if entry is not None:
                weight, old = state.weights[index], state.momenta.get(index)
                weight[:], momentum = updated(list(weight), old and list(old), list(entry), state.option)
                state.momenta[index] = put(momentum, old)
        if buffers is not None:
            state.buffer[:] = settled([list(left) for _, (left,) in buffers])

    def norm(self, gradient, meet, there):
        for index, entry in enumerate(gradient):
            if entry is not None:
                self._norms[index] = sum(entry) % PRIME
        meet()
        return float(sum(self._norms[index] for index in (range(PARAMETERS) if there is None else there)))

    def capture(self, *, copy):
        return Captured({}, {}, {"state": self.state})

    def lay_out(self, placement, take, known=None):
        owners = CONTENTS.owners(placement.workers) if self.portable else [0] * PARAMETERS  # one has all of it
        return lay_out(CONTENTS, owners, placement, take)

    def open(self, layout, arena, worker):
        if worker is not None:
            weights = [self.view(arena, at, VECTOR) for at in layout.weights]
            self.state = State(weights, {}, self.view(arena, layout.starts[0], SCALAR), self.state.option)
            self._norms = frombuffer(arena, "int64", PARAMETERS, layout.norms)
        return self

    def view(self, memory, offset, spec):
        return frombuffer(memory, "int64", spec.elements, offset)

    def add_into(self, left, right, homes):
        return list(map(added_into, left, right, homes))

    def add_up(self, parts, additions, first, divisor):
        sums = [None if part is None else list(part) for part in parts]
        for into, other in additions:
            sums[into] = add(sums[into], sums[other])
        return sums[first]

    def aim(self, homes):
        self._homes = homes

    def made(self, absent):
        return {piece: self.state.momenta[piece] for piece in absent if piece in self.state.momenta}

    def adopt(self, pieces, *, more=False):
        self.state.momenta = {**(self.state.momenta if more or not self.portable else {}), **pieces}

    def rest(self):
        """An optimizer that is not portable describes its state by value."""
        described = {index: list(value) for index, value in self.state.momenta.items()}
        return None if self.portable else described, self.state.option

    def take(self, foreign, options):
        self.state.option = options
        if foreign is not None:
            self.state.momenta = {index: list(value) for index, value in foreign.items()}

    def weights(self, numbers=None):
        return self.state.weights

    def take_arrays(self, weights, buffers):
        momenta = {} if self.portable else self.state.momenta
        self.state = State(list(map(list, weights)), momenta, list(buffers[0]), self.state.option)


class Dealer:
    """In place of ``BatchShares``: a sample for each replica."""

    def __init__(self, definition, *_):
        self._replicas = definition.replicas

    def planned(self, step):
        return [
            SimpleNamespace(samples=numpy.array([replica]), step=step, epoch=0) for replica in range(self._replicas)
        ]

    brought = planned
