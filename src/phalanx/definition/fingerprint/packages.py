"""Whose code it is: installed packages go by name and version, all else is the user's and is looked into."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import site
import sys
import sysconfig
import types
from collections.abc import Mapping
from importlib import metadata
from typing import Any

OWN = __name__.partition(".")[0]
PYTHON = "python"


class Packages:
    """Tells installed code from the user's, and notes which packages were met.

    Attributes
    ----------
    met : set of str
        Their names, as imported; the standard library is "python".
    """

    def __init__(self) -> None:
        self.met: set[str] = set()
        paths = [sysconfig.get_paths().get(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        places = {*paths, *site.getsitepackages(), site.getusersitepackages()}
        self._folders = tuple(os.path.realpath(path) + os.sep for path in places if path)
        self._files: dict[str, bool] = {}

    def has(self, module: str | None, file: str | None = None) -> bool:
        """Whether code of this module is installed; its package is noted. ``file`` is where the code itself lies."""
        if module is None or (module == "__main__" and file is None):
            return False
        root = module.partition(".")[0]
        standard = root in sys.stdlib_module_names
        if file is None or file.startswith("<"):
            places = (getattr(sys.modules.get(name), "__file__", None) for name in (module, root))
            file = next((place for place in places if place is not None), None)
        if not (standard or root == OWN or (file is not None and self._within(file))):
            return False
        self.met.add(PYTHON if standard else root)
        return True

    def versions(self) -> dict[str, str]:
        """The version of every package that was met, as far as it is told."""
        return {name: _version(name) for name in sorted(self.met)}

    def module(self, name: str, level: int, names: Mapping[str, Any]) -> types.ModuleType | None:
        """A module of the user's that a function imports when it is called; None for installed ones.

        Raises
        ------
        Exception
            It cannot be imported; whatever its code raises.
        """
        if level:
            name = importlib.util.resolve_name("." * level + name, names.get("__package__") or "")
        root = name.partition(".")[0]
        if root in sys.stdlib_module_names or root == OWN:
            return None
        if root not in sys.modules:
            found = importlib.util.find_spec(root)
            if found is None or self._within(found.origin or next(iter(found.submodule_search_locations or ()), "")):
                return None
        elif self.has(root):
            return None
        return importlib.import_module(name)

    def _within(self, file: str) -> bool:
        if file not in self._files:
            place = os.path.realpath(file)
            self._files[file] = any(place.startswith(folder) for folder in self._folders)
        return self._files[file]


def _version(name: str) -> str:
    if name == PYTHON:
        return platform.python_version()
    told = getattr(sys.modules.get(name), "__version__", None)
    if isinstance(told, str):
        return told
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of unknown version"
