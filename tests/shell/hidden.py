"""Hides what another system lacks, in a process that then imports phalanx: set SYSTEM to darwin or win32.

Torch and others look at the system when they are imported, so they are imported first.
"""

import builtins
import importlib
import io
import os
import select
import signal
import socket
import sys
import types

for first in ("asyncio", "concurrent.futures", "multiprocessing.connection", "subprocess", "tempfile", "cloudpickle",
              "numpy", "torch._dynamo", "torch.utils.data", "tqdm", "typer"):  # fmt: skip
    importlib.import_module(first)

SYSTEM = os.environ["SYSTEM"]
LACKS = {
    "darwin": {os: "memfd_create pidfd_open sched_getaffinity sched_setaffinity", signal: "pidfd_send_signal"},
    "win32": {
        os: "memfd_create pidfd_open sched_getaffinity sched_setaffinity fork register_at_fork pread pwrite geteuid "
        "getuid fchmod O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_CLOEXEC setpgid getpgid killpg waitid setsid",
        signal: "pidfd_send_signal SIGKILL SIGSTOP SIGCONT SIGCHLD SIGUSR1 SIGUSR2 SIGBUS SIGHUP SIGTSTP SIGSYS "
        "SIGTRAP SIGPIPE SIGXCPU SIGXFSZ SIGALRM pthread_sigmask",
        select: "poll epoll",
        socket: "AF_UNIX send_fds recv_fds",
    },
}
HELD = {}


def locking(descriptor, mode, count):
    """As msvcrt has it: of one byte, which is beyond what a file has."""
    assert os.lseek(descriptor, 0, os.SEEK_CUR) == 1 << 30
    file = os.fstat(descriptor).st_ino
    if mode and HELD.setdefault(file, descriptor) != descriptor:
        raise PermissionError(13, "Permission denied")
    if not mode:
        HELD.pop(file, None)


def refused(function):
    """An opening function that finds no /proc, and on Windows opens no folder."""

    def opened(path, *more, **named):
        if isinstance(path, (str, os.PathLike)):
            if os.fspath(path).startswith(("/proc", "/sys")):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            if SYSTEM == "win32" and os.path.isdir(path):
                raise PermissionError(13, "Permission denied", str(path))
        return function(path, *more, **named)

    return opened


for module, names in LACKS[SYSTEM].items():
    for name in filter(lambda name: hasattr(module, name), names.split()):
        delattr(module, name)
if SYSTEM == "win32":
    sys.modules.update(dict.fromkeys(("fcntl", "resource", "termios", "pwd", "grp")))
    sys.modules["msvcrt"] = types.ModuleType("msvcrt")
    vars(sys.modules["msvcrt"]).update(LK_NBLCK=2, LK_UNLCK=0, locking=locking)
io.open = builtins.open = refused(io.open)
os.open = refused(os.open)
sys.platform = SYSTEM
