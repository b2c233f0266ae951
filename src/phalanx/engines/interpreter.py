"""How a new interpreter is started: it imports what this one did from where this one did, and nothing from elsewhere.

Python puts the working directory first in the path of ``python -c``, so that a file there may pass for a module of the
standard library. Here the standard library comes first, folders that are named relative to the working directory are
left out, and what this process has loaded is looked for where it came from. User code gets the path of this process
with the other settings, before it runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder

# Runs before any other import: until the path is set, ``sys`` alone comes from where it should.
START = """
import sys
sys.path[:] = {path!r}
from importlib.machinery import PathFinder
class Homes:
    homes = {homes!r}
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return PathFinder.find_spec(name, [cls.homes[name]]) if path is None and name in cls.homes else None
sys.meta_path.insert(0, Homes)
import ctypes
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: until everything is imported
from phalanx.engines.zygote import main
main({arguments})
"""
TUNED = "glibc.malloc.hugetlb=1"  # big blocks in huge pages; user code sees its own environment


def command(*arguments: object) -> list[str]:
    """The command that starts a zygote: its ``main`` gets these arguments."""
    path = _path()
    code = START.format(path=path, homes=dict(_homes(path)), arguments=", ".join(map(repr, arguments)))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-c", code]


def environment() -> dict[str, str]:
    """The environment of a zygote."""
    tunables = filter(None, [os.environ.get("GLIBC_TUNABLES"), TUNED])
    return {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}


def _path() -> list[str]:
    """The path of this process without what is relative, the standard library first."""
    home = os.path.dirname(os.__file__)
    standard = (home, os.path.join(home, "lib-dynload"))
    entries = [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]
    return sorted(entries, key=lambda entry: entry not in standard)


def _homes(path: list[str]) -> Iterator[tuple[str, str]]:
    """Folders of what this process has loaded and would not find in the same place along ``path``."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and name != "__main__" and isinstance(file, str) and os.path.isabs(file):
            spec = PathFinder.find_spec(name, path)
            if spec is None or spec.origin != file:
                yield name, os.path.dirname(os.path.dirname(file) if hasattr(module, "__path__") else file)
