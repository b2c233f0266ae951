"""What the caller's process knows of the state of a step, besides what lies in the arena.

Weights, buffers, optimizer state lie in the arena, and in the snapshot there. Options of optimizers and schedules
follow from those of an earlier step and the losses since.
Batches that the caller brought cannot be read again, so they are kept as long as a step may have to be done again.
"""

from __future__ import annotations

from typing import Any

from phalanx.seams import RunState
from phalanx.shared.reports import Reports
from phalanx.shared.state import Mirror


class StateRecord:
    """What a worker has to know to be at the beginning of a step.

    Parameters
    ----------
    mirror : Mirror
        The caller's own state, and the way into the arena.
    run_state : RunState
        The steps that the caller has seen.
    reports : Reports
        Of the steps that it has not seen yet.

    Attributes
    ----------
    home : int or None
        The step at which the caller's own state is; None once there is a snapshot by the caller's wish, which takes its
        place.
    batches : dict
        Those that the caller brought since the last snapshot, by their step, as they are written for workers.
    """

    def __init__(self, mirror: Mirror, run_state: RunState, reports: Reports) -> None:
        self._mirror = mirror
        self._run_state = run_state
        self._reports = reports
        self.home: int | None = self.seen
        self.batches: dict[int, bytes] = {}
        self._base: tuple[int, Any] = (self.seen, None)  # a step, and the options before it
        self._foreign: Any = None  # state of an optimizer that is not the framework's own, as the caller has it

    @property
    def seen(self) -> int:
        """How many steps the caller has seen."""
        return len(self._run_state.loss_history)

    @property
    def base(self) -> int:
        """The step from which on losses have to be told."""
        return self._base[0]

    def put(self) -> int:
        """Put the caller's own state into the arena; returns its step."""
        assert self.home is not None  # it is given up only when there is a snapshot
        state = self._mirror.put()
        self._base = (self.home, state["options"])
        self._foreign = state["foreign"]
        return self.home

    def keep(self, step: int, options: Any) -> None:
        """A snapshot before ``step`` has taken the place of the caller's own state, which may change from here on."""
        self.home, self._base = None, (step, options)

    def note_batch(self, step: int, batch: bytes, *, kept: int) -> int:
        """The caller brought a batch; those that the snapshot covers may go. Returns the bytes of all that are kept."""
        self.batches = {earlier: kept_batch for earlier, kept_batch in self.batches.items() if earlier >= kept}
        self.batches[step] = batch
        return sum(map(len, self.batches.values()))

    def loss(self, step: int) -> float:
        """Of a finished step."""
        return self._run_state.loss_history[step] if step < self.seen else self._reports.read(step)[0]

    def described(self, step: int) -> dict[str, Any]:
        """What to tell a worker that is to be at the beginning of ``step``."""
        begun, options = self._base
        return {
            "step": step,
            "foreign": self._foreign,
            "options": options,
            "losses": [self.loss(earlier) for earlier in range(begun, step)],
            "restore": False,
        }
