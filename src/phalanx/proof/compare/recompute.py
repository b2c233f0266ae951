"""Two recipes computed side by side until they differ: which phase of a step, which replica, which tensor."""

from __future__ import annotations

import linecache
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from phalanx import errors
from phalanx.checkpoint.chained import tensors_of
from phalanx.errors import PhalanxError
from phalanx.proof.compare.values import Difference, Unequal, flat, taken, unequal
from phalanx.proof.instant import Instant, shown
from phalanx.seams.records import Captured, StepReport, Tensor, Watch

SECONDS = 120.0  # that computing steps again may take
ELSEWHERE = tuple(os.path.dirname(os.path.realpath(file)) for file in (os.__file__, errors.__file__))  # no user code


class Told(NamedTuple):
    """Something that was computed within a replica-step: when, what, as bytes, and where in user code."""

    phase: str
    name: str
    values: dict[str, Tensor]
    line: str


def first_difference(one: Instant, other: Instant, last: int, *, operations: bool = False) -> Difference | None:
    """Do steps on both sides, from where they are, up to ``last``.

    None if they do the same; or if that takes too long, which shows in where the two are then.
    """
    end = time.monotonic() + SECONDS
    before = _states(one, other)
    start = unequal(*map(_tensors, before))
    if start is not None:
        return _at(one.step, None, "state", start)
    updates = range(one.update, one.definition.rounds.updates(last + 1))
    for update in shown(updates, "phalanx: computing both again"):
        if time.monotonic() > end:
            break
        reports = one.advance(whole=False), other.advance(whole=False)
        after = _states(one, other)
        if _same(*reports) and unequal(*map(_tensors, after)) is None:
            before = after
            continue
        one.put(before[0], update)
        other.put(before[1], update)
        found = _within_replicas(one, other, operations) or _folded(one, other) or _after_folds(one, reports, after)
        return replace(found, part=one.phase)
    return None


def _at(step: int, replica: int | None, phase: str, what: Unequal, line: str = "") -> Difference:
    return Difference(step=step, replica=replica, phase=phase, line=line, **what._asdict())


def _states(one: Instant, other: Instant) -> tuple[Captured, Captured]:
    return one.capture(), other.capture()


def _tensors(state: Captured) -> dict[str, Tensor]:
    return tensors_of(state.weights, state.training)


def _same(one: StepReport, other: StepReport) -> bool:
    left, right = ((repr(report.parts), repr(report.grad_norm), repr(report.lr)) for report in (one, other))
    return left == right


def _within_replicas(one: Instant, other: Instant, operations: bool) -> Difference | None:
    """The first replica that does something else, and what."""
    shares = one.shares(), other.shares()
    for replica in range(min(map(len, shares))):
        dealt = [{"samples": taken(side[replica].samples)} for side in shares]
        found = unequal(*dealt)
        if found is not None:
            return _at(one.step, replica, "samples", found)
        if len(shares[0][replica].samples):
            found = replica_difference(one, other, replica)
            if found is not None:
                return (operations and replica_difference(one, other, replica, operations=True)) or found
    return None


def replica_difference(one: Instant, other: Instant, replica: int, *, operations: bool = False) -> Difference | None:
    """What a replica does differently on two sides, in the order in which it is computed."""
    sides = [computed(instant, replica, operations=operations) for instant in (one, other)]
    for left, right in zip(*sides, strict=False):
        if (left.phase, left.name) != (right.phase, right.name):
            name = f"{left.name or left.phase} against {right.name or right.phase}"
            lines = " against ".join(dict.fromkeys(line for line in (left.line, right.line) if line))
            return _at(one.step, replica, left.phase, Unequal(name, None, None), lines)
        found = unequal(left.values, right.values)
        if found is not None:
            return _at(one.step, replica, left.phase, found, left.line)
    return None


def computed(instant: Instant, replica: int, *, operations: bool = False) -> list[Told]:
    """Everything that a replica-step computes, as bytes, in order."""
    told: list[Told] = []
    buffers: dict[str, Tensor] = {}
    phases = {
        "batch": "batch",
        "module": "forward",
        "output": "forward",
        "operation": "forward",
        "backward": "gradient",
    }

    def tell(kind: str, name: str, value: Any) -> None:
        if kind == "buffer":
            buffers[name] = taken(value)
        elif kind in ("operation", "backward"):
            line = _line(value[1] if len(value) > 1 else _stack())
            told.append(Told(phases[kind], name, flat(value[0], name), line))
            if kind == "backward":
                phases["operation"] = phases["backward"]
        else:
            root = name or {"output": "output", "module": "model"}.get(kind, "batch")
            told.append(Told(phases[kind], name, flat(value, root), ""))
            if kind == "output":
                phases["operation"] = "loss"  # what comes now, up to the backward pass

    try:
        done = instant.replica(replica, Watch(tell, operations=operations))
    except PhalanxError as error:
        cause = error.__cause__ or error
        text = f"{type(cause).__name__}: {cause}"
        return [*told, Told("forward", "exception", {"exception": taken(text)}, "")]
    told.append(Told("loss", "loss", flat({"loss": done.loss, "weight": done.weight}, "loss"), ""))
    gradients = {name: taken(value) for name, value in instant.named(done.gradient).items()}
    told += [Told("gradient", name, {name: value}, "") for name, value in gradients.items()]
    return told + [Told("buffer", name, {name: value}, "") for name, value in buffers.items()]


def _folded(one: Instant, other: Instant) -> Difference | None:
    """The first parameter whose gradients, all of them the same, add up to something else."""
    means = [{name: taken(value) for name, value in instant.mean().items()} for instant in (one, other)]
    found = unequal(*means)
    return None if found is None else _at(one.step, None, "fold", found)


def _after_folds(one: Instant, reports: tuple[StepReport, StepReport], after: tuple[Captured, Captured]) -> Difference:
    """The mean gradients are the same: what comes after them differs."""
    numbers = [{"norm": taken(report.grad_norm)} for report in reports]
    norm = unequal(*numbers)
    if norm is not None:
        return _at(one.step, None, "norm", norm)
    what = unequal(*map(_tensors, after))
    if what is None:
        rates = [{"lr": taken(report.lr)} for report in reports]
        return _at(one.step, None, "update", unequal(*rates) or Unequal("lr", None, None))
    trained = what.name in one.parameters or what.name.startswith("optimizer")
    phase = "update" if trained else "buffer"
    return _at(one.step, None, phase, what)


def _stack() -> list[tuple[str, int]]:
    """File and line of what is being run, from the innermost frame outwards."""
    return [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_stack())]


def _line(frames: Sequence[tuple[str, int]]) -> str:
    """The innermost line of user code; in a backward pass there may be none."""
    for name, number in frames:
        file = os.path.realpath(name)
        if os.path.exists(file) and "site-packages" not in file and not file.startswith(ELSEWHERE):
            return f"{name}:{number}: {linecache.getline(name, number).strip()}"
    return ""
