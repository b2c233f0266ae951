"""The commands ``phalanx check``, ``tune`` and ``devices``: what to look at before a long run."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

import typer

from phalanx.cli.files import load_recipe
from phalanx.cli.printed import check_picture, save, show
from phalanx.frameworks.registry import all_devices
from phalanx.proof import check as checked
from phalanx.tuning import Tuned, tune

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Plot = Annotated[str, typer.Option("--plot", metavar="PATH", help="Where to write the picture.")]
Devices = Annotated[str, typer.Option("--devices", help="As in cuda, or cuda:0,cuda:1.")]


def add_to(app: typer.Typer) -> None:
    """Make these commands some of ``app``."""
    for name, command in (("check", check_recipe), ("tune", tune_recipe), ("devices", list_devices)):
        app.command(name)(command)


def check_recipe(
    file: Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="A Python file that defines `recipe`, or NAME.")],
    devices: Devices = "",
    steps: Annotated[int, typer.Option("--steps", help="How many to train each time.")] = 5,
    into: Annotated[str, typer.Option("--into", hidden=True)] = "",
    json_: Json = False,
) -> None:
    """Before a long run, train a few steps again, in a new process and with more workers.

    With --devices: twice on one device, on two and on all.

    Exit status 0 if all is the same, 1 if something differs, 2 if that could not be told.
    """
    recipe, *_ = load_recipe(file)
    if into:  # the new process
        recipe = dataclasses.replace(recipe, steps=steps, epochs=None)
        typer.echo(checked.trained(recipe, "", pathlib.Path(into), engine="inline").digest)
        return
    named = devices.split(",") if devices else []
    rows: list[checked.Row] = []
    for row in checked.check(recipe, file, named, steps):
        rows.append(row)
        if not json_:
            outcome = {True: row.digest or "nothing was written", False: "DIFFERENT", None: "could not be told"}
            took = "" if row.seconds is None else f"  {row.seconds * 1e3:.1f} ms a step"
            typer.echo(f"{row.what:32}  {outcome[row.same]}{took}" + (f"\n  {row.told}" if row.told else ""))
    status, facts = checked.verdict(rows), checked.circumstances(named, recipe.replicas)
    said = ("the same", "DIFFERENT", "it could not be told")[status]
    told = {"circumstances": facts, "rows": [dataclasses.asdict(row) for row in rows], "same": status == checked.SAME}
    show(told, [*(facts.items() if named else ()), [said]], json_=json_)
    if status:
        raise typer.Exit(status)


def tune_recipe(
    file: Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="A Python file that defines `recipe`, or NAME.")],
    seconds: Annotated[float, typer.Option("--seconds", help="About how long it may take.")] = 60.0,
    plot: Plot = "",
    json_: Json = False,
) -> None:
    """Measure how many replicas, workers and threads suit a recipe on this machine, and give advice.

    Replicas and threads are part of the answer: with others, a recipe ends in other weights.
    """
    check_picture(plot)
    recipe, *_ = load_recipe(file)
    found = tune(recipe, seconds, progress=False if json_ else "auto")
    if plot:
        save(found.plot(), plot)
    show(dataclasses.asdict(found), _measured(found), json_=json_)


def list_devices(json_: Json = False) -> None:
    """List which devices each framework can use here, and what is missing for the others."""
    names = ("framework", "device", "what", "missing")
    rows = all_devices()
    told = [[framework, device, what or f"not here: {missing}"] for framework, device, what, missing in rows]
    show([dict(zip(names, row, strict=True)) for row in rows], told, json_=json_)


def _measured(found: Tuned) -> list[list[str]]:
    """A row for each way that was measured, one for each whose phases are known, and the advice."""
    rows = [["replicas", "workers", "threads", "ms a step", "samples/s", "price of R", "memory"]]
    for row in found.rows:
        price = "" if row.price is None else f"{row.price:.2f}"
        numbers = f"{row.seconds * 1e3:.2f}", f"{row.samples_per_second:,.0f}", price, f"{row.memory / 2**20:,.0f} MiB"
        rows.append([str(row.replicas), str(row.workers), str(row.threads), *numbers])
    told = [row for row in found.rows if row.phases]
    if told:
        rows += [[], ["one process, ms a step:"], ["replicas", *(told[0].phases or ())]]
    for row in told:
        rows.append([str(row.replicas), *(f"{spent * 1e3:.2f}" for spent in (row.phases or {}).values())])
    return [*rows, [], [found.advice]]
