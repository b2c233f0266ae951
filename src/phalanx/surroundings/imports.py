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
from typing import NamedTuple

from phalanx.surroundings.sources import SOURCES, is_installed

TASKS = pathlib.Path("/proc/self/task")
DESCRIPTORS = pathlib.Path("/proc/self/fd")


class Harm(NamedTuple):
    """What an import did, so that this process may not be forked any more.

    Attributes
    ----------
    packages : list of str
        The package that was imported, and those that came with it.
    why : str
    """

    packages: list[str]
    why: str


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


def take(modules: Mapping[str, str], left_out: Collection[str]) -> Harm | None:
    """Import these modules of installed packages, but those of packages in ``left_out``.

    One whose package would be found elsewhere is passed over. Stops at the first package that does harm. Where /proc
    does not tell of harm, nothing is imported.
    """
    if not TASKS.exists():
        return None
    before, sources = _descriptors(), SOURCES.names()
    packages: dict[str, list[str]] = {}
    for name in modules:
        packages.setdefault(name.partition(".")[0], []).append(name)
    for package, names in packages.items():
        new = [name for name in names if name not in sys.modules]
        if not new or package in left_out or not _found(package, modules):
            continue
        known = set(sys.modules)
        why = _failed(new) or _harm(before, sources)
        if why is not None:
            came = {name.partition(".")[0] for name in sys.modules.keys() - known} - set(sys.stdlib_module_names)
            return Harm(sorted({package} | came - {name.partition(".")[0] for name in known}), why)
    return None


def _found(package: str, modules: Mapping[str, str]) -> bool:
    """Whether the package is found here where the modules of it were."""
    if package in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and (package not in modules or spec.origin == modules[package])


def _failed(names: Iterable[str]) -> str | None:
    """Import; why that is no import that may be done here."""
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # else nothing of it was run
                return f"{name} cannot be imported there ({error})"
        except BaseException as error:
            return f"{name} cannot be imported there ({type(error).__name__}: {error})"
    return None


def _harm(before: Collection[str], sources: Collection[str]) -> str | None:
    """What was left that forked children cannot share."""
    pid = os.fork()  # libraries that know of forks end their threads now
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if len(list(TASKS.iterdir())) > 1:
        return "starts a thread"
    opened = sorted(_descriptors() - set(before))
    if opened:
        return f"opens {opened[0]}"
    if any((each / "children").read_text().strip() for each in TASKS.iterdir()):
        return "starts a process"
    own = sorted(SOURCES.names() - set(sources))
    return f"imports {own[0]}, which is your own code" if own else None


def _descriptors() -> set[str]:
    """What is open, but for files and what all processes have."""
    found: set[str] = set()
    for each in DESCRIPTORS.iterdir():
        try:
            mode = os.fstat(int(each.name)).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                found.add(os.readlink(each))
        except OSError:  # it was that of the listing
            continue
    return found - {"/dev/null", "/dev/urandom", "/dev/random"}
