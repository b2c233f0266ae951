"""Code objects: what they do, as text without lines and addresses, and what they read of values outside of them."""

from __future__ import annotations

import bisect
import dis
import sys
import types
from dataclasses import dataclass, field
from typing import Any

from phalanx.definition.fingerprint.arrays import is_array
from phalanx.definition.fingerprint.graph import Owner
from phalanx.definition.packages import Packages
from phalanx.definition.reachable import held_by
from phalanx.surroundings.sources import nested

IDLE = frozenset({"NOP", "CACHE", "RESUME", "EXTENDED_ARG"})
OUTER = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
INNER = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"})
JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
FLAGS = 0x0F | 0x20 | 0x80 | 0x100 | 0x200  # optimized, new locals, *args, **kwargs, generator, coroutines
ABSENT = object()
Chain = tuple[tuple[str, Any], ...]


@dataclass
class Reads:
    """What a function reads of what lies outside of it.

    Attributes
    ----------
    names : dict
        Per global or enclosing name, the ways into it: ``(("attribute", "x"), ("item", 0))``; ``()`` is all of it.
    imports : list
        ``(module, level, names)`` of import statements inside; no names: the module itself.
    aliases : dict
        Local names of modules that are imported inside, and the ways into them.
    """

    names: dict[str, set[Chain]] = field(default_factory=dict[str, set[Chain]])
    imports: list[tuple[str, int, tuple[str, ...]]] = field(default_factory=list[tuple[str, int, tuple[str, ...]]])
    aliases: dict[tuple[str, int], set[Chain]] = field(default_factory=dict[tuple[str, int], set[Chain]])


def spelled(code: types.CodeType) -> str:
    """What a code object does: instructions with their values; no lines, no docstring, sets in a fixed order."""
    kept = [item for item in dis.get_instructions(code) if item.opname not in IDLE]
    offsets = [item.offset for item in kept]

    def value(item: dis.Instruction) -> str:
        if item.opcode in JUMPS:
            return str(bisect.bisect_left(offsets, item.argval))
        return _constant(item.argval)

    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    head = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & FLAGS, parameters)
    return f"{head} {' '.join(f'{item.opname}:{value(item)}' for item in kept)} {code.co_exceptiontable.hex()}"


def reads(code: types.CodeType) -> Reads:
    """Which names a function and those inside it read."""
    result = Reads()
    for inner in nested(code):
        items = [item for item in dis.get_instructions(inner) if item.opname not in IDLE]
        local = _imported(items, result)
        for number, item in enumerate(items):
            if item.opname in OUTER and item.argval not in local:
                result.names.setdefault(item.argval, set()).add(_chain(items, number))
            elif item.argval in local and item.opname in OUTER | INNER:
                result.aliases.setdefault(local[item.argval], set()).add(_chain(items, number))
    return result


def taken(
    name: str, value: Any, chains: set[Chain], written: set[str], packages: Packages
) -> list[tuple[str, Any, bool]]:
    """What a function takes of a value that it names: (how that is called, the part, whether the function writes it).

    Of modules, records and dicts it takes attributes and items. An attribute that it writes is told apart from the rest
    of a record, whether it is there yet or not.
    """
    if isinstance(value, (types.ModuleType, types.FunctionType, type)):
        written = written - {name}  # `module.function(x)` calls it, and changes no module
    apart = _set_on(name, value, written)
    rest = {chain for chain in chains if not any(chain[:1] == (("attribute", key),) for key in apart)}
    parts = dict(part for chain in rest for part in _followed(name, value, chain, packages))
    if name in parts and apart:
        parts[name] = Owner(value, written=apart)
    held = vars(value) if isinstance(value, type) else held_by(value) if apart else {}
    parts |= {f"{name}.{key}": held[key] for key in apart if key in held}
    within = {told for told in parts if any(told.startswith((f"{other}.", f"{other}[")) for other in parts)}
    changed = written | {name} if apart and isinstance(value, (dict, list)) else written
    return [(told, parts[told], _changes(told, changed)) for told in sorted({*parts} - within)]


def _followed(name: str, value: Any, chain: Chain, packages: Packages) -> list[tuple[str, Any]]:
    """Where a way into a value leads, by its name; nothing for what installed modules hold."""
    for kind, key in chain:
        if isinstance(value, types.ModuleType):
            if packages.has(value.__name__):
                return []
            below = vars(value).get(key, sys.modules.get(f"{value.__name__}.{key}", ABSENT))
            if kind != "attribute" or below is ABSENT:
                return []
        elif kind == "attribute":
            below = _attribute(value, key)
        else:
            below = value.get(key, ABSENT) if type(value) is dict else ABSENT
        if below is ABSENT:
            break
        name, value = (f"{name}.{key}" if kind == "attribute" else f"{name}[{key!r}]"), below
    return [(name, value)]


def _attribute(value: Any, name: str) -> Any:
    """An attribute that lies in the object itself; ABSENT for all that a class may compute."""
    held = getattr(value, "__dict__", None) if not isinstance(value, (type, types.FunctionType)) else None
    if type(held) is dict and name in held and not hasattr(getattr(type(value), name, None), "__get__"):
        return held[name]
    return ABSENT


def _set_on(name: str, value: Any, written: set[str]) -> frozenset[str]:
    """Attributes of a value that a function writes; not of modules, functions and arrays."""
    if isinstance(value, (types.ModuleType, types.FunctionType)) or is_array(value):
        return frozenset()
    return frozenset(other.removeprefix(f"{name}.") for other in written if other.startswith(f"{name}."))


def _changes(told: str, written: set[str]) -> bool:
    """Whether a function writes what it reads under this name."""
    name = told.partition("[")[0]
    return any(name == other or name.startswith(f"{other}.") for other in written)


def _chain(items: list[dis.Instruction], number: int) -> Chain:
    """The attributes and constant items that are taken of what an instruction loads, or the attribute that is set."""
    chain: list[tuple[str, Any]] = []
    while number + 1 < len(items):
        following = items[number + 1]
        if following.opname in ("STORE_ATTR", "DELETE_ATTR"):
            chain.append(("attribute", following.argval))
            break
        if following.opname == "COPY" and items[number + 2].opname == "LOAD_ATTR":  # to be stored again, as by +=
            number += 1
        elif following.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(("attribute", following.argval))
            number += 1
        elif following.opname == "LOAD_CONST" and number + 2 < len(items) and _takes_item(items[number + 2]):
            chain.append(("item", following.argval))
            number += 2
        else:
            break
    return tuple(chain)


def _takes_item(item: dis.Instruction) -> bool:
    return item.opname == "BINARY_SUBSCR" or (item.opname == "BINARY_OP" and item.argrepr == "[]")


def _imported(items: list[dis.Instruction], result: Reads) -> dict[str, tuple[str, int]]:
    """Note imports; local names of modules that ``import a`` and ``import a.b as c`` make."""
    local: dict[str, tuple[str, int]] = {}
    for number, item in enumerate(items):
        if item.opname != "IMPORT_NAME":
            continue
        level, names = items[number - 2].argval or 0, items[number - 1].argval
        if names:
            result.imports.append((item.argval, level, tuple(names)))
            continue
        stored = next((later for later in items[number + 1 :] if later.opname.startswith("STORE_")), None)
        if stored is not None:
            whole = items[number + 1] is not stored
            local[stored.argval] = (item.argval if whole else item.argval.partition(".")[0], level)
    return local


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return f"<{spelled(value)}>"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return repr(value)
