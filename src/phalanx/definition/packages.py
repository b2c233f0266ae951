"""Whose code it is: installed packages go by name and version, all else is the user's and is looked into."""

from __future__ import annotations

import functools
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
INSTALLERS = frozenset({"site-packages", "dist-packages"})  # also of an environment that this one's path leads to


class Packages:
    """Tells installed code from the user's, and notes which packages were met.

    Attributes
    ----------
    met : set of str
        Their names, as imported; the standard library is "python".
    """

    def __init__(self) -> None:
        self.met: set[str] = set()

    def has(self, module: Any, file: str | None = None) -> bool:
        """Whether code of this module is installed, as ``installed`` says; its package is noted."""
        package = installed(module, file)
        if package is not None:
            self.met.add(package)
        return package is not None

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
            spec = importlib.util.find_spec(root)
            if spec is None or _is_installed(spec.origin or next(iter(spec.submodule_search_locations or ()), "")):
                return None
        elif self.has(root):
            return None
        return importlib.import_module(name)


def installed(module: Any, file: str | None = None) -> str | None:
    """The package that code of this module is installed with, "python" for the standard library; None: the user's.

    ``file`` is where the code itself lies, if that is known.
    """
    if not isinstance(module, str) or (module == "__main__" and file is None):
        return None
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return PYTHON
    if file is None or file.startswith("<"):
        files = (getattr(sys.modules.get(name), "__file__", None) for name in (module, root))
        file = next((name for name in files if name is not None), None)
    return root if root == OWN or (file is not None and _is_installed(file)) else None


@functools.cache
def _folders() -> tuple[str, ...]:
    """Where installers put packages, and the standard library."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({os.path.realpath(path) + os.sep for path in paths if path})


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    path = os.path.realpath(file)
    return path.startswith(_folders()) or not INSTALLERS.isdisjoint(path.split(os.sep))


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
