"""Where two runs differ first: recipe, environment, data, then the step, the replica, the phase and the tensor.

Links tell the step without reading all of them; hashes of states tell which tensors; and where the recipes are at hand,
the steps since the last state that was the same are computed again on both sides, which tells the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.errors import PhalanxError, UsageError
from phalanx.proof.compare.fields import another, different_fields
from phalanx.proof.compare.links import in_common, parting
from phalanx.proof.compare.recompute import first_difference
from phalanx.proof.compare.sides import Side, side
from phalanx.proof.compare.values import Difference, Unequal, unequal
from phalanx.proof.instant import Instant, snapshot_at

UNTOLD = {"gradient": "links do not tell a replica's gradient from the fold of all",
          "update": "links do not tell an update from a gradient or a fold of the same norm"}  # fmt: skip


def diff(
    a: Any, b: Any, *, recipes: tuple[Definition | None, Definition | None] = (None, None), operations: bool = False
) -> Difference | None:
    """Where two runs differ first.

    Parameters
    ----------
    a, b : path-like, Result or dict of tensors
        Directories of runs, snapshots, chains, safetensors files; results, or tensors by name.
    recipes : (Recipe, Recipe), optional
        Those of the two runs, so that steps can be computed again. By default, those that were trained in this process.
    operations : bool
        Whether to go down to the first operation whose output differs.

    Returns
    -------
    Difference or None
        None: they are the same, as far as both say anything.

    Raises
    ------
    UsageError
        One of them is nothing that can be compared, or they have nothing in common.
    SnapshotError
        One of them is damaged.
    """
    one = side(a, recipes[0])
    try:
        other = side(b, recipes[1])
        try:
            return _compared(one, other, operations)
        finally:
            other.close()
    finally:
        one.close()


def _compared(one: Side, other: Side, operations: bool) -> Difference | None:
    fields = different_fields(one, other)
    if one.loose or other.loose:
        return _loosely(one, other, fields)
    parted = parting(one.links, other.links) if one.links and other.links else None
    last_same, state = _states(one, other)
    if parted is None and state is None:
        return _ends(one, other, fields, last_same)
    found, note, parameters = None, "", list[str]()
    last = min(([parted.step or 0] if parted else []) + ([state - 1] if state is not None else []))
    if not (missing := _missing(one, other)) and last >= 0:
        found, note, parameters = _again(one, other, last_same, last, operations)
    elif state != 0:
        note = f"{missing}, so nothing was computed again"
    if found is None:
        found = _as_recorded(one, other, parted, state, last_same, parameters)
        untold = UNTOLD.get(found.phase or "", "") if found.name != "lr" else ""
        note = "; ".join(filter(None, [note, untold]))
    replica = found.replica
    if parted and (parted.step or 0) <= (found.step or 0):
        note = "; ".join(filter(None, [f"link {parted.step}: {parted.note}", note]))
        replica = parted.replica if replica is None and parted.step == found.step else replica
    return replace(found, fields=fields, replica=replica, note=note, losses=_losses(one, other))


def _loosely(one: Side, other: Side, fields: dict[str, str]) -> Difference | None:
    """Tensors of no known step, with those of the newest state of the other side."""
    sides = [side.loose or side.newest() for side in (one, other)]
    both = bool(one.loose and other.loose)
    if not both and not set(sides[0]) & set(sides[1]):
        raise UsageError(f"{one.name} and {other.name} have no tensor in common; give a run that has a snapshot")
    what = unequal(*sides, common=not both)
    if what is None:
        return None
    return Difference(fields, phase="tensors", **what._asdict())


def _missing(one: Side, other: Side) -> str:
    """Why steps cannot be computed again, if they cannot."""
    for run, name in ((one, "A"), (other, "B")):
        if run.recipe is None:
            return "no recipe is at hand"
        why = another(run.recipe, run.run.get("recipe"))
        if why:
            return f"the recipe at hand is not the one that {name} had ({why})"
    return ""


def _ends(one: Side, other: Side, fields: dict[str, str], same: int) -> Difference | None:
    """All that both have is the same: one may have more of it.

    Raises
    ------
    UsageError
        What they have is not of the same steps.
    """
    common = max(same, in_common(one.links, other.links))
    counts = [max([len(side.links or ()), *side.states]) for side in (one, other)]
    states = set(one.states) & set(other.states)
    if common < min(counts) or not (common or states):
        raise UsageError(
            f"it cannot be told: A has {counts[0]} steps and B has {counts[1]}, and what both say is the same up to "
            f"step {common}, from where on they have no links or states of the same steps; give runs with chains, or "
            "snapshots of one step"
        )
    if counts[0] != counts[1]:
        note = f"A has {counts[0]} steps, and B has {counts[1]}; those that both have are the same"
        return Difference(fields, min(counts), None, "end", note=note, losses=_losses(one, other))
    return Difference(fields, losses=_losses(one, other)) if fields else None


def _states(one: Side, other: Side) -> tuple[int, int | None]:
    """The newest step up to which states are known to be the same, and the first one whose state is another."""
    same = 0
    for step in sorted(set(one.states) & set(other.states)):
        left, right = one.states[step], other.states[step]
        if any(left[name] != right[name] for name in left if name in right):
            return same, step
        same = step
    return same, None


def _again(one: Side, other: Side, same: int, last: int, operations: bool) -> tuple[Difference | None, str, list[str]]:
    """Compute the steps since the last state that was the same again, on both sides.

    Returns what differs, or why nothing was found, and the names of parameters.
    """
    assert one.recipe is not None, "who asks has looked"
    assert other.recipe is not None, "who asks has looked"
    starts = [step for step in set(one.states) & set(other.states) if step <= min(same, last)]
    begins: list[Any] = [None, None]
    for step in sorted(starts, reverse=True):
        try:
            begins = [snapshot_at(side.folder, step) for side in (one, other)]
            break
        except PhalanxError:
            continue
    try:
        with Instant(one.recipe, begins[0]) as left, Instant(other.recipe, begins[1]) as right:
            found = first_difference(left, right, last, operations=operations)
            note = (
                "" if found else "computed again here, both recipes do the same: one of the two runs did something else"
            )
            if found is None and left.step <= last:
                note = f"computing steps again took too long, and came to step {left.step}"
            return found, note, left.parameters
    except PhalanxError as error:
        return None, f"steps could not be computed again: {error}", []


def _as_recorded(
    one: Side, other: Side, parted: Difference | None, state: int | None, same: int, parameters: Sequence[str]
) -> Difference:
    """What links and hashes of states tell by themselves."""
    if state is not None and (parted is None or state <= (parted.step or 0)):
        leaf = _differing(one, other, state)[0]
        phase = "state" if state == 0 or state - same > 1 else _written_in(leaf, one.states[state], parameters)
        return Difference(step=max(0, state - 1), phase=phase, **_measured(one, other, state, leaf)._asdict())
    assert parted is not None, "one of both differs"
    if state is not None and state == (parted.step or 0) + 1 and parted.phase in ("gradient", "update"):
        return replace(parted, **_measured(one, other, state, _differing(one, other, state)[0])._asdict())
    return parted


def _written_in(leaf: str, state: Mapping[str, str], parameters: Sequence[str]) -> str:
    """The phase of a step that writes a tensor; "state" where nobody knows whether it is a parameter or a buffer."""
    kept = [name for name in state if name.startswith("optimizer.")]
    if leaf in parameters or leaf.startswith("optimizer") or any(leaf in name for name in kept):
        return "update"
    return "buffer" if parameters or kept else "state"


def _differing(one: Side, other: Side, state: int) -> list[str]:
    left, right = one.states[state], other.states[state]
    return [name for name in left if name in right and left[name] != right[name]]


def _measured(one: Side, other: Side, state: int, leaf: str) -> Unequal:
    """How much a tensor differs, where both states are there."""
    sides = [{name: value for name, value in side.tensors(state).items() if name == leaf} for side in (one, other)]
    found = unequal(*sides) if all(sides) else None
    return found or Unequal(leaf, None, None)


def _losses(one: Side, other: Side) -> tuple[list[float], list[float]]:
    return tuple(  # type: ignore[return-value]
        [float(side.links.told(step).get("loss", "nan")) for step in range(side.links.first, len(side.links))]
        if side.links is not None and len(side.links) <= 100_000
        else []
        for side in (one, other)
    )
