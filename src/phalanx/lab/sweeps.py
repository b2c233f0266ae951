"""The runs of a folder side by side: arguments, last values, state, and which is the best."""

from __future__ import annotations

import pathlib
from collections.abc import Container, Iterator, Sequence
from typing import Any

from phalanx.checkpoint.directory import LOG, at_work
from phalanx.errors import UsageError
from phalanx.lab.pages import LOSS, History, best_of, read, spelled


def rows_of(folder: pathlib.Path, names: Container[str] | None = None) -> list[dict[str, Any]]:
    """The runs in ``folder``, and ``folder`` if it is one, by name; or those of ``names``.

    Each has its ``arguments``, ``steps``, last ``loss``, last ``metrics`` by name, ``state``, and its ``best`` value
    (of which ``name``, after how many ``steps``). ``best_of_all`` marks one of them.

    Raises
    ------
    UsageError
        There are none.
    """
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = {str(path.relative_to(folder)): path for path in (folder, *below) if (path / LOG).is_file()}
    runs = {name: path for name, path in found.items() if names is None or name in names}
    if not runs:
        raise UsageError(f"DIR is {str(folder)!r}, in which there is no run; give a folder with directories of runs")
    histories = [read(path) for path in runs.values()]
    rows = [_row(name, path, history) for (name, path), history in zip(runs.items(), histories, strict=True)]
    best = best_of(histories)
    return [{**row, "best_of_all": number == best} for number, row in enumerate(rows)]


def table(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """The lines of a table, with a column for each argument and metric."""
    arguments = list(dict.fromkeys(name for row in rows for name in row["arguments"]))
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    own = ["steps", "loss", *metrics, "best", "state"]
    yield ["run", *(f"argument {name}" if name in own else name for name in arguments), *own]
    for row in rows:
        values = [str(row["arguments"].get(name, "")) for name in arguments]
        numbers = [row["loss"], *(row["metrics"].get(name) for name in metrics)]
        shown = ["" if number is None else f"{number:.4g}" for number in numbers]
        yield [
            row["run"],
            *values,
            str(row["steps"]),
            *shown,
            spelled(row["best"]) + " *" * row["best_of_all"],
            row["state"],
        ]


def _row(name: str, path: pathlib.Path, history: History) -> dict[str, Any]:
    last = history.last()
    return {
        "run": name,
        "arguments": history.arguments,
        "steps": max(history.steps, default=-1) + 1,
        "loss": last.pop(LOSS, None),
        "metrics": last,
        "best": history.best(),
        "state": "running" if at_work(path) else _state(history),
    }


def _state(history: History) -> str:
    """How a run that is not at work ended."""
    last: dict[str, Any] = {}  # of the newest call, the last line of each kind
    for event in history.events:
        last = {} if event.get("event") in ("start", "resume") else last
        last[str(event.get("event"))] = event
    if "error" in last:
        return f"failed: {last['error'].get('error')}"
    end = last.get("end", {})
    total, stopped_by = end.get("total"), end.get("stopped_by")
    if total is not None and end["step"] >= total:
        return "finished"
    if stopped_by:
        return f"stopped early by {stopped_by}"
    return "ended" if end and total is None else "interrupted"
