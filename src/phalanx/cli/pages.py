"""The log of a run, as rows of a table and as a page of HTML that needs nothing but a browser."""

from __future__ import annotations

import contextlib
import html
import math
import pathlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.checkpoint import files
from phalanx.checkpoint.resume import read_any
from phalanx.errors import SnapshotError, UsageError
from phalanx.proof.replay import events
from phalanx.run.plots import plot_runs, svg

RATE = "samples a second"
SHOWN = ("start", "resume", "death", "replaced", "rollback", "snapshot", "failed", "end")
MOST_EVENTS = 200  # on a page, the last ones
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 820px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin-top: 2rem } svg { width: 100%; height: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td, th { text-align: left; padding: .15rem .6rem .15rem 0; border-bottom: 1px solid #8884; vertical-align: top }
td { overflow-wrap: anywhere } td:first-child { white-space: nowrap }
"""


@dataclass
class History:
    """What the log of a run says; lines of steps that were done again replace the earlier ones.

    Attributes
    ----------
    steps : dict of int to dict
        The line of each step.
    events : list of dict
        All other lines.
    facts : dict
        Of the newest snapshot.
    """

    name: str
    steps: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Numbers over steps, by what they are: loss, evaluations, norm of the gradient, rate, throughput."""
        names = dict.fromkeys(name for line in self.steps.values() for name in line.get("metrics", {}))
        curves: dict[str, list[tuple[float, float]]] = {key: [] for key in ("loss", *names, "grad_norm", "lr", RATE)}
        for step, line in sorted(self.steps.items()):
            rate = line["samples"] / line["seconds"] if line.get("seconds") else None
            for key, value in ({RATE: rate} | line | line.get("metrics", {})).items():
                if key in curves and isinstance(value, (int, float)) and math.isfinite(value):
                    curves[key].append((step, float(value)))
        return curves

    def row(self) -> dict[str, Any]:
        """The summary of the run, as one row of a table."""
        kinds = Counter(line.get("event") for line in self.events)
        stamps = [line["time"] for line in (*self.steps.values(), *self.events) if "time" in line]
        whole = max(stamps, default=0.0) - min(stamps, default=0.0)
        inside = sum(line.get("seconds") or 0.0 for line in self.steps.values())
        saved = sum(line.get("seconds") or 0.0 for line in self.events if line.get("event") == "snapshot")
        names = [name for name in self.curves() if name not in ("grad_norm", "lr", RATE)]
        last = {f"last {name}": points[-1][1] for name in names if (points := self.curves()[name])}
        return {
            "run": self.name,
            "steps": len(self.steps),
            **last,
            "workers": next((line["workers"] for line in reversed(self.events) if "workers" in line), None),
            "deaths": kinds["death"],
            "replacements": kinds["replaced"],
            "snapshots": kinds["snapshot"],
            "seconds": whole,
            "seconds in steps": inside,
            "seconds between steps": max(0.0, whole - inside),
            "seconds writing snapshots, beside steps": saved,
            "milliseconds a step": inside / len(self.steps) * 1e3 if self.steps else 0.0,
        }


def report(runs: Sequence[pathlib.Path], to: pathlib.Path) -> list[dict[str, Any]]:
    """Write a page about one run, or two side by side; returns its rows.

    Raises
    ------
    UsageError
        There are more than two, one has no log, or matplotlib is not installed.
    """
    if len(runs) > 2:
        raise UsageError(f"RUN was given {len(runs)} times; a page shows one run, or two side by side")
    histories = [read(path) for path in runs]
    to.parent.mkdir(parents=True, exist_ok=True)
    files.replace(to, lambda file: file.write(page(histories).encode()))
    return [history.row() for history in histories]


def read(path: pathlib.Path) -> History:
    """A run's history out of its directory."""
    history = History(path.name)
    for line in events(path):
        if line.get("event") == "step":
            history.steps[line["step"]] = line
            continue
        if line.get("event") in ("start", "resume"):
            history.steps = {step: kept for step, kept in history.steps.items() if step < line["step"]}
        history.events.append(line)
    with contextlib.suppress(SnapshotError):
        newest = read_any(path)
        history.facts = {"recipe": newest.noted("values"), **newest.environment}
    return history


def page(histories: Sequence[History]) -> str:
    """The whole page."""
    title = html.escape(" and ".join(history.name for history in histories))
    parts = [f"<h1>phalanx: {title}</h1>", _table(lines([history.row() for history in histories])), _picture(histories)]
    for history in histories:
        name, shown = html.escape(history.name), [line for line in history.events if line.get("event") in SHOWN]
        rows = [[line.get(key, "") for key in ("event", "step", "worker", "why")] for line in shown[-MOST_EVENTS:]]
        parts += [f"<h2>What happened in {name}</h2>", _table([["event", "step", "worker", "why"], *rows])]
        parts += [f"<h2>The environment of {name}</h2>", _table(history.facts.items())]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style>{''.join(parts)}</html>\n"
    )


def lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows side by side: a line for each entry, with its name first."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [[name, *(_number(row.get(name)) for row in rows)] for name in names]


def _table(rows: Any) -> str:
    cells = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _picture(histories: Sequence[History]) -> str:
    deaths = [[line["step"] for line in one.events if line.get("event") == "death"] for one in histories]
    return svg(plot_runs([one.name for one in histories], [one.curves() for one in histories], deaths))


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
