"""The commands ``phalanx diff``, ``replay``, ``check``, ``verify`` and ``certify``.

Exit status of diff, check and verify: 0 the same, 1 they differ, 2 it could not be told.

A run may come from anywhere. So the Python file that it names for its recipe is executed only if the user names that
file, too, or agrees.
"""

from __future__ import annotations

import bdb
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from phalanx.checkpoint.chained import source_hash
from phalanx.cli.common import Arguments, Json, echo, load_recipe, located, show, writing
from phalanx.cli.jobs import arguments_of
from phalanx.errors import PhalanxError, UsageError
from phalanx.proof.diff import diff as compare
from phalanx.proof.replay import replay
from phalanx.proof.sides import section, side
from phalanx.proof.verify import DIFFERENT, UNKNOWN, Verified, certify, check_certificate, claim_of, verify
from phalanx.recipe import Recipe
from phalanx.surroundings.presence import printable

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run.")]
FILE = "FILE[:NAME]"
STEPS = 5  # of check
From = Annotated[str, typer.Option("--recipe", metavar=FILE, help="The Python file that defines the recipe.")]
Trust = Annotated[bool, typer.Option("--trust", help="Execute the Python file that the run names for its recipe.")]


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
    recipe: From = "",
    trust: Trust = False,
    json_: Json = False,
) -> None:
    """Say where two runs differ first: recipe, environment, data, then step, replica, phase and tensor.

    Replica and tensor need the recipe: --recipe gives that of both, and --trust takes what each run names.

    Exit status 0 if they are the same, 1 if they differ, 2 if that could not be told.
    """
    difference = None if recipe else compare(a, b, operations=ops)
    if recipe or (difference is not None and difference.step is not None and difference.phase != "end"):
        runs = _noted(a), _noted(b)
        if recipe or trust or _agreed(runs):
            recipes = _loaded(runs[0], recipe), _loaded(runs[1], recipe)
            difference = compare(a, b, recipes=recipes, operations=ops)
        elif runs[0].origin or runs[1].origin:
            echo(f"phalanx: no step was computed again: {_unasked(runs, '--recipe')}", err=True)
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
    trust: Trust = False,
) -> None:
    """Compute one replica of one step of a run again, in this process."""
    if step < 0 and not failure:
        raise UsageError("--step is missing; give --step K --replica R, or --failure")
    where: dict[str, Any] = {} if failure else {"step": step, "replica": replica, "phase": phase or None}
    known = _known(_noted(run), recipe, trust=trust)
    try:
        outcome = replay(known, run, **where, debug=pdb)
    except bdb.BdbQuit as error:
        raise typer.Exit(1) from error
    facts = {"step": outcome.step, "replica": outcome.replica, "samples": list(outcome.samples), "loss": outcome.loss}
    show(facts, facts.items(), json_=False)
    if failure and math.isfinite(outcome.loss):
        echo("phalanx: this raised nothing here; phalanx check FILE says whether two runs of it are the same", err=True)


@app.command("check")
@_untold()
def check_recipe(
    file: Annotated[
        str, typer.Argument(metavar=f"[{FILE}]", help="A Python file that defines `recipe`, or NAME.")
    ] = "",
    arguments: Arguments = None,
    devices: Annotated[str, typer.Option("--devices", help="As in cuda, or cuda:0,cuda:1.")] = "",
    steps: Annotated[int, typer.Option("--steps", help="How many to train each time.")] = STEPS,
    into: Annotated[str, typer.Option("--into", hidden=True)] = "",
    json_: Json = False,
) -> None:
    """Before a long run, train a few steps again, in a new process and with more workers.

    With --devices: twice on one device, on two and on all, and what deterministic kernels and the exchange cost.

    Without FILE: what a report of a fault has to say of this machine, and the digests of three built-in recipes.

    Exit status 0 if all is the same, 1 if something differs, 2 if that could not be told.
    """
    if not file:
        for option, given, usual in (("--devices", devices, ""), ("--steps", steps, STEPS)):
            if given != usual:
                raise UsageError(f"{option} is {given}, but FILE is missing; give the file of a recipe to train")
        return _check_machine(json_=json_)
    from phalanx.lab import check as checked

    recipe, evaluation, _ = load_recipe(file, arguments or ())
    if into:  # the new process
        recipe = dataclasses.replace(recipe, steps=steps, epochs=None)
        echo(str(checked.trained(recipe, "", pathlib.Path(into), engine="inline", evaluation=evaluation).digest))
        return None
    named = devices.split(",") if devices else []
    rows: list[checked.Row] = []
    for row in checked.check(recipe, file, named, steps, arguments or (), evaluation):
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
    return None


def _check_machine(*, json_: bool) -> None:
    """What a report of a fault has to say of this machine."""
    from phalanx.lab import machine

    facts = machine.described()
    if not json_:
        show(facts, [row for name, told in facts.items() for row in _told(name, told)], json_=False)
    recipes = machine.digests()
    rows = [row for name, told in recipes.items() for row in _told(name, told)]
    show({**facts, "recipes": recipes}, rows, json_=json_)
    same = [told["same with two workers"] for told in recipes.values() if "error" not in told]
    if False in same or len(same) < len(recipes):
        raise typer.Exit(DIFFERENT if False in same else UNKNOWN)


def _told(name: str, told: Any) -> list[list[Any]]:
    """A fact as rows of a table."""
    return [[f"{name}: {what}", value] for what, value in told.items()] if isinstance(told, dict) else [[name, told]]


@app.command("verify")
@_untold()
def verify_run(
    run: Annotated[str, typer.Argument(metavar="RUN|CERTIFICATE", help="A run's directory, or a certificate.")],
    file: Annotated[str, typer.Argument(metavar=f"[{FILE}]", help="The Python file that defines the recipe.")] = "",
    arguments: Arguments = None,
    steps: Annotated[str, typer.Option("--steps", metavar="A:B", help="From, and up to but without.")] = "",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Worker processes that compute.")] = 1,
    trust: Trust = False,
    json_: Json = False,
) -> None:
    """Compute a run again from its snapshots and compare links; or train again what a certificate is of.

    Exit status 0 if they are the same, 1 if they differ, 2 if that could not be told.
    """
    path = pathlib.Path(run)
    noted = _noted(run) if path.is_dir() else _noted(run, {"arguments": claim_of(path).get("arguments")})
    noted = noted._replace(arguments=arguments_of(arguments or ()) or noted.arguments)
    known = _known(noted, file, "", trust=trust)
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
    trust: Trust = False,
) -> None:
    """Verify a run, and write what defined it, in which environment, and what came out of it.

    Exit status 0 if it is what it says, 1 if it is not, 2 if that could not be told; only 0 writes.
    """
    known = _known(_noted(run), recipe, trust=trust)
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


class Noted(NamedTuple):
    """What a run says of its recipe: the file, as ``FILE:NAME`` or "", its hash, and arguments."""

    run: str
    origin: str
    source: Any
    arguments: dict[str, Any]

    @property
    def path(self) -> str:
        """The file."""
        return located(self.origin)[0]


def _noted(run: str, record: dict[str, Any] | None = None) -> Noted:
    if record is None:
        with contextlib.closing(side(run)) as known:
            record = known.run
    path, name = located(str(record.get("origin") or ""))
    origin = f"{os.path.abspath(path)}:{name}" if path else ""
    return Noted(run, origin, record.get("source"), section(record, "arguments"))


def _loaded(run: Noted, file: str) -> Recipe | None:
    """The recipe in the file that the user gave, else in that which the run names, with the run's arguments."""
    return load_recipe(file or run.origin, run.arguments)[0] if file or run.origin else None


def _known(run: Noted, file: str, option: str = "--recipe", *, trust: bool) -> Recipe:
    known = _loaded(run, file) if file or trust or _agreed([run]) else None
    if known is None:
        raise UsageError(_unasked([run], option))
    return known


def _agreed(runs: Sequence[Noted]) -> bool:
    """Ask whether the files that runs name may be executed. Without a terminal, they may not."""
    hashes = [source_hash(run.path) for run in runs]
    if None in hashes or not (os.isatty(0) and os.isatty(2)):
        return False
    for run, known in zip(runs, hashes, strict=True):
        same = "the recorded one" if known == run.source else "NOT the recorded one"
        facts = f"It belongs to {_owner(run.path)}, and its hash is {same}."
        echo(f"{printable(run.run)} names {printable(run.origin)} for the recipe. {facts}", err=True)
    typer.echo("Execute it? [y/N] ", nl=False, err=True)  # stdout is for what comes of it
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _owner(path: str) -> str:
    try:
        return pathlib.Path(path).owner()
    except KeyError:
        return f"uid {os.stat(path).st_uid}"


def _unasked(runs: Sequence[Noted], option: str) -> str:
    """What was not executed, and the command that would; ``option`` of it names the file, or its last argument."""
    names = [f"{printable(run.run)} names {printable(run.origin) or 'no file'}" for run in runs]
    found = {shlex.quote(run.origin) for run in runs if os.path.isfile(run.path) and run.origin.isprintable()}
    words = [shlex.quote(word) for word in sys.argv[1:]]
    named = "--trust" if len(found) > 1 else f"{option} {next(iter(found), FILE)}".strip()
    words.insert(1 if option else len(words), named)
    why = "what a run names is executed only if you say so; if you trust it" if found else "say where it is"
    return f"{' and '.join(names)} for the recipe; {why}: phalanx {' '.join(words)}"


def _range(steps: str) -> tuple[int, int] | None:
    if not steps:
        return None
    first, _, last = steps.partition(":")
    if not (first.isdigit() and last.isdigit()):
        raise UsageError(f"--steps is {steps!r}; give two numbers, as in 100:200")
    return int(first), int(last)
