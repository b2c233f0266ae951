"""The commands ``phalanx diff``, ``replay``, ``check``, ``verify`` and ``certify``.

Exit status of diff, check and verify: 0 the same, 1 they differ, 2 it could not be told.
"""

from __future__ import annotations

import bdb
import contextlib
import dataclasses
import json
import os
import pathlib
import traceback
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from phalanx.cli.common import Arguments, File, Json, echo, load_recipe, show, writing
from phalanx.errors import PhalanxError, UsageError
from phalanx.proof import check as checked
from phalanx.proof.diff import diff as compare
from phalanx.proof.replay import replay
from phalanx.proof.sides import side
from phalanx.proof.verify import UNKNOWN, Verified, certify, check_certificate, claim_of, verify
from phalanx.recipe import Recipe

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run.")]
From = Annotated[str, typer.Option("--recipe", metavar="FILE[:NAME]", help="Where the run's recipe is, if it moved.")]


app = typer.Typer()


@contextlib.contextmanager
def _untold() -> Iterator[None]:
    """Exit with the status UNKNOWN after any error: Python's own status would mean that something differs."""
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        if isinstance(error, PhalanxError):
            echo(f"phalanx: {error}", err=True)
        else:
            echo(traceback.format_exc().rstrip(), err=True)
        raise typer.Exit(UNKNOWN) from error


@app.command()
@_untold()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A run, snapshot, chain or safetensors file.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What it is compared with.")],
    ops: Annotated[
        bool, typer.Option("--ops", help="Down to the first operation, with the line of your code.")
    ] = False,
    json_: Json = False,
) -> None:
    """Say where two runs differ first: recipe, environment, data, then step, replica, phase and tensor.

    Exit status 0 if they are the same, 1 if they differ, 2 if that could not be told.
    """
    difference = compare(a, b, recipes=(_recipe_of(a), _recipe_of(b)), operations=ops)
    facts = {} if difference is None else {**dataclasses.asdict(difference), "text": str(difference)}
    show({"same": difference is None, **facts}, [[difference or "the same"]], json_=json_)
    if difference is not None:
        raise typer.Exit(1)


@app.command("replay")
def replay_step(
    run: RunArgument,
    step: Annotated[int, typer.Option("--step", help="Which step, from 0.")] = -1,
    replica: Annotated[int, typer.Option("--replica", help="Which replica, from 0.")] = 0,
    phase: Annotated[str, typer.Option("--phase", help="Which phase, by its name, if steps have some.")] = "",
    failure: Annotated[bool, typer.Option("--failure", help="The step and replica at which the run failed.")] = False,
    pdb: Annotated[bool, typer.Option("--pdb", help="Stop at the first line of forward or loss.")] = False,
    recipe: From = "",
) -> None:
    """Compute one replica of one step of a run again, in this process."""
    known = _known(run, recipe)
    if step < 0 and not failure:
        raise UsageError("--step is missing; give --step K --replica R, or --failure")
    where: dict[str, Any] = {} if failure else {"step": step, "replica": replica, "phase": phase or None}
    try:
        outcome = replay(known, run, **where, debug=pdb)
    except bdb.BdbQuit as error:
        raise typer.Exit(1) from error
    facts = {"step": outcome.step, "replica": outcome.replica, "samples": list(outcome.samples), "loss": outcome.loss}
    show(facts, facts.items(), json_=False)


@app.command("check")
@_untold()
def check_recipe(
    file: File,
    arguments: Arguments = None,
    devices: Annotated[str, typer.Option("--devices", help="As in cuda, or cuda:0,cuda:1.")] = "",
    steps: Annotated[int, typer.Option("--steps", help="How many to train each time.")] = 5,
    into: Annotated[str, typer.Option("--into", hidden=True)] = "",
    json_: Json = False,
) -> None:
    """Before a long run, train a few steps again, in a new process and with more workers.

    With --devices: twice on one device, on two and on all, and what deterministic kernels and the exchange cost.

    Exit status 0 if all is the same, 1 if something differs, 2 if that could not be told.
    """
    recipe, *_ = load_recipe(file, arguments or ())
    if into:  # the new process
        recipe = dataclasses.replace(recipe, steps=steps, epochs=None)
        echo(str(checked.trained(recipe, "", pathlib.Path(into), engine="inline").digest))
        return
    named = devices.split(",") if devices else []
    rows: list[checked.Row] = []
    for row in checked.check(recipe, file, named, steps, arguments or ()):
        rows.append(row)
        if not json_:
            outcome = {True: row.digest, False: "DIFFERENT", None: "could not be told"}
            time = "" if row.seconds is None else f"  {row.seconds * 1000:.1f} ms a step"
            echo(f"{row.what:32}  {outcome[row.same]}{time}" + (f"\n  {row.told}" if row.told else ""))
    status, facts = checked.verdict(rows), checked.circumstances(named, recipe.replicas)
    said = ("the same", "DIFFERENT", "it could not be told")[status]
    report = {"circumstances": facts, "rows": [dataclasses.asdict(row) for row in rows], "same": status == checked.SAME}
    show(report, [*(facts.items() if named else ()), [said]], json_=json_)
    if status:
        raise typer.Exit(status)


@app.command("verify")
@_untold()
def verify_run(
    run: Annotated[str, typer.Argument(metavar="RUN|CERTIFICATE", help="A run's directory, or a certificate.")],
    file: Annotated[str, typer.Argument(metavar="[FILE[:NAME]]", help="The recipe, if it is not where it was.")] = "",
    steps: Annotated[str, typer.Option("--steps", metavar="A:B", help="From, and up to but without.")] = "",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Worker processes that compute.")] = 1,
    json_: Json = False,
) -> None:
    """Compute a run again from its snapshots and compare links; or train again what a certificate is of.

    Exit status 0 if they are the same, 1 if they differ, 2 if that could not be told.
    """
    path = pathlib.Path(run)
    known = _known(run, file, f"phalanx verify {run} FILE[:NAME]")
    if path.is_dir():
        verified = verify(known, path, steps=_range(steps), workers=workers)
    elif steps:
        raise UsageError(f"--steps chooses among steps of a run, and {run} is no directory of one")
    else:
        verified = check_certificate(path, known, workers=workers)
    _end(verified, json_=json_)


@app.command("certify")
@_untold()
def certify_run(
    run: RunArgument,
    out: Annotated[str, typer.Option("-o", "--out", metavar="FILE", help="Where to write it.")] = "certificate.json",
    recipe: From = "",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Worker processes that compute.")] = 1,
) -> None:
    """Verify a run, and write what defined it, in which environment, and what came out of it.

    Exit status 0 if it is what it says, 1 if it is not, 2 if that could not be told; only 0 writes.
    """
    known = _known(run, recipe)
    verified, facts = certify(known, pathlib.Path(run), workers=workers)
    if not facts:
        _end(verified, json_=False)
    with writing("--out", out) as target:
        target.write_text(json.dumps(facts, indent=1) + "\n")
    echo(f"chain   {facts['chain']}\ndigest  {facts['digest']}\n{out}")


def _end(verified: Verified, *, json_: bool) -> None:
    show(dataclasses.asdict(verified), [[verified.text]], json_=json_)
    if verified.status:
        raise typer.Exit(verified.status)


def _recipe_of(run: str, file: str = "") -> Recipe | None:
    """The recipe of a run, from ``file`` or the file that it noted, with its arguments; None where there is none."""
    recorded = {}
    if os.path.isdir(run):
        with contextlib.closing(side(run)) as known:
            recorded = known.run
    elif file:
        recorded = claim_of(pathlib.Path(run))
    origin, arguments = file or recorded.get("origin"), recorded.get("arguments")
    if not isinstance(origin, str):
        return None
    try:
        return load_recipe(origin, arguments if isinstance(arguments, dict) else ())[0]
    except Exception as error:  # whatever the file does
        if file:
            raise
        echo(f"phalanx: the recipe of {run} was not loaded from {origin}: {error}", err=True)
        return None


def _known(run: str, file: str, otherwise: str = "--recipe FILE[:NAME]") -> Recipe:
    """The recipe in a file, or that of a run."""
    known = _recipe_of(run, file)
    if known is None:
        raise UsageError(f"the recipe of {run} is not known; say where it is: {otherwise}")
    return known


def _range(steps: str) -> tuple[int, int] | None:
    if not steps:
        return None
    first, colon, last = steps.partition(":")
    if not colon or not first.isdigit() or not last.isdigit():
        raise UsageError(f"--steps is {steps!r}; give two numbers, as in 100:200")
    return int(first), int(last)
