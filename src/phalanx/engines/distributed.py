"""The distributed engine: this host's part of a run over several, in worker processes of its own.

Every process of the world does the same steps, and has the whole state; what hosts need of each other their workers
exchange (``hosts.across``). A host that is lost ends the run everywhere, with an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.contracts import Course, Framework
from phalanx.definition import Definition
from phalanx.engines.deadline import Deadline
from phalanx.engines.processes import Processes
from phalanx.errors import UsageError
from phalanx.events import StepReport
from phalanx.fingerprint import fingerprint
from phalanx.frameworks.opening import open_framework, recorded_environment
from phalanx.hosts.across import SeveredError
from phalanx.hosts.world import World
from phalanx.plan.placement import hosts
from phalanx.state.wire import packed, unpacked

PATIENCE = 60.0  # seconds beyond those that workers wait for other hosts


class Distributed(Processes):
    """Implements ``contracts.Engine`` for one process of a torch.distributed world.

    Parameters
    ----------
    definition : Definition
    framework : Framework
    course : Course
    world : World
    workers : int
        On each host.
    """

    def __init__(
        self, definition: Definition, framework: Framework, course: Course, world: World, workers: int
    ) -> None:
        self._world = world
        blocks, placements = hosts(definition.replicas, world.size, workers)
        deadline = Deadline(world.seconds + PATIENCE)
        super().__init__(definition, framework, placements[world.rank], course, deadline, world.meeting(blocks))
        self.workers = workers * world.size

    def advance(self, batch: Any, horizon: int) -> StepReport:
        """See ``contracts.Engine.advance``."""
        try:
            return super().advance(batch, horizon)
        except SeveredError as error:
            step = len(self.course.loss_history)
            failure = self._world.lost(error, step)
            self._ended, self._lost = str(failure), True
            raise failure from error

    def close(self) -> None:
        """Take the state home, end the workers, leave the world."""
        try:
            super().close()
        finally:
            self._world.close()


def open_distributed(
    definition: Definition,
    workers: int | None,
    cores: int,
    seconds: float | None,
    begin: Callable[[Framework], Course],
) -> Distributed:
    """Meet the others, see that all mean the same, take over rank 0's state, and start this host's workers.

    Raises
    ------
    UsageError
        Another process has another recipe or environment, or there are more processes than replicas.
    RunError
        Another process does not come.
    """
    world = World(seconds)
    try:
        if world.size > definition.replicas:
            raise UsageError(
                f"there are {world.size} processes, but {definition.replicas} replicas to compute; start fewer"
            )
        facts = {"recipe": fingerprint(definition), "environment": recorded_environment()}
        wanted = cores // world.here() if workers is None else workers // world.size
        count = world.agree(facts, max(1, min(wanted, definition.replicas // world.size)))
        framework = open_framework(definition, ["cpu"])
        course = _same_start(world, framework, begin)
        return Distributed(definition, framework, course, world, count)
    except BaseException:
        world.close()
        raise


def _same_start(world: World, framework: Framework, begin: Callable[[Framework], Course]) -> Course:
    """Rank 0 may go on from a snapshot; all others take over what it has."""
    if world.rank == 0:
        course = begin(framework)
        told = {"losses": course.loss_history, "samples": course.samples, "resumed_from": course.resumed_from}
        with framework.environment:
            world.broadcast(packed(framework.snapshots.capture(copy=False), told))
        return course
    captured, told = unpacked(world.broadcast(b""))
    with framework.environment:
        framework.snapshots.adopt(captured)
    return Course(told["losses"], told["samples"], resumed_from=told["resumed_from"])
