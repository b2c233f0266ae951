"""Python runs this at its start: notes which files of phalanx a process enters, while WALK names a log.

A line per file and process: the process, and the path in the package. A file is entered when one of its functions is
called, other than by an import. Workers are forks of a process that has run this, and go on noting.
"""

import os
import sys
import threading

PACKAGE = os.sep + "phalanx" + os.sep
LOG = os.environ.get("WALK")


class Noting:
    """Called for each call of a function in this process; notes each file once, and again after ``begin``."""

    def __init__(self, log):
        self.descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.begin()

    def begin(self):
        """Forget what this process entered, and say so: a line without a path."""
        self.process, self.entered = os.getpid(), set()
        os.write(self.descriptor, f"{self.process} \n".encode())

    def __call__(self, frame, event, argument):
        path = frame.f_code.co_filename
        if event != "call" or PACKAGE not in path:
            return
        if self.process != os.getpid():
            self.begin()
        if path not in self.entered and not importing(frame):
            self.entered.add(path)
            os.write(self.descriptor, f"{self.process} {path.rpartition(PACKAGE)[2]}\n".encode())


def importing(frame):
    """Whether a module of the package is being imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and PACKAGE in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


if LOG:
    noting = Noting(LOG)
    threading.setprofile(noting)
    sys.setprofile(noting)
