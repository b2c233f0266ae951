"""The options of a run: where and how it executes. Each changes the speed, not the answer; checked once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, TypedDict

from phalanx.checkpoint.resume import ANYWAY
from phalanx.checkpoint.tensors import PICKLES
from phalanx.definition import checks
from phalanx.definition.callback import said
from phalanx.definition.checks import ARGUMENTS, answer
from phalanx.definition.evaluation import Evaluation, check_metric, listed_evaluations, names_of
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.run.observers import checked_callbacks
from phalanx.seams.records import RunOptions
from phalanx.surroundings import presence

Auto = Literal["auto"]


class Options(TypedDict, total=False):
    """What ``train`` and ``start`` accept; they document each."""

    workers: int | Auto
    readers: int | Auto
    engine: Literal["auto", "inline", "processes", "distributed"]
    devices: str | Sequence[str]
    nondeterministic: Literal["error", "allow"]
    run_dir: Any
    resume: bool | Literal["anyway"]
    snapshot_every: int | Auto
    keep_snapshots: int
    on_snapshot_error: Literal["continue", "stop"]
    chain: int | Literal["auto", "every", "off"]
    audit: float
    max_failures: int
    max_seconds: float | None
    deadline_seconds: float | Auto
    lost_after: float
    min_hosts: int
    secret_file: Any
    warm_start: Any
    evaluation: Evaluation | Sequence[Evaluation] | Mapping[str, Evaluation] | None
    callbacks: Sequence[Any]
    progress: bool | Auto


Check = Callable[[str, Any], Any]
FIELDS = frozenset(item.name for item in dataclasses.fields(Definition))
NEEDS_RUN_DIR = ("resume", "snapshot_every", "keep_snapshots", "on_snapshot_error", "chain")
MOST_READERS = 64
SOURCES = "give a snapshot, a run_dir, a safetensors file, a state dict or result.best"
CHAIN = {"auto": None, "every": 1, "off": 0}


def settle(options: Mapping[str, Any], replicas: int) -> SimpleNamespace:
    """Every option after checking; refuse what this version cannot do.

    None stands for "auto", and for a ``run_dir`` or ``warm_start`` that was not given.

    Raises
    ------
    UsageError
        Names the option, its value and the way out.
    """
    for name in options:
        if name not in DEFAULTS:
            raise UsageError(unknown(name, DEFAULTS))
    given: dict[str, Any] = {**DEFAULTS, **options}
    settled = SimpleNamespace(**{name: check(name, given[name]) for name, (_, check) in CHECKS.items()})
    _check_engine(settled, replicas)
    for name in NEEDS_RUN_DIR:
        if settled.run_dir is None and given[name] != DEFAULTS[name]:
            raise UsageError(f"{name} is {checks.shown(given[name])}, but there is no run_dir; give one, or leave it")
    return settled


def of_run(settled: SimpleNamespace, audit: Any) -> RunOptions:
    """What engines have to know of the options, and of what callbacks say of themselves."""
    told = [(said(each), type(each).__name__) for each in settled.callbacks]
    averaging = [(each.decay_of_workers, name) for each, name in told if each.decay_of_workers is not None]
    gradients = tuple(name for each, _ in told for name in each.gradients)
    allow, only = settled.nondeterministic == "allow", averaging[0] if len(averaging) == 1 else None
    return RunOptions(audit, allow, settled.max_failures, only, gradients)


def unknown(name: str, known: Iterable[str], options: Iterable[str] = ()) -> str:
    """Text about an unknown argument: where it exists, or the most similar one that does."""
    if name in options:
        return f"{name} is not an argument of Recipe, but an option: recipe.train({name}=...)"
    if name in FIELDS and name not in set(known):
        return f"{name} is not an option of train() and start(), but part of the answer: Recipe(..., {name}=...)"
    return f"{name} is not an argument{' here' if name in ARGUMENTS else ''}; {answer(name, known)}"


def check_evaluated(definition: Definition, settled: SimpleNamespace) -> None:
    """Refuse evaluations without epochs, and callbacks or a schedule that wait for a metric that is not evaluated.

    Notes who waits for which: objects tell the names of what they compute only in an evaluation.
    """
    if settled.max_seconds is not None and definition.data is None:
        raise UsageError(
            f"max_seconds is {settled.max_seconds:.10g}, but data is None: you bring the batches, so stop bringing them"
        )
    if settled.evaluation and definition.data is None:
        raise UsageError("evaluation is given, but data is None, so there are no epochs; call run.evaluate() yourself")
    for due in settled.evaluation if definition.batch_size is None else ():  # a chunk is a sample
        due.metrics(single=False).check_merges()
    waiting = [(type(item).__name__, metric) for item in settled.callbacks if (metric := said(item).waits_for)]
    if waiting and not settled.evaluation:
        name, metric = waiting[0]
        if definition.data is None:
            raise UsageError(
                f"callbacks has {name}({metric!r}), but data is None, so nothing is evaluated by itself; leave it out, "
                "and call run.evaluate(...) and run.save(...) in your loop"
            )
        raise UsageError(
            f"callbacks has {name}({metric!r}), but nothing is evaluated, so that it would never be told a value; pass "
            f"evaluation=phalanx.Evaluation({{{metric!r}: ...}}, data)"
        )
    if definition.schedule_on is not None and not settled.evaluation:
        raise UsageError(
            f"schedule_on is {definition.schedule_on!r}, but nothing is evaluated; pass evaluation=Evaluation(...)"
        )
    settled.waiting = [(f"metric of {name}", metric) for name, metric in waiting]
    if definition.schedule_on is not None:
        settled.waiting.append(("schedule_on", definition.schedule_on))
    names = names_of(settled.evaluation)
    for argument, metric in settled.waiting:
        check_metric(argument, metric, names)
    _check_callbacks(definition, settled)


def _check_callbacks(definition: Definition, settled: SimpleNamespace) -> None:
    """Refuse callbacks that would write the same files; warn of one that waits for an epoch that does not come."""
    writing = [(type(item).__name__, said(item).waits_for) for item in settled.callbacks if said(item).writes_best]
    for name, metric in writing:
        if settled.run_dir is not None and writing.count((name, metric)) > 1:
            raise UsageError(
                f"callbacks has {name}({metric!r}) twice, which would write the same files in run_dir; leave one "
                "out, raise keep, or give the metric a second name in evaluation="
            )
    for wanted in [epoch for item in settled.callbacks if (epoch := said(item).thaws_in) is not None]:
        last = definition.epoch_of(definition.rounds.updates(definition.total) - 1) if definition.total else None
        if last is not None and last < wanted:
            checks.warn(
                f"Thaw has epoch={wanted}, but the last epoch of this run is {last}, counted from 0, so nothing is "
                "thawed; give a smaller epoch, or train for more epochs"
            )


def _check_engine(settled: SimpleNamespace, replicas: int) -> None:
    """Refuse workers and devices that do not go with each other or with the engine."""
    workers, engine = settled.workers, settled.engine
    if workers is not None and workers > replicas:
        raise UsageError(
            f"workers is {workers}, but {checks.counted(replicas, 'replica')} to compute; use workers <= replicas"
        )
    several = workers is not None and workers > 1
    world = engine == "distributed" or (engine == "auto" and presence.several())
    if world and settled.max_seconds is not None:
        raise UsageError(
            f"max_seconds is {settled.max_seconds:.10g}, but this run has several processes, whose clocks would stop "
            "them after different steps; give a run_dir, and have the launcher send SIGTERM when the time is over"
        )
    if engine == "inline" and several:
        raise UsageError(f"workers is {workers}, but engine='inline' is one worker; use engine='processes' or 'auto'")


def _one_of(*known: object) -> Check:
    return functools.partial(checks.choice, allowed=known)


def _unless(none: str | None, check: Callable[..., Any], **words: Any) -> Check:
    """The check of an option for which ``none`` stands for None."""
    return lambda name, value: None if type(value) is type(none) and value == none else check(name, value, **words)


COUNT = _unless("auto", checks.integer, least=1, hint="or 'auto'")


def _chain(name: str, value: Any) -> int | None:
    """Steps from one digest of the state to the next: None for "auto", 0 for none."""
    if isinstance(value, str) and value in CHAIN:
        return CHAIN[value]
    return checks.integer(name, value, least=1, hint="or 'auto', 'every' or 'off'")


def _share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise UsageError(f"{name} is {checks.shown(value)}; it must be a share of steps from 0 to 1, as in audit=0.01")
    return float(value)


def _devices(_: str, devices: Any) -> tuple[str, ...]:
    """Their names; none for 'auto'. The CPU has one name."""
    if isinstance(devices, str):
        devices = () if devices == "auto" else (devices,)
    elif not isinstance(devices, (tuple, list)) or not devices or not all(isinstance(name, str) for name in devices):
        raise UsageError(
            f"devices is {checks.shown(devices)}; it must be 'auto' or a list of device names such as ['cuda:0']; for "
            "two processes: workers=2"
        )
    return tuple("cpu" if name == "cpu:0" else name for name in devices)


def _source(name: str, value: Any) -> Any:
    """What a run is to begin from: None, an absolute path, or a dict of tensors and arrays."""
    value = getattr(value, "weights", value)  # of result.best, or of what phalanx.load returned
    if value is None or isinstance(value, Mapping):
        return value
    path = checks.path(name, value, hint=SOURCES)
    if path.suffix in PICKLES:
        raise UsageError(
            f"{name} is {str(value)!r}, which may be a pickle, and those can run code when they are read; give the "
            "dict in it (torch.load(path, weights_only=True)), or write it as a safetensors file"
        )
    return path


# Each option: its default, and the check that turns a value into what the run takes.
CHECKS: Mapping[str, tuple[Any, Check]] = {
    "workers": ("auto", COUNT),
    "readers": ("auto", _unless("auto", checks.integer, least=0, most=MOST_READERS, hint="or 'auto'")),
    "engine": ("auto", _one_of("auto", "inline", "processes", "distributed")),
    "devices": ("auto", _devices),
    "nondeterministic": ("error", _one_of("error", "allow")),
    "run_dir": (None, _unless(None, checks.path, hint="give a directory, or leave it out")),
    "resume": (True, _one_of(True, False, ANYWAY)),
    "snapshot_every": ("auto", COUNT),
    "keep_snapshots": (3, functools.partial(checks.integer, least=1)),
    "on_snapshot_error": ("continue", _one_of("continue", "stop")),
    "chain": ("auto", _chain),
    "audit": (0.0, _share),
    "max_failures": (10, functools.partial(checks.integer, least=1)),
    "max_seconds": (None, _unless(None, checks.positive, hint="or None, for no limit")),
    "deadline_seconds": ("auto", _unless("auto", checks.positive, hint="or 'auto'")),
    "lost_after": (10.0, checks.positive),
    "min_hosts": (1, functools.partial(checks.integer, least=1)),
    "secret_file": (None, _unless(None, checks.path, hint="give a file, or leave it out")),
    "warm_start": (None, _source),
    "evaluation": (None, lambda _, value: listed_evaluations(value)),
    "callbacks": ((), lambda _, value: checked_callbacks(value)),
    "progress": ("auto", _one_of(True, False, "auto")),
}
DEFAULTS = {name: default for name, (default, _) in CHECKS.items()}
