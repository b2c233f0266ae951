"""The options of a run: where and how it executes. Each changes the speed, never the answer; checked once."""

from __future__ import annotations

import difflib
import pathlib
import select
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from phalanx.checkpoint.resume import ANYWAY
from phalanx.definition import checks
from phalanx.definition.evaluation import Evaluation
from phalanx.errors import UsageError
from phalanx.seams.events import StepReport
from phalanx.surroundings import presence


class Options(TypedDict, total=False):
    """What ``train`` and ``start`` accept; they document each."""

    workers: int | str
    engine: str
    devices: str | Sequence[str]
    run_dir: Any
    resume: bool | str
    snapshot_every: int | str
    keep_snapshots: int
    on_snapshot_error: str
    deadline_seconds: float | str
    warm_start: Any
    evaluation: Evaluation | None
    callbacks: Sequence[Callable[[StepReport], Any]]
    progress: bool | str


NEEDS_RUN_DIR: Mapping[str, Any] = {
    "resume": True,
    "snapshot_every": "auto",
    "keep_snapshots": 3,
    "on_snapshot_error": "continue",
}


@dataclass(frozen=True)
class Settled:
    """Options after checking: None stands for "auto", and for a ``run_dir`` or ``warm_start`` that there is not."""

    workers: int | None
    engine: str
    devices: tuple[str, ...]
    deadline_seconds: float | None
    run_dir: pathlib.Path | None
    resume: bool | str
    snapshot_every: int | None
    keep_snapshots: int
    on_snapshot_error: str
    warm_start: pathlib.Path | None
    evaluation: Evaluation | None
    callbacks: tuple[Callable[[StepReport], Any], ...]
    progress: bool | str


def settle(options: Mapping[str, Any], replicas: int) -> Settled:
    """Check every option; refuse what this version cannot do.

    Raises
    ------
    UsageError
        Names the option, its value and the way out.
    """
    known = Options.__annotations__
    for name in options:
        if name not in known:
            raise UsageError(unknown(name, known))
    engine = options.get("engine", "auto")
    workers = _checked_workers(options.get("workers", "auto"), replicas)
    devices = _checked_devices(options.get("devices", "auto"))
    _check_engine(engine, workers, devices)
    progress = options.get("progress", "auto")
    checks.choice("progress", progress, (True, False, "auto"))
    saving = {**NEEDS_RUN_DIR, **options}
    keep = checks.integer("keep_snapshots", saving["keep_snapshots"], least=1)
    every = _checked_every(saving["snapshot_every"])
    run_dir = _path("run_dir", options.get("run_dir"))
    _check_saving(saving, run_dir)
    return Settled(
        workers=workers,
        engine=engine,
        devices=devices,
        deadline_seconds=_checked_deadline(options.get("deadline_seconds", "auto")),
        run_dir=run_dir,
        resume=saving["resume"],
        snapshot_every=every,
        keep_snapshots=keep,
        on_snapshot_error=saving["on_snapshot_error"],
        warm_start=_path("warm_start", options.get("warm_start")),
        evaluation=_checked_evaluation(options.get("evaluation")),
        callbacks=_checked_callbacks(options.get("callbacks", ())),
        progress=progress,
    )


def unknown(name: str, known: Iterable[str]) -> str:
    """Text about an argument that does not exist, with the likeliest one that does."""
    close = difflib.get_close_matches(name, list(known), n=1)
    guess = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
    return f"{name} is not an argument; {guess}"


def _checked_workers(workers: Any, replicas: int) -> int | None:
    """W; None for 'auto'."""
    if workers == "auto":
        return None
    count = checks.integer("workers", workers, least=1, hint="or 'auto'")
    if count > replicas:
        raise UsageError(f"workers is {count}, but there are {replicas} replicas to compute; use workers <= replicas")
    return count


def _check_engine(engine: Any, workers: int | None, devices: tuple[str, ...]) -> None:
    checks.choice("engine", engine, ("auto", "inline", "processes", "distributed"))
    several = workers is not None and workers > 1
    spawns = engine in ("processes", "distributed") or several or (engine == "auto" and presence.several())
    if engine == "inline" and several:
        raise UsageError(f"workers is {workers}, but engine='inline' is one worker; use engine='processes' or 'auto'")
    elsewhere = [name for name in devices if name != "cpu"]
    if spawns and elsewhere:
        raise UsageError(
            f"devices names {elsewhere[0]!r}, but worker processes compute on the CPU in this version; leave devices "
            "out, or use workers=1 and engine='inline' in one process"
        )
    if spawns and not hasattr(select, "poll"):
        raise UsageError("worker processes need Linux or macOS; use engine='inline' (same answer)")


def _checked_every(every: Any) -> int | None:
    """Steps from one snapshot to the next; None for 'auto'."""
    return None if every == "auto" else checks.integer("snapshot_every", every, least=1, hint="or 'auto'")


def _check_saving(saving: Mapping[str, Any], run_dir: pathlib.Path | None) -> None:
    checks.choice("resume", saving["resume"], (True, False, ANYWAY))
    checks.choice("on_snapshot_error", saving["on_snapshot_error"], ("continue", "stop"))
    if run_dir is None:
        for name, default in NEEDS_RUN_DIR.items():
            if saving[name] != default:
                raise UsageError(
                    f"{name} is {checks.shown(saving[name])}, but there is no run_dir; give one, or leave it"
                )


def _path(name: str, value: Any) -> pathlib.Path | None:
    return None if value is None else checks.path(name, value, hint="give a directory, or leave it out")


def _checked_deadline(seconds: Any) -> float | None:
    """Seconds; None for 'auto'."""
    if seconds == "auto":
        return None
    return checks.positive("deadline_seconds", seconds, hint="or 'auto'")


def _checked_devices(devices: Any) -> tuple[str, ...]:
    """Their names; none for 'auto'. The CPU has one name."""
    if isinstance(devices, str):
        devices = () if devices == "auto" else (devices,)
    elif not isinstance(devices, (tuple, list)) or not devices or not all(isinstance(name, str) for name in devices):
        raise UsageError(
            f"devices is {checks.shown(devices)}; it must be 'auto' or a list of device names such as ['cuda:0']"
        )
    names = tuple("cpu" if name == "cpu:0" else name for name in devices)
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"devices is {checks.shown(devices)}, which names {name!r} more than once, and a device computes one "
                "replica at a time; name each once"
            )
    return names


def _checked_evaluation(evaluation: Any) -> Evaluation | None:
    if evaluation is not None and not isinstance(evaluation, Evaluation):
        raise UsageError(
            f"evaluation is a {type(evaluation).__name__}; it must be a phalanx.Evaluation(metric_fn, data), or None"
        )
    return evaluation


def _checked_callbacks(callbacks: Any) -> tuple[Callable[[StepReport], Any], ...]:
    listed: list[Any] = list(callbacks) if isinstance(callbacks, Iterable) else [None]
    if not all(callable(callback) for callback in listed):
        raise UsageError(
            f"callbacks is {checks.shown(callbacks)}; it must be a list of functions f(report), as in callbacks=[show]"
        )
    return tuple(listed)
