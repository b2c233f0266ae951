"""Is a run what its chain says: steps are computed again from snapshots, and their links compared."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.checkpoint.chain import body_of, line_after
from phalanx.checkpoint.chained import fields_of
from phalanx.checkpoint.resume import losses_in
from phalanx.checkpoint.snapshot import Snapshot
from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.errors import SnapshotError, UsageError
from phalanx.frameworks.registry import changed_environment
from phalanx.plan.keys import splitmix64
from phalanx.proof.compare.fields import differing
from phalanx.proof.compare.links import parted
from phalanx.proof.compare.sides import Side, side
from phalanx.proof.instant import Instant, nearest, snapshot_at, steps_in, sums
from phalanx.proof.replay import failure_of
from phalanx.surroundings.presence import shows, usable_cores

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit statuses
ALONE_SECONDS = 2.0  # that are computed in this process, before it is worth starting others


@dataclass(frozen=True)
class Verified:
    """What came of computing a run again.

    Attributes
    ----------
    status : int
        0: all that was compared is the same; 1: it differs; 2: it could not be told.
    steps : int
        How many steps were compared.
    text : str
        The outcome in words.
    """

    status: int
    steps: int
    text: str


def verify(
    recipe: Definition,
    run_dir: Any,
    *,
    steps: tuple[int, int] | None = None,
    sample: int | None = None,
    workers: int = 1,
    progress: bool | str = "auto",
) -> Verified:
    """Compute steps of a run again, and compare links and digests of states.

    Parameters
    ----------
    recipe : Recipe
        Of the run.
    run_dir : path-like
    steps : (int, int), optional
        From, and up to but without; all by default.
    sample : int, optional
        Of the stretches between snapshots, so many, which the chain's root draws.
    workers : int
        Worker processes that compute a stretch. What takes longer than a moment is computed side by side, as many
        stretches between snapshots as there are cores for.
    progress : bool or "auto"

    Returns
    -------
    Verified

    Raises
    ------
    UsageError
        It has no chain, or ``steps`` are not in it.
    SnapshotError
        The chain or a snapshot is damaged.
    """
    path = checks.path("run_dir", run_dir, hint="give the directory of a run")
    with_chain = side(path, recipe)
    try:
        if with_chain.links is None:
            raise UsageError(f"run_dir is {str(path)!r}, which has no chain; give the directory of a run")
        reason = _unlike(recipe, with_chain) or _cut(with_chain, whole=steps is None)
        if reason:
            return Verified(UNKNOWN, 0, reason)
        stretches = _stretches(with_chain, path, steps, sample)
        found = _verified(recipe, with_chain, stretches, workers, progress)
        _, reads = differing(recipe, with_chain.run["recipe"])
        if found.status == DIFFERENT and reads:
            return Verified(UNKNOWN, found.steps, f"{found.text}, but the recipe may be another: {reads}")
        damaged = _damaged(recipe, with_chain, stretches) if found.status == SAME else ""
        if damaged:
            return Verified(UNKNOWN, found.steps, f"{found.text}, but {damaged}")
        return found if found.status else dataclasses.replace(found, text=found.text + _blamed(recipe, path))
    finally:
        with_chain.close()


def _cut(run: Side, *, whole: bool) -> str:
    """Why the chain cannot be that of the whole run."""
    assert run.links is not None, "who asks has looked"
    newest, count = max(run.states, default=0), len(run.links)
    if whole and newest > count:
        return (
            f"it cannot be told: {run.links.path} has {count} steps, and the newest snapshot is of step {newest}, so "
            "the chain was cut" + (f"; --steps {run.links.first}:{count} checks what is left of it" if count else "")
        )
    return "" if count > run.links.first else f"it cannot be told: {run.links.path} has no steps yet"


def _damaged(recipe: Definition, run: Side, stretches: Sequence[tuple[int, int]]) -> str:
    """Which snapshot of these steps cannot be used, if one cannot; one that went away meanwhile is none."""
    for step in steps_in(run.folder):
        if any(first <= step <= end for first, end in stretches):
            try:
                known = itertools.chain(*(range(first, min(step, end)) for first, end in stretches))
                _check_losses(recipe, run, snapshot_at(run.folder, step), known)
            except SnapshotError as error:
                if step in steps_in(run.folder):
                    return f"{error}; remove that folder, which a run that goes on does not use either"
    return ""


def _blamed(recipe: Definition, folder: pathlib.Path) -> str:
    """Which worker was wrong where an audit ended the run, in words; "" where none did, or its batch was brought."""
    try:
        failed = failure_of(folder)
    except UsageError:
        return ""
    if not failed.sums or failed.structure is not None:
        return ""
    with Instant(recipe, nearest(folder, failed.step)) as instant:
        instant.go_to(failed.step, failed.phase or None, progress=False)
        right = sums(instant, failed.replica)
    wrong = sorted({worker for worker, came in zip(failed.workers, failed.sums, strict=True) if came not in right})
    named = f"; of replica {failed.replica} of step {failed.step}, of which an audit had two values,"
    if len(wrong) == 1 and any(came in right for came in failed.sums):
        return f"{named} worker {wrong[0]} had the wrong one"
    return f"{named} neither comes out here: look whether the model computes the same twice (phalanx check)"


def _check_losses(recipe: Definition, run: Side, saved: Snapshot, steps: Iterable[int]) -> None:
    """Raise if a snapshot has another loss of one of these steps than the chain."""
    assert run.links is not None, "who asks has looked"
    rounds = recipe.rounds
    history = losses_in(saved, rounds.updates(saved.step))
    for step in steps:
        mine = history[rounds.updates(step) : rounds.updates(step + 1)]
        if list(map(str, mine)) != list(map(str, run.links.losses(step))):
            raise SnapshotError(f"the snapshot of step {saved.step} has another loss of step {step} than the chain")


def _unlike(recipe: Definition, run: Side) -> str:
    """Why bits may differ here, whatever the run did."""
    if changes := changed_environment(run.run.get("environment") or {}):
        return f"it cannot be checked here: {changes[0]} in the run"
    if not run.run.get("recipe"):
        return "it cannot be checked: the run does not say which recipe it had"
    differs, _ = differing(recipe, run.run["recipe"])
    return f"it cannot be checked: the recipe is another: {differs}" if differs else ""


def _stretches(
    run: Side, path: pathlib.Path, steps: tuple[int, int] | None, sample: int | None
) -> Sequence[tuple[int, int]]:
    """What is to be compared, cut where there are snapshots."""
    links = run.links
    assert links is not None, "who asks has looked"
    first, last = steps or (links.first, len(links))
    if not links.first <= first < last <= len(links):
        raise UsageError(f"steps is {first}:{last}, and the chain has {links.first}:{len(links)}; give some of those")
    cuts = sorted({first, last, *(step for step in steps_in(path) if first < step < last)})
    found = list(itertools.pairwise(cuts))
    if sample is not None:
        key = int(links.root[:16], 16)
        found = sorted(found, key=lambda part: splitmix64(key ^ part[0]))[:sample]
    return sorted(found)


class _Going(NamedTuple):
    """A stretch that is being computed: its number, what it is, its steps, and whether in processes of its own."""

    number: int
    stretch: tuple[int, int]
    steps: Generator[str, None, None]
    apart: bool


def _verified(
    recipe: Definition, run: Side, stretches: Sequence[tuple[int, int]], workers: int, progress: bool | str
) -> Verified:
    """The outcome; of several stretches that differ, the first one's.

    What takes more than a moment is computed side by side, as many stretches as there are cores for.
    """
    from tqdm import tqdm

    began, beside, done, differs = time.monotonic(), usable_cores() // workers, 0, ""
    gone: set[int] = set()  # steps whose batches are
    total = sum(end - begin for begin, end in stretches)
    waiting, going = deque(enumerate(stretches)), deque[_Going]()
    with (
        contextlib.ExitStack() as opened,
        tqdm(total=total, unit="step", disable=not shows(progress)) as bar,
    ):
        while waiting or going:
            apart = beside > 1 and time.monotonic() - began > ALONE_SECONDS
            while waiting and len(going) < (beside if apart else 1):
                number, stretch = waiting.popleft()
                steps = _compared(recipe, run, stretch, workers, gone, progress=not apart and progress, apart=apart)
                going.append(_Going(number, stretch, opened.enter_context(contextlib.closing(steps)), apart))
            one = going.popleft()  # the others compute meanwhile
            try:
                reason = next(one.steps, None)
            except UsageError:
                if not one.apart:
                    raise
                beside = 1  # it cannot leave this process
                waiting.appendleft((one.number, one.stretch))
                continue
            if reason:
                differs = reason
                going = deque(item for item in going if item.number < one.number)  # the rest does not matter any more
                waiting.clear()
            elif reason is not None:
                done += 1
                bar.update()
                going.append(one)
    return Verified(DIFFERENT, done, differs) if differs else _agreed(done, total, gone)


def _agreed(done: int, total: int, gone: set[int]) -> Verified:
    """Nothing differs; of ``total`` steps, ``done`` could be computed again."""
    same = f"the same: {done} steps, computed again, have the links of the run"
    if done == total:
        return Verified(SAME, done, same)
    named = f"step {min(gone)}" + (f" and of {len(gone) - 1} more" if len(gone) > 1 else "")
    why = (
        f"{total - done} of the steps cannot be computed again: the batch of {named} was brought by the caller, and is "
    )
    why += "gone; steps after it can from the next snapshot on"
    return Verified(UNKNOWN, done, f"{same}, but {why}" if done else f"it cannot be told: {why}")


def _compared(
    recipe: Definition, run: Side, stretch: tuple[int, int], workers: int, gone: set[int],
    *, progress: bool | str, apart: bool,
) -> Generator[str, None, None]:  # fmt: skip
    """For each step of a stretch how it differs from the run, in words; empty where it does not.

    Ends before a step whose batch was brought, which is added to those that are ``gone``.
    """
    begin, end = stretch
    links = run.links
    assert links is not None, "who asks has looked"
    with Instant(recipe, nearest(run.folder, begin), workers, apart=apart) as instant:
        for step in range(max(instant.step, links.first), end):
            if links.brought(step):
                gone.add(step)
                end = step
                break
        if end < begin:
            return
        instant.go_to(begin, progress=progress)
        for step in range(begin, end):
            ahead = min([end, *(known for known in run.states if known > step)])
            yield _state_of(instant, run) or _step_of(instant, run, ahead)
        reason = _state_of(instant, run)
        if reason:
            yield reason


def _step_of(instant: Instant, run: Side, ahead: int) -> str:
    """Do a step, maybe up to ``ahead`` of them; how its link differs from that of the run, in words."""
    links, step = run.links, instant.step
    assert links is not None, "who asks has looked"
    body = body_of(fields_of(instant.advance(ahead), instant.definition, instant.brought))
    told = links.told(step)
    if line_after(links.before(step), body, links.width) == links.line(step):
        return ""
    found = parted(step, json.loads(body), told, ("computed again", "in the run"))
    if found is None:
        return f"step {step}: the line is not the one that computing it again makes: the file was changed"
    return f"step {step} differs: {found.phase}: {found.note}"


def _state_of(instant: Instant, run: Side) -> str:
    """How the state differs from what the run noted of it, in words, if it did."""
    known = run.states.get(instant.step)
    if known is None:
        return ""
    differing = [name for name, value in instant.leaves.items() if known.get(name, value) != value]
    if not differing:
        return ""
    return f"the state after {instant.step} steps differs in {len(differing)} tensors, the first is {differing[0]}"
