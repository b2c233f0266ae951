"""Where the recipe of a run can be found again: in this process, or in a Python file that defines it."""

from __future__ import annotations

import os
import pathlib
import sys
import weakref
from typing import Any

from phalanx.definition.fields import Definition

LOADED = "phalanx_file_"  # how modules are called that were loaded for their recipe
_HERE: weakref.WeakValueDictionary[str, Definition] = weakref.WeakValueDictionary()


def remember(path: pathlib.Path, definition: Definition) -> None:
    """A run of this recipe works in this directory, in this process."""
    _HERE[os.path.realpath(path)] = definition


def recall(path: pathlib.Path) -> Definition | None:
    """The recipe whose run worked in a directory in this process, if anybody still has it."""
    return _HERE.get(os.path.realpath(path))


def origin_of(definition: Definition) -> str | None:
    """``FILE:NAME`` of a module that has the recipe under a name; None if none was found."""
    home = sys.modules.get(getattr(definition.make_model, "__module__", None) or "")
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith(LOADED)]
    for module in [sys.modules.get("__main__"), home, *loaded]:
        name = _name_in(module, definition)
        if name is not None:
            return name
    return None


def _name_in(module: Any, definition: Definition) -> str | None:
    file = getattr(module, "__file__", None)
    names = [name for name, value in list(vars(module or sys).items()) if value is definition]
    return f"{os.path.realpath(file)}:{names[0]}" if file and names else None
