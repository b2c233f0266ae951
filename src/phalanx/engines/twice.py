"""A replica computed twice from the same state: what user code keeps elsewhere from call to call shows there.

In steps 0, 1, 10, 100 and so on, and in the first step of a process, every worker does so with its first replica. Later
steps find what acts late: a teacher that equals its student at first, a queue that is used once it is full.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.definition.reachable import differences, values
from phalanx.errors import StateError, spell_samples
from phalanx.seams import Computed, Framework, Todo, Watch
from phalanx.surroundings.current import CURRENT

STEPS = (0, *(10**power for power in range(16)))
SHOWN = 6  # of what changed
HELD = re.compile(r"\._(?:modules|buffers|parameters)\['(.*?)'\]")
STATE = re.compile(r"model\b.*\._(?:buffers|parameters)\[")
UNSEEN = "nothing in sight (an operation that does not come to the same twice, a generator, a clock, faulty memory)"
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
    allow : bool or None
        Whether a difference is only warned of, once, by whoever computes the first replica; None: nothing is due.

    Attributes
    ----------
    due : dict
        The updates of those steps, and this for each of them.
    """

    def __init__(self, definition: Definition, framework: Framework, *, allow: bool | None) -> None:
        self._definition = definition
        self._framework = framework
        self._allow = allow
        self._after = definition.rounds.updates
        self.due: dict[int, Any] = {}
        for step in STEPS:
            self.begin(self._after(step))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._framework, name)

    def begin(self, update: int) -> None:
        """What is left of its step is computed twice, too: the process begins there."""
        if self._allow is not None:
            step = self._definition.rounds.at(update).step
            self.due |= dict.fromkeys(range(update, self._after(step + 1)), self)

    def gradients(self, todo: Sequence[Todo]) -> Iterator[Computed]:
        """See ``seams.Framework.gradients``.

        Raises
        ------
        StateError
            The first replica came to something else when it was computed again, or left more behind than buffers.
        """
        if not todo or (self._allow and todo[0].replica):
            yield from self._framework.gradients(todo)
            return
        told: dict[str, list[Any]] = defaultdict(list)
        watch = Watch(lambda kind, name, value: told[kind].append((name, value)), parameters=True)
        (first,) = self._framework.gradients(todo[:1], watch)
        if told["early"] or (told["written"] and self._definition.replicas > 1):
            changed = [f"{name!r} {how}" for name, how in told["early"] + told["written"]]
            self._report(todo[0], "left more behind than buffers", changed)
        if told["written"]:  # a lone replica may, as in a plain loop, and has done so now
            yield first
            todo = todo[1:]
        before = self._noted(first)
        del first  # the next gradient may lie in the same memory
        for number, computed in enumerate(self._framework.gradients(todo)):
            if not number and not told["written"] and before != (after := self._noted(computed)):
                what = ", ".join(name for name, value in before.items() if value != after[name])
                changed = self._changed(todo[0], dict(told["model"]))
                self._report(todo[0], f"came to {what} when it was computed again from the same state", changed)
            yield computed

    def _noted(self, computed: Computed) -> dict[str, Any]:
        """What a replica came to, in numbers that can be compared."""
        arithmetic = self._framework.arithmetic
        return {
            "another loss": repr(arithmetic.read([computed.loss])),
            "another weight": computed.weight,
            "another gradient": arithmetic.checksum(computed.gradient or []),
            "other buffers": arithmetic.checksum(computed.buffers),
        }

    def _changed(self, one: Todo, model: dict[str, Any]) -> list[str]:
        """What user code holds that is another after computing the replica once more; the state is not meant."""
        roots = {**self._definition.holders, **model}
        before = values(roots)
        with contextlib.suppress(Exception):
            list(self._framework.gradients([one]))
        found = differences(before, values(roots))
        return [HELD.sub(r".\1", path) for path in found if not STATE.match(path)] or [UNSEEN]

    def _report(self, one: Todo, what: str, changed: Sequence[str]) -> None:
        name, samples = self._definition.rounds.names[one.phase], one.share.samples
        moment = f"step {CURRENT.step}, phase {name!r}" if name else f"step {CURRENT.step}"
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        message = (
            f"replica {one.replica} of {moment}, samples {spell_samples(samples)}, {what}; what changed in between: "
            f"{', '.join(changed[:SHOWN])}{more}. {WAYS}"
        )
        if not self._allow:
            raise StateError(message, step=CURRENT.step, replica=one.replica, samples=samples)
        checks.warn(message)
        self._allow, self.due = None, {}
