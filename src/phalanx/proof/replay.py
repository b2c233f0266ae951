"""Any replica of any step of a run, computed again in this process: as values, or under a debugger."""

from __future__ import annotations

import bdb
import contextlib
import dataclasses
import functools
import inspect
import pathlib
import pdb
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.checkpoint.directory import BATCH, events
from phalanx.checkpoint.tensors import read_tree
from phalanx.definition import checks
from phalanx.definition.data import map_tree
from phalanx.definition.fields import Definition
from phalanx.definition.plain import Each, check_like
from phalanx.errors import PhalanxError, RunError, SnapshotError, UsageError, safe_str
from phalanx.frameworks.registry import as_factory
from phalanx.proof.instant import Instant, nearest, of_updates
from phalanx.proof.sides import another, side
from phalanx.seams.records import Watch


@dataclass(frozen=True)
class Replayed:
    """What one replica computed in one step.

    Attributes
    ----------
    step, replica : int
    samples : tuple of int
        Indices into the data.
    batch : Any
        As the model got it.
    output : Any
        What ``forward_fn``, or the model, returned; None where the framework cannot tell.
    loss : float
    weight : float or None
        The weight that the loss returned, if it returned one.
    gradients : dict
        By name of the parameter, before weighting and clipping; those that have none are left out.
    buffers : dict
        By name, as the replica left them.
    """

    step: int
    replica: int
    samples: tuple[int, ...]
    batch: Any = field(repr=False)
    output: Any = field(repr=False)
    loss: float
    weight: float | None
    gradients: dict[str, Any] = field(repr=False)
    buffers: dict[str, Any] = field(repr=False)


def replay(
    recipe: Definition | RunError,
    run_dir: Any = None,
    *,
    step: int | None = None,
    replica: int | None = None,
    phase: str | None = None,
    debug: bool = False,
    progress: bool | str = "auto",
) -> Replayed:
    """Compute one replica of one step again, from the same state and samples, with the same random keys.

    Parameters
    ----------
    recipe : Recipe or RunError
        An error that ended a run has all that is needed: the recipe, the state before the step, the batch if it was
        brought; step and replica are those that failed.
    run_dir : str or path, optional
        The state before the step is computed from the nearest snapshot there; without it, from the first step on.
    step : int, optional
        From 0; by default, with ``run_dir``, that at which the run failed last.
    replica : int, optional
        From 0; by default that which failed.
    phase : str, optional
        Which of the recipe's phases, by its name; by default that which failed, else the first of the step.
    debug : bool
        Stop under ``pdb`` at the first line of forward or loss, and where user code raises.
    progress : bool or "auto"
        Whether a bar is shown while the steps in between are computed.

    Returns
    -------
    Replayed

    Raises
    ------
    UsageError
        There is no such step, replica or phase, or the recipe has no data.
    SnapshotError
        The chain is damaged. Or the batch of the step was brought, and there is no good snapshot of that step.
    WorkerError
        User code raised, as it did in the run; ``__cause__`` is its own exception.
    bdb.BdbQuit
        The debugger was left with ``q``.
    """
    if isinstance(recipe, RunError):
        return _of_error(recipe, replica, debug=debug)
    folder = None if run_dir is None else checks.path("run_dir", run_dir, hint="give the directory of a run")
    if folder is not None and not folder.is_dir():
        raise UsageError(f"run_dir is {str(folder)!r}, which is no directory; give the directory of a run")
    batch = None
    if folder is not None and (step is None or recipe.data is None):
        failed = failure_of(folder)
        if step in (None, failed.step):
            batch, phase = failed.batch(folder), phase or failed.phase or None
        step, replica = failed.step if step is None else step, failed.replica if replica is None else replica
    if step is None or replica is None:
        missing = "step" if step is None else "replica"
        raise UsageError(f"{missing} is not given; name step and replica, or give the run_dir of a run that failed")
    if recipe.data is not None:
        checks.integer("step", step, least=0, most=None if recipe.total is None else max(0, recipe.total - 1))
    checks.integer("replica", replica, least=0, most=recipe.replicas - 1)
    begin = nearest(folder, step)
    if batch is not None and (begin.step if begin else 0) != step:
        raise SnapshotError(f"there is no good snapshot of step {step}, and batches of the steps before it are gone")
    before = None if folder is None else _loss_in(folder, recipe, step, replica)
    with Instant(recipe, begin, batch=batch, folder=folder) as instant:
        instant.go_to(step, phase, progress=progress)
        computed = replayed(instant, replica, debug=debug)
    if before not in (None, str(computed.loss)):
        checks.warn(
            f"replica {replica} of step {step} comes to the loss {computed.loss}, and came to {before} in the run: "
            "this recipe, or something that it reads, is another"
        )
    return computed


def _loss_in(folder: pathlib.Path, recipe: Definition, step: int, replica: int) -> str | None:
    """The loss of a replica in a run, if its chain has one; warns where the run had another recipe.

    Raises
    ------
    SnapshotError
        The chain is damaged.
    """
    with contextlib.suppress(UsageError, LookupError), contextlib.closing(side(folder)) as run:
        if why := another(recipe, run.run.get("recipe")):
            text = f"the run in {str(folder)!r} had another recipe ({why}): this one is computed, from the run's state"
            checks.warn(text)
        elif recipe.phases is None and run.links is not None and run.links.first <= step < len(run.links):
            loss, weight = (run.links[step][name][replica] for name in ("losses", "weights"))
            return str(loss) if weight else None
    return None


def _of_error(error: RunError, replica: int | None, *, debug: bool) -> Replayed:
    """Replay from what an error has in memory."""
    recipe, replica = error.recipe, error.replica if replica is None else replica
    if recipe is None or error.step is None or replica is None:
        raise UsageError(
            f"this {type(error).__name__} names no step and replica of a run; give the recipe, step= and replica="
        )
    if error.result is None or error.result.steps != error.step:
        raise UsageError(
            f"this {type(error).__name__} does not have the state before step {error.step}; give the recipe and its "
            "run_dir"
        )
    checks.integer("replica", replica, least=0, most=recipe.replicas - 1)
    definition = dataclasses.replace(recipe, make_model=as_factory(error.result.model))
    losses = of_updates(error.result, definition)
    with Instant(definition, batch=error.batch, losses=losses) as instant:
        return replayed(instant, replica, debug=debug)


def replayed(instant: Instant, replica: int, *, debug: bool = False) -> Replayed:
    """Compute a replica of the step at which ``instant`` is."""
    seen: dict[str, Any] = {}
    buffers: dict[str, Any] = {}

    def tell(kind: str, name: str, value: Any) -> None:
        if kind == "buffer":
            buffers[name] = value.detach().clone() if hasattr(value, "detach") else value
        elif kind in ("batch", "output"):
            seen[kind] = value

    run = functools.partial(instant.replica, replica, Watch(tell))
    computed = debugged(run, _stops(instant)) if debug else run()
    gradients = instant.named(computed.gradient)
    output = map_tree(lambda value: value.detach() if hasattr(value, "detach") else value, seen.get("output"))
    samples = tuple(int(sample) for sample in instant.shares()[replica].samples)
    return Replayed(
        instant.step, replica, samples, seen.get("batch"), output, computed.loss, computed.weight, gradients, buffers
    )


FAILURE = {"step": int, "replica": int, "phase": str, "workers": Each(int), "sums": Each(int)}  # in the log
UNSAID: dict[str, Any] = {"phase": "", "workers": [], "sums": []}


class Failed(NamedTuple):
    """Where a run failed: step, replica, the structure of the caller's batch, if one was brought, and the phase.

    If an audit ended the run, also the two workers and the checksums of what they computed.
    """

    step: int
    replica: int
    structure: Any
    phase: str
    workers: Sequence[int] = ()
    sums: Sequence[int] = ()

    def batch(self, folder: pathlib.Path) -> Any:
        """The caller's batch; None where the step was a planned one.

        Raises
        ------
        SnapshotError
            It was not kept, or is damaged.
        """
        return None if self.structure is None else read_tree(folder / BATCH, self.structure)


def failure_of(folder: pathlib.Path) -> Failed:
    """Where a run failed last.

    Raises
    ------
    UsageError
        It did not fail, or the error names no replica.
    """
    for event in events(folder, newest_first=True):
        facts: dict[str, Any] = {name: event.get(name, UNSAID.get(name)) for name in FAILURE}
        with contextlib.suppress(ValueError):  # it names no step and replica, or was changed
            check_like(facts, FAILURE, "it")
            if event["event"] == "error":
                return Failed(**facts, structure=event.get("batch"))
    raise UsageError(f"no step of the run in {str(folder)!r} failed; name one with --step and --replica")


def debugged(run: Callable[[], Any], stops: Sequence[types.CodeType]) -> Any:
    """Call ``run`` under ``pdb``: stop at the first line of each of ``stops``, and where an exception is raised."""
    debugger = pdb.Pdb(readrc=False)  # that of the working directory may be somebody else's
    debugger.reset()
    for code in stops:
        debugger.set_break(code.co_filename, code.co_firstlineno, funcname=code.co_name)
    debugger.botframe = sys._getframe()
    debugger.set_continue()
    before = sys.gettrace()
    sys.settrace(debugger.trace_dispatch)
    try:
        return run()
    except PhalanxError as error:
        sys.settrace(None)
        cause = error.__cause__ or error
        if isinstance(cause, bdb.BdbQuit):
            raise cause from None
        print(f"{type(cause).__name__}: {safe_str(cause)}", file=debugger.stdout)
        debugger.clear_all_breaks()
        debugger.reset()
        debugger.interaction(None, cause.__traceback__)
        raise
    finally:
        sys.settrace(before)


def _stops(instant: Instant) -> list[types.CodeType]:
    """The code of forward and loss, as far as they are functions of Python."""
    definition = instant.definition
    if (forward := definition.forward_fn) is None:
        model = instant.exported.model()
        forward = getattr(model, "forward", model)
    codes = [_code(function) for function in (forward, definition.loss_fn) if function is not None]
    return [code for code in codes if code is not None]


def _code(function: Any) -> types.CodeType | None:
    while isinstance(function, functools.partial):
        function = next((item for item in function.args if callable(item)), function.func)
    function = getattr(function, "forward", function)
    function = inspect.unwrap(function)
    return getattr(function if inspect.isroutine(function) else vars(type(function)).get("__call__"), "__code__", None)
