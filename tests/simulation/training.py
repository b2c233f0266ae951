"""A machine of integers that stands for training, and its engine: a worker in each process, which meets the others'.

The next state needs a number of every replica, so it shows at once who went on with what.
"""

from __future__ import annotations

import contextlib
import datetime
from types import SimpleNamespace

import torch

from phalanx.engines.hosts.gloo import Gloo
from phalanx.errors import RunError, SeveredError
from phalanx.seams.records import Captured, StepReport, Tensor
from phalanx.surroundings import interrupts
from tests.simulation.net import PrefixStore, Store

REPLICAS, PRIME = 8, 2_147_483_647
COMPUTE = 0.3  # seconds of a step
EVALUATE = 0.25  # seconds of an evaluation
WAKE = 0.1  # between two looks of a caller at news
SECONDS = 4.0  # to wait for another process


def part(state, step, replica):
    """What a replica computes in a step."""
    return (state * (2 * replica + 3) + 7 * step + replica + 1) % PRIME


def after(state, step, parts):
    """The next state."""
    return (state + sum((at + 1) * value for at, value in enumerate(parts)) + step) % PRIME


def sequence(steps):
    """The states of an undisturbed run, from the first to the last."""
    states = [1]
    for step in range(steps):
        states.append(after(states[-1], step, [part(states[-1], step, replica) for replica in range(REPLICAS)]))
    return states


class Framework:
    """The caller's model is one integer."""

    environment, sharing, name = contextlib.nullcontext(), SimpleNamespace(devices=(), averages=None), "integers"

    def __init__(self):
        self.state = 1

    def capture(self, copy):
        return Captured({"state": Tensor("int64", (1,), self.state.to_bytes(8, "little"))}, {}, {})

    def adopt(self, captured):
        self.state = int.from_bytes(bytes(captured.weights["state"].content), "little")


class Machine:
    """Stands for ``Processes``: a worker of this process computes steps, and exchanges numbers with the others'."""

    environment = reading = contextlib.nullcontext()
    simulation = None  # the one that is running

    def __init__(self, definition, framework, placement, records, deadline, rendezvous, readers, alarm):
        self.progress, self.workers, self.ended, self.closed, self.lost = records.progress, 1, "", False, False
        self._framework, self._rendezvous, self._alarm = framework, rendezvous, alarm
        self._state, self._done, self._horizon, self._losses = framework.state, self._steps, 0, {}
        self._resting = self._tearing = False  # the worker has nothing to do; it makes an update
        self._trouble, self._schedule = "", self.simulation.schedule
        self._worker = self.simulation.worker(self._work)
        try:
            self._check_alarm()
        except BaseException:
            self._schedule.kill(self._worker)
            raise

    def eval_point(self):
        """The optimizer has one mode."""

    @property
    def _steps(self):
        return len(self.progress.loss_history)

    def _work(self):
        place = self._rendezvous
        try:
            store = Store(*place.address, timeout=datetime.timedelta(seconds=SECONDS))
            store = PrefixStore(f"workers/{place.run}", store)
            hosts = Gloo(store, place.rank, len(place.blocks), SECONDS, "")
            while True:
                self._resting = True
                self._schedule.wait(lambda: self._horizon > self._done)
                self._resting = False
                self._schedule.wait(seconds=COMPUTE)
                parts = self._exchanged(hosts)
                self._tearing = True
                self._schedule.wait()
                self._state = after(self._state, self._done, parts)
                self._losses[self._done] = float(self._state)
                self._done, self._tearing = self._done + 1, False
        except (SeveredError, RuntimeError) as error:
            self._trouble = str(error)

    def _exchanged(self, hosts):
        """What all replicas computed, in order."""
        place = self._rendezvous
        rows = [torch.zeros(len(block), dtype=torch.int64) for block in place.blocks]
        for at, replica in enumerate(place.blocks[place.rank]):
            rows[place.rank][at] = part(self._state, self._done, replica)
        others = [rank for rank in range(len(rows)) if rank != place.rank]
        for other in others:
            hosts.begin_send(rows[place.rank], other)
        for other in others:
            hosts.wait([hosts.begin_receive(rows[other], other)])
        return torch.cat(rows).tolist()

    def advance(self, batch, horizon):
        self.check_able()
        step, self._horizon = self._steps, max(self._horizon, horizon)
        try:
            while self._done == step:
                self._schedule.wait(lambda: self._done > step or self._idle(), WAKE)
                if self._done == step:
                    self._check_others()
        except RunError as error:
            self.ended = str(error)
            raise
        return self._absorbed()

    def evaluate(self, metrics, data, batch_size, weights):
        self.check_able()
        end = self._schedule.now + EVALUATE
        while self._schedule.now < end:
            self._schedule.wait(self._idle, WAKE)
            self._check_others()
        return [[(float(self._state), 1.0)]]

    def pause(self):
        self._horizon = 0
        self._schedule.wait(lambda: self._resting or self._idle())
        return self._done == self._steps

    def break_off(self):
        if not self.closed:
            self.ended = ""
            self.close()

    def close(self):
        """End the worker, but not in its update."""
        if self.closed:
            return
        self._schedule.wait(lambda: not self._tearing or self._idle())
        self._schedule.kill(self._worker)
        self.lost, self.closed = self._tearing, True
        if not self.lost:
            self._framework.state = self._state
        while self._done > self._steps:
            self.progress.unseen.append(self._absorbed())

    def check_able(self):
        if self.ended:
            raise RunError(f"this run cannot go on: {self.ended}; start another")

    def _idle(self):
        return bool(self._trouble) or not self._schedule.lives(self._worker)

    def _check_others(self):
        interrupts.check()
        self._check_alarm()
        if self._idle():
            raise SeveredError(self._trouble or "a worker was killed", step=self._steps)

    def _check_alarm(self):
        if why := self._alarm():
            raise SeveredError(why, step=self._steps)

    def _absorbed(self):
        step, loss = self._steps, self._losses[self._steps]
        self.progress.add(loss, REPLICAS)
        return StepReport(step, 0, loss, 0.0, 0.0, REPLICAS, COMPUTE, losses={})
