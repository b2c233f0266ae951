"""What R costs: said once in a run that takes long, since whoever took the default may not know it.

A model that computes R shares pays R times for what does not depend on their size: Python and autograd for each
operation, reading weights, writing gradients. How much that is follows from two shares, computed one by one and as one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from phalanx.definition import checks
from phalanx.definition.batches import BatchShares
from phalanx.definition.fields import Definition
from phalanx.plan import replica_key
from phalanx.seams import Framework
from phalanx.seams.records import RunState, Todo

LONG_SECONDS = 30.0  # of a run that is done, and at least as many to come
DEAR = 1.5
TRIES = 3


class Price:
    """Looks at the steps of a run, and measures what R costs as soon as it is known to take long.

    Parameters
    ----------
    definition : Definition
    framework : Framework
        In the caller's process, with any weights.
    run_state : RunState
        What was done; ``priced`` says whether somebody has looked already.
    """

    def __init__(self, definition: Definition, framework: Framework, run_state: RunState) -> None:
        self._definition = definition
        self._framework = framework
        self._run_state = run_state
        self._seconds = 0.0
        self._seen = 0
        # Not where two shares are not one of twice the size, nor where another size would be compiled for.
        unfit = definition.source is None or definition.batch_size is None or framework.lanes is not None
        run_state.priced |= unfit or definition.replicas == 1 or framework.compiles

    def look(self, seconds: float) -> None:
        """Hear how long a step took."""
        if self._run_state.priced:
            return
        self._seconds += seconds
        self._seen += 1
        left = (self._definition.updates or 0) - len(self._run_state.loss_history)
        if self._seconds < LONG_SECONDS or left * self._seconds / self._seen < LONG_SECONDS:
            return
        self._run_state.priced = True
        # User code that fails will do so in a step, which says where; and no warning may lose the report of this one.
        with contextlib.suppress(Exception):
            found = price(self._definition, self._framework)
            if found > DEAR:
                checks.warn(
                    f"replicas={self._definition.replicas} takes about {found:.1f} times the computing of one replica "
                    "here, as each of its shares is small; `phalanx tune FILE`, or phalanx.tune(recipe), measures what "
                    "other numbers cost (they are part of the answer: another one ends in other weights)"
                )


def price(definition: Definition, framework: Framework) -> float:
    """Processor time of forward and backward for R shares, over that for the whole batch as one.

    Two shares are computed one by one and as one, a few times each; the rest is arithmetic, so that no more memory is
    needed than for twice a share. Nothing of the run changes.
    """
    with framework.environment:
        one, other = BatchShares(definition, framework.opened).planned(0)[:2]
        both = dataclasses.replace(one, samples=np.concatenate([one.samples, other.samples]))
        key = replica_key(definition.seed, 0, 0, definition.replicas)
        todo = [Todo(0, key, one, 1.0), Todo(1, key, other, 1.0), Todo(0, key, both, 1.0)]
        times = [(_seconds(framework, todo[:2]), _seconds(framework, todo[2:])) for _ in range(TRIES)]
        framework.rewind()
    apart, together = (min(column) for column in zip(*times, strict=True))
    fixed = max(0.0, apart - together)  # of a share, whatever its size
    proportional = max(0.0, apart / 2 - fixed)
    return definition.replicas * (fixed + proportional) / (fixed + definition.replicas * proportional)


def _seconds(framework: Framework, todo: Sequence[Todo]) -> float:
    began = time.process_time()
    for _ in framework.gradients(todo):
        pass
    return time.process_time() - began
