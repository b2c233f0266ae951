"""What keeps the chain of a run: a link for every step, and now and then a digest of the state beside it."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np

from phalanx.checkpoint.chain import BROUGHT, CHAIN, ChainFile
from phalanx.checkpoint.directory import RunDirectory
from phalanx.checkpoint.origin import origin_of, remember
from phalanx.checkpoint.pacing import Pacing
from phalanx.checkpoint.snapshot import tensors_of
from phalanx.checkpoint.tensors import leaf
from phalanx.definition.fields import Definition
from phalanx.definition.fingerprint import hashed
from phalanx.definition.streams import Drawn
from phalanx.errors import UsageError
from phalanx.frameworks.registry import recorded_environment
from phalanx.seams import Engine
from phalanx.seams.events import StepReport
from phalanx.seams.observer import Observer
from phalanx.seams.snapshots import Captured

SHARE = 0.004  # of the time, at most, for digests of the state, with "auto"
SECONDS = 5.0  # between two of them, at least
SAMPLES = 32  # hexadecimal digits of the hash of what was dealt


class Chained(Observer):
    """Adds a link to the chain for every step.

    Parameters
    ----------
    directory : RunDirectory
    definition : Definition
    every : int or None
        Steps from one digest of the state to the next; None: as seldom as costs next to nothing; 0: none.
    recipe : dict
        The recipe's fingerprint.
    """

    def __init__(self, directory: RunDirectory, definition: Definition, every: int | None, recipe: Any) -> None:
        self._directory = directory
        self._definition = definition
        self._every = every
        self._recipe = recipe
        self._chain: ChainFile | None = None
        self._engine: Engine | None = None
        self._brought = ""
        self._pacing = Pacing(every, SECONDS, SHARE)

    def begin(self, engine: Engine, run: Any = None) -> None:
        """Go on with the chain, or begin one; note recipe and environment, and the state as it is."""
        self._engine = engine
        done = engine.run_state.steps
        try:
            told = (
                len(self._definition.rounds.every) * self._definition.replicas + len(self._definition.phases or ()) * 3
            )
            self._chain = ChainFile(self._directory.root / CHAIN, done, told)
        except OSError as error:
            where = str(self._directory.root / CHAIN)
            raise UsageError(f"the run's chain, {where!r}, cannot be written: {error}; mend that file") from error
        self._directory.before_writing.append(self._chain.sync)
        remember(self._directory.root, self._definition)
        facts = {"recipe": self._recipe, "environment": recorded_environment(), "replicas": self._definition.replicas}
        self._chain.record("run", step=done, origin=origin_of(self._definition), **facts)
        engine.run_state.chain = self._chain.root
        if self._every != 0:
            self._digest(done)

    def brought(self, batch: Any) -> None:
        """The next step's samples are these, brought by the caller or a stream."""
        self._brought = brought_as(batch)

    def horizon(self, steps: int) -> int:
        """The step after which the next digest is due, or, with "auto", probably is."""
        return self._pacing.horizon(steps)

    def step(self, report: StepReport) -> None:
        """Add the step's link; digest the state if that is due."""
        assert self._chain is not None, "no step comes before begin"
        assert self._engine is not None
        brought, self._brought = self._brought, ""
        self._engine.run_state.chain = self._chain.add(fields_of(report, self._definition, brought))
        self._pacing.stepped(report.seconds)
        if self._pacing.due(report.step + 1):
            self._digest(report.step + 1)

    def end(self) -> None:
        """Write no more."""
        if self._chain is not None:
            self._chain.close()

    def _digest(self, steps: int) -> None:
        assert self._chain is not None, "nobody asks before begin"
        assert self._engine is not None
        began = time.monotonic()
        captured = self._engine.capture()
        try:
            leaves = leaves_of(captured)
            self._chain.record("state", step=steps, leaves=leaves)
            self._directory.digested = steps, leaves
        finally:
            captured.release()
        self._pacing.took(began)


def fields_of(report: StepReport, definition: Definition, brought: str = "") -> dict[str, Any]:
    """What a link says of a step; ``brought``: the hash of the batch, if the caller brought it."""
    dealt = brought or dealt_as(definition.plan.indices(report.step))
    phases = {name: list(phase) for name, phase in report.phases.items()}
    return {
        "step": report.step, "samples": dealt, "loss": report.loss, "norm": report.grad_norm, "lr": report.lr,
        "losses": list(report.parts[0::2]), "weights": list(report.parts[1::2]),
        **({"phases": phases} if phases else {}),
    }  # fmt: skip


def dealt_as(samples: Any) -> str:
    """A hash of sample indices in their order."""
    return hashlib.sha256(np.asarray(samples, np.int64).tobytes()).hexdigest()[:SAMPLES]


def brought_as(batch: Any) -> str:
    """A hash of what the caller or a stream brought for a step."""
    return batch.hash[:SAMPLES] if isinstance(batch, Drawn) else BROUGHT + hashed(batch).hex()[:SAMPLES]


def leaves_of(captured: Captured) -> dict[str, str]:
    """A hash of each tensor of a state, by name: parameters, buffers, optimizer state; as snapshots have them, too."""
    return {name: leaf(tensor) for name, tensor in tensors_of(captured.weights, captured.training).items()}
