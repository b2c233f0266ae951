"""Many recipes at once on one machine: folds, seeds, a grid. Each is trained in a process of its own, inline.

Each run is kept in a directory, as any run may be. So a job that dies goes on where it was, and so does the same call
after everything was killed. When a job has ended, the caller opens its run, does no step of it, and has the result.
Rejected: to send results through a pipe. A class that a script defines would then be another class in the caller, and
what is not sent would have to be made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import select
import signal
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.callbacks import Log
from phalanx.checkpoint.chained import origin_of, remember_origin
from phalanx.definition import checks
from phalanx.definition.evaluation import listed_evaluations
from phalanx.engines.processes.handle import Output, WorkerHandle
from phalanx.engines.processes.messages import DriverChannel, caused, ended, sendable
from phalanx.engines.processes.serialization import adopt_environment, described, pack, pack_each, unpack, unpack_one
from phalanx.engines.processes.starter import WARM
from phalanx.errors import Preempted, RunError, UsageError, safe_str
from phalanx.frameworks.registry import in_use, numeric_environment, reduced, starting
from phalanx.recipe import Recipe
from phalanx.run.observers import checked_callbacks
from phalanx.run.result import Result
from phalanx.run.run import Run
from phalanx.shared.memory import Memory
from phalanx.surroundings import interrupts, presence, system

DEATHS = 3  # of one job's processes in a row, that end it
POLL_MILLISECONDS = 100
HERE = "phalanx.lab.many"
OURS = HERE, "phalanx.engines.selection"  # what a job imports; where each did it, a job took 40 ms more of a processor
READY = ("ready",)  # a job tells that it hears Ctrl-C
SAVED = ("saved",)  # SIGTERM came to it alone, or to all: it goes on in another process, unless all are to end
TOLD = "seconds", "startup_seconds", "resumed_from", "stopped_early"  # of a job's result; its run has the rest


@dataclass(frozen=True)
class Job:
    """One recipe, and what its process needs beside it.

    Attributes
    ----------
    name : str
        Of its place in the results, and of its folder.
    recipe : Recipe
    options : dict of str
        Those of ``train``.
    """

    name: str
    recipe: Recipe
    options: dict[str, Any]

    def start(self, **more: Any) -> Run:
        """Begin its run here, or open it."""
        return self.recipe.start(engine="inline", progress=False, **(self.options | more))

    def packed(self) -> dict[str, Any]:
        """What travels."""
        fields = {item.name: getattr(self.recipe, item.name) for item in dataclasses.fields(self.recipe)}
        return {"name": self.name, "fields": fields, "options": self.options, "origin": origin_of(self.recipe)}


def train_all(
    recipes: Any,
    workers: Any = "auto",
    run_dir: Any = None,
    *,
    devices: Sequence[str] | None = None,
    progress: Any = "auto",
) -> Any:
    """Train many recipes at once, each in a process of its own: folds, seeds, a grid.

    Digests are those of training one after another. Data that several recipes share lies in memory once. A job whose
    process is killed goes on from its newest snapshot. One that hangs is not noticed: kill its process, or end all.

    Parameters
    ----------
    recipes : list, or dict of str
        Recipes, or tuples (recipe, evaluation) or (recipe, evaluation, callbacks). A dict names them. Callbacks are
        called in the job's process. Afterwards those here have the state that they had there: ``begin``, ``load`` and
        ``end`` are called here, too.
    workers : int or "auto"
        How many train at a time. "auto": as many as keep this machine's cores busy.
    run_dir : str or path, optional
        Each run is kept in a folder of it, by its name or number. The same call again goes on. Without it what
        callbacks write into the run's folder is gone afterwards.
    devices : list of str, optional
        One for each process, for recipes on accelerators, which are refused without.
    progress : bool or "auto"
        True: a bar on stderr, or lines if that is no terminal. "auto": a bar if it is one.

    Returns
    -------
    list, or dict of str, of Result
        In the order of ``recipes``.

    Raises
    ------
    UsageError
        The call is wrong.
    RunError
        Some recipes failed. Its ``results`` are as those that are returned, with errors in place of those that failed.
    KeyboardInterrupt, Preempted
        Ctrl-C, or SIGTERM where there is a ``run_dir``: steps that were begun were ended, and saved. It has ``results``
        too, with None for recipes that have not ended.

    Examples
    --------
    >>> results = phalanx.train_all([recipe.replace(seed=seed) for seed in range(5)], run_dir="runs/seeds")
    """
    if presence.several():
        raise UsageError("train_all() is for one machine, and this process is one of several of a launcher; start one")
    if not system.has_workers():
        raise UsageError(
            f"train_all() starts processes, which needs Linux, and this is {sys.platform}; train one after another, to "
            "the same digests: [recipe.train() for recipe in recipes]"
        )
    where = None if run_dir is None else checks.path("run_dir", run_dir)
    named = _named(recipes)
    given = named if isinstance(recipes, Mapping) else None
    with contextlib.ExitStack() as held:
        folder = where or pathlib.Path(held.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-")))
        jobs = [_job(name, value, folder, kept=where is not None) for name, value in named.items()]
        _check_logs(jobs)
        places = _places(workers, devices, jobs)
        outcomes: list[Any] = [None] * len(jobs)
        try:
            with (
                interrupts.guarded(),
                contextlib.closing(Crew(jobs, places)) as crew,
                _bar(len(jobs), progress) as tell,
                interrupts.on_sigterm(crew.terminate if where else None),
            ):
                for number, outcome in crew.outcomes():
                    with interrupts.held():  # Ctrl-C comes out of the crew, which has all steps ended
                        outcomes[number] = _result(jobs[number], outcome, kept=where is not None)
                    tell(jobs[number].name, outcomes[number])
        except (KeyboardInterrupt, Preempted) as error:
            error.results = _as_given(outcomes, given)  # type: ignore[attr-defined,union-attr]
            raise
    return _checked(outcomes, jobs, given)


class Crew:
    """The processes of jobs, as many at a time as there are places.

    Parameters
    ----------
    jobs : sequence of Job
    places : sequence of str
        The devices of each process.
    """

    def __init__(self, jobs: Sequence[Job], places: Sequence[str]) -> None:
        self._jobs, self._places = jobs, list(places)
        self._waiting = deque(range(len(jobs)))
        self._alive: dict[int, tuple[WorkerHandle, str]] = {}
        self._told: dict[int, Any] = {}  # what a job said at its end
        self._deaths = Counter[int]()
        self._terminated = False
        self._output, self._poller = Output(), select.poll()
        self._memories = [Memory(0), Memory(0)]
        try:
            code = [value for job in jobs for value in vars(job.recipe).values() if callable(value)]
            WARM.prepare(jobs[0].recipe, [*code, *(job.options for job in jobs)], OURS)
            threads = max(job.recipe.threads for job in jobs)
            numeric = {key: value for name in ("torch", *in_use()) for key, value in numeric_environment(name).items()}
            pack({**described("torch"), "numeric": numeric, "threads": threads}, self._memories[0], reduced)
            pack_each([job.packed() for job in jobs], self._memories[1], reduced)
        except BaseException:
            self.close()
            raise

    def outcomes(self) -> Iterator[tuple[int, Any]]:
        """The number of each job that has ended, and what it said: facts of its run, or an error.

        After Ctrl-C and SIGTERM no more are started. Those that run end their steps; a second Ctrl-C does not wait for
        them.
        """
        try:
            while self._waiting or self._alive:
                interrupts.check()
                if self._terminated:
                    raise Preempted("SIGTERM came, and jobs that it left alive have saved; the same call goes on")
                self._fill()
                yield from self._listen()
        except (KeyboardInterrupt, Preempted):
            self._waiting.clear()
            for handle, _ in self._alive.values():  # one that is not ready would not hear it, and has begun nothing
                handle.send(signal.SIGINT if handle.ready else signal.SIGKILL)
            while self._alive:
                interrupts.check()
                yield from self._listen()
            raise

    def terminate(self) -> None:
        """Have all end their steps soon; for a signal handler."""
        self._terminated = True

    def close(self) -> None:
        """End all processes that are left."""
        for handle, _ in self._alive.values():
            self._output.forget(handle.pipes)
            handle.end()
        self._alive.clear()
        for memory in self._memories:
            memory.close()

    def _fill(self) -> None:
        while self._waiting and self._places:
            number, place = self._waiting.popleft(), self._places.pop()
            inherited = [memory.fd for memory in self._memories]
            handle = WorkerHandle(number, inherited, HERE)
            self._alive[number] = handle, place
            self._output.follow(handle.pipes)
            for fd in handle.watched:
                self._poller.register(fd, select.POLLIN)
            with contextlib.suppress(OSError):  # it has died, which shows elsewhere
                handle.channel.send_bytes(place.encode())

    def _listen(self) -> Iterator[tuple[int, Any]]:
        """Carry what jobs print, take their messages, and clear away those that have ended."""
        ready = {fd for fd, _ in self._poller.poll(POLL_MILLISECONDS)}
        for fd in self._output.carry(ready):  # a job may close its output, and go on
            self._poller.unregister(fd)
        for number, (handle, _) in list(self._alive.items()):
            goes_on = handle.channel.fileno() not in ready or self._hear(number, handle)
            if handle.pidfd in ready or not goes_on:
                yield from self._cleared(number)

    def _hear(self, number: int, handle: WorkerHandle) -> bool:
        """Take messages that have come; whether there may be more."""
        messages, goes_on = handle.heard()
        for told in messages:
            if told == READY:
                handle.ready = True
            else:
                self._told[number] = told
        return goes_on

    def _cleared(self, number: int) -> Iterator[tuple[int, Any]]:
        handle, place = self._alive.pop(number)
        self._places.append(place)
        for fd in handle.watched:
            with contextlib.suppress(KeyError):  # its output had ended before
                self._poller.unregister(fd)
        if handle.channel.poll():  # else a process that it has left behind may hold the other end
            self._hear(number, handle)
        self._output.forget(handle.pipes)
        status = handle.end()
        told = self._told.pop(number, None)
        if told not in (None, SAVED):
            yield number, told
            return
        self._deaths[number] = 0 if told == SAVED else self._deaths[number] + 1
        if self._deaths[number] < DEATHS:
            self._waiting.appendleft(number)
            return
        why, _ = ended(None if status is None else os.waitstatus_to_exitcode(status))
        yield number, ("failed", RunError(f"its process {why}, {DEATHS} times in a row"), None, "")


def live(channel: int, inherited: Sequence[int], number: int) -> None:
    """Be the process of job ``number``: train it, and say how that went."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # one is sent to let the step end
    caller = DriverChannel(channel)
    caller.tell(*READY)
    environment_memory, jobs = (Memory(0, fd) for fd in inherited)
    ending: list[None] = []  # has an entry once SIGTERM came
    try:
        environment = unpack(environment_memory)
        adopt_environment(environment)
        with starting(environment["threads"]):
            packed = unpack_one(jobs, number)
        recipe = Recipe(**packed["fields"])
        where, arguments = packed["origin"]
        if where is not None:
            remember_origin(recipe, where, arguments or {})
        place = caller.received().decode()
        with Job(packed["name"], recipe, packed["options"]).start(devices=place) as run:
            if place == "auto":
                _check_place(run.params)
            with interrupts.on_sigterm(lambda: ending.append(run.terminate("SIGTERM came"))):
                run.finish()
        result = run.result()
        caller.tell("done", result.steps, {name: getattr(result, name) for name in TOLD})
    except KeyboardInterrupt:
        caller.tell("interrupted")
    except Exception as error:
        saved = ending and isinstance(error, Preempted)
        caller.tell(*(SAVED if saved else ("failed", *sendable(error))))
    except BaseException as error:
        told = f"its code ended its process, by {type(error).__name__}({safe_str(error)})"
        caller.tell("failed", *sendable(caused(RunError(told), error)))


def _check_place(params: Mapping[str, Any]) -> None:
    """Refuse a model that ``make_model`` put on an accelerator, which all processes would share."""
    device = getattr(next(iter(params.values()), None), "device", None)
    kind = str(getattr(device, "type", None) or getattr(device, "platform", None) or "cpu")
    if kind != "cpu":
        raise UsageError(f"its model is on {device}, and several would share that; give devices=, one per process")


def _named(recipes: Any) -> dict[str, Any]:
    """What the caller gave, by name or number."""
    if not isinstance(recipes, Iterable):
        raise UsageError(f"recipes is {checks.shown(recipes)}; it must be a list of recipes, or a dict of them by name")
    pairs = recipes.items() if isinstance(recipes, Mapping) else enumerate(recipes)
    named = dict[str, Any]()
    for name, value in pairs:
        if str(name) in named:
            raise UsageError(f"recipes has the name {str(name)!r} twice, as text; give each a name of its own")
        named[str(name)] = value
    return named


def _job(name: str, value: Any, folder: pathlib.Path, *, kept: bool) -> Job:
    """A job out of what the caller gave, with the options of its run."""
    parts = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], Recipe):
        raise UsageError(
            f"recipes[{name!r}] is {checks.shown(value)}; it must be a Recipe, or (recipe, evaluation), or (recipe, "
            "evaluation, callbacks)"
        )
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise UsageError(f"recipes has the name {name!r}, which is that of a folder, too; leave out slashes and dots")
    recipe: Recipe = parts[0]
    evaluation, callbacks = (*parts[1:], None, None)[:2]
    if recipe.data is None:
        raise UsageError(f"recipes[{name!r}] has no data, so its caller brings batches, and here nobody does")
    options: dict[str, Any] = {
        "run_dir": folder / name,
        "evaluation": listed_evaluations(evaluation),
        "callbacks": checked_callbacks(callbacks or ()),
    }
    if not kept:
        options |= {"chain": "off", "keep_snapshots": 1, "on_snapshot_error": "stop"}
    return Job(name, recipe, options)


def _check_logs(jobs: Sequence[Job]) -> None:
    """Refuse logs that two jobs would write to the same place."""
    owners = dict[str, str]()
    for job in jobs:
        for log in job.options["callbacks"]:
            if not isinstance(log, Log) or not log.where:
                continue
            owner = owners.setdefault(os.path.abspath(str(log.where)), job.name)
            if owner != job.name:
                raise UsageError(
                    f"recipes {owner!r} and {job.name!r} both log to {str(log.where)!r}; leave out where=, then each "
                    "has a log in its own folder"
                )


def _places(workers: Any, devices: Any, jobs: Sequence[Job]) -> list[str]:
    """The devices of each process."""
    if not jobs:
        raise UsageError("recipes is empty; give at least one recipe")
    if workers != "auto":
        workers = checks.integer("workers", workers, least=1, hint="or 'auto'")
    if devices is not None:
        listed = [devices] if isinstance(devices, str) else list(devices)
        if not listed or not all(isinstance(device, str) for device in listed):
            raise UsageError(f"devices is {checks.shown(devices)}; it must be a list of names, as in ['cuda:0']")
        return listed[: None if workers == "auto" else workers]
    if workers == "auto":
        workers = max(1, presence.usable_cores() // max(job.recipe.threads for job in jobs))
    return ["auto"] * min(workers, len(jobs))


def _result(job: Job, outcome: Any, *, kept: bool) -> Any:
    """What a job came to: its result, an error, or None where Ctrl-C came before its end."""
    kind, *facts = outcome
    if kind == "interrupted":
        return None
    if kind == "failed":
        error, cause, text = facts
        (cause or error).add_note(f"in the process of recipe {job.name!r}:\n{text}")
        return error if cause is None else caused(error, cause)
    try:
        steps, told = facts
        with job.start() as run:
            while run.steps < steps and next(run, None):  # its last snapshot could not be written
                pass
        result = dataclasses.replace(run.result(), **told)
    except Exception as error:  # its folder was changed meanwhile, or a callback raised here
        if interrupts.of_handler(error):
            raise
        return error
    if kept:
        return result
    best = result.best
    if best is not None:
        best = dataclasses.replace(best, kept=best.weights, path=None)
    return dataclasses.replace(result, chain=None, best=best)


def _as_given(outcomes: Iterable[Any], named: Mapping[str, Any] | None) -> Any:
    return list(outcomes) if named is None else dict(zip(named, outcomes, strict=True))


def _checked(outcomes: Sequence[Any], jobs: Sequence[Job], named: Mapping[str, Any] | None) -> Any:
    """The results; one RunError if some recipes failed. There was no Ctrl-C here, so all have ended."""
    stopped = RunError("its process was interrupted, though there was no Ctrl-C here")
    outcomes = [stopped if one is None else one for one in outcomes]
    failed = [(job.name, one) for job, one in zip(jobs, outcomes, strict=True) if isinstance(one, Exception)]
    results = _as_given(outcomes, named)
    if failed:
        told = "; ".join(f"{name}: {type(error).__name__}: {safe_str(error)}" for name, error in failed[:3])
        more = f", and {len(failed) - 3} more" if len(failed) > 3 else ""
        error = RunError(f"{len(failed)} of {len(jobs)} recipes failed ({told}{more}); error.results has all")
        error.results = results  # type: ignore[attr-defined]
        raise caused(error, failed[0][1])
    return results


@contextlib.contextmanager
def _bar(total: int, progress: Any) -> Iterator[Any]:
    """A function that tells of each job that has ended."""
    if not presence.shows(progress):
        yield lambda name, outcome: None
    elif not presence.terminal():
        done = Counter[str]()

        def say(name: str, outcome: Any) -> None:
            done["all"] += 1
            presence.say(f"recipe {name} ({done['all']} of {total}): {_short(outcome)}")

        yield say
    else:
        from tqdm import tqdm

        with tqdm(total=total, desc="phalanx", unit="recipe", dynamic_ncols=True) as bar:

            def draw(name: str, outcome: Any) -> None:
                bar.set_postfix_str(presence.printable(f"{name}: {_short(outcome)}"), refresh=False)
                bar.update()

            yield draw


def _short(outcome: Any) -> str:
    if not isinstance(outcome, Result):
        return "not ended" if outcome is None else f"failed, {type(outcome).__name__}"
    facts = {"loss": outcome.loss, **outcome.metrics}
    return ", ".join(f"{name} {value:.4g}" for name, value in facts.items() if value is not None)
