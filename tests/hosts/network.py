"""Hosts on one machine as ``phalanx.lab.network`` makes them, and processes on them."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

from phalanx.lab import network
from phalanx.lab.network import why_not

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SECONDS = 300
NUMBERS = itertools.count()


class Network(network.Network):
    """Hosts, links that can be slowed down, and processes, which end with the ``with`` block."""

    def __init__(self, count):
        super().__init__(count)
        self.processes = []

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.file is not None:
                process.file.close()
        super().__exit__()

    def shape(self, megabits, milliseconds):
        """Slow the links down: so many Mbit/s in each direction, so long a way from host to host.

        Returns what was done: kernels without netem can limit the rate (tbf), but not delay anything.
        """
        netem = ["netem", "rate", f"{megabits}mbit", "delay", f"{milliseconds}ms", "limit", "100000"]
        bucket = ["tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms"]
        for way, told in (
            (netem, f"{megabits} Mbit/s and {milliseconds} ms (netem)"),
            (bucket, f"{megabits} Mbit/s (tbf)"),
        ):
            done = [
                subprocess.run(["tc", "-n", host, "qdisc", "replace", "dev", "eth0", "root", *way], capture_output=True)
                for host in self.hosts
            ]
            if not any(one.returncode for one in done):
                return told
        raise RuntimeError("tc can neither delay nor limit here")

    def sent(self, number):
        """Bytes that a host has sent so far."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        command = [*self.inside(number), "cat", path]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def start(self, number, *command, streams=None, **environment):
        """Run something on a host; its output and errors are in ``process.file``, or where ``streams`` say."""
        told = {"OMP_NUM_THREADS": "1", "NPROC": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}", **environment}
        file = tempfile.TemporaryFile("w+") if streams is None else None  # noqa: SIM115  read when it has ended
        process = subprocess.Popen(
            [*self.inside(number), *command], env={**os.environ, **told}, start_new_session=True,
            cwd=ROOT, **(streams or {"stdout": file, "stderr": subprocess.STDOUT}),
        )  # fmt: skip
        process.file = file
        self.processes.append(process)
        return process

    def ranks(self, code, *arguments, each=1, streams=None, **environment):
        """``each`` processes of a script per host, as a launcher would start them; by rank."""
        size = len(self.hosts) * each
        world = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(29500 + next(NUMBERS)), "WORLD_SIZE": str(size),
                 "LOCAL_WORLD_SIZE": str(each), **environment}  # fmt: skip
        return [
            self.start(
                rank // each,
                sys.executable,
                "-c",
                code,
                *arguments,
                RANK=str(rank),
                LOCAL_RANK=str(rank % each),
                streams=streams,
                **world,
            )
            for rank in range(size)
        ]


def output(process, seconds=SECONDS):
    """(exit status, what it wrote) of a process that is to end by itself."""
    try:
        process.wait(seconds)
    finally:
        process.file.seek(0)
        text = process.file.read()
        process.file.close()
        if process.poll() is None:
            raise AssertionError(f"it did not end within {seconds} s:\n{text}")
    return process.returncode, text


def until(condition, seconds=SECONDS):
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def descendants(pid):
    """All processes below this one, itself included."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                for child in file.read().split():
                    found += descendants(int(child))
    return found


def strike(process, number):
    """Send a signal to a process and to everything below it, at once."""
    pids = descendants(process.pid)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids


def gone(pids):
    """Whether none of these processes is left."""
    return not any(os.path.exists(f"/proc/{pid}") and not _is_zombie(pid) for pid in pids)


def _is_zombie(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
    return True


__all__ = ["Network", "descendants", "gone", "output", "strike", "threading", "until", "why_not"]
