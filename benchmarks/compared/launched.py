"""A job of one library in processes of its own: started, watched by what it computes, killed, and cleaned up.

Every process of a job has a word of its own in its environment. So processes that left their parent are found, too, and
no process is ended that the job did not start.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid

HERE = pathlib.Path(__file__).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3")
QUORUM = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
RECORD = struct.Struct("dd")
NAP = 0.02


@dataclasses.dataclass(frozen=True)
class Library:
    """A column of the comparison."""

    name: str
    program: str
    package: str
    launcher: str

    @property
    def version(self) -> str | None:
        """The installed one, or None."""
        if importlib.util.find_spec(self.package) is None:
            return None
        if self.package == "phalanx":
            return importlib.import_module("phalanx").__version__
        return importlib.metadata.version("torchft-nightly" if self.package == "torchft" else self.package)


LIBRARIES = (
    Library("phalanx", "phalanx_job.py", "phalanx", "python"),
    Library("DDP", "ddp.py", "torch", "torchrun"),
    Library("Lightning", "lightning_job.py", "lightning", "torchrun"),
    Library("Accelerate", "accelerate_job.py", "accelerate", "torchrun"),
    Library("Ray Train", "ray_job.py", "ray", "python"),
    Library("torchft", "torchft_job.py", "torchft", "torchrun for each worker, and torchft_lighthouse"),
)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward pass: when, of how many samples, in which process."""

    at: float
    samples: int
    process: int


class Job:
    """One run of a library's program."""

    def __init__(self, library: Library, workers: int, folder: pathlib.Path, *, epochs: int) -> None:
        self.word, self.root = uuid.uuid4().hex, pathlib.Path(tempfile.mkdtemp(prefix="c"))
        (self.root / "log").mkdir()
        self.environment = {
            **os.environ, "COMPARED_RUN": self.word, "COMPARED_FOLDER": str(folder), "COMPARED_WORKERS": str(workers),
            "COMPARED_LOG": str(self.root / "log"), "COMPARED_EPOCHS": str(epochs), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE.parent.parent / 'src'}:{HERE}", "GLOO_SOCKET_IFNAME": "lo", "RUST_BACKTRACE": "0",
            "TMPDIR": str(self.root), "RAY_TMPDIR": str(self.root), "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONWARNINGS": "ignore", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        self.output = (self.root / "output").open("w+b")
        self.began, self.ended, self.services = time.time(), 0.0, []
        if library.launcher == "python":
            self.mains = [self._start([sys.executable, library.program])]
        elif library.launcher == "torchrun":
            self.mains = [self._start([*TORCHRUN, "--standalone", "--nproc-per-node", str(workers), library.program])]
        else:
            self.mains = self._replica_groups(library, workers)

    def _replica_groups(self, library: Library, workers: int) -> list[subprocess.Popen]:
        """A lighthouse, and an agent with one process for each worker."""
        lighthouse, *ports = free_ports(1 + workers)
        command = shutil.which("torchft_lighthouse", path=pathlib.Path(sys.executable).parent)
        assert command is not None
        self.services = [self._start([command, *QUORUM, "--bind", f"127.0.0.1:{lighthouse}"])]
        address = ("--nnodes", "1", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port")
        return [
            self._start(
                [*TORCHRUN, *address, str(port), library.program],
                REPLICA_GROUP_ID=str(group), TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{lighthouse}",
            ) for group, port in enumerate(ports)
        ]  # fmt: skip

    def _start(self, command: list[str], **more: str) -> subprocess.Popen:
        return subprocess.Popen(
            command, cwd=HERE, env=self.environment | more, stdin=subprocess.DEVNULL, stdout=self.output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def passes(self) -> list[Pass]:
        """All forward passes until now, in the order of time."""
        found = [
            Pass(at, int(samples), int(path.name))
            for path in (self.root / "log").iterdir()
            for at, samples in RECORD.iter_unpack(whole(path.read_bytes()))
        ]
        return sorted(found, key=lambda each: each.at)

    def computing(self) -> list[int]:
        """Worker processes that live, the last that began at the end."""
        begins = {each.process: each.at for each in reversed(self.passes())}
        mains = [main.pid for main in self.mains]
        return [pid for pid in sorted(begins, key=lambda pid: begins[pid]) if pid not in mains and alive(pid)]

    def over(self) -> bool:
        """Whether all of it has ended by itself."""
        return all(main.poll() is not None for main in self.mains)

    def wait(self, limit: float, samples: float = float("inf")) -> bool:
        """Until it ends or has computed so many samples; False: it did neither in ``limit`` seconds."""
        until, looked = time.time() + limit, 0.0
        while time.time() < until:
            if self.over():
                self.ended = self.ended or time.time()
                return True
            if samples < float("inf") and time.time() > looked + 5 * NAP:
                if sum(each.samples for each in self.passes()) >= samples:
                    return True
                looked = time.time()
            time.sleep(NAP)
        return False

    def code(self) -> int:
        """0, or the first exit code that is another."""
        return next((main.returncode for main in self.mains if main.returncode), 0)

    def weights(self) -> str | None:
        """The hash that it printed last."""
        found = re.findall(r"^weights (\w{64})$", self.text(), re.MULTILINE)
        return found[-1] if found else None

    def text(self) -> str:
        """All that it printed."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    def kill_everything(self) -> None:
        """``kill -9`` of each process of the job, until none is left."""
        until = time.time() + 30
        while (left := self._processes()) and time.time() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(NAP)
        for process in (*self.mains, *self.services):
            process.wait(30)

    def _processes(self) -> list[int]:
        word, found = f"COMPARED_RUN={self.word}".encode(), []
        for path in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdigit() and word in (path / "environ").read_bytes() and alive(int(path.name)):
                    found.append(int(path.name))
        return found

    def close(self) -> None:
        """End what is left of it, and remove its files."""
        self.kill_everything()
        self.output.close()
        shutil.rmtree(self.root, ignore_errors=True)


def whole(written: bytes) -> bytes:
    """Without the beginning of a record that is just being written."""
    return written[: len(written) // RECORD.size * RECORD.size]


def alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
