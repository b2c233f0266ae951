"""Where two runs differ first: recipe, environment, data, then the step, the replica, the phase and the tensor.

Links tell the step without reading all of them; hashes of states tell which tensors; and where the recipes are at hand,
the steps since the last state that was the same are computed again on both sides, which tells the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.errors import PhalanxError, UsageError
from phalanx.proof.compare.fields import another, different_fields
from phalanx.proof.compare.links import Parting, in_common, parting
from phalanx.proof.compare.recompute import Found, first_difference
from phalanx.proof.compare.sides import Side, side
from phalanx.proof.compare.values import Unequal, unequal
from phalanx.proof.instant import Instant, snapshot_at

WHOLE = {"samples": "samples", "batch": "batch", "forward": "forward pass", "loss": "loss", "gradient": "gradient",
         "fold": "fold", "norm": "norm of the gradient", "update": "update", "buffer": "buffers", "state": "state",
         "end": "number of steps", "tensors": "tensors"}  # fmt: skip

UNTOLD = {"gradient": "links do not tell a replica's gradient from the fold of all",
          "update": "links do not tell an update from a gradient or a fold of the same norm"}  # fmt: skip
OF_REPLICAS = ("samples", "batch", "forward", "loss", "gradient", "buffer")


@dataclass(frozen=True)
class Difference:
    """What two runs, or states, have not in common, and where that is seen first.

    Attributes
    ----------
    fields : dict of str to str
        What differs of recipe, environment and data, each in words, by the name of the field.
    step : int or None
        The first step that differs; None where no step does.
    replica : int or None
        The first replica that differs in it; None for what belongs to no replica.
    phase : str or None
        "samples", "batch", "forward", "loss", "gradient", "fold", "norm", "update" or "buffer"; "state" for the state
        at the beginning, or where nobody can tell how it came about; "end" where one side only has more steps.
    name : str or None
        Of the tensor, module, operation or number.
    elements : int or None
        How many elements of the tensor differ.
    ulp : int or None
        The largest difference between two of them, in units of the last place.
    line : str
        The line of user code; where operations were asked for.
    note : str
        What else there is to say.
    part : str
        Which of the recipe's phases (``phalanx.Phase``), if it has some.
    """

    fields: dict[str, str] = field(default_factory=dict[str, str])
    step: int | None = None
    replica: int | None = None
    phase: str | None = None
    name: str | None = None
    elements: int | None = None
    ulp: int | None = None
    line: str = ""
    note: str = ""
    part: str = ""
    losses: tuple[Sequence[float], Sequence[float]] = field(default=((), ()), repr=False)

    def __str__(self) -> str:
        told: list[str] = []
        if self.phase is not None:
            part = f", phase {self.part!r}" if self.part else ""
            where = "" if self.step is None else f" in step {self.step}{part}"
            whose = f" of replica {self.replica}" if self.replica is not None and self.phase in OF_REPLICAS else ""
            what = f", {self._what()}" if self.name not in (None, self.phase) else ""
            told.append(f"A and B differ first{where}: {WHOLE.get(self.phase, self.phase)}{whose}{what}{self._much()}")
        elif self.fields:
            told.append("A and B were not made in the same way, but nothing that can be compared differs")
        told += [f"  {text}" for text in (self.line, self.note) if text]
        return "\n".join([*told, *(f"  {text}" for text in self.fields.values())])

    def plot(self) -> Any:
        """The loss of both over the steps, and how far they are apart; returns the axes.

        Raises
        ------
        UsageError
            matplotlib is not installed.
        """
        from phalanx.run.plots import plot_difference

        return plot_difference(*self.losses, self.step, str(self).splitlines()[0])

    def _what(self) -> str:
        known = self.line or self.name in ("output", "exception", "model")
        return f"module {self.name!r}" if self.phase == "forward" and not known else str(self.name)

    def _much(self) -> str:
        if self.elements is None:
            return ""
        apart = "" if self.ulp is None else f", at most {self.ulp} ULP apart"
        return f": {self.elements} element{'s' * (self.elements != 1)}{apart}"


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
        Whether to go down to the first operation whose output differs while its inputs agree.

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
    found, note, untold = None, "", ""
    last = min(([parted.step] if parted is not None else []) + ([state - 1] if state is not None else []))
    if not (missing := _missing(one, other)) and last >= 0:
        found, note = _again(one, other, last_same, last, operations)
    elif state != 0:
        note = f"{missing}, so nothing was computed again"
    if found is None:
        found = _as_recorded(one, other, parted, state, last_same)
        untold = UNTOLD.get(found.phase, "") if found.what.name != "lr" else ""
    same = parted and found.replica is None and parted.step == found.step
    replica = parted.replica if parted and same else found.replica
    linked = _linked(parted) if parted and parted.step <= found.step else ""
    note = "; ".join(filter(None, [linked, note, untold]))
    where = (found.step, replica, found.phase, found.what.name, found.what.elements, found.what.ulp, found.line)
    return Difference(fields, *where, note, found.part, _losses(one, other))


def _loosely(one: Side, other: Side, fields: dict[str, str]) -> Difference | None:
    """Tensors of no known step, with those of the newest state of the other side."""
    sides = [side.loose or side.newest() for side in (one, other)]
    both = bool(one.loose and other.loose)
    if not both and not set(sides[0]) & set(sides[1]):
        raise UsageError(f"{one.name} and {other.name} have no tensor in common; give a run that has a snapshot")
    what = unequal(*sides, common=not both)
    if what is None:
        return None
    return Difference(fields, None, None, "tensors", *what)


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


def _again(one: Side, other: Side, same: int, last: int, operations: bool) -> tuple[Found | None, str]:
    """Compute the steps since the last state that was the same again, on both sides."""
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
            if found is None and left.step <= last:
                return None, f"computing steps again took too long, and came to step {left.step}"
    except PhalanxError as error:
        return None, f"steps could not be computed again: {error}"
    if found is None:
        return None, "computed again here, both recipes do the same: one of the two runs did something else"
    return found, ""


def _as_recorded(one: Side, other: Side, parted: Parting | None, state: int | None, same: int) -> Found:
    """What links and hashes of states tell by themselves."""
    if state is not None and (parted is None or state <= parted.step):
        leaf = _differing(one, other, state)[0]
        unknown = state == 0 or state - same > 1
        trained = leaf.startswith("optimizer") or any(
            name.startswith("optimizer.") and leaf in name for name in one.states[state]
        )
        phase = "state" if unknown else "update" if trained else "buffer"
        return Found(max(0, state - 1), None, phase, _measured(one, other, state, leaf))
    assert parted is not None, "one of both differs"
    what = Unequal(parted.field, None, None)
    if state is not None and state == parted.step + 1 and parted.phase in ("gradient", "update"):
        what = _measured(one, other, state, _differing(one, other, state)[0])
    return Found(parted.step, parted.replica, parted.phase, what, part=parted.part)


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


def _linked(parted: Parting) -> str:
    """What two links say, in words."""
    values, name = parted.values, parted.field
    if parted.replica is not None and name in ("losses", "weights") and all(parted.replica < len(v) for v in values):
        values = values[0][parted.replica], values[1][parted.replica]
        name = f"{'loss' if name == 'losses' else 'weight'} of replica {parted.replica}"
    return f"link {parted.step}: {name} is {_short(values[0])} in A, and {_short(values[1])} in B"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
