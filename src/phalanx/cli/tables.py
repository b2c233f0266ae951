"""What the command line prints line by line: ``phalanx check``, ``phalanx tune`` and ``phalanx devices``."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import typer

from phalanx.proof import check as checked
from phalanx.proof import stable
from phalanx.proof import tune as tuned
from phalanx.recipe import Recipe


def check(recipe: Recipe, devices: Sequence[str], steps: int, *, json_: bool) -> int:
    """Print each run of the check; returns the exit status."""
    facts = checked.circumstances(devices, recipe.replicas)
    rows = []
    for row in checked.check(recipe, devices, steps):
        rows.append(row)
        if not json_:
            typer.echo(f"{row.what:38}  {row.digest or row.problem}  {row.seconds * 1e3:.1f} ms a step")
    status = checked.verdict(rows)
    if json_:
        same = status == checked.SAME
        told = {"circumstances": facts, "rows": [dataclasses.asdict(row) for row in rows], "same": same}
        typer.echo(json.dumps(told))
    else:
        lines = [f"{name:38}  {value}" for name, value in facts.items()]
        typer.echo("\n".join([*lines, ("the same digest", "DIFFERENT DIGESTS", "it could not be told")[status]]))
    return status


def stability(recipe: Recipe, file: str, steps: int, cost: float, *, json_: bool) -> int:
    """Print each finding, and what R costs; returns the exit status."""
    findings = []
    for finding in stable.stable(recipe, file, steps):
        findings.append(finding)
        if not json_:
            outcome = {True: "the same", False: "DIFFERENT", None: "could not be told"}[finding.same]
            outcome = outcome if finding.what[0] in "d0123456789" else "none" if finding.same else "some"
            typer.echo(f"{finding.what:52}  {outcome}{f': {finding.told}' if finding.told else ''}")
    status = stable.verdict(findings)
    if json_:
        told = {"findings": [dataclasses.asdict(finding) for finding in findings], "same": status == stable.SAME}
        typer.echo(json.dumps(told))
        return status
    if cost:
        typer.echo("what replicas, workers and threads cost here:")
        tune(recipe, cost, "", json_=False)
    typer.echo(("the same", "DIFFERENT", "it could not be told")[status])
    return status


def trace(recipe: Recipe) -> list[stable.Seen]:
    """Hashes of all that a first step computes, for a process that compares them with its own."""
    return stable.traced(recipe)


def tune(recipe: Recipe, seconds: float, plot: str, *, json_: bool) -> None:
    """Print what was measured, and the advice."""
    found = tuned.tune(recipe, seconds, progress=False if json_ else "auto")
    if plot:
        target = pathlib.Path(plot)
        target.parent.mkdir(parents=True, exist_ok=True)
        found.plot().figure.savefig(target)
    if json_:
        typer.echo(json.dumps(dataclasses.asdict(found)))
        return
    typer.echo("replicas  workers  threads  ms a step  samples/s  price of R     memory")
    for row in found.rows:
        price = "" if row.price is None else f"{row.price:.2f}"
        typer.echo(
            f"{row.replicas:8}  {row.workers:7}  {row.threads:7}  {row.seconds * 1e3:9.2f}  "
            f"{row.samples_per_second:9,.0f}  {price:>10}  {row.memory / 2**20:5,.0f} MiB"
        )
    told = [row for row in found.rows if row.phases]
    if told:
        typer.echo("\none process, ms a step" + "".join(f"{name:>10}" for name in told[0].phases or ()))
    for row in told:
        parts = "".join(f"{spent * 1e3:10.2f}" for spent in (row.phases or {}).values())
        typer.echo(f"{f'replicas={row.replicas}':23}{parts}")
    typer.echo(f"\n{found.advice}")


def devices(*, json_: bool) -> None:
    """Print which devices there are, and what is missing for the others."""
    rows = checked.all_devices()
    if json_:
        names = ("framework", "device", "what", "missing")
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
        return
    for framework, device, what, missing in rows:
        typer.echo(f"{framework:9} {device:8} {what or f'not here: {missing}'}")
