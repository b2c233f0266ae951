"""Train a part of the model from an epoch on."""

from __future__ import annotations

from typing import Any

from phalanx.definition import checks
from phalanx.definition.callback import Callback
from phalanx.errors import UsageError


class Thaw(Callback):
    """Freezes parameters when the run begins, and trains them from an epoch on.

    The step at which they are thawed follows from the recipe, and snapshots have what is frozen, so the answer is exact
    for any number of workers, kills and resumes. It is an option that changes the answer. A run may go on with another
    epoch or other names: a warning says so. Where the run before has done the next step, and that comes to something
    else now, it is refused as another recipe is, unless ``resume="anyway"``.

    Parameters
    ----------
    *names : str
        Names of modules or parameters, or patterns, as ``run.thaw`` takes them: ``Thaw("encoder", epoch=2)``.
    epoch : int
        The first epoch, counted from 0, in which they are trained; at least 1.
    """

    everywhere = True
    may_fail = True

    def __init__(self, *names: str, epoch: int) -> None:
        self._names, self._run, self._same = names, None, False
        self.thaws_in = checks.integer("epoch", epoch, least=1)
        if not names:
            raise UsageError("Thaw has no names; name parameters, as in Thaw('encoder', epoch=2)")

    def begin(self, run: Any) -> None:
        """Freeze them, unless the run goes on from a snapshot of a run with the same, which has what was frozen."""
        self._run: Any = run
        if run.epoch is None:
            raise UsageError("Thaw counts epochs, and a stream or brought batches have none; call run.thaw() yourself")
        if not (run.steps and self._same):
            change = run.freeze if run.epoch < self.thaws_in else run.thaw
            change(*self._names)
        self._same = False

    def step(self, report: Any) -> None:
        """Thaw them where the epoch before ends."""
        if report.epoch is not None and report.epoch < self.thaws_in == self._run.epoch:
            self._run.thaw(*self._names)

    def state(self) -> dict[str, Any]:
        """What is frozen until when."""
        return {"names": list(self._names), "epoch": self.thaws_in}

    def load(self, state: Any) -> None:
        """Compare with what the snapshot was saved with."""
        self._same = state == self.state()
        if not self._same:
            checks.warn(
                f"the snapshot was saved with Thaw of {state}, and this run has {self.state()}, which is to hold from "
                "here on; what else was frozen stays so, unless run.thaw() is called"
            )
