"""The log of a run, as rows of a table and as a page of HTML that needs nothing but a browser."""

from __future__ import annotations

import contextlib
import datetime
import functools
import html
import itertools
import pathlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from phalanx.callbacks.best import Better
from phalanx.checkpoint import files
from phalanx.checkpoint.chain import CHAIN, records
from phalanx.checkpoint.directory import events
from phalanx.definition import checks
from phalanx.definition.evaluation import meant
from phalanx.definition.plain import distinct_names
from phalanx.errors import SnapshotError, UsageError
from phalanx.proof.sides import section
from phalanx.run.plots import RATE, plot_runs, svg
from phalanx.surroundings.presence import printable

LAST, ARGUMENT = "last ", "argument "
BEGINS, DEATHS = ("start", "resume"), ("death", "lost")  # of a worker, or of another process
DROPPED = "dropped"  # messages from outside; the last such event says how many
HAPPENED = "event", "step", "worker", "why"  # columns, beside the time
LOSS, BESIDE = "loss", ("grad_norm", "lr", RATE)
MOST_BESIDE = 3  # runs that have a column each in a terminal, and their names in a page's title
MOST_EVENTS = 200  # on a page, the last ones
MOST = 1e300  # larger values, infinity and NaN are not drawn
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin-top: 2rem } svg { width: 100%; min-width: 600px; height: auto }
div { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td, th { text-align: left; padding: .15rem .6rem .15rem 0; border-bottom: 1px solid #8884; vertical-align: top }
.best { background: #3a32 } td:first-child { white-space: nowrap } td:nth-child(2):last-child { word-break: break-word }
@media (prefers-color-scheme:dark){body{background:#161616;color:#ddd} svg{filter:invert(.91) hue-rotate(180deg)}}
"""


def _is_number(value: Any) -> TypeGuard[float | str]:
    """Whether a value of the log is one; those that are not finite are texts."""
    return isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")


@dataclass
class History:
    """What the log of a run says; lines of steps that were done again replace the earlier ones.

    Attributes
    ----------
    steps : dict of int to dict
        The line of each step.
    events : list of dict
        All other lines.
    calls : list of list of float
        The times of the first and the last line of each call of the run.
    recipe, facts, arguments : dict
        Fields, environment, and arguments of the function that returned the recipe, as the run noted them last.
    saved_by : tuple of str
        The metric and the mode of the first ``SaveBest``; ("", "auto") without one.
    """

    name: str
    steps: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    calls: list[list[float]] = field(default_factory=list[list[float]])
    recipe: dict[str, Any] = field(default_factory=dict[str, Any])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    saved_by: tuple[str, str] = ("", "auto")

    @functools.cached_property
    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Numbers over steps, by what they are: loss, evaluations, norm of the gradient, rate, throughput."""
        metrics = {step: distinct_names(line.get("metrics", {}), (LOSS, *BESIDE)) for step, line in self.steps.items()}
        names = [*(name for values in metrics.values() for name in values), *sorted(self.losses())]
        curves: dict[str, list[tuple[float, float]]] = {key: [] for key in (LOSS, *names, *BESIDE)}
        for step, line in sorted(self.steps.items()):
            rate = line["samples"] / line["seconds"] if line.get("seconds") else None
            own = {key: line.get(key) for key in (LOSS, *BESIDE)}
            for key, value in (own | {RATE: rate} | metrics[step] | line.get("losses", {})).items():
                if key in curves and isinstance(value, (int, float)) and abs(value) < MOST:
                    curves[key].append((step, float(value)))
        return curves

    def last(self) -> dict[str, float]:
        """The last loss, and the last value of each metric, also if it is not finite."""
        found = dict[str, float]()
        for _, line in sorted(self.steps.items()):
            values = {LOSS: line.get(LOSS)} | distinct_names(line.get("metrics", {}), (LOSS, *BESIDE))
            found |= {name: float(value) for name, value in values.items() if _is_number(value)}
        return found

    def losses(self) -> set[str]:
        """Names of losses beside the loss."""
        return {name for line in self.steps.values() for name in line.get("losses", ())}

    def best(self) -> dict[str, Any]:
        """The best value with its steps, of what ``SaveBest`` goes by, else the first metric that can be ranked."""
        known, (metric, mode) = list(self.last()), self.saved_by
        others = sorted(known, key=LOSS.__eq__)  # the loss last
        for name, sense in [(meant(metric, known) or metric, mode), *((other, "auto") for other in others)]:
            with contextlib.suppress(UsageError, ValueError):  # it does not say what is better, or has no finite value
                rank = Better(name, sense).rank
                step, value = min(self.curves.get(name, ()), key=lambda point: rank(point[1]))
                return {"name": name, "value": value, "steps": int(step) + 1, "mode": sense}
        return {}

    def row(self) -> dict[str, Any]:
        """The summary of the run, as one row of a table."""
        kinds = Counter(line.get("event") for line in self.events)
        stamps = [stamp for call in self.calls for stamp in call]
        whole = sum(max(call) - min(call) for call in self.calls if call)  # not what lay between calls
        inside = sum(line.get("seconds") or 0.0 for line in self.steps.values())
        saved = sum(line.get("seconds") or 0.0 for line in self.events if line.get("event") == "snapshot")
        rates = self.curves["lr"]
        lrs = {f"{when} lr": rates[at][1] for when, at in (("first", 0), ("last", -1)) if rates}
        return {
            "run": self.name,
            **{f"{ARGUMENT}{name}": value for name, value in self.arguments.items()},
            "steps": len(self.steps),
            **{f"{LAST}{name}": value for name, value in self.last().items()},
            "best": spelled(self.best()),
            **lrs,
            "started": _clock(min(stamps, default=None)),
            "ended": _clock(max(stamps, default=None)),
            "lasted": lasting(whole),
            "workers": next((line.get("workers") for line in reversed(self.events) if line["event"] in BEGINS), None),
            "deaths": sum(kinds[kind] for kind in DEATHS),
            "replacements": kinds["replaced"] + kinds["joined"],
            "dropped messages": next((one.get("why") for one in reversed(self.events) if one["event"] == DROPPED), 0),
            "snapshots": kinds["snapshot"],
            "seconds": whole,
            "seconds in steps": inside,
            "seconds between steps": max(0.0, whole - inside),
            "seconds writing snapshots, beside steps": saved,
            "milliseconds a step": inside / len(self.steps) * 1e3 if self.steps else 0.0,
        }


def report(runs: Sequence[pathlib.Path], to: pathlib.Path) -> list[dict[str, Any]]:
    """Write a page about runs; returns a row for each. Of several, the best one has a star.

    Raises
    ------
    UsageError
        One has no log, or matplotlib is not installed.
    """
    histories = [read(path) for path in runs]
    if len({history.name for history in histories}) < len(histories):
        for history, path in zip(histories, runs, strict=True):
            history.name = str(path)
    to.parent.mkdir(parents=True, exist_ok=True)
    files.replace(to, lambda file: file.write(page(histories).encode()))
    return _rows(histories)


def best_of(histories: Sequence[History]) -> int | None:
    """Which run has the best value of all: of the first metric that is the best of one, else of the loss."""
    bests = [history.best() for history in histories]
    named = ((best["name"], best["mode"]) for best in bests if best and best["name"] != LOSS)
    shared, mode = next(named, (LOSS, "auto"))
    rank, known = Better(shared, mode).rank, [best for best in bests if best and best["name"] == shared]
    return bests.index(min(known, key=lambda best: rank(best["value"]))) if known else None


def spelled(best: Mapping[str, Any]) -> str:
    """A run's best value, in words."""
    return "{name} {value:.4g} after {steps}".format(**best) if best else ""


def _rows(histories: Sequence[History]) -> list[dict[str, Any]]:
    rows = [history.row() for history in histories]
    if len(rows) > 1 and (best := best_of(histories)) is not None:
        rows[best]["best"] += " *"
    return rows


def read(path: pathlib.Path) -> History:
    """A run's history out of its directory."""
    history = History(path.resolve().name)
    for line in events(path):
        begins = line["event"] in BEGINS
        if begins or not history.calls:
            history.calls.append([])
        if "time" in line:
            history.calls[-1][1:] = [line["time"]]  # after the first
        if line["event"] == "step":
            history.steps[line["step"]] = line
            continue
        if begins:
            history.steps = {step: kept for step, kept in history.steps.items() if step < line["step"]}
        history.events.append(line)
    run: dict[str, Any] = {}
    try:
        *_, run = run, *records(path / CHAIN, "run")
    except SnapshotError as error:
        checks.warn(f"{error}; arguments, recipe and environment of {history.name} are not shown")
    recipe, history.arguments, history.facts = (section(run, name) for name in ("recipe", "arguments", "environment"))
    history.recipe, beside = _fields(section(recipe, "values")), section(recipe, "beside")
    metric, mode = (str(beside.get(f"SaveBest.{name}", "")) for name in ("metric", "mode"))
    history.saved_by = metric.strip("'"), mode.strip("'") or "auto"
    return history


def page(histories: Sequence[History]) -> str:
    """The whole page. Of several runs there is a table with a row for each first."""
    names = ", ".join(history.name for history in histories)
    title = _text(names if len(histories) <= MOST_BESIDE else f"{len(histories)} runs")
    rows, best = _rows(histories), best_of(histories)
    deaths = [[line["step"] for line in one.events if line["event"] in DEATHS] for one in histories]
    picture = svg(plot_runs([one.name for one in histories], [one.curves for one in histories], deaths))
    first = _table(short(rows), best) if len(rows) > 1 else ""
    parts = [f"<h1>phalanx: {title}</h1>{first}<div>{picture}</div>{_table(lines(rows))}"]
    for history in histories:
        name = _text(history.name)
        happened = [
            [_clock(line.get("time")), *(line.get(key, "") for key in HAPPENED)]
            for line in history.events[-MOST_EVENTS:]
        ]
        parts += [
            f"<h2>What happened in {name}</h2>{_table([('time', *HAPPENED), *happened])}",
            f"<h2>The recipe of {name}</h2>{_table(history.recipe.items())}",
            f"<h2>The environment of {name}</h2>{_table(history.facts.items())}",
        ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style>{''.join(parts)}</html>\n"
    )


def lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows side by side: a line for each entry, with its name first."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [[name, *(_number(row.get(name)) for row in rows)] for name in names]


def short(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows below each other, with the heading first: what tells runs apart."""
    kept = "run", "steps", "best", "lasted", "started"
    return list(
        zip(*(line for line in lines(rows) if line[0] in kept or line[0].startswith((ARGUMENT, LAST))), strict=True)
    )


def lasting(seconds: float) -> str:
    """A duration in words, as in 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _fields(values: Mapping[str, str]) -> dict[str, str]:
    """The fields of a recipe by short names, as in "optimizer lr"; without the default optimizer's rate if unused."""
    used = {name: text for name, text in values.items() if name != "lr" or values.get("optimizer") == "None"}
    short = {name: re.sub(r"\.keywords\['(\w+)'\]", r" \1", name).removesuffix(".func") for name in used}
    return {short[name]: str(text).strip("'") for name, text in used.items() if not name.endswith("__class__")}


def _clock(stamp: float | None) -> str:
    return "" if stamp is None else datetime.datetime.fromtimestamp(stamp).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _text(value: Any) -> str:
    return html.escape(printable(str(value)))


def _table(rows: Any, best: int | None = None) -> str:
    """Rows of cells; ``best`` counts those after the first, the heading."""
    cells = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows)
    marks = (' class="best"' if best is not None and number == best + 1 else "" for number in itertools.count())
    inside = "".join(f"<tr{mark}>{row}</tr>" for row, mark in zip(cells, marks, strict=False))
    return f"<div><table>{inside}</table></div>"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
