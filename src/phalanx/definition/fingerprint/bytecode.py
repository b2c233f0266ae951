"""Code objects: what they do, as text without lines and addresses, and which names outside of them they read."""

from __future__ import annotations

import bisect
import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

IDLE = frozenset({"NOP", "CACHE", "RESUME", "EXTENDED_ARG"})
OUTER = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
INNER = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"})
JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
FLAGS = 0x0F | 0x20 | 0x80 | 0x100 | 0x200  # optimized, new locals, *args, **kwargs, generator, coroutines
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
    found = Reads()
    for inner in nested(code):
        items = [item for item in dis.get_instructions(inner) if item.opname not in IDLE]
        local = _imported(items, found)
        for number, item in enumerate(items):
            if item.opname in OUTER and item.argval not in local:
                found.names.setdefault(item.argval, set()).add(_chain(items, number))
            elif item.argval in local and item.opname in OUTER | INNER:
                found.aliases.setdefault(local[item.argval], set()).add(_chain(items, number))
    return found


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of functions inside it."""
    yield code
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from nested(item)


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


def _imported(items: list[dis.Instruction], found: Reads) -> dict[str, tuple[str, int]]:
    """Note imports; local names of modules that ``import a`` and ``import a.b as c`` make."""
    local: dict[str, tuple[str, int]] = {}
    for number, item in enumerate(items):
        if item.opname != "IMPORT_NAME":
            continue
        level, names = items[number - 2].argval or 0, items[number - 1].argval
        if names:
            found.imports.append((item.argval, level, tuple(names)))
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
