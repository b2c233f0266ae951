"""The runs of a folder side by side: arguments, last values, state, and which is the best."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.callbacks.best import Better
from phalanx.checkpoint.chain import CHAIN, records
from phalanx.checkpoint.directory import LOG, at_work
from phalanx.cli.pages import RATE, History, read
from phalanx.errors import UsageError

LOSS = "loss"


@dataclass(frozen=True)
class Row:
    """A run.

    Attributes
    ----------
    name : str
        Of its directory; "." for the folder itself.
    arguments : dict
        Of the function that returned its recipe.
    steps : int
        How many are done.
    loss : float or None
        Of the last step.
    metrics : dict of str to float
        The last value of each.
    best : dict
        The best ``value`` of a metric or the loss, its ``name``, and after how many ``steps`` it was; may be empty.
    state : str
    best_of_all : bool
    """

    name: str
    arguments: dict[str, Any]
    steps: int
    loss: float | None
    metrics: dict[str, float]
    best: dict[str, Any]
    state: str
    best_of_all: bool = False


def rows_of(folder: pathlib.Path) -> list[Row]:
    """The runs in ``folder``, and ``folder`` if it is one, by name.

    Raises
    ------
    UsageError
        There are none.
    """
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    runs = {str(path.relative_to(folder)): path for path in (folder, *below) if (path / LOG).is_file()}
    if not runs:
        raise UsageError(f"DIR is {str(folder)!r}, in which there is no run; give a folder with directories of runs")
    rows = [_row(name, path, read(path)) for name, path in runs.items()]
    names = [row.best["name"] for row in rows if row.best]
    shared = next((name for name in names if name != LOSS), LOSS)
    values = {number: row.best["value"] for number, row in enumerate(rows) if row.best and row.best["name"] == shared}
    first = min(values, key=lambda number: _better(shared).rank(values[number]), default=None)
    return [replace(row, best_of_all=number == first) for number, row in enumerate(rows)]


def table(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The lines of a table, with a column for each argument and metric."""
    arguments = list(dict.fromkeys(name for row in rows for name in row.arguments))
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    yield ["run", *arguments, "steps", "loss", *metrics, "best", "state"]
    for row in rows:
        best = "{name} {value:.4g} after {steps}".format(**row.best) if row.best else ""
        values = [row.arguments.get(name, "") for name in arguments]
        numbers = [row.loss, *(row.metrics.get(name) for name in metrics)]
        shown = ["" if number is None else f"{number:.4g}" for number in numbers]
        mark = " *" if row.best_of_all else ""
        yield [row.name, *map(str, values), str(row.steps), *shown, best + mark, row.state]


def _row(name: str, path: pathlib.Path, history: History) -> Row:
    curves = {name: points for name, points in history.curves().items() if points}
    metrics = {name: points for name, points in curves.items() if name not in (LOSS, "grad_norm", "lr", RATE)}
    last = {name: points[-1][1] for name, points in curves.items()}
    recorded = [record.get("arguments") for record in records(path / CHAIN, "run")]
    arguments = recorded[-1] if recorded and isinstance(recorded[-1], dict) else {}
    best: dict[str, Any] = {}
    for metric in (*metrics, LOSS):
        with contextlib.suppress(UsageError):  # its name does not say what is better
            better = _better(metric)
            step, value = min(curves.get(metric, ()), key=lambda point: better.rank(point[1]), default=(0, math.nan))
            best = {"name": metric, "value": value, "steps": int(step) + 1} if metric in curves else {}
            break
    values = {metric: last[metric] for metric in metrics}
    state = "running" if at_work(path) else _state(history)
    return Row(name, arguments, max(history.steps, default=-1) + 1, last.get(LOSS), values, best, state)


def _state(history: History) -> str:
    """How a run that is not at work ended."""
    last: dict[str, Any] = {}  # of the newest call, the last line of each kind
    for event in history.events:
        last = {} if event.get("event") in ("start", "resume") else last
        last[str(event.get("event"))] = event
    if "error" in last:
        return f"failed: {last['error'].get('error')}"
    end = last.get("end", {})
    if end.get("stopped_by"):
        return f"stopped early by {end['stopped_by']}"
    total = end.get("total")
    if "end" not in last or (total is not None and end["step"] < total):
        return "interrupted"
    return "ended" if total is None else "finished"


def _better(metric: str) -> Better:
    return Better(metric, "auto")
