"""A worker: it builds the recipe's state over the arena, then goes from step to step with the others.

Between grants it sleeps. It sends errors to the caller's process. A replacement begins at the step of the dead worker.
"""

from __future__ import annotations

import copy
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
from phalanx.definition.evaluation import Metrics
from phalanx.definition.fields import unpacked
from phalanx.engines.gradients import Gradients
from phalanx.engines.link import Link
from phalanx.engines.linked import linked
from phalanx.engines.processes.board import Station
from phalanx.engines.processes.messages import DriverChannel, sendable
from phalanx.engines.processes.serialization import adopt_environment, remarked, unpack
from phalanx.engines.reading import Taken
from phalanx.engines.twice import Twice
from phalanx.errors import LostError, Trouble, UsageError
from phalanx.frameworks.registry import open_framework, starting
from phalanx.plan.lifecycle import next_snapshot
from phalanx.plan.shares import share_bounds
from phalanx.seams import Framework
from phalanx.seams.records import Todo, Weights
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
        orders = unpack(memories.orders)
        worker.take(orders)
        give_back()  # the model as it was made, before it moved into the arena
    except Exception as error:
        caller.tell("failed", *sendable(remarked(error)))
        return
    caller.tell("ready")
    with worker.environment:
        worker.serve(orders["grant"], joining=orders["joining"])


class Worker:
    """The state of worker ``number``; ``setup`` is what the caller wrote to the recipe's memory."""

    def __init__(self, caller: DriverChannel, setup: dict[str, Any], memories: Memories, number: int) -> None:
        warnings.showwarning = self._pass_on
        # Ctrl-C is the caller's, who says in the counters when to stop. Raised here, it could strike anywhere.
        # This is a handler because programs that user code starts would inherit an ignored signal.
        signal.signal(signal.SIGINT, lambda *_: None)
        self._caller, self._mailbox, self._number = caller, memories.mailbox, number
        self._placement, self._step = setup["placement"], 0
        self._pace = self._saving = 0.0  # seconds of the latest step, and of the latest snapshot in memory
        self._definition = unpacked(setup)
        self._device = setup["devices"][number] if setup["devices"] else "cpu"
        options = setup["options"]
        self._framework: Framework = open_framework(self._definition, [self._device], allow=bool(options.allow))
        self.environment = self._framework.environment
        self._share(memories, setup)
        ahead = functools.partial(Taken, Inputs(memories.inputs, self._definition.replicas)) if setup["ahead"] else None
        self._dealer = BatchShares(self._definition, self._framework.opened, ahead)
        self._twice = Twice(
            self._definition, self._framework, allow=options.allow, audit=options.audit,
            blocks=self._placement.blocks, worker=number, sums=self._counters.sums,
            began=setup["began"],
        )  # fmt: skip
        self._gradients = Gradients(self._framework, options.gradients) if options.gradients else None
        self._settled = False

    def _share(self, memories: Memories, setup: dict[str, Any]) -> None:
        if self._placement.copies and (averaging := setup["options"].averaging):
            self._framework.sharing.keep_average(self._definition.rounds, averaging[0])
        plan = ArenaPlan(self._framework.sharing, self._placement, setup["contents"])
        if plan.layout.signature() != setup["signature"]:
            raise UsageError(
                "make_model returned another model in a worker process than in this one; it must return the same "
                "parameters and buffers each time, whatever the process"
            )
        arena = memories.arena.map()
        self._counters = plan.counters(arena, self._number)
        self._own = self._counters.workers[self._number]
        self._own.replicas = 0  # those of the worker that this one replaces were computed before
        self._barrier = Barrier(self._counters, self._number)
        kind = CopiedShard if self._placement.copies else Shard
        self._shard = kind(self._framework.sharing, plan.layout, arena, memories.base, self._number)
        station = Station(self._framework, self._shard, plan, self._placement, arena, self._barrier)
        self._link: Link = linked(station, memories, setup)

    def take(self, orders: dict[str, Any]) -> None:
        """Go to the beginning of a step, with the state in the arena and the options in ``orders``."""
        self._framework.rewind()
        self._shard.frozen.enter(orders["step"])
        # A copy: tensors among them lie in memory that is written again when another worker is started.
        self._shard.take(*copy.deepcopy((orders["foreign"], orders["options"])))
        for loss in orders["losses"]:  # schedules are not saved, but stepped again
            self._framework.schedule(loss)
        if orders["restore"] and self._checksum(self._shard.restore()) != self._own.checksum:
            raise LostError(
                f"worker {self._number}'s part of the snapshot in memory is damaged, or its scheduler, stepped again, "
                "came to other options (it reads a clock or weights): the checksum differs, so that what was lost "
                "cannot be done again; run again, with a run_dir from the newest snapshot there"
            )
        if orders["restore"] and isinstance(self._shard, CopiedShard):
            self._barrier.wait()  # others restore what this worker takes
            self._shard.load()
        self._twice.begin(orders["step"])
        self._come_to(orders["step"])

    def resume(self, step: int, loss: float) -> None:
        """Go on at ``step``. The others know that the step before is done; this worker may not know it yet."""
        self._framework.rewind()
        if self._step < step:
            self._framework.schedule(loss)
        self._come_to(step)

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
            self._barrier.begin(grant)
            try:
                self._do(counters.kind)
            except Trouble:
                self._fail()
            except BaseException as error:  # sys.exit() in user code, too
                self._fail()
                self._caller.tell("error", *sendable(error), self._step)
            sys.stdout.flush()
            order()

    def _do(self, kind: int) -> None:
        if kind == STEPS:
            self._advance(self._dealer.planned(self._step))
            while self._counters.agreed > self._step:
                self._advance(self._dealer.planned(self._step))
        elif kind == BATCH:
            self._advance(self._dealer.brought(unpack(self._mailbox)["batch"]))
        else:
            facts = unpack(self._mailbox)
            task = facts.pop("task")
            tasks = {"evaluate": self._evaluate, "state": self._describe, "take": self.take, "resume": self.resume}
            tasks |= {"peek": self._peek, "gradients": self._kept_gradients, "hand_over": self._hand_over}
            self._caller.tell("result", self._counters.grant, tasks[task](**facts))

    def _advance(self, shares: list[Share]) -> None:
        """One step."""
        t = self._step
        started, lr = time.perf_counter(), self._framework.lr
        self._framework.following = functools.partial(self._following, t + 1) if self._counters.kind == STEPS else None
        if self._counters.snapshot_due == t:
            self._save()
            self._saving = time.perf_counter() - started
        self._link.begin(t, shares)
        proposal = self._twice.propose(self._link, t, shares)
        if self._gradients is not None:
            self._gradients.keep(self._definition.rounds.at(t), proposal.gradient)
        if self._number == 0:
            samples = sum([len(share.samples) for share in shares])
            self._announce(t, proposal, lr, samples, started)
        try:
            commit(self._framework, self._link, t, proposal)
        except BaseException as error:
            if not isinstance(error, Trouble):
                self._caller.tell("torn", *sendable(error), t)
            raise Trouble from error
        self._come_to(t + 1)
        failed = None
        try:
            self._framework.schedule(proposal.loss)
        except Exception as error:
            self._fail()
            self._caller.tell("unscheduled", *sendable(error), t)
            failed = error
        if self._number == 0:
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
        return following(self._definition, self._link.hosted, self._dealer.planned, step, self._counters.horizon)

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

    def _come_to(self, step: int) -> None:
        self._step = step
        self._shard.frozen.enter(step)
        self._barrier.enter(step)
        # All workers have to decide alike whether they send early. Who sends early on a wrong guess sends all again,
        # and would wait for others that send once. Nothing compares what they decided. Yet `_twice.due` may differ: a
        # replacement computes its first step twice, and survivors do not (`take`, `resume`). That does no harm only
        # because `Exchanged._foresee` forgets all guesses whenever workers connect anew. So nobody sends early in the
        # first two steps after a death. A worker that had warned of another outcome once cleared its list, and then
        # decided otherwise than the others. Not covered: any other fact here that is known to one worker alone.
        once = self._definition.phases is None and self._definition.micro_batches == 1
        self._link.overlaps = once and step not in self._twice.due

    def _describe(self, save: bool, change: tuple[Any, int] | None = None) -> dict[str, Any]:
        if change is not None:
            self._framework.schedule(*change)  # repeated, it changes nothing
        if save:
            self._save()
        return self._shard.state()

    def _hand_over(self, source: int) -> dict[str, Any] | None:
        assert isinstance(self._shard, CopiedShard), "others have their state in the arena"
        self._framework.rewind()
        return self._shard.whole() if self._number == source else None

    def _save(self) -> None:
        self._own.checksum = self._checksum(self._shard.save())

    def _checksum(self, contents: int) -> int:
        """The checksum of this worker's part of the snapshot (``contents``: of its arrays) and of its options."""
        return contents ^ int(self._framework.options_checksum[0])

    def _fail(self) -> None:
        """Have the others leave the grant. A barrier that this worker has reached lets them pass.

        Whoever sees the trouble sees that: ``wait`` and ``_wait_for`` of the barrier have ordered it before.
        """
        self._counters.trouble = 1
        self._link.leave()

    def _evaluate(self, metric_fn: Metrics, data: Any, batch_size: int, weights: Weights | None) -> list[Any]:
        """Measure this worker's block of chunks."""
        shares = self._dealer.chunks(data, batch_size, metric_fn.collate_fn)
        mine = range(*share_bounds(len(shares), self._placement.workers)[self._number])
        return self._twice.readings(metric_fn, shares, mine, weights, self._tick)

    def _tick(self) -> None:
        """Say that a long evaluation goes on, unless it is to be left."""
        if self._counters.pause == LEAVE:
            raise Trouble
        self._own.total += 1

    def _peek(self) -> dict[str, Any] | None:
        return self._twice.peek(self._step) if self._number == 0 else None

    def _kept_gradients(self, step: int) -> dict[int, tuple[str, Any]] | None:
        """Those of a step that callbacks asked for; None if it was begun before this worker came."""
        return self._gradients.latest if self._gradients and self._gradients.step == step else None

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
