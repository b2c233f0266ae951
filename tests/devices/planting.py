"""Faults in worker processes: what ``make_model`` plants there stays as long as they live."""

import os

import pytest

CALLER = "PHALANX_TEST_CALLER"  # in the environment, as processes of a world compare what recipes hold


class Planted:
    """A ``make_model`` whose worker processes have a fault: ``fault(patch)`` is called in each, before the model."""

    def __init__(self, make_model, fault):
        self.make_model, self.fault = make_model, fault
        mark_caller()

    def __call__(self):
        if in_worker():
            self.fault(pytest.MonkeyPatch())  # which is never undone
        return self.make_model()


def mark_caller():
    """Note that this process starts workers."""
    os.environ[CALLER] = str(os.getpid())


def in_worker():
    return os.environ[CALLER] != str(os.getpid())
