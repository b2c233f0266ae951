"""The distributed engine: this host's part of a run over several, in worker processes.

Every process of the world does the same steps, and has the whole state. Workers exchange what hosts need of each other
(``rendezvous``). A process that is lost, or leaves the run, ends it everywhere, with an error that names the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.checkpoint.tensors import CALLBACKS, kept, packed, states_in, unpacked
from phalanx.definition.data import Columns, Drawn
from phalanx.definition.described import shared
from phalanx.definition.fields import Definition
from phalanx.definition.plain import hashed
from phalanx.engines.changing import Changing
from phalanx.engines.hosts.world import CLOSED, World
from phalanx.engines.processes.driver import Processes, beside
from phalanx.engines.recovery.failures import Deadline
from phalanx.errors import SeveredError, UsageError
from phalanx.frameworks.registry import open_framework, recorded_environment
from phalanx.plan import Rounds
from phalanx.plan.fold import hosts
from phalanx.seams import Framework
from phalanx.seams.records import Captured, Evaluated, RunState, StepReport

COMPARED_BYTES = 256 << 20
PATIENCE = 60.0  # seconds beyond those that workers wait for other hosts


class Distributed(Changing[Processes]):
    """Implements ``seams.Engine`` for one process of a torch.distributed world, by an engine for this host.

    Parameters
    ----------
    definition : Definition
    framework : Framework
    run_state : RunState
    world : World
    workers : int
        Their number on each host.
    readers : int
    """

    def __init__(
        self,
        definition: Definition,
        framework: Framework,
        run_state: RunState,
        world: World,
        workers: int,
        readers: int = 0,
    ) -> None:
        self._definition = definition
        self._framework = framework
        self._world = world
        self._on_each, self._readers = workers, readers
        super().__init__(run_state, self._on_this_host)
        self.workers, self._last = workers * world.size, False

    def _on_this_host(self) -> Processes:
        definition, framework, world = self._definition, self._framework, self._world
        blocks, placements = hosts(definition.replicas, world.size, self._on_each)
        rendezvous = world.rendezvous(blocks)
        deadline = Deadline(world.seconds + PATIENCE)
        placement = dataclasses.replace(placements[world.rank], copies=bool(framework.sharing.devices))
        facts = definition, framework, placement, self.run_state, deadline, rendezvous
        return Processes(*facts, readers=self._readers)

    def advance(self, batch: Any, horizon: int) -> StepReport:
        """Any error ends the run, here and in all other processes."""
        self.check_able()
        step = self._steps
        try:
            if batch is not None:
                self._check_batch(step, batch)
            report = self.engine.advance(batch, horizon)
            self._last = isinstance(batch, Drawn) and batch.last and batch.epoch + 1 == self._definition.epochs
            return report
        except SeveredError as error:
            failure = self._world.lost(error, step)
            self._quit(str(failure))
            raise failure from None
        except BaseException as error:
            self._world.tell(f"{type(error).__name__}: {error}")
            self._quit(f"{type(error).__name__} ({error}) at step {step}, and others do not wait for it")
            raise

    def capture(self) -> Captured:
        """Works after others have left, too. The state is that of the last step that was finished here."""
        if not self.engine.closed or self.engine.lost:
            return self.engine.capture()
        with self._framework.environment:
            return self._framework.capture(copy=False)

    def close(self) -> None:
        """Copy the state to the caller, end the workers, leave the world."""
        if not self.engine.closed and not self.engine.ended and not self._finished:
            self._world.tell(f"{CLOSED} {self._steps} steps")
        try:
            self.engine.close()
        finally:
            self._world.close()

    @property
    def _steps(self) -> int:
        return len(self.run_state.loss_history)

    @property
    def _finished(self) -> bool:
        """Whether all planned steps are done, so that nobody waits for this process any more."""
        return self._last or (self._definition.updates is not None and self._steps == self._definition.updates)

    def _quit(self, why: str) -> None:
        """Copy the state after the last finished step to the caller, as far as it is whole, and end the run here."""
        self.engine.ended = why
        self.close()

    def _check_batch(self, step: int, batch: Any) -> None:
        """Every process must bring the same batch, as each computes its replicas' shares of it."""
        odd = self._world.odd_one(hashed(batch.hash if isinstance(batch, Drawn) else batch))
        if odd is not None:
            raise UsageError(
                f"the batch of step {step} is another in process {odd} than in process 0; every process brings the "
                "whole batch, and phalanx takes from it what its replicas need"
            )


def open_distributed(
    definition: Definition,
    workers: int | None,
    devices: Sequence[str],
    cores: Sequence[int],
    seconds: float | None,
    begin: Callable[[Framework], RunState],
    *,
    allow: bool = False,
    readers: int | None = 0,
) -> Distributed:
    """Meet the others, check that all agree, adopt rank 0's state, and start this host's workers.

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
            raise UsageError(f"there are {world.size} processes, but replicas is {definition.replicas}; start fewer")
        framework = open_framework(definition, devices, allow=allow, processes=world.size, apart=True)
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
        run_state = _same_start(world, framework, begin, definition.rounds)
        run_state.allow = allow
        return Distributed(definition, framework, run_state, world, count, beside(readers, count, room))
    except SeveredError as error:
        failure = world.lost(error, 0)
        world.close()
        raise failure from None
    except BaseException as error:
        world.tell(f"{type(error).__name__}: {error}")
        world.close()
        raise


def _facts(definition: Definition, framework: Framework, workers: int | None) -> dict[str, Any]:
    """What else has to be the same in all processes. Columns are compared whole, if that does not take long."""
    arrays = definition.source.arrays if isinstance(definition.source, Columns) else ()
    whole = sum(array.nbytes for array in arrays) <= COMPARED_BYTES
    with framework.environment:
        own = framework.capture(copy=False).facts.get("environment", {})
    return {
        "steps": definition.total,
        "epochs": definition.epochs,
        "workers": workers,
        "devices": [name.partition(":")[0] for name in framework.sharing.devices],
        "data": hashed(tuple(arrays)).hex() if whole else None,
        "environment": {**recorded_environment(), **own},
    }


def _same_start(world: World, framework: Framework, begin: Callable[[Framework], RunState], rounds: Rounds) -> RunState:
    """Rank 0 may go on from a snapshot; all others adopt its state."""
    if world.rank == 0:
        run_state = begin(framework)
        history = {
            "losses": run_state.loss_history,
            "samples": run_state.samples,
            "resumed_from": run_state.resumed_from,
            "averaging": run_state.averaging,
            "evaluated": [dataclasses.astuple(item) for item in run_state.evaluated],
        }
        history[CALLBACKS], tensors = kept(run_state.callbacks)
        with framework.environment:
            captured = framework.capture(copy=False)
            world.broadcast(packed(dataclasses.replace(captured, training={**captured.training, **tensors}), history))
        return run_state
    captured, history = unpacked(world.broadcast(b""))
    with framework.environment:
        framework.adopt(captured)
    evaluated = [Evaluated(*item) for item in history["evaluated"]]
    run_state = RunState(
        history["losses"], history["samples"], resumed_from=history["resumed_from"], evaluated=evaluated
    )
    run_state.rounds = rounds
    run_state.averaging = tuple(history["averaging"]) if history["averaging"] else None
    run_state.callbacks = states_in(history, captured.training)
    return run_state
