"""What is made of a run's directory: one file of weights, and a page of HTML that needs nothing but a browser."""

from __future__ import annotations

import html
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.checkpoint import files
from phalanx.checkpoint.directory import LOG
from phalanx.checkpoint.export import write_file
from phalanx.checkpoint.resume import read_any
from phalanx.errors import SnapshotError, UsageError

WIDTH, HEIGHT, MARGIN = 720, 240, 60
POINTS = 600  # of a curve, at most: each is the mean of the steps that it stands for
TICKS = 4
MOST_LOG = 1 << 44  # bytes
STYLE = """
:root { color-scheme: light dark; --a: #1f5a96; --b: #c1452b; --grid: #8884; }
@media (prefers-color-scheme: dark) { :root { --a: #7db4ea; --b: #ff9b80; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin-top: 2rem }
svg { width: 100%; height: auto; overflow: visible } text { fill: currentColor; font: 11px system-ui, sans-serif }
.a { stroke: var(--a); color: var(--a) } .b { stroke: var(--b); color: var(--b) } path { fill: none; stroke-width: 1.6 }
.grid { stroke: var(--grid) } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td, th { text-align: left; padding: .15rem .6rem .15rem 0; border-bottom: 1px solid var(--grid); vertical-align: top }
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

    def curve(self, key: str) -> list[tuple[float, float]]:
        """A number of each step, where it is there and finite."""
        pairs = ((step, self.value(line, key)) for step, line in sorted(self.steps.items()))
        return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]

    @staticmethod
    def value(line: Mapping[str, Any], key: str) -> float | None:
        """A number of a line; rates and metrics are found by name."""
        if key == "samples a second":
            return line["samples"] / line["seconds"] if line.get("seconds") else None
        found = line.get(key, line.get("metrics", {}).get(key))
        return float(found) if isinstance(found, (int, float)) else None

    @property
    def metrics(self) -> list[str]:
        """Names of all that was evaluated."""
        return list(dict.fromkeys(name for line in self.steps.values() for name in line.get("metrics", {})))


def export(run: str, to: str) -> int:
    """Write the weights of the newest good snapshot of a run as one file; returns after how many steps they are."""
    newest = read_any(pathlib.Path(run))
    write_file(to, newest.weights)
    return newest.step


def report(runs: Sequence[pathlib.Path], to: pathlib.Path) -> None:
    """Write a page about one run, or two side by side.

    Raises
    ------
    UsageError
        There are more than two, or one has no log.
    """
    if len(runs) > 2:
        raise UsageError(f"RUN was given {len(runs)} times; a page shows one run, or two side by side")
    histories = [read(path) for path in runs]
    to.parent.mkdir(parents=True, exist_ok=True)
    files.replace(to, lambda file: file.write(page(histories).encode()))


def read(path: pathlib.Path) -> History:
    """A run's history out of its directory."""
    history = History(path.name)
    try:
        lines = files.read(path / LOG, MOST_LOG).decode(errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"RUN is {str(path)!r}, which has no {LOG} ({error.strerror}); give a run_dir") from error
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:  # torn by a kill
            continue
        if line.get("event") == "step":
            history.steps[line["step"]] = line
        else:
            if line.get("event") in ("start", "resume"):
                history.steps = {step: kept for step, kept in history.steps.items() if step < line["step"]}
            history.events.append(line)
    try:
        newest = read_any(path)
        history.facts = {"recipe": newest.noted("values"), **newest.environment}
    except SnapshotError:
        pass
    return history


def page(histories: Sequence[History]) -> str:
    """The whole page."""
    title = " and ".join(history.name for history in histories)
    metrics = list(dict.fromkeys(name for history in histories for name in history.metrics))
    names = (
        f'<span class="{mark}">&#9644; {html.escape(one.name)}</span>'
        for mark, one in zip("ab", histories, strict=False)
    )
    parts = [f"<h1>phalanx: {html.escape(title)}</h1><p>{' '.join(names)}</p>", _table(*_summary(histories))]
    for key in ("loss", *metrics, "grad_norm", "lr", "samples a second"):
        parts.append(_chart(key, histories))
    parts += ["<h2>Where the time went</h2>", _table(*_times(histories))]
    for history in histories:
        kinds = ("start", "resume", "death", "replaced", "rollback", "snapshot", "failed", "end")
        rows = [
            [line["event"], str(line.get("step", "")), str(line.get("worker", "")), str(line.get("why", ""))]
            for line in history.events
            if line.get("event") in kinds
        ]
        parts += [f"<h2>What happened in {html.escape(history.name)}</h2>"]
        parts += [_table(["event", "step", "worker", "why"], rows[-200:])]
        parts += ["<h2>Its environment</h2>", _table(["", ""], [[k, str(v)] for k, v in history.facts.items()])]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>{''.join(parts)}</html>\n"
    )


def _summary(histories: Sequence[History]) -> tuple[list[str], list[list[str]]]:
    rows: list[list[str]] = []
    for history in histories:
        losses = history.curve("loss")
        kinds = [line.get("event") for line in history.events]
        workers = next((str(line["workers"]) for line in reversed(history.events) if "workers" in line), "")
        last = f"{losses[-1][1]:.6g}" if losses else ""
        rows.append([history.name, str(len(history.steps)), last, workers, str(kinds.count("death")),
                     str(kinds.count("replaced")), str(kinds.count("snapshot"))])  # fmt: skip
    return ["run", "steps", "last loss", "workers", "deaths", "replacements", "snapshots"], rows


def _times(histories: Sequence[History]) -> tuple[list[str], list[list[str]]]:
    """Steps, snapshots (written beside them), and all else: evaluations, callbacks, waiting."""
    rows: list[list[str]] = []
    for history in histories:
        lines = [*history.steps.values(), *history.events]
        stamps = sorted(line["time"] for line in lines if "time" in line)
        steps = sum(History.value(line, "seconds") or 0.0 for line in history.steps.values())
        saved = sum(History.value(line, "seconds") or 0.0 for line in history.events if line["event"] == "snapshot")
        whole = stamps[-1] - stamps[0] if stamps else 0.0
        mean = steps / len(history.steps) * 1e3 if history.steps else 0.0
        shown = [f"{value:.2f} s" for value in (whole, steps, max(0.0, whole - steps), saved)]
        rows.append([history.name, *shown, f"{mean:.2f} ms"])
    return ["run", "from first to last line", "in steps", "between them", "writing snapshots (beside)", "a step"], rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    return f"<table><tr>{titles}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _chart(key: str, histories: Sequence[History]) -> str:
    """Curves of all runs over their steps; deaths as marks on the axis of steps."""
    curves = [_thinned(history.curve(key)) for history in histories]
    points = [point for curve in curves for point in curve]
    if not points:
        return ""
    right, low, high = max(x for x, _ in points) or 1, min(y for _, y in points), max(y for _, y in points)
    high = high if high > low else low + (abs(low) or 1.0)

    def placed(x: float, y: float) -> tuple[float, float]:
        return MARGIN + x / right * (WIDTH - MARGIN), (high - y) / (high - low) * HEIGHT

    parts: list[str] = []
    for tick in range(TICKS + 1):
        y = low + (high - low) * tick / TICKS
        _, at = placed(0, y)
        parts.append(
            f'<path class="grid" d="M{MARGIN} {at:.1f}H{WIDTH}"/><text x="0" y="{at + 4:.1f}">{_number(y)}</text>'
        )
        x = right * tick / TICKS
        parts.append(f'<text x="{placed(x, low)[0]:.1f}" y="{HEIGHT + 18}" text-anchor="middle">{x:.0f}</text>')
    for name, curve, history in zip("ab", curves, histories, strict=False):
        path = "L".join("{:.1f} {:.1f}".format(*placed(*point)) for point in curve)
        parts.append(f'<path class="{name}" d="M{path}"><title>{html.escape(history.name)}</title></path>')
        for line in history.events:
            if line.get("event") == "death":
                at = placed(line["step"], low)[0]
                parts.append(f'<path class="{name}" d="M{at:.1f} {HEIGHT - 6}v12"><title>a death</title></path>')
    picture = f'<svg viewBox="0 -8 {WIDTH} {HEIGHT + 32}" role="img">{"".join(parts)}</svg>'
    return f"<h2>{html.escape(key)}</h2>{picture}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _thinned(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    size = -(-len(curve) // POINTS)
    groups = [curve[start : start + size] for start in range(0, len(curve), size or 1)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
