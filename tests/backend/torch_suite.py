"""PyTorch's own tests of torch.distributed, out of its wheel, under another backend than those it knows.

Its gates name backends where they mean capabilities: they are read as Gloo's, the backend for tensors on the CPU, while
the groups that the tests make are those of the other. Bodies stay as they are. Ranks are forked, as torch's own
test_distributed_fork did: to spawn them would be six seconds of imports for each of 285 tests.
"""

import json
import sys
import unittest
from unittest import mock

import torch.multiprocessing
from torch.testing._internal.distributed import distributed_test  # reads BACKEND, which is gloo here, and WORLD_SIZE

import phalanx.backend  # noqa: F401  (before ranks are forked)

ALSO = "Only MPI supports"  # the gate of all_to_all on the CPU: the one capability here that Gloo is not said to have


class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All of the suite."""

    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def _test_accumulate_gradients_no_sync(self, *arguments, **options):
        """Asks for the backend's name, to learn whether tensors are to be on a GPU."""
        with mock.patch.object(distributed_test, "BACKEND", "gloo"):
            super()._test_accumulate_gradients_no_sync(*arguments, **options)


class Lines(unittest.TestResult):
    """Writes a line about each test: its name, how it went, and why."""

    def __init__(self, file):
        super().__init__()
        self.file = file
        self.told = ["passed", ""]

    def startTest(self, test):
        super().startTest(test)
        self.told = ["passed", ""]

    def stopTest(self, test):
        super().stopTest(test)
        print(json.dumps([test.id().rpartition(".")[2], *self.told]), file=self.file, flush=True)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.told = ["skipped", reason]

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.told = ["failed", self.failures[-1][1]]

    def addError(self, test, err):
        super().addError(test, err)
        self.told = ["failed", self.errors[-1][1]]


def main(backend, path):
    """Run all of it under a backend; write the lines into a file."""
    distributed_test.BACKEND = backend
    for test in vars(distributed_test.DistributedTest._DistTestBase).values():
        if getattr(test, "__unittest_skip_why__", "").startswith(ALSO):
            test.__unittest_skip__ = False
    with open(path, "w") as file:
        unittest.defaultTestLoader.loadTestsFromTestCase(TorchSuite).run(Lines(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
