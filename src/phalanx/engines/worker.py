"""A worker's life: build the recipe's state over the arena, then go from step to step with the others.

Between grants it sleeps. Whatever goes wrong is told to the caller's process; the worker goes idle and can go on.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import cloudpickle

from phalanx.contracts import Framework
from phalanx.data import Share
from phalanx.deal import Dealer
from phalanx.definition import Definition
from phalanx.engines import control as words_of
from phalanx.engines.arena import Plan
from phalanx.engines.control import Control, Meeting, Trouble, fence, order
from phalanx.engines.habitat import inhabit
from phalanx.engines.heap import give_back
from phalanx.engines.link import ArenaLink
from phalanx.engines.memory import Memory
from phalanx.engines.parcel import picklable, unpack
from phalanx.errors import UsageError
from phalanx.frameworks.opening import open_framework
from phalanx.plan import evaluation_key
from phalanx.plan.shares import share_bounds
from phalanx.replica import measure
from phalanx.step import commit, propose

IDLE_YIELDS = 500


class Interrupted(BaseException):
    """The caller pressed Ctrl-C: leave the step as it is."""


class Caller:
    """The way to the caller's process: messages there, wakings and the end of the socket from there."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)
        self._poller = select.poll()
        self._poller.register(fd, select.POLLIN)

    def tell(self, kind: str, *facts: Any) -> None:
        """Send a message."""
        self._connection.send_bytes(cloudpickle.dumps((kind, *facts)))

    def wake(self) -> None:
        """Send an empty message."""
        self._connection.send_bytes(b"")

    def sleep(self, milliseconds: int) -> None:
        """Wait until woken; SystemExit if the caller is gone or wants this worker to end."""
        if self._poller.poll(milliseconds) and not os.read(self._connection.fileno(), 4096):
            raise SystemExit


def live(channel: int, memories: Sequence[int], number: int) -> None:
    """Be worker ``number`` of a run until the caller closes the channel."""
    caller = Caller(channel)
    parcel, arena, mailbox = (Memory(0, fd) for fd in memories)
    try:
        inhabit(unpack(mailbox))
        worker = Worker(caller, unpack(parcel), arena, mailbox, number)
    except Exception as error:
        caller.tell("failed", *_spelled(error))
        return
    caller.tell("ready")
    with worker.environment:
        worker.serve()


class Worker:
    """The state of a worker.

    Parameters
    ----------
    caller : Caller
    setup : dict
        The caller's parcel.
    arena, mailbox : Memory
    number : int
    """

    def __init__(self, caller: Caller, setup: dict[str, Any], arena: Memory, mailbox: Memory, number: int) -> None:
        warnings.showwarning = self._pass_on
        signal.signal(signal.SIGINT, self._interrupted)
        self._caller = caller
        self._mailbox = mailbox
        self._number = number
        self._placement = setup["placement"]
        self._step = setup["steps"]
        self._computing = False
        self._definition = Definition(**setup["fields"])
        self._framework: Framework = open_framework(self._definition, "cpu")
        self.environment = self._framework.environment
        self._share(arena, setup)
        self._dealer = Dealer(self._definition, self._framework)
        self._settled = False
        give_back()  # the model as it was made, before it moved into the arena

    def _share(self, memory: Memory, setup: dict[str, Any]) -> None:
        plan = Plan(self._framework.sharing, self._placement)
        if plan.layout.signature() != setup["signature"]:
            raise UsageError(
                "make_model returned another model in a worker process than in this one; it must return the same "
                "parameters and buffers each time, whatever the process"
            )
        arena = memory.map()
        self._control: Control = plan.control(arena)
        self._meeting = Meeting(self._control, self._number)
        shard = self._framework.sharing.shard(plan.layout, arena, self._number)
        shard.take(setup["state"])
        self._state = shard.state
        self._link = ArenaLink(
            self._framework, shard, plan, self._placement, arena, self._control, self._meeting, self._number
        )

    def serve(self) -> None:
        """Do what is granted, one grant after another."""
        words = self._control.words
        grant = 0
        while True:
            grant = self._next_grant(grant)
            order()
            self._meeting.begin(grant)
            try:
                self._do(words[words_of.KIND])
            except (Trouble, Interrupted):
                words[words_of.TROUBLE] = 1
            except BaseException as error:  # sys.exit() in user code, too
                words[words_of.TROUBLE] = 1
                self._caller.tell("error", *_spelled(error), self._step)
            sys.stdout.flush()
            order()
            words[self._control.place(self._number, words_of.IDLE)] = grant
            fence()
            self._wake_caller(idle=self._control.all_idle())

    def _do(self, kind: int) -> None:
        words = self._control.words
        if kind == words_of.STEPS:
            self._advance(self._dealer.planned(self._step))
            while words[words_of.AGREED] > self._step:
                self._advance(self._dealer.planned(self._step))
        elif kind == words_of.BATCH:
            self._advance(self._dealer.brought(unpack(self._mailbox)["batch"]))
        else:
            task = unpack(self._mailbox)
            self._computing = bool(task)
            try:
                answer = self._evaluate(**task) if task else self._state()
            finally:
                self._computing = False
            self._caller.tell("result", answer)

    def _advance(self, shares: list[Share]) -> None:
        """One step."""
        words, t = self._control.words, self._step
        started, lr = time.perf_counter(), self._framework.lr
        self._link.begin()
        self._computing = True
        try:
            proposal = propose(self._framework, self._link, self._definition, t, shares)
        finally:
            self._computing = False
        if self._number == 0:
            more = words[words_of.UNTIL] > t + 1 and not words[words_of.PAUSE]
            words[words_of.AGREED] = t + 2 if more else t + 1
        try:
            commit(self._framework, self._link, t, proposal)
        except BaseException as error:
            if not isinstance(error, Trouble):
                self._caller.tell("torn", *_spelled(error), t)
            raise Trouble from error
        self._step = t + 1
        failed = None
        try:
            self._framework.schedule(proposal.loss)
        except Exception as error:
            words[words_of.TROUBLE] = 1
            self._caller.tell("unscheduled", *_spelled(error), t)
            failed = error
        if self._number == 0:
            samples = sum([len(share.samples) for share in shares])
            self._control.write(t, proposal.loss, proposal.norm, lr, samples, started, time.perf_counter())
            self._wake_caller(idle=False)
        if failed is not None:
            raise Trouble from failed
        if not self._settled:
            self._settled = True
            give_back()  # optimizer state as the first update made it

    def _evaluate(self, metric_fn: Any, data: Any, batch_size: int) -> list[tuple[float, float]]:
        """Measure this worker's block of chunks."""
        shares = self._dealer.chunks(data, batch_size)
        start, end = share_bounds(len(shares), self._placement.workers)[self._number]
        seed = self._definition.seed
        return [
            measure(self._framework, metric_fn, evaluation_key(seed, chunk), shares[chunk])
            for chunk in range(start, end)
        ]

    def _next_grant(self, last: int) -> int:
        words = self._control.words
        sleeping = self._control.place(self._number, words_of.SLEEPING)
        for _ in range(IDLE_YIELDS):
            if words[words_of.GRANT] != last:
                return words[words_of.GRANT]
            os.sched_yield()
        words[sleeping] = 1
        fence()
        while words[words_of.GRANT] == last:
            self._caller.sleep(1000)
        words[sleeping] = 0
        return words[words_of.GRANT]

    def _wake_caller(self, *, idle: bool) -> None:
        """Wake the caller's process if it sleeps and has something to look at: enough reports, or idle workers."""
        words = self._control.words
        fence()
        if words[words_of.ASLEEP] and (words[words_of.DONE] >= words[words_of.AWAITED] or idle):
            self._caller.wake()

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C: break off what user code computes; what is being committed is finished."""
        phase = self._control.words[self._control.place(self._number, words_of.PHASE)]
        if self._computing and phase == words_of.COMPUTE:
            self._computing = False
            raise Interrupted

    def _pass_on(self, message: Any, category: type[Warning], filename: str, line: int, *_: Any) -> None:
        """Warnings are shown by the caller's process, once for all workers."""
        try:
            self._caller.tell("warning", str(message), category, filename, line)
        except (TypeError, AttributeError, pickle.PicklingError):
            self._caller.tell("warning", str(message), UserWarning, filename, line)


def _spelled(error: BaseException) -> tuple[Any, Any, str]:
    """An error as it travels: itself, its cause, and where it was raised."""
    text = "".join(traceback.format_exception(error))
    cause = error.__cause__
    return picklable(error), None if cause is None else picklable(cause), text
