"""Faults in worker processes: what ``make_model`` plants there stays as long as they live."""

import os

import pytest


class Planted:
    """A ``make_model`` whose worker processes have a fault: ``fault(patch)`` is called in each, before the model."""

    def __init__(self, make_model, fault):
        self.make_model, self.fault, self.caller = make_model, fault, os.getpid()

    def __call__(self):
        if os.getpid() != self.caller:
            self.fault(pytest.MonkeyPatch())  # which is never undone
        return self.make_model()
