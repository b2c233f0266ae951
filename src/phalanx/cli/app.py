"""The commands that train, show and look: ``phalanx --help`` lists them all.

Those that compare, replay and verify runs are in ``proving``.

Exit codes: 0 done; 1 the run went wrong (its error says how); 2 the call is wrong; 3 too many processes were lost,
run the same again; 4 two workers or processes computed different bits, so not on this machine; 75 stopped by SIGTERM or
--max-seconds, the state was saved, run the same again; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from phalanx import __version__
from phalanx.callbacks.best import best_in
from phalanx.checkpoint.named import state_dict_of
from phalanx.checkpoint.resume import ANYWAY, read_any
from phalanx.checkpoint.tensors import read_file, states_in, write_file
from phalanx.cli import proving
from phalanx.cli.common import Arguments, File, Json, Plot, echo, load_recipe, load_recipes, plain, save, show
from phalanx.cli.jobs import combinations, number
from phalanx.definition import checks
from phalanx.definition.evaluation import Evaluation
from phalanx.errors import CorruptionError, PeersLostError, PhalanxError, Preempted, RunError, UsageError
from phalanx.frameworks.registry import all_devices
from phalanx.recipe import Recipe
from phalanx.run.result import Result
from phalanx.surroundings.presence import rank, say, several

if TYPE_CHECKING:
    from phalanx.lab.chaos import Trial
    from phalanx.lab.tuning import Tuned

EXIT_RUN, EXIT_INTERRUPTED = 1, 130
EXITS = {UsageError: 2, PeersLostError: 3, CorruptionError: 4, Preempted: 75}
FORMAT = warnings.formatwarning
SRUN = (
    "srun --ntasks-per-node=1 --kill-on-bad-exit=0 bash -c 'set -- $(scontrol show hostnames $SLURM_STEP_NODELIST); "
    "MASTER_ADDR=$1 MASTER_PORT=29500 RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS "
    "exec phalanx train job.py --run-dir /shared/runs/a'"
)
EXIT_CODES = (
    "Exit codes: 0 done, 1 the run went wrong, 2 the call is wrong, 3 too many processes were lost: run again, 4 bits "
    "differ: not here again, 75 saved at SIGTERM or --max-seconds: run again, 130 stopped by Ctrl-C."
)


class Commands(TyperGroup):
    """Says how arguments of a recipe are written, where an unknown option was given."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Exception as error:  # typer brings a click of its own, or not, so classes differ
            known = vars(error)
            if type(error).__name__ == "NoSuchOption" and "arguments" in [
                one.name for one in known["ctx"].command.params
            ]:
                known["message"] += ". Arguments of the recipe are written without dashes, as in lr=0.1"
            raise


app = typer.Typer(
    cls=Commands,
    help=f"Synchronous data-parallel training with an exact answer.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
RunDir = Annotated[str, typer.Option("--run-dir", metavar="DIR", help="Keep snapshots there, and go on from them.")]
SnapshotEvery = Annotated[str, typer.Option("--snapshot-every", help="Steps from one snapshot to the next, or auto.")]
Devices = Annotated[str, typer.Option("--devices", help="As in cuda, or cuda:0,cuda:1. Never changes the answer.")]
Workers = Annotated[str, typer.Option("--workers", help="How many workers, or auto. Never changes the answer.")]
Readers = Annotated[str, typer.Option("--readers", help="How many processes that read data ahead, or auto.")]
Resume = Annotated[str, typer.Option("--resume", help="Go on from --run-dir: yes, no, or anyway (another recipe).")]
Audit = Annotated[str, typer.Option("--audit", metavar="SHARE", help="Share of steps with a replica computed twice.")]
MaxSeconds = Annotated[
    float | None, typer.Option("--max-seconds", help="Stop after so long; with --run-dir, run again to go on.")
]
Weights = Annotated[
    str,
    typer.Option("--save", metavar="FILE", help="Write the weights, averaged ones if there are, as model.safetensors."),
]
Jobs = Annotated[str, typer.Option("--jobs", help="Train all of lr=0.1,0.01 seed=0..4, so many at a time, or auto.")]
ALONE = {  # options that --jobs does not go with, and their defaults
    "--workers": "auto",
    "--readers": "auto",
    "--snapshot-every": "auto",
    "--audit": "0",
    "--resume": "yes",
    "--max-seconds": None,
    "--plot": "",
    "--save": "",
}
RESUME = {"yes": True, "no": False, ANYWAY: ANYWAY}


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Options before the command."""
    if version:
        echo(f"phalanx {__version__}")


@app.command()
def train(
    file: File,
    arguments: Arguments = None,
    workers: Workers = "auto",
    devices: Devices = "auto",
    run_dir: RunDir = "",
    snapshot_every: SnapshotEvery = "auto",
    resume: Resume = "yes",
    readers: Readers = "auto",
    audit: Audit = "0",
    max_seconds: MaxSeconds = None,
    plot: Plot = "",
    weights: Weights = "",
    json_: Json = False,
    quiet: Quiet = False,
    jobs: Jobs = "",
) -> None:
    """Train the recipe in a Python file.

    The file defines `recipe = phalanx.Recipe(...)`; `evaluation = phalanx.Evaluation(...)` and `callbacks = [...]`
    beside it are used too. Or it defines `def recipe(lr=1e-3, seed=0): return phalanx.Recipe(...)`; then lr=0.01
    and the like set its arguments. It may also return (recipe, evaluation) or (recipe, evaluation, callbacks).

    With --jobs, arguments may have several values, and all combinations are trained, each in a folder of --run-dir
    (by default runs) that is called after them. The same command goes on.
    """
    if jobs:
        beside = workers, readers, snapshot_every, audit, resume, max_seconds, plot, weights
        _swept(file, arguments or (), jobs, devices, run_dir or "runs", beside, json_=json_, quiet=quiet)
        return
    if weights and pathlib.Path(weights).suffix != ".safetensors":
        raise UsageError(f"--save is {weights!r}; end it in .safetensors")
    checks.choice("--resume", resume, tuple(RESUME))
    recipe, evaluation, callbacks = load_recipe(file, arguments or ())
    _refuse_unconnected_tasks()  # only now: the file may have made a world of them
    saving = {"run_dir": run_dir or None, "snapshot_every": number(snapshot_every), "resume": RESUME[resume]}
    result = _trained(
        recipe, evaluation, workers, quiet=quiet, devices=_listed(devices), callbacks=callbacks,
        readers=number(readers), audit=number(audit), max_seconds=max_seconds, **saving,
    )  # fmt: skip
    if rank() > 0 and result.chain is None:  # one of several processes; another one reports
        say(f"process {rank()} is done: {result.steps} steps, digest {result.digest}")
        return
    if weights:
        result.save(weights, averaged=result.averaged is not None)
    drawn = save(result.plot(), plot) if plot else None
    _report(pathlib.Path(file.split(":")[0]).name, result, drawn, json_=json_)
    if run_dir and "by max_seconds=" in (result.stopped_early or ""):
        raise typer.Exit(EXITS[Preempted])


def _swept(
    file: str,
    arguments: Sequence[str],
    jobs: str,
    devices: str,
    run_dir: str,
    beside: Sequence[Any],
    *,
    json_: bool,
    quiet: bool,
) -> None:
    """Train all combinations of arguments, and print a table of the runs."""
    if other := [name for (name, usual), value in zip(ALONE.items(), beside, strict=True) if value != usual]:
        raise UsageError(f"{other[0]} is given beside --jobs, which trains each recipe inline; leave one of them out")
    if not arguments:
        raise UsageError("--jobs trains all combinations of arguments, and no arguments are given; as in lr=0.1,0.01")
    from phalanx.lab import sweeps
    from phalanx.lab.many import train_all

    given = combinations(arguments)
    recipes = dict(zip(given, load_recipes(file, list(given.values())), strict=True))
    _refuse_unconnected_tasks()
    names = _listed(devices)
    error = None
    try:
        train_all(
            recipes, number(jobs), run_dir, devices=None if names == "auto" else names,
            progress=False if quiet or json_ else "auto",
        )  # fmt: skip
    except RunError as raised:
        error = raised
    with contextlib.suppress(*([UsageError] if error else [])):  # none of them may have begun
        rows = sweeps.rows_of(pathlib.Path(run_dir), recipes)
        show(rows, sweeps.table(rows), json_=json_)
    if error is not None:
        raise error


@app.command()
def demo(
    name: Annotated[str, typer.Argument(metavar="NAME", help="digits.")] = "digits",
    workers: Workers = "auto",
    devices: Devices = "auto",
    plot: Plot = "out/demo-{name}.png",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train LeNet on the 1,797 handwritten digits that come with scikit-learn, 20 epochs, a few seconds.

    Draws a picture of loss and accuracy.
    """
    checks.choice("NAME", name, ("digits",))
    from phalanx.lab import digits

    try:
        recipe, evaluation = digits.demo()
    except ImportError as error:
        raise UsageError(f"this demo cannot be run ({error}); pip install 'phalanx[demo]'") from error
    result = _trained(recipe, evaluation, workers, quiet=quiet, devices=_listed(devices))
    drawn = save(result.plot(), plot.format(name=name)) if plot else None
    _report(name, result, drawn, json_=json_)


@app.command()
def chaos(
    file: File,
    arguments: Arguments = None,
    kills: Annotated[int, typer.Option("--kills", min=1, help="How many workers to kill.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="When and whom; give the same to see the same.")] = 0,
    workers: Annotated[int, typer.Option("--workers", min=1, help="How many workers there are.")] = 3,
    hosts: Annotated[int, typer.Option("--hosts", help="Strike so many hosts on this machine, and links.")] = 1,
    json_: Json = False,
) -> None:
    """Kill workers at random while a recipe trains, and see whether the digest is what it would have been.

    With --hosts, whole hosts fall, freeze, leave, lose their links or room on their disks, and come back; so many times
    as --kills says. They are network namespaces where those can be made, else processes.

    Exit code 1 if a digest differs or anything is left behind.
    """
    from phalanx.lab.chaos import campaign

    recipe, evaluation, _ = load_recipe(file, arguments or ())
    if workers > recipe.replicas:
        raise UsageError(f"--workers is {workers}, but the recipe has {recipe.replicas} replicas; use at most those")
    if hosts > 1:
        given = {"file": file, "arguments": arguments or (), "workers": workers}
        _fallen(recipe, evaluation, given, kills, seed, hosts, json_=json_)
        return
    if not json_:
        echo(f"phalanx: killing {kills} workers of {file}, seed {seed}")
    trials = campaign(recipe, kills, seed, workers, lambda one: None if json_ else echo(_spelled(one)), evaluation)
    pauses = sorted(pause for one in trials for pause in one.pauses)
    median = round(pauses[len(pauses) // 2] * 1e3, 1) if pauses else None
    struck = {"kills": sum(one.kills for one in trials), "median_pause_ms": median}
    _ended(trials, struck, struck, seed, json_=json_)


def _fallen(
    recipe: Recipe, evaluation: Any, given: dict[str, Any], faults: int, seed: int, hosts: int, *, json_: bool
) -> None:
    """Strike hosts, and print what came of it."""
    from phalanx.lab import falls

    if hosts > min(given["workers"], recipe.replicas):
        raise UsageError(f"--hosts is {hosts}, but --workers is {given['workers']}; each host has at least one")
    if not json_:
        echo(f"phalanx: {faults} faults of {hosts} hosts, seed {seed}. {falls.without_links()}".rstrip())
    runs = falls.campaign(recipe, given, faults, seed, hosts, lambda line: None if json_ else echo(line), evaluation)
    struck = Counter(fault.what for run in runs for fault in run.faults)
    joined = {"joined": sum(run.joined for run in runs)}
    _ended(runs, {"faults": dict(struck), **joined}, struck | joined, seed, json_=json_)


def _ended(runs: Sequence[Any], facts: dict[str, Any], rows: dict[str, Any], seed: int, *, json_: bool) -> None:
    """Print what came of a campaign; exit if anything was wrong."""
    wrong, problems = sum(not run.right for run in runs), [run.problem for run in runs if run.problem]
    counts = {"runs": len(runs), "wrong": wrong, "seed": seed}
    told = {**rows, **counts, "problems": "; ".join(problems) or "none"}
    show({**facts, **counts, "problems": problems}, told.items(), json_=json_)
    if wrong or problems:
        raise typer.Exit(EXIT_RUN)


@app.command("tune")
def tune_recipe(
    file: File,
    arguments: Arguments = None,
    seconds: Annotated[float, typer.Option("--seconds", help="About how long it may take.")] = 60.0,
    plot: Plot = "",
    json_: Json = False,
) -> None:
    """Measure how many replicas, workers and threads suit a recipe on this machine, and give advice.

    Replicas and threads are part of the answer: with others, a recipe ends in other weights.
    """
    from phalanx.lab.tuning import tune

    recipe, *_ = load_recipe(file, arguments or ())
    tuned = tune(recipe, seconds, progress=False if json_ else "auto")
    if plot:
        save(tuned.plot(), plot)
    show(dataclasses.asdict(tuned), _measured(tuned), json_=json_)


@app.command("devices")
def list_devices(json_: Json = False) -> None:
    """List which devices each framework can use here, and what is missing for the others."""
    names = ("framework", "device", "what", "missing")
    rows = all_devices()
    lines = [[framework, device, what or f"not here: {missing}"] for framework, device, what, missing in rows]
    show([dict(zip(names, row, strict=True)) for row in rows], lines, json_=json_)


@app.command("export")
def export_weights(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, or a snapshot.")],
    to: Annotated[str, typer.Option("--to", metavar="FILE", help="Where to.")] = "model.safetensors",
    best: Annotated[bool, typer.Option("--best", help="Those that SaveBest kept, instead of the newest.")] = False,
) -> None:
    """Write a run's weights as one safetensors file, for load_state_dict and any other tool.

    They are those of the newest snapshot, or, with --best, the best ones that SaveBest kept.
    """
    newest = read_any(pathlib.Path(run))
    weights, step = state_dict_of(newest), newest.step
    if best:
        step, path = best_in(pathlib.Path(run), states_in(newest.facts, newest.training))
        weights = read_file(path)
    write_file(to, newest.weights if weights is None else weights)
    if weights is None:
        echo(
            "phalanx: the snapshot does not say which names load_state_dict takes, so these are all parameters and "
            "buffers, tied ones once: load them with strict=False"
        )
    echo(f"{step} steps  {to}")


@app.command("report")
def report_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Directories of runs, one or more.")],
    to: Annotated[str, typer.Option("--to", metavar="FILE", help="Where to.")] = "report.html",
    json_: Json = False,
) -> None:
    """Draw runs as one page of HTML: loss, evaluations, throughput, where time goes, deaths, snapshots, environment.

    Of several runs the best one is marked: by the metric of SaveBest, else the first whose name says what is better,
    else the loss.
    """
    from phalanx.lab import pages

    rows = pages.report([pathlib.Path(run) for run in runs], pathlib.Path(to))
    many = len(rows) > pages.MOST_BESIDE
    show({"runs": rows, "report": to}, [*(pages.short if many else pages.lines)(rows), ["report", to]], json_=json_)


@app.command("runs")
def list_runs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder with directories of runs.")],
    json_: Json = False,
) -> None:
    """List the runs in a folder, with their arguments, last values and state; a star marks the best of all.

    The best has the best value of the metric of SaveBest, else of the first metric of which the name says whether more
    is better, else the lowest loss.
    """
    from phalanx.lab import sweeps

    rows = sweeps.rows_of(pathlib.Path(folder))
    show(rows, sweeps.table(rows), json_=json_)


@app.command()
def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="ring, ordered or naive (all-reduce); broadcast, reduce_scatter, all_gather."
        ),
    ],
    participants: Annotated[int, typer.Option("--participants", help="How many take part.")] = 4,
) -> None:
    """Show a collective algorithm round by round, in words."""
    from phalanx.collectives import schedule, spell_rounds

    for line in spell_rounds(schedule(name, participants)):
        echo(line)


app.add_typer(proving.app)


def main() -> None:
    """Run the command line; errors become one sentence and an exit code, warnings of the package one line each."""
    warnings.formatwarning = _warned
    try:
        app()
    except PhalanxError as error:
        code = next((code for kind, code in EXITS.items() if isinstance(error, kind)), EXIT_RUN)
        if code == EXIT_RUN and error.__cause__ is not None:
            echo("".join(traceback.format_exception(error.__cause__)).rstrip(), err=True)
        echo(f"phalanx: {error}", err=True)
        sys.exit(code)


def _warned(
    message: Warning | str, category: type[Warning], filename: str, number: int, line: str | None = None
) -> str:
    """A warning as text: one sentence where it would point at the shell's script, as no line of the user's called."""
    if filename == getattr(sys.modules["__main__"], "__file__", None):
        return plain(f"phalanx: {message}\n")
    return plain(FORMAT(message, category, filename, number, line))


def _refuse_unconnected_tasks() -> None:
    """Refuse to be one of several tasks of srun that know nothing of each other; a batch script has no step."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks not in ("", "1") and not several() and os.environ.get("WORLD_SIZE") != "1":
        raise UsageError(
            f"srun has started {tasks} tasks, but RANK, WORLD_SIZE and MASTER_ADDR do not say that they belong "
            f"together, so each would train alone, and all into one run_dir. One run over all tasks: {SRUN}. One run: "
            "srun --ntasks=1. A run in each task, with directories of their own: set WORLD_SIZE=1"
        )


def _listed(devices: str) -> str | list[str]:
    return devices if devices == "auto" else devices.split(",")


def _trained(recipe: Recipe, evaluation: Evaluation | None, workers: str, *, quiet: bool, **saving: Any) -> Result:
    try:
        return recipe.train(workers=number(workers), evaluation=evaluation, progress=not quiet, **saving)
    except KeyboardInterrupt as interrupt:
        result = getattr(interrupt, "result", None)
        after = f" after {result.steps} steps, digest {result.digest}" if result is not None else ""
        echo(f"\nphalanx: stopped{after}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from interrupt


def _spelled(one: Trial) -> str:
    """The outcome of a run of a campaign, as a line."""
    verdict = "same digest" if one.right else "WRONG DIGEST"
    return f"seed {one.seed}: {one.kills} kills, {one.steps} steps, {verdict} {one.problem}".rstrip()


def _report(name: str, result: Result, drawn: pathlib.Path | None, *, json_: bool) -> None:
    """Print what came out, the digest last."""
    done = result.steps - (result.resumed_from or 0)
    facts: dict[str, Any] = {
        "name": name,
        "metrics": {evaluated.name: _plain(evaluated.value) for evaluated in result.metric_history},
        "stopped_early": result.stopped_early,
        "best": None if result.best is None else str(result.best),
        "loss": _plain(result.loss),
        "seconds_per_epoch": result.seconds / done * result.steps_per_epoch
        if result.steps_per_epoch and done
        else None,
        "steps": result.steps,
        "resumed_from_step": result.resumed_from,
        "samples": result.samples,
        "replicas": result.replicas,
        "workers": result.workers,
        "steps_audited": result.audited or None,
        "picture": None if drawn is None else str(drawn),
        "chain": result.chain,
        "digest": result.digest,
    }
    before = ["phalanx: this was done before; nothing was left to do"] if result.resumed_from == result.steps else []
    picture = [] if drawn is None else [f"phalanx: the picture is {drawn}"]
    show(facts, [[text] for text in (*before, *picture, str(result))], json_=json_)


def _plain(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity: those become text."""
    return value if value is None or math.isfinite(value) else str(value)


def _measured(tuned: Tuned) -> list[list[str]]:
    """A row for each way that was measured, and the advice."""
    rows = [["replicas", "workers", "threads", "ms a step", "samples/s", "price of R", "memory"]]
    for row in tuned.rows:
        price = "" if row.price is None else f"{row.price:.2f}"
        numbers = f"{row.seconds * 1e3:.2f}", f"{row.samples_per_second:,.0f}", price, f"{row.memory / 2**20:,.0f} MiB"
        rows.append([str(row.replicas), str(row.workers), str(row.threads), *numbers])
    return [*rows, [], [tuned.advice]]
