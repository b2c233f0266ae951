"""The commands ``phalanx check`` and ``phalanx tune``: what to look at before a long run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from phalanx.cli import tables
from phalanx.cli.files import load_recipe
from phalanx.cli.printed import check_picture

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Plot = Annotated[str, typer.Option("--plot", metavar="PATH", help="Where to write the picture.")]
Devices = Annotated[str, typer.Option("--devices", help="As in cuda, or cuda:0,cuda:1.")]


def add_to(app: typer.Typer) -> None:
    """Make these commands some of ``app``."""
    for name, command in (("check", check_recipe), ("tune", tune_recipe)):
        app.command(name)(command)


def check_recipe(
    file: Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="A Python file that defines `recipe`, or NAME.")],
    devices: Devices = "",
    steps: Annotated[int, typer.Option("--steps", help="How many to train each time.")] = 5,
    cost: Annotated[float, typer.Option("--cost", help="Seconds to measure what R costs; 0: leave it out.")] = 15.0,
    trace: Annotated[bool, typer.Option("--trace", hidden=True)] = False,
    json_: Json = False,
) -> None:
    """Before a long run, do everything again, in a new process and with more workers, and see whether it is the same.

    With --devices: a few steps on one device twice, on two and on all. Exit status 0 if all is the same, 1 if something
    differs, 2 if that could not be told.
    """
    recipe, *_ = load_recipe(file)
    if trace:
        typer.echo(json.dumps(tables.trace(recipe)))
        return
    if devices:
        status = tables.check(recipe, devices.split(","), steps, json_=json_)
    else:
        status = tables.stability(recipe, file, steps, cost, json_=json_)
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
    tables.tune(recipe, seconds, plot, json_=json_)
