"""How what a simulated process asks its system for is replaced, for the time of a run."""

from __future__ import annotations

import builtins
import contextlib
from types import SimpleNamespace

import pytest


@contextlib.contextmanager
def replaced(modules, names):
    """Inside, each of these names stands for another thing, in all of the modules that have it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, thing in names.items():
            users = [module for module in modules if name in vars(module) or name in vars(builtins)]
            assert users, f"nobody uses {name}"
            for module in users:
                patch.setattr(module, name, thing, raising=False)
        yield


def altered(module, **names):
    """A copy of a module in which some names stand for other things."""
    return SimpleNamespace(**{**vars(module), **names})


class Poller:
    """In place of ``select.poll``: it waits for files that say whether they are readable."""

    def __init__(self, schedule):
        self.schedule, self.files = schedule, {}  # in order, as they are told of in one

    def register(self, file, _):
        self.files[file] = None

    def unregister(self, file):
        del self.files[file]

    def readable(self):
        return [(file, 1) for file in self.files if file.readable()]

    def poll(self, milliseconds):
        self.schedule.check()
        if milliseconds and not self.readable():
            self.schedule.wait(self.readable, milliseconds / 1000)
        return self.readable()
