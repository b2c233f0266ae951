"""Where two runs differ first: recipe, environment, data, then the step, the replica, the phase and the tensor.

Links tell the step, and hashes of states tell the tensors. If the recipes are at hand, the steps since the last equal
state are computed again on both sides. That tells the rest: phase, replica, tensor, and the operation with its line
in user code.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from phalanx import errors
from phalanx.checkpoint.chained import tensors_of
from phalanx.checkpoint.snapshot import Snapshot, read
from phalanx.definition.fields import Definition
from phalanx.errors import PhalanxError, SnapshotError, UsageError, safe_str
from phalanx.proof.difference import SIDES, Difference, compare, flat, in_common, parting, taken, unlike
from phalanx.proof.instant import Instant, devices_of, whole
from phalanx.proof.sides import Side, another, different_fields, side
from phalanx.run.observers import shown
from phalanx.seams.records import Captured, StepReport, Tensor, Watch

UNTOLD = {"gradient": "links do not tell a replica's gradient from the fold of all",
          "update": "links do not tell an update from a gradient or a fold of the same norm"}  # fmt: skip
ELSEWHERE = tuple(os.path.dirname(os.path.realpath(file)) for file in (os.__file__, errors.__file__))  # no user code


def diff(
    a: Any, b: Any, *, recipes: tuple[Definition | None, Definition | None] = (None, None), operations: bool = False
) -> Difference | None:
    """Where two runs differ first.

    Parameters
    ----------
    a, b : str or path, Result or dict of tensors
        Directories of runs, snapshots, chains, safetensors files; results, or tensors by name.
    recipes : (Recipe, Recipe), optional
        Those of the two runs, so that steps can be computed again. By default, those that were trained in this process.
    operations : bool
        Whether to go down to the first operation whose output differs.

    Returns
    -------
    Difference or None
        None: all that both of them record is the same.

    Raises
    ------
    UsageError
        One of them cannot be compared, or they have nothing in common.
    SnapshotError
        One of them is damaged.
    """
    with contextlib.closing(side(a, recipes[0])) as one, contextlib.closing(side(b, recipes[1])) as other:
        if one.name == other.name:
            one.name, other.name = SIDES
        difference = _compared(one, other, operations)
        return difference and replace(difference, sides=(one.name, other.name))


def _compared(one: Side, other: Side, operations: bool) -> Difference | None:
    fields = different_fields(one, other)
    if one.loose or other.loose:
        return _loosely(one, other, fields)
    parted = (
        parting(one.links, other.links, (f"in {one.name}", f"in {other.name}")) if one.links and other.links else None
    )
    last_same, state = _states(one, other)
    if parted is None and state is None:
        return _ends(one, other, fields, last_same)
    difference, note, parameters = None, "", list[str]()
    last = min(([parted.step or 0] if parted else []) + ([state - 1] if state is not None else []))
    if not (missing := _missing(one, other)) and last >= 0:
        difference, note, parameters = _again(one, other, last_same, last, operations)
    elif state != 0:
        note = f"{missing}, so nothing was computed again"
    if difference is None:
        difference = _as_recorded(one, other, parted, state, last_same, parameters)
        untold = UNTOLD.get(difference.phase or "", "") if difference.name != "lr" else ""
        note = "; ".join(filter(None, [note, untold]))
    replica = difference.replica
    if parted and (parted.step or 0) <= (difference.step or 0):
        if parted.name == "lr":  # a cause, as what a recipe says is
            fields.setdefault("lr", f"{parted.note}, in step {parted.step}")
        else:
            note = "; ".join(filter(None, [f"link {parted.step}: {parted.note}", note]))
        replica = parted.replica if replica is None and parted.step == difference.step else replica
    return replace(difference, fields=fields, replica=replica, note=note)


def _loosely(one: Side, other: Side, fields: dict[str, str]) -> Difference | None:
    """Compare tensors of no known step with those of the newest state of the other side."""
    sides = [side.loose or side.tensors(max(side.saved, default=0)) for side in (one, other)]
    both = bool(one.loose and other.loose)
    if not both and not set(sides[0]) & set(sides[1]):
        raise UsageError(f"{one.name} and {other.name} have no tensor in common; give a run that has a snapshot")
    what = compare(*sides, common=not both)
    return what and replace(what, fields=fields, phase="tensors")


def _missing(one: Side, other: Side) -> str:
    """Why steps cannot be computed again, if they cannot."""
    for run in (one, other):
        if run.recipe is None:
            return "no recipe is at hand"
        why = another(run.recipe, run.run.get("recipe"))
        if why:
            return f"the recipe at hand is not the one that {run.name} had ({why})"
    return ""


def _ends(one: Side, other: Side, fields: dict[str, str], same: int) -> Difference | None:
    """The outcome where all that both have is the same: one may have more steps.

    Raises
    ------
    UsageError
        What they have is not of the same steps.
    SnapshotError
        A snapshot is damaged.
    """
    for folder in (*one.saved.values(), *other.saved.values()):
        whole(folder)  # what cannot be read may differ
    common = max(same, in_common(one.links, other.links))
    counts = [max([len(side.links or ()), *side.states]) for side in (one, other)]
    states = set(one.states) & set(other.states)
    if common < min(counts) or not (common or states):
        raise UsageError(
            f"it cannot be told: {one.name} has {counts[0]} steps and {other.name} has {counts[1]}, and what both say "
            f"is the same up to step {common}, from where on they have no links or states of the same steps; give runs "
            "with chains, or snapshots of one step"
        )
    if counts[0] != counts[1]:
        note = f"{one.name} has {counts[0]} steps, and {other.name} has {counts[1]}; those that both have are the same"
        return Difference(fields, min(counts), None, "end", note=note)
    return Difference(fields) if fields else None


def _states(one: Side, other: Side) -> tuple[int, int | None]:
    """The newest step up to which states are known to be the same, and the first one whose state is another."""
    same = 0
    for step in sorted(set(one.states) & set(other.states)):
        if unlike(one.states[step], other.states[step]):
            return same, step
        same = step
    return same, None


def _again(one: Side, other: Side, same: int, last: int, operations: bool) -> tuple[Difference | None, str, list[str]]:
    """Compute the steps since the last equal state again, on both sides.

    Returns what differs, or why nothing was found, and the names of parameters.
    """
    assert one.recipe is not None, "who asks has looked"
    assert other.recipe is not None, "who asks has looked"
    begins: tuple[Snapshot | None, Snapshot | None] = None, None
    known = set(one.saved) & set(other.saved) & set(one.states) & set(other.states)
    for step in sorted((step for step in known if step <= min(same, last)), reverse=True):
        with contextlib.suppress(SnapshotError):  # an earlier one may be whole
            begins = read(one.saved[step]), read(other.saved[step])
            break
    try:
        with (
            Instant(one.recipe, begins[0], folder=one.folder, devices=devices_of(one.folder, last)) as left,
            Instant(other.recipe, begins[1], folder=other.folder, devices=devices_of(other.folder, last)) as right,
        ):
            difference = first_difference(left, right, last, operations=operations)
            same_now = "computed again here, both recipes do the same: one of the two runs did something else"
            return difference, "" if difference else same_now, left.parameters
    except PhalanxError as error:
        return None, f"steps could not be computed again: {error}", []


def _as_recorded(
    one: Side, other: Side, parted: Difference | None, state: int | None, same: int, parameters: Sequence[str]
) -> Difference:
    """The difference that links and hashes of states tell by themselves."""
    if state is not None and (parted is None or state <= (parted.step or 0)):
        what = _measured(one, other, state)
        unsure = state == 0 or state - same > 1
        phase = "state" if unsure else _written_in(str(what.name), one.states[state], parameters)
        return replace(what, step=max(0, state - 1), phase=phase)
    assert parted is not None, "one of both differs"
    if state is not None and state == (parted.step or 0) + 1 and parted.phase in ("gradient", "update"):
        what = _measured(one, other, state)
        return replace(parted, name=what.name, elements=what.elements, ulp=what.ulp)
    return parted


def _written_in(leaf: str, state: Mapping[str, str], parameters: Sequence[str]) -> str:
    """The phase of a step that writes a tensor; "state" where nobody knows whether it is a parameter or a buffer."""
    kept = [name for name in state if name.startswith("optimizer.")]
    if leaf in parameters or leaf.startswith("optimizer") or any(leaf in name for name in kept):
        return "update"
    return "buffer" if parameters or kept else "state"


def _measured(one: Side, other: Side, state: int) -> Difference:
    """The first tensor that differs after so many steps, and how much, where both states are there."""
    leaf = unlike(one.states[state], other.states[state])[0]
    with contextlib.suppress(SnapshotError, KeyError):  # their hashes differ all the same
        left, right = ({leaf: side.tensors(state)[leaf]} for side in (one, other))
        return compare(left, right) or Difference(name=leaf)
    return Difference(name=leaf)


class ComputedValue(NamedTuple):
    """A value that was computed within a replica-step: its phase, name, bytes, and line of user code."""

    phase: str
    name: str
    values: dict[str, Tensor]
    line: str = ""


def first_difference(one: Instant, other: Instant, last: int, *, operations: bool = False) -> Difference | None:
    """Do the steps up to ``last`` on both sides, from where they are; None if both compute the same."""
    before = one.capture(), other.capture()
    start = compare(*map(_tensors, before))
    if start is not None:
        return replace(start, step=one.step, phase="state")
    updates = range(one.update, one.definition.rounds.updates(last + 1))
    for update in shown(updates, "phalanx: computing both again"):
        reports = one.advance(whole=False), other.advance(whole=False)
        after = one.capture(), other.capture()
        alike = len({repr((report.parts, report.grad_norm, report.lr)) for report in reports}) == 1
        if alike and compare(*map(_tensors, after)) is None:
            before = after
            continue
        one.put(before[0], update)
        other.put(before[1], update)
        first = _within_replicas(one, other, operations)
        first = first or _first(one.step, None, *map(_after_replicas, (one, other), reports, after))
        return replace(first or Difference(step=one.step, phase="update", name="lr"), part=one.phase)
    return None


def _tensors(state: Captured) -> dict[str, Tensor]:
    return tensors_of(state.weights, state.training)


def _within_replicas(one: Instant, other: Instant, operations: bool) -> Difference | None:
    """The first replica that computes something else, and the first value that differs."""
    for replica, shares in enumerate(zip(one.shares(), other.shares(), strict=False)):
        dealt = [[ComputedValue("samples", "samples", {"samples": taken(share.samples)})] for share in shares]
        difference = _first(one.step, replica, *dealt)
        if difference is None and len(shares[0].samples):
            difference = _first(one.step, replica, computed(one, replica), computed(other, replica))
            if difference is not None and operations:
                closer = [computed(instant, replica, operations=True) for instant in (one, other)]
                difference = _first(one.step, replica, *closer) or difference
        if difference is not None:
            return difference
    return None


def _first(
    step: int, replica: int | None, one: Sequence[ComputedValue], other: Sequence[ComputedValue]
) -> Difference | None:
    """The first value that two sides computed differently, in the order of computation."""
    for left, right in zip(one, other, strict=False):
        if (left.phase, left.name) != (right.phase, right.name):
            name = f"{left.name or left.phase} against {right.name or right.phase}"
            lines = " against ".join(dict.fromkeys(line for line in (left.line, right.line) if line))
            return Difference(step=step, replica=replica, phase=left.phase, name=name, line=lines)
        mismatch = compare(left.values, right.values)
        if mismatch is not None:
            return replace(mismatch, step=step, replica=replica, phase=left.phase, line=left.line)
    return None


def computed(instant: Instant, replica: int, *, operations: bool = False) -> list[ComputedValue]:
    """Everything that a replica-step computes, as bytes, in order."""
    records: list[ComputedValue] = []
    buffers: dict[str, Tensor] = {}
    stage = "forward"  # of operations

    def tell(kind: str, name: str, value: Any) -> None:
        nonlocal stage
        stage = {"output": "loss", "backward": "gradient"}.get(kind, stage)
        if kind == "buffer":
            buffers[name] = taken(value)
        elif kind in ("operation", "backward"):
            line = _line(value[1] if len(value) > 1 else _stack())
            records.append(ComputedValue(stage, name, flat(value[0], name), line))
        else:
            root = name or {"output": "output", "module": "model"}.get(kind, "batch")
            records.append(ComputedValue("batch" if kind == "batch" else "forward", name, flat(value, root)))

    try:
        done = instant.replica(replica, Watch(tell, operations=operations))
    except PhalanxError as error:
        cause = error.__cause__ or error
        text = f"{type(cause).__name__}: {safe_str(cause)}"
        return [*records, ComputedValue("forward", "exception", {"exception": taken(text)})]
    records.append(ComputedValue("loss", "loss", flat({"loss": done.loss, "weight": done.weight}, "loss")))
    named = instant.named(done.gradient)
    records += [ComputedValue("gradient", name, {name: taken(value)}) for name, value in named.items()]
    return records + [ComputedValue("buffer", name, {name: value}) for name, value in buffers.items()]


def _after_replicas(instant: Instant, report: StepReport, after: Captured) -> list[ComputedValue]:
    """What follows the gradients of replicas: their mean, its norm, and the new state."""
    mean = {name: taken(value) for name, value in instant.mean().items()}
    state = _tensors(after)
    updated = {name: state[name] for name in state if name in instant.parameters or name.startswith("optimizer")}
    buffers = {name: state[name] for name in state if name not in updated}
    groups = {"fold": mean, "norm": {"norm": taken(report.grad_norm)}, "update": updated, "buffer": buffers}
    return [ComputedValue(phase, phase, values) for phase, values in groups.items()]


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
