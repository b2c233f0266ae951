"""A worker: it builds the recipe's state over the arena, then goes from step to step with the others.

Between grants it sleeps. It sends errors to the caller's process. A replacement begins at the step of the dead worker.
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
from typing import Any

from phalanx.definition.batches import BatchShares
from phalanx.definition.data import Share
from phalanx.definition.fields import unpacked
from phalanx.engines.gradients import Gradients
from phalanx.engines.link import Link
from phalanx.engines.linked import linked
from phalanx.engines.processes.board import Station
from phalanx.engines.processes.messages import DriverChannel, sendable
from phalanx.engines.processes.serialization import adopt_environment, remarked, unpack
from phalanx.engines.reading import Taken
from phalanx.engines.twice import Twice
from phalanx.errors import Trouble, UsageError
from phalanx.frameworks.registry import open_framework, starting
from phalanx.plan.fold import Placement
from phalanx.plan.lifecycle import next_snapshot
from phalanx.seams import Framework
from phalanx.seams.records import Todo
from phalanx.shared.counters import BATCH, LEAVE, STEPS, Barrier
from phalanx.shared.inputs import Inputs
from phalanx.shared.layout import ArenaPlan
from phalanx.shared.memory import Memories, Memory, fence, give_back, order
from phalanx.shared.state import CopiedShard, Shard
from phalanx.step import Proposal, commit, following

IDLE_YIELDS = 500
SHARE = 0.005  # of the time may go into snapshots


def live(channel: int, inherited: Sequence[int], number: int) -> None:
    """Be worker ``number`` of a run until the caller closes the channel."""
    caller = DriverChannel(channel)
    memories = Memories(*(Memory(0, fd) for fd in inherited))
    try:
        environment = unpack(memories.environment)
        adopt_environment(environment)
        with starting(environment["threads"]):  # what is unpacked may hold arrays of a framework
            worker = Worker(caller, unpack(memories.recipe), memories, number)
        begin, grant, joining = unpack(memories.orders)
        begin.do(worker)
        give_back()  # the model as it was made, before it moved into the arena
    except Exception as error:
        caller.tell("failed", *sendable(remarked(error)))
        return
    caller.tell("ready")
    with worker.environment:
        worker.serve(grant, joining=joining)


class Worker:
    """The state of worker ``number``; ``setup`` is what the caller wrote to the recipe's memory."""

    def __init__(self, caller: DriverChannel, setup: dict[str, Any], memories: Memories, number: int) -> None:
        warnings.showwarning = lambda *_, **__: None  # the caller opened the recipe, too, and has shown them
        # Ctrl-C is the caller's, who says in the counters when to stop. Raised here, it could strike anywhere.
        # This is a handler because programs that user code starts would inherit an ignored signal.
        signal.signal(signal.SIGINT, lambda *_: None)
        self.number = number
        self.placement: Placement = setup["placement"]
        self.step = 0
        self._caller = caller
        self._mailbox = memories.mailbox
        self._pace = self._saving = 0.0  # seconds of the latest step, and of the latest snapshot in memory
        self._definition = unpacked(setup)
        device = setup["devices"][number] if setup["devices"] else "cpu"
        options = setup["options"]
        self.framework: Framework = open_framework(self._definition, [device], allow=bool(options.allow))
        warnings.showwarning = self._pass_on
        self.environment = self.framework.environment
        self._share(memories, setup)
        ahead = functools.partial(Taken, Inputs(memories.inputs, self._definition.replicas)) if setup["ahead"] else None
        self.dealer = BatchShares(self._definition, self.framework.opened, ahead)
        self.twice = Twice(
            self._definition, self.framework, allow=options.allow, audit=options.audit,
            blocks=self.placement.blocks, worker=number, sums=self._counters.sums,
            began=setup["began"],
        )  # fmt: skip
        self.gradients = Gradients(self.framework, options.gradients) if options.gradients else None
        self._settled = False

    def _share(self, memories: Memories, setup: dict[str, Any]) -> None:
        if self.placement.copies and (averaging := setup["options"].averaging):
            self.framework.sharing.keep_average(self._definition.rounds, averaging[0])
        plan = ArenaPlan(self.framework.sharing, self.placement, setup["contents"])
        if plan.layout.signature() != setup["signature"]:
            raise UsageError(
                "make_model returned another model in a worker process than in this one; it must return the same "
                "parameters and buffers each time, whatever the process"
            )
        arena = memories.arena.map()
        self._counters = plan.counters(arena, self.number)
        self._own = self._counters.workers[self.number]
        self._own.replicas = 0  # those of the worker that this one replaces were computed before
        self.barrier = Barrier(self._counters, self.number)
        kind = CopiedShard if self.placement.copies else Shard
        self.shard = kind(self.framework.sharing, plan.layout, arena, memories.base, self.number)
        station = Station(self.framework, self.shard, plan, self.placement, arena, self.barrier)
        self._link: Link = linked(station, memories, setup)

    def restore(self) -> bool:
        """Take this worker's part of the snapshot in memory; returns whether it is what was saved."""
        return self._checksum(self.shard.restore()) == self._own.checksum

    def serve(self, grant: int, *, joining: bool) -> None:
        """Do what is granted, one grant after another; ``grant`` itself only if ``joining`` it."""
        counters = self._counters
        while True:
            if not joining:
                self._own.finished = grant
                fence()
                self._wake_caller(idle=counters.all_idle())
                grant = self._next_grant(grant)
            joining = False
            order()
            self.barrier.begin(grant)
            try:
                self._do(counters.kind)
            except Trouble:
                self._fail()
            except BaseException as error:  # sys.exit() in user code, too
                self._fail()
                self._caller.tell("error", *sendable(error), self.step)
            sys.stdout.flush()
            order()

    def _do(self, kind: int) -> None:
        if kind == STEPS:
            self._advance(self.dealer.planned(self.step))
            while self._counters.agreed > self.step:
                self._advance(self.dealer.planned(self.step))
        elif kind == BATCH:
            self._advance(self.dealer.brought(unpack(self._mailbox)["batch"]))
        else:
            self._caller.tell("result", self._counters.grant, unpack(self._mailbox).do(self))

    def _advance(self, shares: list[Share]) -> None:
        """One step."""
        t = self.step
        started, lr = time.perf_counter(), self.framework.lr
        self.framework.following = functools.partial(self._following, t + 1) if self._counters.kind == STEPS else None
        if self._counters.snapshot_due == t:
            self.save()
            self._saving = time.perf_counter() - started
        self._link.begin(t, shares)
        proposal = self.twice.propose(self._link, t, shares)
        if self.gradients is not None:
            self.gradients.keep(self._definition.rounds.at(t), proposal.gradient)
        if self.number == 0:
            samples = sum([len(share.samples) for share in shares])
            self._announce(t, proposal, lr, samples, started)
        try:
            commit(self.framework, self._link, t, proposal)
        except BaseException as error:
            if not isinstance(error, Trouble):
                self._caller.tell("torn", *sendable(error), t)
            raise Trouble from error
        self.come_to(t + 1)
        failed = None
        try:
            self.framework.schedule(proposal.loss)
        except Exception as error:
            self._fail()
            self._caller.tell("unscheduled", *sendable(error), t)
            failed = error
        if self.number == 0:
            ended = time.perf_counter()
            self._pace = ended - started
            self._counters.finish(t, ended)
            self._wake_caller(idle=False)
        if failed is not None:
            raise Trouble from failed
        if not self._settled:
            self._settled = True
            give_back()  # optimizer state as the first update made it

    def _following(self, step: int) -> list[Todo]:
        return following(self._definition, self._link.hosted, self.dealer.planned, step, self._counters.horizon)

    def _announce(self, t: int, done: Proposal, lr: float, samples: int, started: float) -> None:
        """Write the report before the step is finished. Only the first worker can, and it may die after that."""
        counters = self._counters
        more = counters.horizon > t + 1 and not counters.pause
        counters.agreed = t + 2 if more else t + 1
        ended = time.perf_counter()
        counters.reports.write(t, done.parts, done.named, done.loss, done.norm, lr, samples, started, ended)
        if counters.snapshot_due == t:
            counters.snapshot_step = t  # all have passed a barrier since they saved
        interval = self._saving / (SHARE * self._pace) if self._pace else 1
        counters.snapshot_due = next_snapshot(
            t, counters.snapshot_due, interval, eager=counters.eager, held=bool(counters.held)
        )

    def come_to(self, step: int) -> None:
        """The next step is ``step``."""
        self.step = step
        self.shard.frozen.enter(step)
        self.barrier.enter(step)
        # All workers have to decide alike whether they send early. Who sends early on a wrong guess sends all again,
        # and would wait for others that send once. Nothing compares what they decided. Yet `twice.due` may differ: a
        # replacement computes its first step twice, and survivors do not (`Begin`, `Resume` in tasks.py). That does no
        # harm only because `Exchanged._foresee` forgets all guesses whenever workers connect anew. So nobody sends
        # early in the first two steps after a death. A worker that had warned of another outcome once cleared its list,
        # and then decided otherwise than the others. Not covered: any other fact here that is known to one worker
        # alone.
        once = self._definition.phases is None and self._definition.micro_batches == 1
        self._link.overlaps = once and step not in self.twice.due

    def save(self) -> None:
        """Make this worker's part of the snapshot in memory."""
        self._own.checksum = self._checksum(self.shard.save())

    def _checksum(self, contents: int) -> int:
        """The checksum of this worker's part of the snapshot (``contents``: of its arrays) and of its options."""
        return contents ^ int(self.framework.options_checksum[0])

    def _fail(self) -> None:
        """Have the others leave the grant. A barrier that this worker has reached lets them pass.

        Whoever sees the trouble sees that: ``wait`` and ``_wait_for`` of the barrier have ordered it before.
        """
        self._counters.trouble = 1
        self._link.leave()

    def tick(self) -> None:
        """Say that a long evaluation goes on, unless it is to be left."""
        if self._counters.pause == LEAVE:
            raise Trouble
        self._own.total += 1

    def _next_grant(self, last: int) -> int:
        counters = self._counters
        for _ in range(IDLE_YIELDS):
            if counters.grant != last:
                return counters.grant
            os.sched_yield()
        self._own.sleeping = 1
        fence()  # either this worker sees the grant, or the parent sees that it sleeps
        while counters.grant == last:
            self._caller.sleep(1000)
        self._own.sleeping = 0
        return counters.grant

    def _wake_caller(self, *, idle: bool) -> None:
        """Wake the caller's process if it sleeps and has something to look at: enough reports, or idle workers."""
        counters = self._counters
        fence()  # either this worker sees that the parent sleeps, or the parent sees what there is
        if counters.asleep and (idle or counters.done >= counters.awaited or counters.trouble):
            self._caller.wake()

    def _pass_on(self, message: Any, category: type[Warning], filename: str, line: int, *_: Any) -> None:
        """Warnings are shown by the caller's process, once for all workers."""
        try:
            self._caller.tell("warning", str(message), category, filename, line)
        except (TypeError, AttributeError, pickle.PicklingError):
            self._caller.tell("warning", str(message), UserWarning, filename, line)
