"""Processes of a world on loopback: new ones for one program, or two that stay and run one program after another."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile

from tests.state.runs import ROOT

BEGIN = """
import dataclasses, json, os, sys, time
import torch
import torch.distributed as dist
import phalanx
from tests.families import FAMILIES
rank, family = int(os.environ["RANK"]), FAMILIES["mlp"]
told, results = [], []
def tried(make):
    started = time.monotonic()
    try:
        told.append(make())
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
        results.append(getattr(error, "result", None))
    assert time.monotonic() - started < 50, told  # soon, on a busy machine
"""
END = "\nprint(json.dumps(told))"
# What a program defines is as if it were in the script that was started, as it is in a world of its own.
STAYING = """
import json, sys
for line in sys.stdin:
    names = {"__name__": "__main__"}
    exec(json.loads(line), names)
    print("told", json.dumps(names["told"]), flush=True)
"""


def free_port():
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def started(code, size, environment, ranks=None, **streams):
    """So many processes that run ``code``, with what a launcher tells them, each with its rank; or some of them."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT,
            env={**os.environ, **told, **environment, "RANK": str(rank)}, **streams,
        )
        for rank in (range(size) if ranks is None else ranks)
    ]  # fmt: skip


def ended(processes):
    """End what is left of them."""
    for process in processes:
        process.kill()
        process.wait()


def world(code, size=2, seconds=500, **environment):
    """What each of so many new processes told."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = started(BEGIN + code + END, size, environment, **streams)
    try:
        found = [process.communicate(timeout=seconds) for process in processes]
    finally:
        ended(processes)
    assert [process.returncode for process in processes] == [0] * size, found
    return [json.loads(out.splitlines()[-1]) for out, _ in found]


class Pair:
    """Two processes that stay for many programs: torch is imported once, and what starts workers stays warm.

    ``pair(code)`` is what each of them told. After one that fails both are started anew. ``start(code, **streams)``
    starts them.
    """

    def __init__(self, start):
        self._start, self._processes, self._errors = start, [], None

    def __call__(self, code):
        if not self._processes:
            self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  read when a program has failed
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors, "text": True}
            self._processes = self._start(STAYING, **streams)
        try:
            place = f"import os\nos.environ['MASTER_PORT'] = '{free_port()}'\n"  # the last program's may still be taken
            for process in self._processes:
                process.stdin.write(json.dumps(place + BEGIN + code) + "\n")
                process.stdin.flush()
            return [self._answer(process) for process in self._processes]
        except BaseException:
            self.close()
            raise

    def _answer(self, process):
        for line in process.stdout:
            if line.startswith("told "):
                return json.loads(line.removeprefix("told "))
        self._errors.seek(0)
        raise AssertionError(self._errors.read())

    def close(self):
        """End both."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                process.stdin.close()
                process.wait(10)
        ended(self._processes)
        for process in self._processes:
            process.stdout.close()
        if self._errors is not None:
            self._errors.close()
        self._processes = []
