"""Recipes that a function in a file returns: its arguments from the command line, or from a run that recorded them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.checkpoint.chained import remember_origin
from phalanx.errors import UsageError
from phalanx.recipe import Recipe

KINDS = (bool, int, float, str)
WORDS = {"true": True, "false": False, "none": None}
Given = Sequence[str] | Mapping[str, Any]  # as in lr=0.01, or recorded


def called(function: Callable[..., Any], where: str, given: Given) -> tuple[Recipe, Any, Any]:
    """The recipe that ``function`` returns, and the evaluation and callbacks if it returns these too, else None.

    Parameters
    ----------
    function : callable
    where : str
        ``FILE:NAME`` of it.
    given : sequence of str, or dict
        ``name=value`` for some of its arguments, or the arguments of a run.

    Raises
    ------
    UsageError
        An argument is unknown or of another type than its default, or it returns something else.
    """
    defaults = _defaults(function, where)
    arguments = dict(defaults)
    for name, value in (given if isinstance(given, Mapping) else arguments_of(given)).items():
        if name not in defaults:
            raise UsageError(f"{name} is no argument of {where}; {_listed(defaults)}")
        try:
            arguments[name] = _typed(value, defaults[name]) if isinstance(value, str) else value
        except ValueError:
            kind = type(defaults[name]).__name__
            way = ": write true or false" * (kind == "bool")
            way += "; several values are for --jobs, which trains all" * ("," in value or ".." in value)
            raise UsageError(f"{name} is {value!r}, which is no {kind}{way}; {_listed(defaults)}") from None
    returned = function(**arguments)
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], Recipe):
        raise UsageError(
            f"{where} returned {type(returned).__name__}; it must return a phalanx.Recipe, or (recipe, evaluation), or "
            "(recipe, evaluation, callbacks)"
        )
    plain = {name: value for name, value in arguments.items() if value is None or isinstance(value, KINDS)}
    remember_origin(parts[0], where, plain)
    recipe, evaluation, callbacks, *_ = (*parts, None, None)
    return recipe, evaluation, callbacks


def combinations(given: Sequence[str]) -> dict[str, list[str]]:
    """The arguments of each run of a sweep, by a name that says them: all combinations, the last one changing first.

    ``lr=0.1,0.01`` has two values, ``seed=0..4`` has five.
    """
    values = [(name, _values(text)) for name, text in map(_parted, given)]
    rows = itertools.product(*([f"{name}={value}" for value in each] for name, each in values))
    found = dict[str, list[str]]()
    for row in rows:
        folder = ",".join(row).replace("/", "%")
        if folder in found:
            twice = " and ".join(dict.fromkeys((" ".join(found[folder]), " ".join(row))))
            raise UsageError(f"two runs of the sweep would have the folder {folder!r}: {twice}; leave one out")
        found[folder] = list(row)
    return found


def _values(text: str) -> list[str]:
    if (found := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", text)) is not None:
        first, last = map(int, found.groups())
        if last < first:
            raise UsageError(f"{text!r} has no values, as it counts upwards; write {last}..{first}")
        return [str(value) for value in range(first, last + 1)]
    return text.split(",")


def _defaults(function: Callable[..., Any], where: str) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if odd := [item.name for item in parameters if item.default is item.empty or item.kind is item.POSITIONAL_ONLY]:
        raise UsageError(f"{where} has the argument {odd[0]} without a default; give each one, as in lr=1e-3")
    return {item.name: item.default for item in parameters}


def arguments_of(given: Sequence[str]) -> dict[str, str]:
    """The names and values in texts as ``name=value``, each name once."""
    pairs = list(map(_parted, given))
    names = [name for name, _ in pairs]
    for name, value in pairs:
        if names.count(name) > 1:
            raise UsageError(f"{name} is given {names.count(name)} times; give it once: {name}={value}")
    return dict(pairs)


def _parted(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"{text!r} is no argument of a recipe; give name=value, as in lr=0.01")
    return name, value


def _typed(text: str, default: Any) -> Any:
    """The value that a text says, of the type of ``default``; of any plain type where that is None.

    Raises
    ------
    ValueError
        It says none.
    """
    word, kind = WORDS.get(text.lower(), text), type(default)
    if default is None:
        return number(word) if word is text else word
    value = word if kind is bool else kind(text) if kind in KINDS else None
    if type(value) is not kind:
        raise ValueError
    return value


def number(text: str) -> Any:
    """A number, or the word in place of one, as in auto; a wrong word is refused by name later."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _listed(defaults: Mapping[str, Any]) -> str:
    known = ", ".join(f"{name}={value!r} ({type(value).__name__})" for name, value in defaults.items())
    return f"its arguments are {known}" if known else "it has no arguments"
