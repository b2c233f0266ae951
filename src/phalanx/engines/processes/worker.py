"""A worker's life: build the recipe's state over the arena, then go from step to step with the others.

Between grants it sleeps. Whatever goes wrong is told to the caller's process; the worker goes idle and can go on. One
that replaces another takes up the state as it is, in the step in which the other ended if the rest still wait there.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

from phalanx.definition.batches import BatchShares
from phalanx.definition.data import Share
from phalanx.definition.fields import Definition
from phalanx.engines.hosts.link import HostLink
from phalanx.engines.processes.deadline import SnapshotTimer
from phalanx.engines.processes.environment import adopt_environment
from phalanx.engines.processes.link import ArenaLink
from phalanx.engines.processes.messages import DriverChannel, LostError, as_told
from phalanx.engines.processes.serialization import unpack
from phalanx.errors import UsageError
from phalanx.frameworks.jax.outside import threads
from phalanx.frameworks.registry import open_framework
from phalanx.plan import evaluation_key
from phalanx.plan.shares import share_bounds
from phalanx.seams import Framework
from phalanx.shared import control as words_of
from phalanx.shared.arena import Plan
from phalanx.shared.control import Barrier, Control, Trouble, fence, order
from phalanx.shared.heap import give_back
from phalanx.shared.memory import Memory
from phalanx.shared.state import Shard
from phalanx.step import commit, measure, propose

IDLE_YIELDS = 500


def live(channel: int, memories: Sequence[int], number: int) -> None:
    """Be worker ``number`` of a run until the caller closes the channel."""
    caller = DriverChannel(channel)
    environment_memory, parcel, arena, mailbox, orders = (Memory(0, fd) for fd in memories)
    try:
        place = unpack(environment_memory)
        adopt_environment(place, functools.partial(caller.tell, "imported"))
        with threads(place["threads"]):  # what is unpacked may hold jax arrays
            worker = Worker(caller, unpack(parcel), arena, mailbox, number)
        orders = unpack(orders)
        worker.take(orders)
    except Exception as error:
        caller.tell("failed", *as_told(error))
        return
    caller.tell("ready")
    with worker.environment:
        worker.serve(orders["grant"], joining=orders["joining"])


class Worker:
    """The state of a worker.

    Parameters
    ----------
    caller : DriverChannel
    setup : dict
        The caller's parcel.
    arena, mailbox : Memory
    number : int
    """

    def __init__(
        self, caller: DriverChannel, setup: dict[str, Any], arena: Memory, mailbox: Memory, number: int
    ) -> None:
        warnings.showwarning = self._pass_on
        signal.signal(signal.SIGINT, _left_to_the_caller)
        self._caller = caller
        self._mailbox = mailbox
        self._number = number
        self._placement = setup["placement"]
        self._step = 0
        self._timer = SnapshotTimer()
        self._definition = Definition(**setup["fields"])
        self._framework: Framework = open_framework(self._definition, ["cpu"])
        self.environment = self._framework.environment
        self._share(arena, setup)
        self._dealer = BatchShares(self._definition, self._framework.opened)
        self._settled = False
        give_back()  # the model as it was made, before it moved into the arena

    def _share(self, memory: Memory, setup: dict[str, Any]) -> None:
        plan = Plan(self._framework.sharing, self._placement, setup["state"])
        if plan.layout.signature() != setup["signature"]:
            raise UsageError(
                "make_model returned another model in a worker process than in this one; it must return the same "
                "parameters and buffers each time, whatever the process"
            )
        arena = memory.map()
        self._control: Control = plan.control(arena)
        self._checksum = self._control.place(self._number, words_of.CHECKSUM)
        self._barrier = Barrier(self._control, self._number)
        self._shard = Shard(self._framework.sharing, plan.layout, arena, self._number)
        arguments = self._framework, self._shard, plan, self._placement, arena, self._barrier
        self._link = ArenaLink(*arguments) if setup["hosts"] is None else HostLink(setup["hosts"], *arguments)

    def take(self, orders: dict[str, Any]) -> None:
        """Be at the beginning of a step, with a state that lies in the arena, and options in ``orders``."""
        self._framework.rewind()
        self._shard.take(orders["foreign"], orders["options"])
        if orders["restore"] and self._shard.restore() != self._control.words[self._checksum]:
            raise LostError(
                f"worker {self._number}'s part of the snapshot in memory is damaged: its checksum differs, so that "
                "what was lost cannot be done again; run again, with a run_dir from the newest snapshot there"
            )
        for loss in orders["losses"]:  # schedules are not kept, but done again
            self._framework.schedule(loss)
        self._tell_scheduled(orders["step"])
        self._come_to(orders["step"])

    def resume(self, step: int, loss: float) -> None:
        """Go on at ``step``: the others know that the one before is done, if this worker was not told so."""
        self._framework.rewind()
        if self._step < step:
            self._framework.schedule(loss)
            self._tell_scheduled(step)
        self._come_to(step)

    def serve(self, grant: int, *, joining: bool) -> None:
        """Do what is granted, one grant after another; ``grant`` itself only if ``joining`` it."""
        words = self._control.words
        while True:
            if not joining:
                words[self._control.place(self._number, words_of.IDLE)] = grant
                fence()
                self._wake_caller(idle=self._control.all_idle())
                grant = self._next_grant(grant)
            joining = False
            order()
            self._barrier.begin(grant)
            try:
                self._do(words[words_of.KIND])
            except Trouble:
                words[words_of.TROUBLE] = 1
            except BaseException as error:  # sys.exit() in user code, too
                words[words_of.TROUBLE] = 1
                self._caller.tell("error", *as_told(error), self._step)
            sys.stdout.flush()
            order()

    def _do(self, kind: int) -> None:
        words = self._control.words
        if kind == words_of.STEPS:
            self._advance(self._dealer.planned(self._step))
            while words[words_of.AGREED] > self._step:
                self._advance(self._dealer.planned(self._step))
        elif kind == words_of.BATCH:
            self._advance(self._dealer.brought(unpack(self._mailbox)["batch"]))
        else:
            facts = unpack(self._mailbox)
            task = facts.pop("task")
            tasks = {"evaluate": self._evaluate, "state": self._describe, "take": self.take, "resume": self.resume}
            self._caller.tell("result", words[words_of.GRANT], tasks[task](**facts))

    def _advance(self, shares: list[Share]) -> None:
        """One step."""
        words, t = self._control.words, self._step
        started, lr = time.perf_counter(), self._framework.lr
        if words[words_of.SNAPSHOT_DUE] == t:
            self._timer.keep(self._save)
        self._link.begin(even=len({len(share.samples) for share in shares}) == 1)
        proposal = propose(self._framework, self._link, self._definition, t, shares)
        if self._number == 0:
            samples = sum([len(share.samples) for share in shares])
            self._announce(t, proposal.loss, proposal.norm, lr, samples, started)
        try:
            commit(self._framework, self._link, t, proposal)
        except BaseException as error:
            if not isinstance(error, Trouble):
                self._caller.tell("torn", *as_told(error), t)
            raise Trouble from error
        self._come_to(t + 1)
        failed = None
        try:
            self._framework.schedule(proposal.loss)
            self._tell_scheduled(t + 1)
        except Exception as error:
            words[words_of.TROUBLE] = 1
            self._caller.tell("unscheduled", *as_told(error), t)
            failed = error
        if self._number == 0:
            ended = time.perf_counter()
            self._timer.pace = ended - started
            self._control.reports.finish(t, ended)
            self._wake_caller(idle=False)
        if failed is not None:
            raise Trouble from failed
        if not self._settled:
            self._settled = True
            give_back()  # optimizer state as the first update made it

    def _tell_scheduled(self, step: int) -> None:
        """Tell what schedulers came to before ``step`` if nobody could find it out again, before weights change."""
        options = self._shard.scheduled if self._number == 0 else None
        if options is not None:
            self._caller.tell("scheduled", step, options)

    def _announce(self, t: int, loss: float, norm: float, lr: float, samples: int, started: float) -> None:
        """What the first worker writes before a step is finished: nobody else could, should it end after that."""
        words = self._control.words
        more = words[words_of.UNTIL] > t + 1 and not words[words_of.PAUSE]
        words[words_of.AGREED] = t + 2 if more else t + 1
        self._control.reports.write(t, loss, norm, lr, samples, started, time.perf_counter())
        if words[words_of.SNAPSHOT_DUE] == t:
            words[words_of.SNAPSHOT_STEP] = t  # all have met since they saved
        due = t < words[words_of.EAGER] or t + 1 - words[words_of.SNAPSHOT_DUE] >= self._timer.interval()
        if due and not words[words_of.HOLD]:
            words[words_of.SNAPSHOT_DUE] = t + 1

    def _come_to(self, step: int) -> None:
        self._step = step
        self._link.enter(step)
        self._barrier.enter(step)

    def _describe(self, save: bool) -> dict[str, Any]:
        if save:
            self._save()
        return self._shard.state()

    def _save(self) -> None:
        self._control.words[self._checksum] = self._shard.save()

    def _evaluate(self, metric_fn: Any, data: Any, batch_size: int) -> list[tuple[float, float]]:
        """Measure this worker's block of chunks."""
        shares = self._dealer.chunks(data, batch_size)
        start, end = share_bounds(len(shares), self._placement.workers)[self._number]
        seed, words = self._definition.seed, self._control.words
        found: list[tuple[float, float]] = []
        for chunk in range(start, end):
            if words[words_of.PAUSE] == words_of.LEAVE:
                raise Trouble
            found.append(measure(self._framework, metric_fn, evaluation_key(seed, chunk), shares[chunk]))
            words[self._control.place(self._number, words_of.TOTAL)] += 1  # a long evaluation is not silent
        return found

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
        if words[words_of.ASLEEP] and (
            idle or words[words_of.DONE] >= words[words_of.AWAITED] or words[words_of.TROUBLE]
        ):
            self._caller.wake()

    def _pass_on(self, message: Any, category: type[Warning], filename: str, line: int, *_: Any) -> None:
        """Warnings are shown by the caller's process, once for all workers."""
        try:
            self._caller.tell("warning", str(message), category, filename, line)
        except (TypeError, AttributeError, pickle.PicklingError):
            self._caller.tell("warning", str(message), UserWarning, filename, line)


def _left_to_the_caller(number: int, frame: FrameType | None) -> None:
    """Ctrl-C is the caller's: it says in the control block when to stop. Raised here, it could be anywhere.

    A handler, as programs that user code starts would inherit that a signal is ignored.
    """
