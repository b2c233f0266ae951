"""Stop a run when a metric has not become better for a while."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.callbacks.better import Better
from phalanx.definition import checks
from phalanx.definition.checks import answering
from phalanx.definition.plain import check_like


@answering(monitor="it is called metric: the name of a metric of evaluation=", min_change="it is called min_delta")
class EarlyStopping:
    """Ends the run once so many evaluations in a row have not improved on the best.

    It decides how many steps there are, so it is the one option of ``train`` that changes the answer. The answer is
    exact all the same: evaluations have the same bits for any number of workers, and what was counted is in snapshots,
    so a run that was killed and resumed stops after the same step.

    Parameters
    ----------
    metric : str
        The name of a metric of ``evaluation=``, as in ``result.metric_history``.
    patience : int, default 3
        Evaluations without an improvement after which the run ends.
    min_delta : float, default 0.0
        By how much a value has to be better to be an improvement.
    mode : "auto", "min" or "max"
        What is better; "auto": as the metric's name says ("accuracy": more, "loss": less).

    Attributes
    ----------
    best_value : float or None
        The best value so far.
    stopped_at : int or None
        After how many steps the run was ended.
    waits_for : str
        The metric's name: a run that evaluates nothing is refused.
    """

    everywhere = True

    def __init__(self, metric: str, patience: int = 3, min_delta: float = 0.0, mode: str = "auto") -> None:
        self._better = Better(metric, mode, min_delta)
        self.waits_for = metric
        self._patience = checks.integer("patience", patience, least=1)
        said = {"patience": self._patience, "min_delta": min_delta, "mode": mode}
        usual = {"min_delta": 0.0, "mode": "auto"}
        shown = [f"{name}={value!r}" for name, value in said.items() if usual.get(name) != value]
        self._spelled = f"{type(self).__name__}({', '.join([repr(metric), *shown])})"
        self._stopped_by = self._spelled
        self.best_value: float | None = None
        self.stopped_at: int | None = None
        self._waited = 0
        self._run: Any = None
        self._resumed = False

    def begin(self, run: Any) -> None:
        """Count from 0 in each run, unless it goes on from a snapshot; one that had ended stays so."""
        self._run = run
        if not self._resumed:
            self.best_value, self.stopped_at, self._waited = None, None, 0
        self._resumed = False
        if self.stopped_at is None:
            return
        if self._stopped_by != self._spelled:
            checks.warn(
                f"the run was stopped after {self.stopped_at} steps by {self._stopped_by}, and stays so, though it is "
                f"{self._spelled} now; choose another run_dir, or leave the callback out to go on"
            )
        run.stop(self._stopped_by)

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Compare with the best."""
        value = self._better.of(values)
        if value is None:
            return
        if self._better.is_better(value, self.best_value):
            self.best_value, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            self.stopped_at, self._stopped_by = self._run.steps, self._spelled
            self._run.stop(self._spelled)

    def state(self) -> dict[str, Any]:
        """What was counted."""
        counted = {"best": self.best_value, "waited": self._waited, "stopped_at": self.stopped_at}
        return counted if self.stopped_at is None else {**counted, "stopped_by": self._stopped_by}

    def load(self, state: Mapping[str, Any]) -> None:
        """Count on from there."""
        ended = {} if state["stopped_at"] is None else {"stopped_by": str}
        kinds = {"best": float | None, "waited": int, "stopped_at": int | None, **ended}
        check_like(state, kinds, "EarlyStopping")
        self.best_value, self._waited, self.stopped_at = state["best"], state["waited"], state["stopped_at"]
        self._stopped_by = state.get("stopped_by", self._spelled)
        self._resumed = True
