"""What the command line prints of a result: text for people, JSON for machines, and a picture."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import typer

from phalanx.errors import UsageError
from phalanx.proof.chaos import Trial
from phalanx.run.result import Result

PICTURES = (".png", ".pdf", ".svg")


def show(facts: Any, rows: Iterable[Sequence[Any]], *, json_: bool) -> None:
    """Print one JSON object for machines, or rows as a table for people."""
    if json_:
        typer.echo(json.dumps(facts))
        return
    cells = [[str(cell) for cell in row] for row in rows]
    table = [row for row in cells if len(row) > 1]  # a cell alone is a sentence
    widths = [max(map(len, column)) for column in itertools.zip_longest(*table, fillvalue="")]
    for row in cells:
        typer.echo("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)).rstrip())


def save(drawn: Any, path: str) -> pathlib.Path:
    """Write a picture, a figure or the axes of one, where --plot says; returns where.

    Raises
    ------
    UsageError
        It cannot be written there.
    """
    target = pathlib.Path(path)
    with writing("--plot", path):
        target.parent.mkdir(parents=True, exist_ok=True)
        getattr(drawn, "figure", drawn).savefig(target)
    return target


@contextlib.contextmanager
def writing(option: str, path: str) -> Iterator[pathlib.Path]:
    """The place that an option names; what cannot be written there is said in words."""
    try:
        yield pathlib.Path(path)
    except OSError as error:
        raise UsageError(f"{option} is {path!r}, which cannot be written: {error.strerror}; give another") from error


def pace(result: Result, devices: Sequence[str] = ()) -> str:
    """As d2l prints it, with examples per second; ``devices``: where it was trained, if not in workers."""
    places = ", ".join(devices or [f"worker {number}" for number in range(result.workers)])
    seconds = result.seconds / result.steps * (result.steps_per_epoch or 1)
    rate = result.samples / result.seconds
    value = result.metric_history[-1].value
    return f"test acc {value:.3f}, {seconds:.2f} sec/epoch, {rate:.0f} examples/sec on [{places}]"


def trial_line(one: Trial) -> str:
    """What a run of a campaign came to."""
    verdict = "same digest" if one.right else "WRONG DIGEST"
    return f"seed {one.seed}: {one.kills} kills, {one.steps} steps, {verdict} {one.problem}".rstrip()


def report(name: str, result: Result, drawn: pathlib.Path | None, *, json_: bool) -> None:
    """Print what came out, the digest last."""
    per_epoch = None
    done = result.steps - (result.resumed_from or 0)
    if result.steps_per_epoch and done:
        per_epoch = result.seconds / done * result.steps_per_epoch
    metrics = {evaluated.name: evaluated.value for evaluated in result.metric_history}
    facts: dict[str, Any] = {
        "name": name,
        "loss": _plain(result.loss),
        "metrics": {name: _plain(value) for name, value in metrics.items()},
        "seconds per epoch": per_epoch,
        "steps": result.steps,
        "resumed from step": result.resumed_from,
        "stopped early": result.stopped_early,
        "samples": result.samples,
        "replicas": result.replicas,
        "workers": result.workers,
        "steps audited": result.audited or None,
        "chain": result.chain,
        "digest": result.digest,
        "picture": None if drawn is None else str(drawn),
    }
    if json_:
        typer.echo(json.dumps({key.replace(" ", "_"): value for key, value in facts.items()}))
        return
    stopped = facts.pop("stopped early")
    shown = {f"test {name}": value for name, value in facts.pop("metrics").items()} | facts
    if stopped is not None:
        before = "; that was before, and nothing was done now" if result.resumed_from == result.steps else ""
        typer.echo(f"phalanx: stopped early {stopped}{before}")
    elif result.resumed_from == result.steps:
        typer.echo("phalanx: all steps were done before; nothing was left to do")
    lines = {key: value for key, value in shown.items() if value is not None and key not in ("name", "digest", "chain")}
    width = max(map(len, lines))
    for key, value in lines.items():
        typer.echo(f"{key:{width}}  {value:.4f}" if isinstance(value, float) else f"{key:{width}}  {value}")
    if result.chain is not None:
        typer.echo(f"chain  {result.chain}")
    typer.echo(f"digest {result.digest}")


def _plain(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity: those become text."""
    return value if value is None or math.isfinite(value) else str(value)


def check_picture(path: str) -> None:
    """Refuse the name of a picture that matplotlib would not know how to write."""
    suffix = pathlib.Path(path).suffix
    if path and suffix not in PICTURES:
        raise UsageError(f"--plot is {path!r}; its ending must be one of {', '.join(PICTURES)}")
