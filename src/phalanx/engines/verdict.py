"""Who was wrong where something was computed twice and came out differently; a fresh process breaks ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.errors import CorruptionError, PhalanxError, RunError
from phalanx.plan.audit import wrong
from phalanx.plan.placement import Placement, place
from phalanx.seams import RunState

MOST = 5  # wrong values in one step that end the run


class Court(Protocol):
    """An engine with workers, as far as a jury needs it."""

    run_state: RunState
    lost: bool

    def ask(self, task: str, facts: dict[str, Any]) -> list[Any]:
        """Have every worker do its part of a task; their answers."""
        ...

    def fetch(self) -> None:
        """Take the state home into the caller's framework."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


Open = Callable[[Placement, RunState], Court]


def decided(
    error: CorruptionError,
    again: Mapping[int, int],
    open_court: Open | None,
    definition: Definition,
    done: RunState,
    batch: Any,
) -> list[int]:
    """The workers that were wrong; a fresh process decides where votes are even. None where nobody can tell."""
    blamed = wrong(error.votes, again)
    if blamed is None and open_court is not None:
        blamed = wrong(error.votes, again, witness(open_court, definition, done, question_of(error, batch)))
    return sorted({max(worker, 0) for worker in blamed or ()})  # one that is alone computed twice by itself


def question_of(error: CorruptionError, batch: Any) -> dict[str, Any]:
    """What is asked of others."""
    facts = {"what": error.what, "replica": error.replica, "block": error.block, "piece": error.piece}
    return {**facts, "batch": batch}


def witness(open_court: Open, definition: Definition, done: RunState, question: dict[str, Any]) -> int | None:
    """What a fresh process comes to, from the state that the caller's framework has; None where none can be started."""
    try:
        fresh = open_court(place(definition.replicas, 1), RunState(list(done.loss_history), priced=True))
    except (PhalanxError, OSError) as error:
        checks.warn(f"no process could be started to tell who computed a wrong value: {error}")
        return None
    try:
        return fresh.ask("vote", question)[0]
    finally:
        fresh.lost = True  # nothing of it is taken home
        fresh.close()


def endless(error: CorruptionError) -> RunError:
    """A step that comes out differently again and again."""
    return RunError(
        f"audits of step {error.step} found wrong values {MOST} times in a row; test this machine's memory and "
        "processors, or, if the model does not compute the same twice, see what phalanx check says",
        step=error.step,
    )
