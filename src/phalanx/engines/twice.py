"""A replica computed twice from the same state: what user code keeps elsewhere from call to call shows there.

In steps 0, 1, 10, 100 and so on, and in the first step of a process, every worker does so with its first replica. Later
steps find what acts late: a teacher that equals its student at first, a queue that is used once it is full.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.definition import checks
from phalanx.definition.current import CURRENT
from phalanx.definition.fields import Definition
from phalanx.definition.reachable import differences, values
from phalanx.errors import StateError, spell_samples
from phalanx.seams import Computed, Framework, Todo, Watch

EARLY = "backward() was called inside forward: use torch.autograd.grad there"
STEPS = (0, *(10**power for power in range(16)))
SHOWN = 6  # of what changed
HELD = re.compile(r"\._(?:modules|buffers|parameters)\['(.*?)'\]")
STATE = re.compile(r"model\b.*\._(?:buffers|parameters)\[")
WAYS = (
    "What code keeps from call to call differs from worker to worker, and is lost with one: keep it in a buffer of the "
    "model (for a loss, too: put its module into the model, and let forward_fn return the loss), or make it a function "
    "of the step: phalanx.current_step(). nondeterministic='allow' makes this a warning"
)


class Twice:
    """Stands for a framework in steps in which a replica is computed twice.

    Parameters
    ----------
    definition : Definition
    framework : Framework
    allow : bool
        Whether a difference is only warned of, once, by whoever computes the first replica.

    Attributes
    ----------
    due : set of int
        The updates of those steps.
    """

    def __init__(self, definition: Definition, framework: Framework, *, allow: bool) -> None:
        self._framework = framework
        self._definition = definition
        self._allow = allow
        updates = definition.rounds.updates
        self.due = {update for step in STEPS for update in range(updates(step), updates(step + 1))}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._framework, name)

    def begin(self, update: int) -> None:
        """It is the first one here."""
        rounds = self._definition.rounds
        if self.due:  # else it was warned
            self.due.update(range(update, rounds.updates(rounds.at(update).step + 1)))

    def gradients(self, todo: Sequence[Todo]) -> Iterator[Computed]:
        """See ``seams.Steppable.gradients``.

        Raises
        ------
        StateError
            The first replica came to something else when it was computed again, or left more behind than buffers.
        """
        if not todo or (self._allow and todo[0].replica):
            yield from self._framework.gradients(todo)
            return
        first, told = self._watched(todo[0])
        early = [f"{name!r} had a gradient before the backward pass ({EARLY})" for name, _ in told["early"]]
        written = [f"{name!r} {how}" for name, how in told["written"]]
        if early or (written and self._definition.replicas > 1):
            self._report(todo[0], "left more behind than buffers", early + written)
        if written:  # a lone replica may, as in a plain loop, and has done so now
            yield first
            yield from self._framework.gradients(todo[1:])
            return
        before = self._noted(first)
        del first  # the next gradient may lie in the same memory
        computing = self._framework.gradients(todo)
        second = next(computing)
        after = self._noted(second)
        if before != after:
            what = ", ".join(
                f"{name} {one}, then {after[name]}" if name == "loss" else f"another {name}"
                for name, one in before.items()
                if one != after[name]
            )
            changed = self._changed(todo[0], told["model"])
            self._report(
                todo[0], f"came out differently when it was computed again from the same state ({what})", changed
            )
        yield second
        yield from computing

    def _watched(self, one: Todo) -> tuple[Computed, dict[str, list[tuple[str, Any]]]]:
        """A replica, and what was told of parameters."""
        told: dict[str, list[tuple[str, Any]]] = {"model": [], "early": [], "written": []}

        def tell(kind: str, name: str, value: Any) -> None:
            if kind in told:
                told[kind].append((name, value))

        (computed,) = self._framework.gradients([one], Watch(tell, parameters=True))
        return computed, told

    def _noted(self, computed: Computed) -> dict[str, Any]:
        """What a replica came to, in numbers that can be compared."""
        arithmetic = self._framework.arithmetic
        (loss,) = arithmetic.read([computed.loss])
        sums = [arithmetic.checksum(vector or []) for vector in (computed.gradient, computed.buffers)]
        return {"loss": repr(loss), "weight": computed.weight} | dict(zip(("gradient", "buffers"), sums, strict=True))

    def _changed(self, one: Todo, model: Sequence[tuple[str, Any]]) -> list[str]:
        """What user code holds that is another after computing the replica once more; the state is not meant."""
        roots = {**self._definition.holders, **dict(model)}
        before = values(roots)
        with contextlib.suppress(Exception):
            for _ in self._framework.gradients([one]):
                pass
        found = [HELD.sub(r".\1", path) for path in differences(before, values(roots)) if not STATE.match(path)]
        return found or ["nothing in sight: an operation that does not come to the same twice, a clock, an iterator"]

    def _report(self, one: Todo, what: str, changed: Sequence[str]) -> None:
        name = self._definition.rounds.names[one.phase]
        moment = f"step {CURRENT.step}, phase {name!r}" if name else f"step {CURRENT.step}"
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        samples = one.share.samples
        message = (
            f"replica {one.replica} of {moment}, samples {spell_samples(samples)}, {what}; what changed in between: "
            f"{', '.join(changed[:SHOWN])}{more}. {WAYS}"
        )
        if not self._allow:
            raise StateError(message, step=CURRENT.step, replica=one.replica, samples=samples)
        checks.warn(message)
        self.due.clear()
