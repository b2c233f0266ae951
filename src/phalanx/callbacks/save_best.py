"""Keep the weights with which a metric was best."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.callbacks.better import Better
from phalanx.checkpoint import files, tensors
from phalanx.checkpoint.tensors import copied_weights, read_weights, weights_of
from phalanx.definition import checks
from phalanx.definition.checks import answering
from phalanx.definition.plain import Each, check_like

FOLDER = "best"
NAME = re.compile(r"step-(\d{12})\.safetensors")


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

    @property
    def weights(self) -> dict[str, Any]:
        """Parameters and buffers by name: ``model.load_state_dict(result.best.weights)``; averaged with ``EMA``."""
        if self.kept is not None:
            return self.kept
        assert self.path is not None
        return read_weights(self.path)


@answering(
    monitor="it is called metric: the name of a metric of evaluation=",
    save_top_k="it is called keep",
    dirpath="they are kept in best/ of train(run_dir=...)",
    filename="they are kept as best/step-....safetensors of train(run_dir=...)",
)
class SaveBest:
    """Keeps the best weights by a metric: as files in the run's directory, or in memory where there is none.

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

    def __init__(self, metric: str, keep: int = 1, mode: str = "auto") -> None:
        self._better = Better(metric, mode)
        self.waits_for = metric
        self._keep = checks.integer("keep", keep, least=1)
        self.kept: list[Best] = []
        self._run: Any = None
        self._folder: pathlib.Path | None = None
        self._known: list[tuple[float, int]] | None = None

    @property
    def best(self) -> Best | None:
        """The best of all; also ``result.best``."""
        return self.kept[0] if self.kept else None

    def begin(self, run: Any) -> None:
        """Begin anew, unless the run goes on from a snapshot; files of steps that are done again are written again."""
        self._run, known = run, self._known or []
        self._folder = None if run.run_dir is None else run.run_dir.resolve() / FOLDER
        self.kept = [Best(self._better.metric, value, steps, self._file_of(steps)) for value, steps in known]
        self._known = None
        if self._folder is None:
            return
        files.make_folder(self._folder)
        files.clear_away(self._folder)
        names = {self._file_of(steps) for _, steps in known}
        for path in self._folder.iterdir():
            if path not in names and NAME.fullmatch(path.name):
                files.remove(path)

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Keep the weights if they are among the best."""
        value = self._better.of(values)
        full = len(self.kept) >= self._keep
        if value is None or not self._better.is_better(value, self.kept[-1].value if full else None):
            return
        run, steps = self._run, self._run.steps
        path, state = self._file_of(steps), (run.model, run.params, run.averaged or {})
        if path is None:
            kept = Best(self._better.metric, value, steps, None, copied_weights(*state))
        else:
            files.make_folder(path.parent)
            files.replace(path, functools.partial(tensors.write, tensors=weights_of(*state)))
            kept = Best(self._better.metric, value, steps, path)
        ranked = sorted([*self.kept, kept], key=lambda item: (self._better.rank(item.value), item.steps))
        self.kept, gone = ranked[: self._keep], ranked[self._keep :]
        for item in gone:
            if item.path is not None:
                files.remove(item.path)

    def state(self) -> dict[str, Any]:
        """Which are kept, without their weights."""
        return {"kept": [[item.value, item.steps] for item in self.kept]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there: their files are in the directory."""
        check_like(state, {"kept": Each([float, int])}, "SaveBest")
        self._known = [(value, steps) for value, steps in state["kept"]]

    def _file_of(self, steps: int) -> pathlib.Path | None:
        return None if self._folder is None else self._folder / f"step-{steps:012d}.safetensors"
