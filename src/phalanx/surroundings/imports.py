"""Imports that processes share: done once before a fork, instead of once in each process that is forked.

A process may be forked after an import that only made objects. It may not where the import started a thread, as the
thread would be missing in the child, together with what it holds locked at that moment; nor where it opened a device,
a socket or the like, which parent and child would then both use. Threads that their library ends before a fork, as
OpenBLAS does, do no harm.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import stat
import sys
from collections.abc import Collection, Iterable, Mapping
from importlib.machinery import ModuleSpec

from phalanx.surroundings.sources import is_installed, note

TASKS = pathlib.Path("/proc/self/task")
DESCRIPTORS = pathlib.Path("/proc/self/fd")


def installed(names: Iterable[str]) -> dict[str, str]:
    """The modules of installed packages among those that are loaded under these names, with their files."""
    wanted = set(names)
    found: dict[str, str] = {}
    for name in [name for name in list(sys.modules) if name in wanted]:  # in the order of their imports
        spec = getattr(sys.modules.get(name), "__spec__", None)
        origin = spec.origin if isinstance(spec, ModuleSpec) and spec.name == name and spec.has_location else None
        if origin is not None and is_installed(origin):
            found[name] = origin
    return found


def take(modules: Mapping[str, str], left_out: Collection[str]) -> list[str]:
    """Import these modules of installed packages, but those of packages in ``left_out``.

    One whose package would be found elsewhere is passed over. Where /proc does not tell of harm, nothing is imported.

    Returns
    -------
    list of str
        A package that did harm, so that this process may not be forked any more, and those that came with it.
    """
    if not TASKS.exists():
        return []
    before = _unshared()
    packages: dict[str, list[str]] = {}
    for name in [name for name in modules if name not in sys.modules]:  # in their order
        packages.setdefault(_root(name), []).append(name)
    for package, names in packages.items():
        known = {_root(name) for name in sys.modules}
        if package not in left_out and _found(package, modules) and (_failed(names) or _unshared() - before):
            return sorted({package} | {_root(name) for name in sys.modules} - known - set(sys.stdlib_module_names))
    return []


def _root(name: str) -> str:
    """The package of a module."""
    return name.partition(".")[0]


def _found(package: str, modules: Mapping[str, str]) -> bool:
    """Whether the package is found here where the modules of it were."""
    if package in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and (package not in modules or spec.origin == modules[package])


def _failed(names: Iterable[str]) -> bool:
    """Import; whether that went wrong, with some of it run."""
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            if not isinstance(error, ModuleNotFoundError) or error.name != name:
                return True
    return False


def _unshared() -> set[str]:
    """What this process has and its forked children could not share: threads, processes, devices, the user's code."""
    pid = os.fork()  # libraries that know of forks end their threads now
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    found = set(note())
    for task in TASKS.iterdir():
        found.update([task.name, *(task / "children").read_text().split()])
    for each in DESCRIPTORS.iterdir():
        try:
            mode = os.fstat(int(each.name)).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                found.add(os.readlink(each))
        except OSError:  # it was that of the listing
            continue
    return found - {"/dev/null", "/dev/urandom", "/dev/random"}
