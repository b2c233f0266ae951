"""Describes a recipe by values that can be written down and compared.

Two recipes differ if plain fields, options of optimizers and schedulers, or digests of the data differ. What functions
and objects lead to (code, closures, globals, attributes) is only a hint: some of it changes in use. Whether it matters
is seen in what a step computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import itertools
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

from phalanx.definition.checks import outline, parameters_of
from phalanx.definition.data import Columns
from phalanx.definition.fields import Definition, Phase
from phalanx.definition.plain import PLAIN, array_summary, container_summary, decoded, is_plain_array, plain, short
from phalanx.definition.reachable import MOST, held_by, installed, parts_of, reachable, version
from phalanx.errors import VALUE_CHARACTERS, shortened

FORMAT = 4
CODE = ("make_model", "data", "loss_fn", "forward_fn", "target_fn", "collate_fn", "batch_sampler")
OPTIONS = ("optimizer", "scheduler")  # plain values that these lead to are options
PHASE = ("name", "chosen", "every", "loss_takes", "loss_over")
# A finished run can be extended by steps and epochs; the others are described in their own way.
ELSEWHERE = ("steps", "epochs", "phases", "weights", *CODE, *OPTIONS)
# What a recipe did not have yet when it was written down is as it is by default.
DEFAULTS = {item.name: repr(item.default) for item in dataclasses.fields(Definition) if item.name not in ELSEWHERE}
PHASE_DEFAULTS = {item.name: repr(item.default) for item in dataclasses.fields(Phase) if item.name in PHASE}
MOST_HINTS = 128  # of a field, the nearest first; what lies beyond is only seen in what a step computes
LISTED = 8  # differences of a kind that are listed
GLOBAL, READS = " (its global ", "code "
DIFFERENTLY = "reads differently"
SIDES = "here", "there"
IDLE, JUMPS = ("NOP", "CACHE", "RESUME", "EXTENDED_ARG"), frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
HAVE_NAMES = (type, FunctionType, BuiltinFunctionType)


@dataclass
class Comparison:
    """How two recipes differ.

    Attributes
    ----------
    differs : list of str
        Differences that make them two recipes.
    hints : list of str
        Code and values that differ, which may explain why a step computes something else.
    versions : list of str
        Which libraries are of other versions, so that bits may differ.
    """

    differs: list[str] = field(default_factory=list[str])
    hints: list[str] = field(default_factory=list[str])
    versions: list[str] = field(default_factory=list[str])


def described(definition: Definition) -> dict[str, Any]:
    """A recipe as JSON values, but for its steps and epochs."""
    met = set[str]()
    data = _data(definition)
    weights = {} if definition.weights is None else {"weights": _summary(array_summary, definition.weights)}
    values, hints = _fields(definition), dict[str, str]()
    for name, root in roots_of(definition):
        if name == "data" and any(digest for _, digest in data.values()):
            continue
        for path, text in itertools.islice(_led_to(name, root, met), MOST_HINTS):
            option = name.endswith(OPTIONS) and not text.startswith(READS) and GLOBAL not in path
            (values if option else hints)[path] = text
    versions = {name: version(name) for name in sorted(met)} | {"python": platform.python_version()}
    return {"format": FORMAT, "values": values, "data": data | weights, "hints": hints, "versions": versions}


def shared(definition: Definition) -> tuple[dict[str, Any], dict[str, str]]:
    """What must be equal in processes that do one run, and plain globals, which need not be: one may be a rank."""
    mine = described(definition)
    hints = mine["hints"].items()
    doubts = {path: text for path, text in hints if GLOBAL in path and not text.startswith(READS)}
    versions = {f"version of {name}": text for name, text in mine["versions"].items()}
    equal = {path: text for path, text in hints if path not in doubts}
    return {**mine["values"], **equal, **mine["data"], **versions}, doubts


def compare(mine: Mapping[str, Any], theirs: Mapping[str, Any], sides: tuple[str, str] = SIDES) -> Comparison:
    """Compare two recipes by their descriptions; ``sides``: where they are, in words.

    Raises
    ------
    ValueError
        One is no description.
    """
    try:
        if theirs["format"] != FORMAT:
            raise ValueError(f"its recipe is of format {theirs['format']!r}, and this phalanx reads format {FORMAT}")
        comparison, between = Comparison(), functools.partial(_between, sides=sides)
        comparison.differs += between(_completed(mine["values"]), _completed(theirs["values"]))
        if mine.get("made") and theirs.get("made"):
            comparison.differs += between(mine["made"], theirs["made"])
        for name in {**mine["data"], **theirs["data"]}:
            one, other = (side["data"].get(name, ["absent", ""]) for side in (mine, theirs))
            if one != other:
                comparison.differs += [_words(name, one[0], other[0], sides)]
        versions = [side["versions"] for side in (mine, theirs)]
        comparison.versions = between(*_common(*versions))
        pythons = {side["python"].rpartition(".")[0] for side in versions}
        if len(pythons) == 1:  # another version has other bytecode
            comparison.hints += between(mine["hints"], theirs["hints"])
        beside = between(*_common(*(side.get("beside", {}) for side in (mine, theirs))))
        comparison.hints += [text for text in beside if len(pythons) == 1 or not text.endswith(DIFFERENTLY)]
        return comparison
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError("its recipe has no form that is known") from error


def made(state: Any) -> dict[str, str]:
    """Describe a new model and its optimizers: shapes, and the options that the framework knows."""
    shapes = {f"make_model: {name}": outline(item) for name, item in state.weights.items()}
    options = decoded(state.facts.get("options"), lambda kept, path: kept, "options")
    kept = {name: item for name, item in state.training.items() if name.startswith("options")}
    tensors = {f"optimizer: {name}": short(bytes(item.content).hex()) for name, item in kept.items()}
    return {**shapes, **dict(_plainly("optimizer: options", options)), **tensors}


def _plainly(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """The plain values in containers, by path."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in pairs:
        yield from _plainly(f"{path}.{key}", item)
    if isinstance(value, PLAIN):
        yield path, repr(value)


def options_of(value: Any) -> dict[str, str]:
    """Plain arguments of the constructor that an object has kept as attributes."""
    held = held_by(value)
    options = {name: held.get(name, held.get(f"_{name}")) for name in parameters_of(type(value))}
    return {name: plain(item) for name, item in options.items() if type(item) in PLAIN and item is not None}


def by_class(items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Each item with the name of its class; from the second of a class on, with a number: "Name-2"."""
    seen: Counter[str] = Counter()
    for item in items:
        seen[name := type(item).__name__] += 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}", item


def functions_of(value: Any, names: Iterable[str]) -> dict[str, str]:
    """What the functions lead to that an object keeps under these names, as hints of a recipe do."""
    kept = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {path: text for name, root in kept.items() for path, text in _led_to(name, root, set())}


def _fields(definition: Definition) -> dict[str, str]:
    """Plain fields of a recipe and of its phases."""
    names = [item.name for item in dataclasses.fields(Definition) if item.name not in ELSEWHERE]
    values = {name: repr(getattr(definition, name)) for name in names}
    values["schedule_every"] = repr(definition.schedule_every or "step")
    if definition.batches is not None:
        values["checksum of batch_sampler's epoch 0"] = str(definition.batches.checksum(0))
    for number, phase in enumerate(definition.phases or ()):
        values |= {f"phases[{number}].{name}": repr(getattr(phase, name)) for name in PHASE}
    return values


def roots_of(definition: Definition) -> Iterator[tuple[str, Any]]:
    """The functions and objects that are searched, by name."""
    for name in (*CODE, *OPTIONS):
        yield name, getattr(definition, name)
    for number, phase in enumerate(definition.phases or ()):
        for name in ("loss_fn", *OPTIONS):
            yield f"phases[{number}].{name}", getattr(phase, name)


def _data(definition: Definition) -> dict[str, list[str]]:
    """A description of the data, and a hash if it is read."""
    data, source = definition.data, definition.source
    if isinstance(source, Columns):
        keys = list(data) if isinstance(data, dict) and len(data) == len(source.arrays) else None
        names = [f"data: item {number if keys is None else repr(keys[number])}" for number in range(len(source.arrays))]
        return {name: _summary(array_summary, array) for name, array in zip(names, source.arrays, strict=True)}
    if isinstance(data, list):
        return {"data": _summary(container_summary, data)}
    if source is not None:
        return {"data": [f"{len(source)} samples", ""]}
    options = [f"{name}={text}" for name, text in options_of(data).items()]
    return {"data": [f"a {type(data).__name__} {' '.join(options)}".strip(), ""]}


def _summary(summary_of: Any, value: Any) -> list[str]:
    try:
        return summary_of(value)
    except Exception:  # of objects, or of a library that cannot read it
        return [f"a {type(value).__name__}", ""]


def _led_to(name: str, root: Any, met: set[str]) -> Iterator[tuple[str, str]]:
    """What functions and objects lead to, the nearest first."""
    if isinstance(root, PLAIN):
        yield name, plain(root)
    for path, value in reachable({name: root}):
        if text := _looked(value, met):
            yield path, text
        for step, part in parts_of(value):
            odd = step.startswith(".__") or (part is None and step.startswith(GLOBAL))
            if isinstance(part, PLAIN) and not odd:
                yield path + step, plain(part)


def _looked(value: Any, met: set[str]) -> str:
    """A text for a value itself, without what it leads to."""
    if isinstance(value, HAVE_NAMES):
        package = installed(value.__module__)
        met.update([package] if package else [])
        if package or isinstance(value, BuiltinFunctionType):
            usual = isinstance(value, type) and value.__module__ == "builtins"
            return "" if usual else f"{value.__module__}.{value.__qualname__}"
        return READS + short(_code(value.__code__)) if isinstance(value, FunctionType) else ""
    if is_plain_array(value):
        return " ".join(_summary(array_summary, value))
    if isinstance(value, (set, frozenset)):
        return plain(value) if all(type(item) in PLAIN for item in value) else f"set of {len(value)}"
    if isinstance(value, (list, tuple, dict)) and len(value) > MOST:
        with contextlib.suppress(TypeError, LookupError):
            return " ".join(container_summary(value))
        return f"{type(value).__name__} of {len(value)}"
    return ""


def _code(code: CodeType) -> str:
    """The instructions of a function, without local names, lines or docstring; sets are sorted."""
    instructions = [(item.opname, "" if item.opcode in JUMPS else item.argval) for item in dis.get_instructions(code)]
    texts = [f"{name} {_code(value) if isinstance(value, CodeType) else plain(value)}" for name, value in instructions]
    return " ".join(text for text in texts if not text.startswith(IDLE))


def _between(mine: Mapping[str, str], theirs: Mapping[str, str], sides: tuple[str, str]) -> list[str]:
    """The values that differ, in words; not those that are absent because something above them differs."""

    def of(side: Mapping[str, str], name: str) -> str:
        return side.get(name, side.get(f"{name}.__class__", "absent"))  # an object in place of a function

    pairs = {name: (of(mine, name), of(theirs, name)) for name in {**mine, **theirs}}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    differences = [
        _words(name, *pair, sides)
        for name, pair in changed.items()
        if "absent" not in pair or not any(name.startswith(above) for above in changed if above != name)
    ]
    return differences[:LISTED] + [f"and {len(differences) - LISTED} more"] * (len(differences) > LISTED)


def _completed(values: Mapping[str, str]) -> dict[str, str]:
    """With the fields that came after a recipe was written down."""
    phases = {name.partition(".")[0] for name in values if name.startswith("phases[")}
    newer = {f"{phase}.{name}": text for phase in phases for name, text in PHASE_DEFAULTS.items()}
    return {**DEFAULTS, **newer, **values}


def _common(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Two sides, with the names that both have."""
    names = [name for name in one if name in other]
    return {name: one[name] for name in names}, {name: other[name] for name in names}


def _words(name: str, one: str, other: str, sides: tuple[str, str]) -> str:
    here, there = sides
    if one == other:
        return f"{name} is another {one} {here} than {there}"
    if READS in (one[: len(READS)], other[: len(READS)]):
        return f"{name} {DIFFERENTLY}"
    one, other = (shortened(str(value), VALUE_CHARACTERS) for value in (one, other))
    return f"{name} is {one} {here}, and {other} {there}"
