"""Callbacks that follow a metric: stop when it no longer improves, keep the weights with which it was best."""

from __future__ import annotations

import functools
import math
import pathlib
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.checkpoint import files, tensors
from phalanx.checkpoint.tensors import copied_weights, read_weights, weights_of
from phalanx.definition import checks
from phalanx.definition.callback import Callback
from phalanx.definition.checks import answering
from phalanx.definition.evaluation import meant
from phalanx.definition.plain import Each, check_like, taking_over
from phalanx.errors import UsageError

LARGE = re.compile(r"acc|auc|f1|f_?score|precision|recall|r2|iou|dice|bleu|rouge|correct", re.IGNORECASE)
SMALL = re.compile(r"loss|err|mse|mae|rmse|perplexity|ppl|nll|wer|cer|entropy", re.IGNORECASE)
FOLDER = "best"
STATE = {"metric": str, "kept": Each([float, int])}  # of SaveBest


class Better:
    """A metric by name, and whether large or small values of it are good.

    Parameters
    ----------
    metric : str
    mode : "min", "max" or "auto"
        "auto": as the metric's name says.
    min_delta : float
        By how much a value has to be better to count.

    Raises
    ------
    UsageError
        An argument is wrong, or the name says nothing.
    """

    def __init__(self, metric: str, mode: str, min_delta: float = 0.0) -> None:
        if not isinstance(metric, str) or not metric:
            raise UsageError(f"metric is {checks.shown(metric)}; it must be the name of a metric of evaluation=")
        checks.choice("mode", mode, ("auto", "min", "max"))
        if not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            raise UsageError(f"min_delta is {checks.shown(min_delta)}; it must be a number of at least 0")
        large, small = bool(LARGE.search(metric)), bool(SMALL.search(metric))
        if mode == "auto" and large == small:
            raise UsageError(
                f"metric is {metric!r}, of which the name does not say whether more is better; add mode='max' or 'min'"
            )
        self.metric = metric
        self._sign = 1 if mode == "max" or (mode == "auto" and large) else -1
        self._min_delta = min_delta

    def of(self, values: Mapping[str, float], names: Collection[str]) -> float | None:
        """The metric's value; None if it is of an evaluation that was not due. The loop refuses unknown names.

        ``names``: of all that is evaluated. Among those that were due, "accuracy" may be that of another data set.
        """
        name = meant(self.metric, names)
        return None if name is None else values.get(name)

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value improves on the best so far; NaN never does."""
        return not math.isnan(value) and (than is None or self._sign * (value - than) > self._min_delta)

    def rank(self, value: float) -> float:
        """Sorts the best value first."""
        return math.inf if math.isnan(value) else -self._sign * value


@answering(monitor="it is called metric: the name of a metric of evaluation=", min_change="it is called min_delta")
class EarlyStopping(Callback):
    """Ends the run once so many evaluations in a row have not improved on the best.

    It decides how many steps there are, so it changes the answer, as a few options of ``train`` do. The answer is exact
    all the same. Evaluations have the same bits for any number of workers, and the count is in snapshots. So a run that
    was killed and resumed stops after the same step.

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
        The metric's name: a run that does not evaluate it is refused.
    """

    everywhere = True
    may_fail = True

    def __init__(self, metric: str, patience: int = 3, min_delta: float = 0.0, mode: str = "auto") -> None:
        self._better = Better(metric, mode, min_delta)
        self.waits_for = metric
        self._patience = checks.integer("patience", patience, least=1)
        self._spelled = f"{type(self).__name__}({metric!r}, patience={self._patience})"
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
        if self.stopped_at is not None:
            run.stop(self._stopped_by)

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Compare with the best."""
        value = self._better.of(values, self._run.metric_names)
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
        return {
            "metric": self.waits_for,
            "best": self.best_value,
            "waited": self._waited,
            "stopped_at": self.stopped_at,
            "stopped_by": self._stopped_by,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue counting from there."""
        state = {"metric": self.waits_for, "stopped_by": self._spelled, **state}  # older snapshots may lack these
        kinds = {"metric": str, "best": float | None, "waited": int, "stopped_at": int | None, "stopped_by": str}
        check_like(state, kinds, "EarlyStopping")
        if _is_another(self, state["metric"]):
            return
        self.best_value, self._waited, self.stopped_at = state["best"], state["waited"], state["stopped_at"]
        self._stopped_by, self._resumed = state["stopped_by"], True


def _is_another(callback: Any, metric: str) -> bool:
    """Whether a snapshot's state is of another metric than that of a callback; warns that it begins anew then."""
    if metric == callback.waits_for:
        return False
    checks.warn(
        f"the snapshot has the state of {type(callback).__name__}({metric!r}), and this run has "
        f"{type(callback).__name__}({callback.waits_for!r}), which begins anew there"
    )
    return True


@dataclass(frozen=True, eq=False)
class Best:
    """Weights that were good.

    Attributes
    ----------
    metric : str
    value : float
        Of the metric.
    steps : int
        How many were done.
    path : pathlib.Path or None
        The safetensors file in ``run_dir``; None where they are kept in memory.
    """

    metric: str
    value: float
    steps: int
    path: pathlib.Path | None = None
    kept: dict[str, Any] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.6g} after {self.steps} steps"

    @property
    def weights(self) -> dict[str, Any]:
        """Parameters and buffers by name: ``model.load_state_dict(result.best.weights)``; averaged with ``EMA``."""
        if self.kept is not None:
            return self.kept
        assert self.path is not None
        for _ in range(100):  # 5 s: of several processes, the first may still be writing it
            if self.path.exists():
                return read_weights(self.path)
            time.sleep(0.05)
        raise UsageError(f"the first process keeps the weights in its run_dir: {self.path} is not on this host")


@answering(
    monitor="it is called metric: the name of a metric of evaluation=",
    save_top_k="it is called keep",
    dirpath="they are kept in best/ of train(run_dir=...)",
    filename="they are kept as best/METRIC-step-....safetensors of train(run_dir=...)",
)
class SaveBest(Callback):
    """Keeps the best weights by a metric: as files in the run's directory, or in memory where there is none.

    Over several hosts each process has the same ``best``. The first writes the files.

    Parameters
    ----------
    metric : str
        The name of a metric of ``evaluation=``.
    keep : int, default 1
        How many are kept.
    mode : "auto", "min" or "max"
        What is better; "auto": as the metric's name says.

    Attributes
    ----------
    kept : list of Best
        The best first.
    """

    everywhere = True
    may_fail = True
    writes_best = True

    def __init__(self, metric: str, keep: int = 1, mode: str = "auto") -> None:
        self._better = Better(metric, mode)
        self._metric, self._mode = metric, mode  # which snapshots tell
        self.waits_for = metric
        self._keep = checks.integer("keep", keep, least=1)
        self.kept: list[Best] = []
        self._run: Any = None
        self._folder: pathlib.Path | None = None
        self._known: list[tuple[float, int]] = []  # what a snapshot says is there
        self._tidy = True  # whether the folder has files of this run only

    @property
    def best(self) -> Best | None:
        """The best of all; also ``result.best``."""
        return self.kept[0] if self.kept else None

    def begin(self, run: Any) -> None:
        """Begin anew, unless the run goes on from a snapshot: then nothing is removed yet, as it may be refused."""
        self._run = run
        self._folder = None if run.kept_in is None else run.kept_in.resolve() / FOLDER
        self.kept = [Best(self._better.metric, value, steps, self._file_of(steps)) for value, steps in self._known]
        self._known, self._tidy = [], not self._writes
        if run.resumed_from is None:
            self._clear()

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Keep the weights if they are among the best."""
        self._clear()
        value = self._better.of(values, self._run.metric_names)
        full = len(self.kept) >= self._keep
        if value is None or not self._better.is_better(value, self.kept[-1].value if full else None):
            return
        run, steps = self._run, self._run.steps
        path, state = self._file_of(steps), (run.model, run.params, run.averaged or {})
        if path is not None and self._writes:
            files.make_folder(path.parent)
            files.replace(path, functools.partial(tensors.write, tensors=weights_of(*state)))
        kept = Best(self._better.metric, value, steps, path, None if path else copied_weights(*state))
        ranked = sorted([*self.kept, kept], key=lambda item: (self._better.rank(item.value), item.steps))
        self.kept, gone = ranked[: self._keep], ranked[self._keep :]
        for item in gone:
            if item.path is not None and self._writes:
                files.remove(item.path)

    def state(self) -> dict[str, Any]:
        """Which are kept, without their weights."""
        return {"metric": self._better.metric, "kept": [[item.value, item.steps] for item in self.kept]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there: their files are in the directory."""
        check_like(state, STATE, "SaveBest")
        if _is_another(self, state["metric"]):
            return
        self._known = [(value, steps) for value, steps in state["kept"]]

    @property
    def _writes(self) -> bool:
        """Whether this process keeps the run now: over hosts another one may begin to, once the first has fallen."""
        return self._run.run_dir is not None

    def _clear(self) -> None:
        """Remove files of steps that are done again, once."""
        if self._tidy or self._folder is None:
            return
        files.make_folder(self._folder)
        files.clear_away(self._folder)
        for path in set(self._folder.glob(file_of(self._better.metric, "[0-9]" * 12))) - {
            one.path for one in self.kept
        }:
            files.remove(path)
        self._tidy = True

    def _file_of(self, steps: int) -> pathlib.Path | None:
        return None if self._folder is None else self._folder / file_of(self._better.metric, steps)


def file_of(metric: str, steps: int | str) -> str:
    """The name of a file of weights; ``steps`` may be a pattern of twelve digits."""
    name = re.sub(r"[^\w.-]", "-", metric)
    return f"{name}-step-{steps:0>12}.safetensors"


def best_in(run: pathlib.Path, states: Mapping[str, Any]) -> tuple[int, pathlib.Path]:
    """After how many steps a run was best, and the file of its weights then; ``states``: of its callbacks.

    Raises
    ------
    UsageError
        SaveBest kept none there.
    """
    state = next(
        (state for name, state in states.items() if name.startswith(SaveBest.__name__)), {"metric": "", "kept": []}
    )
    with taking_over("the state of SaveBest"):
        check_like(state, STATE, "SaveBest")
    if not state["kept"]:
        raise UsageError(
            f"--best is given, but {str(run)!r} has no best weights up to its newest snapshot; train with "
            "callbacks=[phalanx.callbacks.SaveBest('accuracy')] and a run_dir"
        )
    steps = state["kept"][0][1]
    path = run / FOLDER / file_of(state["metric"], steps)
    if not path.is_file():
        raise UsageError(
            f"--best is given, but there is no {str(path)!r}; give the directory of a run, not a snapshot. If the run "
            "was killed after a better step, go on with it first"
        )
    return steps, path
