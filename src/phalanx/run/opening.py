"""Opening a run: options are checked, an earlier state is looked for, and engine, observers and loop are made."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from phalanx.checkpoint.resume import ANYWAY, ResumeState
from phalanx.definition import checks
from phalanx.definition.callback import said
from phalanx.definition.fields import Definition
from phalanx.definition.passes import Opener, Readings
from phalanx.definition.streams import supplied
from phalanx.engines import openers
from phalanx.errors import UsageError
from phalanx.plan.audit import Audit
from phalanx.run.loop import Loop
from phalanx.run.observers import shown, watching
from phalanx.run.options import Options, check_evaluated, of_run, settle
from phalanx.run.run import Run
from phalanx.seams import Engine
from phalanx.surroundings import system
from phalanx.surroundings.turns import Turns

AGAIN_SECONDS = 1.0  # from one try to take over a directory to the next
AHEAD = (
    "readers is {}, but a stream without shards is read in the caller's process, so it has no effect; give it shards=, "
    "or let make_iterable return a torch DataLoader(dataset, batch_size=None, num_workers=1), which reads ahead"
)


def opened(recipe: Definition, options: Options) -> Run:
    """Begin a run of a recipe. If something is refused on the way, what was opened before is closed."""
    called = time.perf_counter()
    given = settle(options, recipe.replicas)
    check_evaluated(recipe, given)
    entered, open_engine = openers()  # they load the code that starts processes

    functions = [(due.metric_fn, due.forward_fn, due.target_fn, due.collate_fn) for due in given.evaluation]
    audit = Audit(given.audit, recipe.seed) if given.audit else None
    with contextlib.ExitStack() as undo:
        world = entered(given, audit, undo)
        own = _of_this_process(given, world)
        past = ResumeState(recipe, own)
        undo.callback(past.close)
        engine = open_engine(
            recipe, own.engine, own.workers, own.devices, own.deadline_seconds, past.begin, of_run(own, audit),
            readers=own.readers, functions=functions, world=world, min_hosts=own.min_hosts,
        )  # fmt: skip
        undo.callback(engine.close)
        past.check(engine)
        turn, keeping = Turns(), past.observers()
        observers = [*watching(own, own.callbacks, recipe, turn), *keeping]
        supply = _supply(recipe, own, engine, world)
        undo.callback(supply.close if supply else bool)
        later = None if own is given else _succeed(recipe, given, engine, turn, lambda: run, world)
        loop = Loop(recipe, engine, own.evaluation, observers, supply, past.first_step, own.waiting, later)
        saver, predictor = keeping[-1] if keeping else None, functools.partial(_predicted, recipe)
        run = Run(recipe, engine, loop, saver, turn, called, predictor, given.run_dir, given.max_seconds)
        for observer in observers:
            observer.begin(engine, run)
            undo.callback(observer.end)
        undo.pop_all()
    return run


def _of_this_process(given: SimpleNamespace, world: Any) -> SimpleNamespace:
    """The options as they hold in this process: of several, one reports and saves."""
    if world is None or world.elect(given.run_dir):
        return given
    everywhere = tuple(item for item in given.callbacks if said(item).everywhere)
    others = {"run_dir": None, "warm_start": None, "callbacks": everywhere, "progress": False}
    return SimpleNamespace(**vars(given) | others)


def _supply(recipe: Definition, options: SimpleNamespace, engine: Engine, world: Any) -> Any:
    """Where samples come from, if the data is a stream."""
    if not recipe.stream:
        return None
    shards = recipe.stream.shards
    if options.readers and not shards:
        checks.warn(AHEAD.format(options.readers))
    opener: Opener = Readings(recipe)
    if shards and options.readers != 0 and system.has_workers():
        from phalanx.engines.shard_readers import readers_of  # it loads the code that starts processes

        workers = engine.workers // (world.size if world else 1)  # of this host
        opener = readers_of(recipe, engine.framework, options.readers, workers) or opener
    bar = functools.partial(shown, unit="sample", progress=options.progress)  # while it is read again
    try:
        return supplied(recipe, engine, bar, anyway=options.resume == ANYWAY, apart=world is not None, opener=opener)
    except BaseException:
        opener.close()
        raise


def _succeed(
    recipe: Definition, given: SimpleNamespace, engine: Engine, turn: Turns, run: Callable[[], Run], world: Any
) -> Iterator[list[Any]]:
    """What this process does once it reports and saves in place of another, as soon as that lets go of run_dir.

    At the end of a run nothing else would save, so it does not wait for the other, which may be stopped for good.
    Members have agreed to go on without that one, and if all of them see one directory, what it has locked is that.
    """
    options = SimpleNamespace(**vars(given) | {"resume": True, "warm_start": None})
    only = tuple(item for item in given.callbacks if not said(item).everywhere)
    observers: list[Any] = [] if run().closed else watching(options, only, recipe, turn)
    saves, again = False, 0.0
    while not saves:
        try:
            past = ResumeState(recipe, options, seize=run().closed and bool(world and world.members.folder))
            past.take_over(engine)
            keeping = past.observers()
            observers += keeping
            run().save_by(keeping[-1] if keeping else None)
            saves = True
        except UsageError as error:
            if run().closed:
                checks.warn(f"nobody has saved step {run().steps}, the last one, as who saved is lost: {error}")
            elif not again:
                checks.warn(f"this process saves in place of another that fell, as soon as it can: {error}")
            again = time.perf_counter() + AGAIN_SECONDS
        for observer in observers:
            observer.begin(engine, run())
        yield observers
        while time.perf_counter() < again and not run().closed:
            yield []
        observers = []


def _predicted(recipe: Definition, model: Any, weights: Any, data: Any, batch_size: int, forward_fn: Any) -> Any:
    """Outputs of a trained model, in this process."""
    from phalanx.engines.here import open_trained

    with open_trained(recipe, model) as (trained, engine):
        return Loop(trained, engine, (), ()).predict(data, batch_size, forward_fn, weights)
