"""The commands ``phalanx train FILE``, ``demo NAME``, ``chaos``, ``check``, ``tune``, ``devices``, ``explain NAME``.

Those that compare, replay and verify runs are in ``proving``.

Exit codes: 0 done; 1 the run went wrong (its error says how); 2 the call is wrong; 75 SIGTERM came and the state was
saved, run the same again; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import pathlib
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from phalanx import __version__
from phalanx.checkpoint.resume import ANYWAY, read_any
from phalanx.checkpoint.tensors import write_file
from phalanx.cli import measuring, pages, proving
from phalanx.cli.files import load_recipe
from phalanx.cli.printed import check_picture, pace, report, show, trial_line
from phalanx.cli.printed import save as save_picture
from phalanx.definition import checks
from phalanx.definition.evaluation import Evaluation
from phalanx.errors import PhalanxError, Preempted, UsageError
from phalanx.proof.chaos import campaign
from phalanx.recipe import Recipe
from phalanx.run.plots import plot_timeline
from phalanx.run.result import Result
from phalanx.surroundings.presence import rank, usable_cores

EXIT_RUN, EXIT_USAGE, EXIT_PREEMPTED, EXIT_INTERRUPTED = 1, 2, 75, 130
EXIT_CODES = (
    "Exit codes: 0 done, 1 the run went wrong, 2 the call is wrong, 75 saved at SIGTERM: run me again, 130 stopped by "
    "Ctrl-C."
)

app = typer.Typer(
    help=f"Synchronous data-parallel training with an exact answer.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
Plot = Annotated[str, typer.Option("--plot", metavar="PATH", help="Where to write the picture of loss and metric.")]
RunDir = Annotated[str, typer.Option("--run-dir", metavar="DIR", help="Keep snapshots there, and go on from them.")]
SnapshotEvery = Annotated[str, typer.Option("--snapshot-every", help="Steps from one snapshot to the next, or auto.")]
Devices = Annotated[str, typer.Option("--devices", help="As in cuda, or cuda:0,cuda:1. Never changes the answer.")]
Workers = Annotated[str, typer.Option("--workers", help="How many workers, or auto. Never changes the answer.")]
Readers = Annotated[str, typer.Option("--readers", help="How many processes that read data ahead, or auto.")]
Resume = Annotated[str, typer.Option("--resume", help="Go on from --run-dir: yes, no, or anyway (another recipe).")]
Audit = Annotated[str, typer.Option("--audit", metavar="SHARE", help="Do this share of steps twice, as in 0.01.")]
RESUME = {"yes": True, "no": False, ANYWAY: ANYWAY}


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Options before the command."""
    if version:
        typer.echo(f"phalanx {__version__}")


@app.command()
def train(
    file: Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="A Python file that defines `recipe`, or NAME.")],
    workers: Workers = "auto",
    devices: Devices = "auto",
    run_dir: RunDir = "",
    snapshot_every: SnapshotEvery = "auto",
    resume: Resume = "yes",
    readers: Readers = "auto",
    audit: Audit = "0",
    plot: Plot = "",
    save: Annotated[str, typer.Option("--save", metavar="FILE", help="Write the weights, as model.safetensors.")] = "",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the recipe in a Python file.

    The file defines `recipe = phalanx.Recipe(...)`; `evaluation = phalanx.Evaluation(...)` and `callbacks = [...]`
    beside it are used too.
    """
    check_picture(plot)
    if save and pathlib.Path(save).suffix != ".safetensors":
        raise UsageError(f"--save is {save!r}; end it in .safetensors")
    checks.choice("--resume", resume, tuple(RESUME))
    recipe, evaluation, callbacks = load_recipe(file)
    saving = {"run_dir": run_dir or None, "snapshot_every": _count(snapshot_every), "resume": RESUME[resume]}
    result = _trained(
        recipe, evaluation, workers, quiet=quiet, devices=_listed(devices), callbacks=callbacks,
        readers=_count(readers), audit=_share(audit), **saving,
    )  # fmt: skip
    if rank() > 0:  # one of several processes: the first reports
        return
    if save:
        result.save(save, averaged=result.averaged is not None)
    drawn = save_picture(result.plot(), plot) if plot else None
    report(pathlib.Path(file.split(":")[0]).name, result, drawn, json_=json_)


class DemoCommand(TyperCommand):
    """Its help is that of the demo that is named before --help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note which demo is named."""
        from phalanx.cli.demos import ABOUT

        named = next((ABOUT[word] for word in args if word in ABOUT), None)
        self.help = named or f"{self.help}\n\n" + "\n\n".join(ABOUT.values())
        return super().parse_args(ctx, args)


@app.command(cls=DemoCommand)
def demo(
    name: Annotated[str, typer.Argument(metavar="NAME", help="digits, iris or fashion-mnist.")],
    workers: Workers = "auto",
    framework: Annotated[str, typer.Option("--framework", help="torch; fashion-mnist also jax, tinygrad.")] = "torch",
    digits: Annotated[bool, typer.Option("--digits", help="fashion-mnist on bundled digits: no network.")] = False,
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="Where the IDX files are.")] = "data/fashion-mnist",
    devices: Devices = "auto",
    plot: Plot = "out/demo-{name}.png",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train on real data and draw a picture; fashion-mnist with one worker or device, and then with all."""
    from phalanx.cli.demos import CHAPTER
    from phalanx.cli.demos import demo as chosen
    from phalanx.frameworks.registry import device_names

    check_picture(plot)
    shown = chosen(name, framework, None if digits else data)
    if not json_:
        typer.echo(f"phalanx: {shown.title}")
    if name == CHAPTER:
        named = [] if devices == "auto" else device_names(devices.split(","), shown.recipe.replicas)
        alone = _trained(shown.recipe, shown.evaluation, "1", quiet=quiet, devices=named[:1] or "auto")
        count = "1" if named else (str(min(usable_cores(), 8)) if workers == "auto" else workers)
        result = _trained(shown.recipe, shown.evaluation, count, quiet=quiet, devices=named or "auto")
        if not json_:
            typer.echo(f"{pace(alone, named[:1])}\n{pace(result, named)}")
        assert alone.digest == result.digest
    else:
        result = _trained(shown.recipe, shown.evaluation, workers, quiet=quiet, devices=_listed(devices))
    report(name, result, save_picture(result.plot(), plot.format(name=name)), json_=json_)


@app.command()
def chaos(
    file: Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="A Python file that defines `recipe`, or NAME.")],
    kills: Annotated[int, typer.Option("--kills", min=1, help="How many workers to kill.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="When and whom; give the same to see the same.")] = 0,
    workers: Annotated[int, typer.Option("--workers", min=1, help="How many workers there are.")] = 3,
    plot: Plot = "out/chaos.png",
    json_: Json = False,
) -> None:
    """Kill workers at random while a recipe trains, and see whether the digest is what it would have been.

    Exit code 1 if a digest differs or anything is left behind.
    """
    check_picture(plot)
    recipe, *_ = load_recipe(file)
    if workers > recipe.replicas:
        raise UsageError(f"--workers is {workers}, but the recipe has {recipe.replicas} replicas; use at most those")
    if not json_:
        typer.echo(f"phalanx: killing {kills} workers of {file}, seed {seed}")
    trials = campaign(recipe, kills, seed, workers, lambda one: None if json_ else typer.echo(trial_line(one)))
    shown = max(trials, key=lambda one: one.kills)
    verdict = "same digest" if shown.right else "WRONG"
    title = f"{shown.kills} kills in {shown.steps} steps, seed {shown.seed}: {verdict}"
    if plot:
        save_picture(plot_timeline(shown.incidents, shown.seconds, workers, title), plot)
    pauses = sorted(pause for one in trials for pause in one.pauses)
    facts = {
        "kills": sum(one.kills for one in trials),
        "runs": len(trials),
        "wrong": sum(not one.right for one in trials),
        "problems": [one.problem for one in trials if one.problem],
        "median_pause_ms": round(pauses[len(pauses) // 2] * 1e3, 1) if pauses else None,
        "seed": seed,
        "picture": plot or None,
    }
    told = {**facts, "problems": "; ".join(facts["problems"]) or "none"}
    show(facts, told.items(), json_=json_)
    if facts["wrong"] or facts["problems"]:
        raise typer.Exit(EXIT_RUN)


@app.command("export")
def export_weights(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, or a snapshot.")],
    to: Annotated[str, typer.Option("--to", metavar="FILE", help="Where to.")] = "model.safetensors",
) -> None:
    """Write the weights of a run's newest snapshot as one safetensors file, which any tool reads."""
    newest = read_any(pathlib.Path(run))
    write_file(to, newest.weights)
    typer.echo(f"{newest.step} steps  {to}")


@app.command("report")
def report_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN [RUN]...", help="Directories of runs.")],
    to: Annotated[str, typer.Option("--to", metavar="FILE", help="Where to.")] = "report.html",
    json_: Json = False,
) -> None:
    """Draw runs as one page of HTML: loss, evaluations, throughput, where time goes, deaths, snapshots, environment."""
    rows = pages.report([pathlib.Path(run) for run in runs], pathlib.Path(to))
    show({"runs": rows, "report": to}, [*pages.lines(rows), ["report", to]], json_=json_)


@app.command()
def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="ring, ordered or naive (all-reduce); broadcast, reduce_scatter, all_gather."
        ),
    ],
    participants: Annotated[int, typer.Option("--participants", help="How many take part.")] = 4,
    plot: Annotated[
        str, typer.Option("--plot", metavar="PATH", help="Where to draw it, for up to 16; '' for no picture.")
    ] = "out/{name}.png",
) -> None:
    """Show a collective algorithm round by round, in words and as a picture."""
    from phalanx.cli.rounds import MOST_PARTICIPANTS, plot_rounds
    from phalanx.collectives import schedule, spell_rounds
    from phalanx.collectives.schedules import ALGORITHMS

    check_picture(plot)
    transfers = schedule(name, participants)
    for line in spell_rounds(transfers):
        typer.echo(line)
    if participants > MOST_PARTICIPANTS:
        typer.echo(f"no picture: {MOST_PARTICIPANTS} participants fit in one")
    elif plot:
        kind = " all-reduce" if name in ALGORITHMS else ""
        drawn = plot_rounds(transfers, participants, f"{name}{kind}, {participants} participants")
        typer.echo(f"picture  {save_picture(drawn, plot.format(name=name))}")


measuring.add_to(app)
proving.add_to(app)


def main() -> None:
    """Run the command line; errors become one sentence and an exit code."""
    try:
        app()
    except UsageError as error:
        typer.echo(f"phalanx: {error}", err=True)
        sys.exit(EXIT_USAGE)
    except Preempted as error:
        typer.echo(f"phalanx: {error}", err=True)
        sys.exit(EXIT_PREEMPTED)
    except PhalanxError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        typer.echo(f"phalanx: {error}", err=True)
        sys.exit(EXIT_RUN)


def _count(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def _share(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _listed(devices: str) -> str | list[str]:
    return devices if devices == "auto" else devices.split(",")


def _trained(recipe: Recipe, evaluation: Evaluation | None, workers: str, *, quiet: bool, **saving: Any) -> Result:
    try:
        return recipe.train(workers=_count(workers), evaluation=evaluation, progress=not quiet, **saving)
    except KeyboardInterrupt as interrupt:
        result = getattr(interrupt, "result", None)
        after = f" after {result.steps} steps, digest {result.digest}" if result is not None else ""
        typer.echo(f"\nphalanx: stopped{after}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt
