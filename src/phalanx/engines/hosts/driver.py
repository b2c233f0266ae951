"""The distributed engine: this host's part of a run over several, in worker processes.

Every process of the world does the same steps, and has the whole state. Workers exchange what hosts need of each other
(``rendezvous``). A run is a sequence of incarnations. One ends when a member or a worker falls, or a process wants to
join: all end their workers after a whole step, agree on the next incarnation (``plan.membership``), give the state to
who has not got it, and start workers again. What was computed of a step that nobody finished is computed again.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from phalanx.checkpoint.tensors import CALLBACKS, kept, packed, states_in, unpacked
from phalanx.definition import checks
from phalanx.definition.batches import Drawn
from phalanx.definition.data import Columns
from phalanx.definition.described import shared
from phalanx.definition.fields import Definition
from phalanx.definition.metrics import Metrics
from phalanx.definition.plain import hashed
from phalanx.definition.reachable import version
from phalanx.definition.shards import Dealing, Head
from phalanx.engines.changing import Changing
from phalanx.engines.hosts.members import CLOSED, DONE, LEAVES, STOPPED, Farewell
from phalanx.engines.hosts.world import World
from phalanx.engines.processes.driver import Processes, beside
from phalanx.engines.processes.starter import WARM
from phalanx.engines.recovery.failures import Deadline
from phalanx.errors import LostError, PeersLostError, RunError, SeveredError, UsageError, WorkerError
from phalanx.frameworks.registry import open_framework, recorded_environment
from phalanx.plan.fold import hosts
from phalanx.plan.lifecycle import MOST
from phalanx.seams import Framework
from phalanx.seams.records import (
    Captured,
    Evaluated,
    Exported,
    Incident,
    Progress,
    Records,
    RunOptions,
    Seen,
    StepReport,
    Training,
    Weights,
)
from phalanx.surroundings import interrupts

T = TypeVar("T")
COMPARED_BYTES = 256 << 20
PATIENCE = 60.0  # seconds beyond those that workers wait for other hosts
LAST_PATIENCE = 600.0  # seconds at least, for others that still evaluate, or save
WAKING_SECONDS = 0.05
REASON_SECONDS = 2.0  # until it is heard why a member left
KEPT = 4  # reports that a member may lack which is one step behind


class Distributed(Changing[Processes]):
    """Implements ``seams.Engine`` for one process of a torch.distributed world, by an engine for each incarnation.

    Parameters
    ----------
    definition : Definition
    framework : Framework
    records : Records
    world : World
    workers : int
        Their number on each host.
    readers : int
    least : int
        With how many members it is worth while to go on.
    chosen : dict, optional
        The incarnation that this process joins.
    """

    def __init__(
        self, definition: Definition, framework: Framework, records: Records, world: World, workers: int,
        readers: int = 0, least: int = 1, chosen: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._definition = definition
        self._framework = framework
        self._world = world
        self._on_each = workers
        self._readers = readers
        self._least = least
        self._deadline = Deadline(world.seconds + PATIENCE)
        self._whole = chosen is None
        self._fresh = chosen is not None  # nothing was done here yet
        self._last = self._gone = False
        self._owner = os.getpid()
        self._stuck = 0  # incarnations without a step
        self._dropped = 0  # messages, as far as they were noted
        self._recent = deque[StepReport](maxlen=KEPT)
        super().__init__(records, lambda: self._entered(chosen)[1])
        self.workers = workers * world.size

    def _on_this_host(self) -> Processes:
        definition, framework, world = self._definition, self._framework, self._world
        self._blocks, placements = hosts(definition.replicas, world.size, self._on_each)
        rendezvous = world.rendezvous(self._blocks)
        placement = dataclasses.replace(placements[world.rank], copies=bool(framework.sharing.devices))
        facts = definition, framework, placement, self._records, self._deadline, rendezvous
        return Processes(*facts, readers=self._readers, alarm=world.members.news)

    def advance(self, batch: Any, horizon: int) -> StepReport:
        """What the recipe raises ends the run, here and in all other processes."""
        self.check_able()
        step = self._steps
        try:
            report = self._retry(lambda: self._advanced(step, batch, horizon))
        except BaseException as error:
            self._leave(*Farewell.after(error), step)
            raise
        self._recent.append(report)
        drawn = batch.drawn if isinstance(batch, Dealing) else batch
        self._last = isinstance(drawn, Drawn) and drawn.last and drawn.epoch + 1 == self._definition.epochs
        self._stuck = 0
        self._note_dropped()
        return report

    def _advanced(self, step: int, batch: Any, horizon: int) -> StepReport:
        if self.progress.unseen:  # it was finished while an incarnation ended
            return self.progress.unseen.popleft()
        # Who comes interrupts a step, so each step is interrupted once at most.
        self._world.members.open = not self._stuck and not self.progress.between_phases
        if isinstance(batch, Dealing):
            try:
                batch = self._dealt(batch)
            except WorkerError as error:
                error.step = step
                raise
        elif batch is not None:
            self._check_batch(step, batch)
        return self.engine.advance(batch, horizon)

    def _dealt(self, dealing: Dealing) -> Drawn:
        """Read what this process's replicas need of a step, and hear how much the others have."""
        rank = self._world.rank
        mine, tensors = kept({str(replica): list(head) for replica, head in dealing.read(self._blocks[rank]).items()})
        told = self._world.told(packed(Captured({}, tensors, {}), {CALLBACKS: mine}))
        heads = dict[int, Head]()
        for block, content in zip(self._blocks, told, strict=True):
            captured, history = unpacked(content)
            theirs = states_in(history, captured.training)
            heads |= {replica: Head.checked(theirs[str(replica)]) for replica in block}
        return dealing.settle(heads)

    def evaluate(self, metrics: Metrics, data: Any, batch_size: int, weights: Weights | None = None) -> list[Any]:
        return self._retry(lambda: self.engine.evaluate(metrics, data, batch_size, weights))

    def eval_point(self) -> Weights | None:
        return self._retry(lambda: self.engine.eval_point())

    def peek(self) -> dict[str, Any] | None:
        return self._retry(lambda: self.engine.peek())

    def schedule(self, value: float | Training, epoch: int) -> None:
        self._retry(lambda: self.engine.schedule(value, epoch))

    def export(self, *, copy: bool, digest: bool = True) -> Exported:
        return self._retry(lambda: self.engine.export(copy=copy, digest=digest))

    def capture(self) -> Captured:
        """Works after others have left, too. The state is that of the last step that was finished here."""
        if not self.engine.closed or self.engine.lost:
            return self._retry(lambda: self.engine.capture())
        return self._captured()

    def close(self) -> None:
        """Copy the state to the caller, end the workers, leave the world. Who is done first waits for the others."""
        try:
            if self._finished and not self._gone and not self.engine.ended:
                self._drain()
        finally:  # a second Ctrl-C does not wait for others
            leaving, error = self.seen.leaving, sys.exc_info()[1]  # a with block ends by it
            stopped = self.seen.stopped_by is not None and error is None
            way = DONE if self._finished else STOPPED if stopped else CLOSED
            by = "" if error is None else f", while handling {Farewell.after(error).why}"
            self._leave(LEAVES if leaving else way, leaving or f"it was closed after {self._steps} steps{by}")

    @property
    def _steps(self) -> int:
        return len(self.progress.loss_history)

    @property
    def _finished(self) -> bool:
        """Whether all planned steps are done, so that nobody waits for this process any more."""
        return self._last or (self._definition.updates is not None and self._steps == self._definition.updates)

    def _drain(self) -> None:
        """Wait until all members have done all steps: one that was a step behind when another fell needs the state."""
        known, end, patience = -1, 0.0, max(self._world.seconds, LAST_PATIENCE)
        try:
            with self._world.waiting_for("others that have not ended"):
                while not self._world.members.finish():
                    if known != (known := len(self._world.members.done)):
                        end = time.monotonic() + patience
                    if time.monotonic() > end:
                        checks.warn(f"others have not ended within {patience:.0f} s; this one does not wait for them")
                        break
                    time.sleep(WAKING_SECONDS)
                    self._retry(self._world.check)
        except PeersLostError as error:  # all is done here, so nothing is needed of the others
            if not self._whole:
                raise
            if self._world.run_dir is not None and not self.progress.leads:
                checks.warn(f"step {self._steps}, the last one, may not be saved; the same call does that: {error}")

    def _leave(self, way: str, why: str, step: int | None = None) -> None:
        """Copy the state after the last finished step to the caller, as far as it is whole, and leave the run."""
        if self._gone or os.getpid() != self._owner:
            return
        self._gone = True
        try:
            if step is None:
                self.engine.close()
            else:
                self.engine.break_off()
                self.engine.ended = f"{why} at step {step}, and others do not wait for it"
        finally:
            self._world.part(way, why)

    # `do` is called again once `_go_on` has put another engine in place. So it has to look up `self.engine` when
    # called: `self._retry(self.engine.peek)` would ask the engine that is closed. `peek` was left out of this once.
    # What is passed here has to be repeatable. A step is, as it is a function of the state. If it was finished while
    # the incarnation ended, `_advanced` finds it in `unseen`. Else it would be done twice, and told twice. A
    # PeersLostError says that this member may not go on, so it is raised. Unless all is done here, the member says
    # before that it leaves, as others may go on. Not covered: what user code raises. That ends the run everywhere
    # (`advance`).
    def _retry(self, do: Callable[[], T]) -> T:
        """Do something. If an incarnation ends meanwhile, do it in the next one."""
        while True:
            try:
                try:
                    return do()
                except (SeveredError, LostError) as error:
                    if self._gone or os.getpid() != self._owner:
                        raise
                    self._go_on(error)
            except PeersLostError as lost:  # the others may go on
                if not self._finished:
                    self._leave(LEAVES, str(lost), self._steps)
                raise

    def _go_on(self, error: RunError) -> None:
        """End this incarnation, and begin the next one that all members agree on."""
        began, was, self._world.members.open = time.perf_counter(), list(self._world.members.ranks), False
        self.engine.break_off()
        self._whole = not self.engine.lost
        self._count(error)
        chosen = self._agreed()
        lost = {rank: self._world.members.spelled(rank) for rank in was if rank in chosen["joined"] + chosen["lost"]}
        chosen, self.engine = self._entered(chosen)
        self.workers = self._on_each * self._world.size
        self._note(chosen, lost, str(error), time.perf_counter() - began)

    def _agreed(self) -> dict[str, Any]:
        unseen = self.progress.unseen
        complete = self.seen.observed == self._steps - len(unseen) and not self.progress.between_phases
        complete = complete and not (self._definition.stream and unseen)  # its epochs are known where it is drawn
        how_stopped = {
            "step": self._steps if self._whole else None, "open": complete, "each": self._on_each,
            "wide": self._stuck > 1,  # maybe a link is cut that no hub has
        }  # fmt: skip
        return self._world.agree_anew(how_stopped, self._least)

    def _entered(self, chosen: dict[str, Any] | None) -> tuple[Any, Processes]:
        """Begin the first incarnation, or the one that was agreed on, or a later one if members fall meanwhile."""
        while True:
            try:
                if chosen is not None:
                    self._on_each = chosen["each"]
                    self._world.next(chosen)
                    self._share(chosen)
                return chosen, self._on_this_host()
            except SeveredError as error:
                self._count(error)
                chosen = self._agreed()

    def _count(self, error: RunError) -> None:
        """Count an incarnation that finished no step."""
        self._stuck += 1
        if self._stuck > MOST:
            kind = PeersLostError if isinstance(error, SeveredError) else RunError
            raise kind(f"{self._stuck} times in a row no step was finished, the last time: {error}", step=self._steps)

    def _share(self, chosen: dict[str, Any]) -> None:
        """Have the whole state here: give it to members that have not got it, or take it from the one that has."""
        me, progress, seen = self._world.members.me, self.progress, self.seen
        behind = self._world.behind(self._steps if self._whole else -1, chosen["step"])
        if me == chosen["source"] and behind:
            reports = [
                report._replace(gradients={}, phases={}, metrics={}) for report in (*self._recent, *progress.unseen)
            ]
            more = {"reports": [report._asdict() for report in reports], "observed": self._steps - len(progress.unseen)}
            more["last"] = self._last
            content = _sent(self._captured(), seen, **more)
            self._world.send(content, behind)
        elif me in behind:
            captured, history = unpacked(self._world.receive(chosen["source"]))
            with self._framework.environment:
                self._framework.adopt(captured)
            if self._fresh:
                _take(seen, captured, history)
                progress.go_back(history["observed"])
            for report in (StepReport(**{**facts, "parts": tuple(facts["parts"])}) for facts in history["reports"]):
                if report.step == self._steps:
                    progress.add(report.loss, 0)
                    progress.unseen.append(report)
            progress.samples, self._last = history["samples"], history["last"]
            if self._framework.sharing.averages:
                seen.waiting.update(states_in(history, captured.training))
        self._whole, self._fresh, progress.leads = True, False, chosen["keeper"] == me

    def _captured(self) -> Captured:
        with self._framework.environment:
            return self._framework.capture(copy=False)

    def _note(self, chosen: dict[str, Any], lost: dict[int, str], error: str, pause: float) -> None:
        """Note who was lost and who joined; or that the same members began anew, as one has lost a worker."""
        step = self._definition.rounds.at(chosen["step"]).step
        what = [("lost", rank, why) for rank, why in lost.items()]
        what += [("joined", rank, f"{self._world.named(rank)} has joined") for rank in chosen["joined"]]
        for kind, rank, why in what or [("again", -1, error)]:
            text = f"{why}; went on after {pause:.2f} s, processes: {self._world.size}"
            self.progress.incidents.append(Incident(time.perf_counter(), kind, rank, step, text))
            if self.progress.leads:
                checks.warn(f"step {step}: {text}")

    def _note_dropped(self) -> None:
        """Note messages from outside that did not fit: the first, whenever there are twice as many, and at the end."""
        dropped = self._world.members.door.dropped
        new = dropped.total() - self._dropped
        if new > self._dropped or (new and self._finished):
            self._dropped += new
            facts = ", ".join(f"{count} {why}" for why, count in sorted(dropped.items()))
            self.progress.incidents.append(Incident(time.perf_counter(), "dropped", -1, self.progress.steps - 1, facts))

    def _check_batch(self, step: int, batch: Any) -> None:
        """Every process must bring the same batch, as each computes its replicas' shares of it."""
        odd = self._world.odd_one(hashed(batch.hash if isinstance(batch, Drawn) else batch))
        if odd is not None:
            raise UsageError(
                f"the batch of step {step} is another in process {odd} than in process 0; every process brings the "
                "whole batch, and phalanx takes from it what its replicas need"
            )


def open_distributed(
    definition: Definition, workers: int | None, devices: Sequence[str], cores: Sequence[int], world: World,
    begin: Callable[[Framework], Seen], options: RunOptions, *, readers: int | None = 0, least: int = 1,
) -> Distributed:  # fmt: skip
    """Check that all processes agree, adopt the keeper's state, and start this host's workers. Or join a run.

    Raises
    ------
    UsageError
        Another process has another recipe or environment, or there are more processes than replicas.
    PeersLostError
        Another process does not come, or was closed.
    """
    if world.size > definition.replicas:
        raise UsageError(f"there are {world.size} processes, but replicas is {definition.replicas}; start fewer")
    framework = open_framework(definition, devices, allow=bool(options.allow), processes=world.size, apart=True)
    named = framework.sharing.devices
    if len(named) > 1:
        raise UsageError(
            f"devices names {len(named)} devices in each of {world.size} processes; start a process for each "
            "device, as torchrun --nproc-per-node does, with devices='local'"
        )
    recipe, doubts = shared(definition)
    room = world.agree({"recipe": recipe, **_facts(definition, framework, workers)}, doubts, cores)
    count = max(1, min(room if workers is None else workers // world.size, definition.replicas // world.size))
    count = 1 if named else count
    chosen = _join(world, definition) if world.joins else None
    blank = Seen(Progress(rounds=definition.rounds, leads=False))
    try:
        seen = blank if world.joins else _same_start(world, framework, begin, blank)
    except SeveredError:
        world.check_final(REASON_SECONDS)
        raise
    records = Records(options, seen.progress, seen)
    run = Distributed(definition, framework, records, world, count, beside(readers, count, room), least, chosen)
    world.tell(run.workers // world.size)
    return run


def _join(world: World, definition: Definition) -> dict[str, Any]:
    """Get ready, then ask to be let in; returns the incarnation that has this process."""
    WARM.prepare(definition)
    end = time.monotonic() + world.seconds
    while not WARM.awake and time.monotonic() < end:
        interrupts.check()
        time.sleep(WAKING_SECONDS)
    chosen = world.join()
    if chosen is None:
        raise PeersLostError("the run that this process was to join has ended; start all processes again")
    return chosen


def _facts(definition: Definition, framework: Framework, workers: int | None) -> dict[str, Any]:
    """What else has to be the same in all processes. Columns are compared whole, if that does not take long."""
    arrays = definition.source.arrays if isinstance(definition.source, Columns) else ()
    whole = sum(array.nbytes for array in arrays) <= COMPARED_BYTES
    with framework.environment:
        own = framework.capture(copy=False).facts.get("environment", {})
    return {
        "version of phalanx": version("phalanx"),
        "steps": definition.total,
        "epochs": definition.epochs,
        "workers": workers,
        "devices": [name.partition(":")[0] for name in framework.sharing.devices],
        "data": hashed(tuple(arrays)).hex() if whole else None,
        "environment": {**recorded_environment(), **own},
    }


def _same_start(world: World, framework: Framework, begin: Callable[[Framework], Seen], blank: Seen) -> Seen:
    """The keeper may go on from a snapshot; all others adopt its state, and note in ``blank`` what it had done."""
    if world.rank == world.keeper:
        seen = begin(framework)
        with framework.environment:
            content = _sent(framework.capture(copy=False), seen)
        world.send(content, [rank for rank in range(world.size) if rank != world.keeper])
        world.share()
        return seen
    captured, history = unpacked(world.receive(world.keeper))
    with framework.environment:
        framework.adopt(captured)
    _take(blank, captured, history)
    world.share()
    return blank


def _sent(captured: Captured, seen: Seen, **more: Any) -> bytes:
    """A state and what was done until then, as other processes take it."""
    progress = seen.progress
    history: dict[str, Any] = {
        "losses": progress.loss_history,
        "samples": progress.samples,
        "resumed_from": progress.resumed_from,
        "made": progress.made,
        "evaluated": [dataclasses.astuple(item) for item in seen.evaluated],
        **more,
    }
    history[CALLBACKS], tensors = kept({**seen.waiting, **seen.states()})
    return packed(dataclasses.replace(captured, training={**captured.training, **tensors}), history)


def _take(seen: Seen, captured: Captured, history: dict[str, Any]) -> None:
    """Note what another process has done."""
    seen.progress.take(*(history[name] for name in ("losses", "samples", "resumed_from", "made")))
    seen.evaluated.extend(Evaluated(*item) for item in history["evaluated"])
    seen.waiting.update(states_in(history, captured.training))
