"""Recipes in Python files, as the command line takes them."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from typing import Any

from phalanx.errors import UsageError
from phalanx.recipe import Recipe


def load_recipe(file: str) -> tuple[Recipe, Any, Any]:
    """The recipe, with the evaluation and the callbacks if there are, of ``PATH`` or ``PATH:NAME``.

    Raises
    ------
    UsageError
        There is no such file, or it defines no recipe of that name. What the file itself raises comes through.
    """
    path, colon, name = file.rpartition(":")
    path, name = (path, name or "recipe") if colon and (not name or name.isidentifier()) else (file, "recipe")
    source = pathlib.Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"phalanx_file_{source.stem}", source)
    if not source.is_file():
        raise UsageError(f"FILE is {path!r}, which does not exist or is no file; give FILE or FILE:NAME")
    if spec is None or spec.loader is None:
        raise UsageError(
            f"FILE is {path!r}, which is not a Python file; give one that defines `{name} = phalanx.Recipe(...)`"
        )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(source.parent))
    spec.loader.exec_module(module)
    recipe = getattr(module, name, None)
    if not isinstance(recipe, Recipe):
        raise UsageError(
            f"{path} defines no recipe named {name!r}; add `{name} = phalanx.Recipe(...)`, or give FILE:NAME"
        )
    return recipe, getattr(module, "evaluation", None), getattr(module, "callbacks", ())
