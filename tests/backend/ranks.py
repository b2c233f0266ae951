"""Ranks of a process group, forked from one process that has torch already; each does a job and says how it went."""

import contextlib
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import traceback

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 300  # within which a job is done, on a busy machine


def be(rank, size, store, backend, job, arguments):
    """Be one rank: make the default group, do the job, leave."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    module, _, name = job.rpartition(".")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    getattr(importlib.import_module(module), name)(rank, size, *arguments)
    dist.destroy_process_group()


def serve():
    """Read orders from stdin; fork ranks for each, and print how they ended."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for line in sys.stdin:
        size, backend, job, arguments = json.loads(line)
        for module in getattr(importlib.import_module(job.rpartition(".")[0]), "LOADED", ()):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        with tempfile.TemporaryDirectory() as folder:
            pids = [start(rank, size, folder, backend, job, arguments) for rank in range(size)]
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            told = [(pathlib.Path(folder) / f"told {rank}").read_text() for rank in range(size)]
        print(json.dumps([codes, told]), flush=True)


def start(rank, size, folder, backend, job, arguments):
    """Fork one rank; what it raises goes into a file."""
    told = pathlib.Path(folder) / f"told {rank}"
    told.write_text("")
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(SECONDS)
        be(rank, size, f"{folder}/store", backend, job, arguments)
        code = 0
    except BaseException:
        told.write_text(traceback.format_exc())
    finally:
        os._exit(code)


@contextlib.contextmanager
def served():
    """A function ``ran(size, job, *arguments, backend="phalanx")``: exit codes and tracebacks of all ranks."""
    command = [sys.executable, "-c", "from tests.backend.ranks import serve; serve()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONWARNINGS": "ignore"}, **pipes) as server:

        def ran(size, job, *arguments, backend="phalanx"):
            server.stdin.write(json.dumps([size, backend, f"tests.backend.{job}", arguments]) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield ran
        server.stdin.close()
