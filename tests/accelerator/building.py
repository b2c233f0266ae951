"""Compiles ``accelerator.cpp`` once per machine, torch and content of the source, and imports what came out.

The compiler is called directly: ``torch.utils.cpp_extension`` would need ninja and setuptools, and its lock outlives a
process that is killed while it holds it.
"""

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = ["accelerator.cpp", "memory.h", "world.h"]
NAME = "fake_accelerator"


class Unavailable(RuntimeError):
    """The accelerator cannot be built here, and the message says why."""


_failures = []  # of this process: what does not compile is not tried again by the next test


def compiled():
    """The extension module: from the cache, or built by whoever comes first while the others wait."""
    if _failures:
        raise _failures[0]
    try:
        return _compiled()
    except RuntimeError as failure:
        _failures.append(failure)
        raise


def _compiled():
    folder = _cache() / f"{NAME}_{_key()}"
    library = folder / f"{NAME}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache():
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(home) / "torch_extensions")


def _key():
    parts = [torch.__version__, sys.version, *_command(""), *((HERE / name).read_text() for name in SOURCES)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _command(output):
    root = Path(torch.__file__).parent
    minor = torch.__version__.split(".")[1]
    libraries = ["c10", "torch_cpu", "torch", "torch_python"]
    return [
        *shlex.split(os.environ.get("CXX", "g++")),
        *("-O1", "-w", "-std=c++20", "-fPIC", "-shared"),
        *("-DAT_PER_OPERATOR_HEADERS", f"-DTORCH_EXTENSION_NAME={NAME}", f"-DTORCH_MINOR={minor}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *("-isystem", str(root / "include"), "-isystem", str(root / "include/torch/csrc/api/include")),
        *("-isystem", sysconfig.get_path("include")),
        str(HERE / SOURCES[0]),
        *("-o", output, f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", *(f"-l{name}" for name in libraries)),
    ]


def _compile(library):
    if os.name != "posix" or not sys.platform.startswith("linux"):
        raise Unavailable("the fake accelerator is for Linux")
    if not shutil.which(_command("")[0]):
        raise Unavailable(f"there is no C++ compiler {_command('')[0]!r} (set CXX)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise Unavailable("Python's headers are not installed")
    unfinished = library.with_suffix(f".{os.getpid()}")
    built = subprocess.run(_command(str(unfinished)), capture_output=True, text=True)
    if built.returncode:
        raise RuntimeError(f"the fake accelerator does not compile:\n{built.stderr[-20_000:]}")
    unfinished.rename(library)
