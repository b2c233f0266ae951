"""Is a run what its chain says: steps are computed again from snapshots, and their links compared.

A certificate is a run that was verified, as a file with all that is needed to train it again and compare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.checkpoint.chain import body_of, line_after, records
from phalanx.checkpoint.chained import fields_of, retrained_in
from phalanx.checkpoint.files import MALFORMED
from phalanx.checkpoint.files import read as read_file
from phalanx.checkpoint.resume import losses_in, read_any
from phalanx.definition import checks
from phalanx.definition.fields import Definition
from phalanx.definition.plain import changes, check_like
from phalanx.errors import SnapshotError, UsageError
from phalanx.frameworks.registry import recorded_environment
from phalanx.proof.difference import parted, unlike
from phalanx.proof.instant import Instant, devices_of, named_devices, nearest, whole
from phalanx.proof.replay import failure_of
from phalanx.proof.sides import Side, another, differing, side
from phalanx.recipe import Recipe
from phalanx.surroundings.presence import shows

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit statuses
FORMAT = 1
FIELDS = {"recipe": dict, "environment": dict, "steps": int, "chain": str, "digest": str}  # of a certificate


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
    workers: int = 1,
    progress: bool | str = "auto",
) -> Verified:
    """Compute steps of a run again, and compare links and digests of states.

    Parameters
    ----------
    recipe : Recipe
        Of the run.
    run_dir : str or path
    steps : (int, int), optional
        The first step, and the one after the last; all by default.
    workers : int
        How many workers compute.
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
    with contextlib.closing(side(path, recipe)) as run:
        if reason := _unlike(recipe, run) or _cut(run, whole=steps is None):
            return Verified(UNKNOWN, 0, reason)
        stretches = _stretches(run, steps)
        outcome = _compared(recipe, run, stretches, workers, progress)
        doubt, first = "", run.chain.first
        if outcome.status == SAME:
            doubt = _damaged(recipe, run, stretches)
            if not doubt and steps is None and first:
                doubt = f"{run.chain.path} begins at step {first}: the links before are not there to be compared"
        if not doubt and (differs := _went_on(recipe, run)):
            doubt = f"it went on with this recipe, by resume='anyway', after another: {differs}"
        elif outcome.status == DIFFERENT and (reads := differing(recipe, run.run["recipe"])[1]):
            doubt = f"the recipe may be another: {reads}"
        if doubt:
            return Verified(UNKNOWN, outcome.steps, f"{outcome.text}, but {doubt}")
        blamed = "" if outcome.status else _blamed(recipe, path, len(run.chain))
        return dataclasses.replace(outcome, text=outcome.text + blamed)


def _went_on(recipe: Definition, run: Side) -> str:
    """How an earlier recipe of the run differs, in words: numbers of its optimizer may have stayed; else empty."""
    told = [record.get("recipe") for record in records(run.chain.path, "run")]
    return next(filter(None, (differing(recipe, one)[0] for one in told if one != run.run["recipe"])), "")


def _cut(run: Side, *, whole: bool) -> str:
    """Why the chain cannot be that of the whole run."""
    newest, count = max([*run.states, *run.saved], default=0), len(run.chain)
    if whole and newest > count:
        return (
            f"it cannot be told: {run.chain.path} has {count} steps, and the newest snapshot is of step {newest}, so "
            "the chain was cut" + (f"; --steps {run.chain.first}:{count} checks what is left of it" if count else "")
        )
    return "" if count > run.chain.first else f"it cannot be told: {run.chain.path} has no steps yet"


def _damaged(recipe: Definition, run: Side, stretches: Sequence[tuple[int, int]]) -> str:
    """Name a snapshot of these steps that cannot be used, or has other losses than the chain; else empty."""
    updates = recipe.rounds.updates
    known = [step for first, end in stretches for step in range(first, end)]
    for saved, folder in run.saved.items():
        if not any(first <= saved <= end for first, end in stretches):
            continue
        try:
            found = whole(folder)
            if found is None:
                continue
            history = losses_in(found, updates(saved))
            for step in (step for step in known if step < saved):
                mine, theirs = history[updates(step) : updates(step + 1)], run.chain.losses(step)
                if list(map(str, mine)) != list(map(str, theirs)):
                    why = f"the snapshot of step {saved} has another loss of step {step} than the chain"
                    raise SnapshotError(why)
        except SnapshotError as error:
            return f"{error}; remove that folder, which a run that goes on does not use either"
    return ""


def _blamed(recipe: Definition, folder: pathlib.Path, steps: int) -> str:
    """Which worker was wrong where an audit ended the run, in words; "" where none did, or its batch was brought."""
    try:
        failed = failure_of(folder)
    except UsageError:
        return ""
    known = 0 <= failed.step <= steps and 0 <= failed.replica < recipe.replicas  # the log may say anything
    if not (known and failed.sums) or failed.structure is not None:
        return ""
    devices = devices_of(folder, failed.step)
    with Instant(recipe, nearest(folder, failed.step), folder=folder, devices=devices) as instant:
        instant.go_to(failed.step, failed.phase or None, progress=False)
        right = instant.sums(failed.replica)
    wrong = sorted({worker for worker, came in zip(failed.workers, failed.sums, strict=False) if came not in right})
    named = f"; of replica {failed.replica} of step {failed.step}, of which an audit had two values,"
    if len(wrong) == 1 and any(came in right for came in failed.sums):
        return f"{named} worker {wrong[0]} had the wrong one"
    return f"{named} neither comes out here: look whether the model computes the same twice (phalanx check)"


def _unlike(recipe: Definition, run: Side) -> str:
    """Why bits may differ here even if the run was right, in words; else empty."""
    if changed := changes(recorded_environment(), run.run.get("environment") or {}):
        return f"it cannot be checked here: {changed[0]} in the run"
    if not run.run.get("recipe"):
        return "it cannot be checked: the run does not say which recipe it had"
    differs, _ = differing(recipe, run.run["recipe"])
    return f"it cannot be checked: the recipe is another: {differs}" if differs else ""


def _stretches(run: Side, steps: tuple[int, int] | None) -> Sequence[tuple[int, int]]:
    """The steps to compare, as ranges that are cut where there are snapshots."""
    links = run.chain
    first, last = steps or (links.first, len(links))
    if not links.first <= first < last <= len(links):
        raise UsageError(f"steps is {first}:{last}, and the chain has {links.first}:{len(links)}; give some of those")
    return list(itertools.pairwise(sorted({first, last, *(at for at in run.saved if first < at < last)})))


def _compared(
    recipe: Definition, run: Side, stretches: Sequence[tuple[int, int]], workers: int, progress: bool | str
) -> Verified:
    """The outcome of computing steps again, up to the first that differs."""
    from tqdm import tqdm

    gone: set[int] = set()  # steps whose batches are gone
    done, total = 0, sum(end - begin for begin, end in stretches)
    with contextlib.closing(_again(recipe, run, stretches, workers, gone, progress)) as steps:
        for reason in tqdm(steps, total=total, unit="step", disable=not shows(progress)):
            if reason:
                return Verified(DIFFERENT, done, reason)
            done += 1
    same = f"the same: {done} steps, computed again, have the links of the run"
    if done == total:
        return Verified(SAME, done, same)
    named = f"step {min(gone)}" + (f" and of {len(gone) - 1} more" if len(gone) > 1 else "")
    why = f"{total - done} of the steps cannot be computed again: the batch of {named} was brought by the caller, and "
    why += "is gone; steps after it can from the next snapshot on"
    return Verified(UNKNOWN, done, f"{same}, but {why}" if done else f"it cannot be told: {why}")


def _again(
    recipe: Definition, run: Side, stretches: Sequence[tuple[int, int]], workers: int, gone: set[int],
    progress: bool | str,
) -> Generator[str, None, None]:  # fmt: skip
    """For each step how it differs from the run, in words; empty where it does not.

    A stretch ends before a step whose batch was brought, which is added to those that are ``gone``.
    """
    links = run.chain
    for begin, end in stretches:
        devices = devices_of(run.folder, begin, workers)
        with Instant(recipe, nearest(run.folder, begin), workers, folder=run.folder, devices=devices) as instant:
            brought = [step for step in range(max(instant.step, links.first), end) if links.brought(step)][:1]
            gone.update(brought)
            end = min([end, *brought])
            if end < begin:
                continue
            instant.go_to(begin, progress=progress)
            for step in range(begin, end):
                ahead = min([end, *(known for known in run.states if known > step)])
                yield _state_of(instant, run) or _step_of(instant, run, ahead)
            if reason := _state_of(instant, run):
                yield reason


def _step_of(instant: Instant, run: Side, ahead: int) -> str:
    """Do a step, while workers may run ahead to ``ahead``; how its link differs from that of the run, in words."""
    links, step = run.chain, instant.step
    body = body_of(fields_of(instant.advance(ahead), instant.definition, instant.brought))
    record = links.fields(step)
    if line_after(links.before(step), body, links.width) == links.line(step):
        return ""
    difference = parted(step, json.loads(body), record, ("computed again", "in the run"))
    if difference is None:
        return f"step {step}: the line is not the one that computing it again makes: the file was changed"
    return f"step {step} differs: {difference.phase}: {difference.note}"


def _state_of(instant: Instant, run: Side) -> str:
    """How the state differs from what the run noted of it, in words, if it did."""
    known = run.states.get(instant.step)
    if known is None or not (names := unlike(instant.leaves, known)):
        return ""
    return f"the state after {instant.step} steps differs in {len(names)} tensors, the first is {names[0]}"


def certify(recipe: Recipe, run_dir: pathlib.Path, *, workers: int = 1) -> tuple[Verified, dict[str, Any]]:
    """Verify a run. Returns the outcome and, if all is the same, a certificate as JSON values; else an empty dict.

    Raises
    ------
    UsageError
        The directory has no chain, or no snapshot of a later step than 0, or the run froze or thawed parameters.
    SnapshotError
        No snapshot there can be used.
    """
    newest = read_any(run_dir)
    if not newest.step:
        raise UsageError(
            f"the newest snapshot in {str(run_dir)!r} is of step 0, so that there is nothing to certify; wait for a "
            "later one, or end the run"
        )
    if retrained_in(run_dir) or recipe.schedule_on is not None:
        raise UsageError(
            f"the run in {str(run_dir)!r} depends on what was frozen, thawed or evaluated in it, which is not in its "
            "recipe, so that no certificate has it; let phalanx verify check the run"
        )
    verified = verify(recipe, run_dir, workers=workers)
    if verified.status != SAME:
        return verified, {}
    with contextlib.closing(side(run_dir)) as run, Instant(recipe, newest) as instant:
        return verified, {
            "certificate": FORMAT, "recipe": newest.recipe, "environment": newest.environment, "steps": newest.step,
            "arguments": run.run.get("arguments"), "device": newest.facts.get("device"),
            "chain": run.chain[newest.step - 1]["link"], "digest": instant.exported.digest,
        }  # fmt: skip


def claim_of(path: pathlib.Path) -> dict[str, Any]:
    """What a certificate says.

    Raises
    ------
    UsageError
        It is no certificate.
    """
    try:
        claim: dict[str, Any] = json.loads(read_file(path.resolve()))
        if claim["certificate"] != FORMAT:
            raise ValueError(f"it is of format {claim['certificate']!r:.80}")
        check_like({name: claim.get(name) for name in FIELDS}, FIELDS, "it")
    except (OSError, *MALFORMED) as error:
        raise UsageError(f"{str(path)!r} is no certificate: {error}; give one that phalanx certify wrote") from error
    return claim


def check_certificate(path: pathlib.Path, recipe: Recipe, *, workers: int = 1) -> Verified:
    """Train the recipe at hand, and compare chain and digest with those of a certificate.

    Raises
    ------
    UsageError
        It is no certificate.
    """
    claim = claim_of(path)
    if differs := another(recipe, claim["recipe"]):
        return Verified(DIFFERENT, 0, f"the recipe differs: {differs}")
    if changed := changes(recorded_environment(), claim["environment"]):
        return Verified(UNKNOWN, 0, f"the recipe is the same, but {changed[0]}, so the bits may differ")
    devices = named_devices(claim.get("device"), workers)
    placed: dict[str, Any] = {"devices": devices} if devices else {"workers": workers}
    with (
        tempfile.TemporaryDirectory(prefix="phalanx-") as folder,
        recipe.start(run_dir=folder, **placed) as run,
    ):
        for report in run:
            if report.step + 1 >= claim["steps"]:
                break
        result = run.result()
    if (result.steps, result.chain, result.digest) == (claim["steps"], claim["chain"], claim["digest"]):
        return Verified(SAME, result.steps, f"the same: {result.steps} steps, trained again, end in chain and digest")
    ends = f"{result.steps} steps, trained again, end in the chain {result.chain} and the digest {result.digest}"
    return Verified(DIFFERENT, result.steps, f"{ends}; the certificate has {claim['chain']} and {claim['digest']}")
