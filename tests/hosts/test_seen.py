"""What observers see in each process of a world is the state of each step, whoever falls: as inline."""

import json
import os
import signal
import subprocess

import pytest

from tests.engines.test_seen import FREEZE, Happens, seen_by
from tests.hosts.worlds import BEGIN, END, ended, started
from tests.seen import compare

CODE = """
from tests.hosts.test_seen import Falls
from tests.engines.test_seen import FREEZE, seen_by
happens = Falls({kill}, {fall}, **({changes}))
told = seen_by(happens, workers={workers}, lost_after=2.0, deadline_seconds=30.0).rows
"""


class Falls(Happens):
    """A callback after which this process kills workers (``kill``: rank, step, number) or itself (``fall``)."""

    def __init__(self, kill=(), fall=None, **changes):
        rank = int(os.environ["RANK"])
        super().__init__([(step, number) for who, step, number in kill if who == rank], **changes)
        self.falls = None if fall is None or fall[0] != rank else fall[1]

    def step(self, report):
        super().step(report)
        if report.step == self.falls:
            os.kill(os.getpid(), signal.SIGKILL)


def seen_in(size, workers=None, kill=(), fall=None, changed=False):
    """What each process that is left has seen, by rank."""
    code = CODE.format(kill=kill, fall=fall, changes=FREEZE if changed else {}, workers=workers or 2 * size)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = started(BEGIN + code + END, size, {}, **streams)
    try:
        found = [process.communicate(timeout=200) for process in processes]
    finally:
        ended(processes)
    left = [rank for rank in range(size) if fall is None or rank != fall[0]]
    assert all(processes[rank].returncode == 0 for rank in left), found
    return {rank: json.loads(found[rank][0].splitlines()[-1]) for rank in left}


FALLS = {
    "workers, one after another": (2, {"kill": [(1, 3, 0), (0, 7, 1)], "changed": True}),
    "a worker and a process": (3, {"kill": [(2, 2, 0)], "fall": (0, 6), "workers": 3}),
}


@pytest.mark.longest
@pytest.mark.parametrize("case", FALLS)
def test_who_is_left_sees_each_step(case):
    """Weights, averages, metrics, outputs, the best: all as inline, in each process, until the end."""
    size, how = FALLS[case]
    wanted = seen_by(Happens(**(FREEZE if how.get("changed") else {})), engine="inline")
    for rank, rows in seen_in(size, **how).items():
        assert compare(rows, wanted) == [], rank
