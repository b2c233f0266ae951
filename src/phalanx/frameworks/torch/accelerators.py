"""Accelerators: their names, what a run sets in this process while it uses them, and what it says if one fails.

This module knows no vendor. It uses what torch has for all kinds of devices (``torch.accelerator``,
``torch.get_device_module``), and leaves out what a kind does not have. CUDA alone needs a variable of the environment
for deterministic kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from phalanx.definition import checks
from phalanx.errors import RunError, UsageError

CUDNN: Any = torch.backends.cudnn
FILLING: Any = torch.utils.deterministic
EXPECTED: dict[str, str] = {}  # modules that register kinds of devices, by kind
MENTIONED: set[str] = set()  # topics that this process has warned of
LOCAL_RANKS = "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"
WORKSPACE, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def prepare(names: Sequence[str], *, allow: bool) -> None:
    """Do what has to be done before the first of these devices is used.

    Raises
    ------
    UsageError
        One was used before, so it is too late.
    """
    for kind in {name.partition(":")[0] for name in names} & set(EXPECTED):
        if not hasattr(torch, kind):
            importlib.import_module(EXPECTED[kind])
        if not hasattr(torch, kind):
            raise UsageError(
                f"devices names {kind!r}, which this process gets from {EXPECTED[kind]}, but importing that does not "
                "register it in a worker; let the module register the kind when it is imported"
            )
    named = any(name.startswith("cuda") for name in names)
    if not allow and torch.version.cuda is not None and (named or (not names and torch.cuda.device_count())):
        set_workspace()


def registered() -> list[str]:
    """The kind of devices that a package has registered in this process, and the module that did; empty if none has."""
    kind = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, kind, None)
    if module is None:
        return []
    return [kind, module.__name__ if type(module) is ModuleType else type(module).__module__]


def expect(kind: list[str]) -> None:
    """Note which module registers a kind in the caller's process; it is imported if a device of it is named."""
    if kind:
        EXPECTED[kind[0]] = kind[1]


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make a device the one that user code gets if it names only the kind."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "set_device"):
        yield
        return
    if isinstance(getattr(module, "device", None), type):  # CUDA's: it goes back without a context on that device
        with module.device(device.index):
            yield
        return
    before = module.current_device()
    module.set_device(device.index)
    try:
        yield
    finally:
        module.set_device(before)


class Deterministic(contextlib.AbstractContextManager[None]):
    """Inside, a device is the current one, its kernels are deterministic, and none is chosen by timing.

    Parameters
    ----------
    device : torch.device
        An accelerator.
    allow : bool
        Whether operations without a deterministic kernel are allowed.
    """

    def __init__(self, device: torch.device, *, allow: bool) -> None:
        self._device, self._allow = device, allow
        prepare([device.type], allow=allow)

    def __enter__(self) -> None:
        self._current = current(self._device)
        self._current.__enter__()
        self._flags = CUDNN.benchmark, CUDNN.deterministic, FILLING.fill_uninitialized_memory
        self._mode = torch.get_deterministic_debug_mode()
        CUDNN.benchmark, CUDNN.deterministic = False, True
        if not self._mode:
            FILLING.fill_uninitialized_memory = False  # torch's own check: it writes all new memory once more
        _be_deterministic(not self._allow)

    def __exit__(self, *_: object) -> None:
        _be_deterministic(self._mode > 0, warn_only=self._mode == 1)
        CUDNN.benchmark, CUDNN.deterministic, FILLING.fill_uninitialized_memory = self._flags
        self._current.__exit__(None, None, None)


def _be_deterministic(on: bool, *, warn_only: bool = False) -> None:
    """As ``torch.use_deterministic_algorithms``, which imports the compiler; that takes a second in each worker."""
    if "torch._dynamo" in sys.modules:  # something is compiled, or will be
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
    else:
        torch._C._set_deterministic_algorithms(on, warn_only=warn_only)


def set_workspace() -> None:
    """Set the variable that makes CUDA's matrix products deterministic; it is read once, before the first of them.

    Raises
    ------
    UsageError
        There was one without it.
    """
    if os.environ.get(WORKSPACE) in WORKSPACES:
        return
    os.environ[WORKSPACE] = WORKSPACES[0]
    if not torch.cuda.is_initialized():
        return
    try:
        with Deterministic(torch.device("cuda", torch.cuda.current_device()), allow=False):
            torch.zeros(16, 16, device="cuda").mm(torch.zeros(16, 16, device="cuda"))
    except RuntimeError as error:
        del os.environ[WORKSPACE]
        raise UsageError(
            f"CUDA multiplied matrices in this process before {WORKSPACE} was set, so its products may differ from run "
            f"to run; write this before anything uses CUDA: import os; os.environ[{WORKSPACE!r}] = {WORKSPACES[0]!r} "
            '(or give the promise up: nondeterministic="allow")'
        ) from error


@contextlib.contextmanager
def watched(devices: Sequence[torch.device]) -> Iterator[None]:
    """Name the device if one fails while it is waited for.

    Raises
    ------
    RunError
        A device failed: what it computed, and what lies in its memory, is lost.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        names = ", ".join(map(str, dict.fromkeys(devices)))
        traceback.clear_frames(error.__traceback__)  # they hold what the failed step had computed
        raise RunError(
            f"out of memory on {names} ({error}); use a larger micro_batches= or replicas= (both part of the answer), "
            "which make what is computed at once smaller, or set PYTORCH_ALLOC_CONF=expandable_segments:True"
        ) from error
    except RuntimeError as error:
        lost = [str(device) for device in dict.fromkeys(devices) if device.type != "cpu" and not answers(device)]
        if not lost:
            raise
        raise RunError(
            f"{', '.join(lost)} failed ({error}); what lies in its memory is lost, so this process cannot go on with "
            "it: start again, with a run_dir from the newest snapshot there, on other devices if it stays broken. An "
            "index out of range (of an embedding, of a class) looks like this: do that step with devices='cpu', or set "
            "CUDA_LAUNCH_BLOCKING=1"
        ) from error


def answers(device: torch.device) -> bool:
    """Whether a device still computes; it is waited for."""
    try:
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError:
        return False
    return True


def found(names: Sequence[str], replicas: int, home: torch.device, *, apart: bool = False) -> list[torch.device]:
    """The devices with these names; for no names ``home``, where the model was made.

    One is in use from here on. Several are left alone, as is one that a worker has (``apart``): to use a device takes
    half a gigabyte of it, and a process that only starts workers does not need it.

    Raises
    ------
    UsageError
        torch cannot use one here, they are of several kinds, one comes twice, or there are more than replicas.
    """
    if not names:
        kind, count = accelerator()
        if home.type == "cpu" and kind is not None:  # a run does not use them because nobody named them
            _mention(
                "idle",
                f"{count} {kind} devices are idle, as make_model makes the model elsewhere; devices={kind!r} uses them",
            )
        return [home]
    listed = spelled(names, replicas)
    devices = list(map(listed_device if apart or len(listed) > 1 else named_device, listed))
    kinds = [device.type for device in devices]
    several = range(len(devices)) if set(kinds) == {"cpu"} else devices  # the CPU may be named more than once
    checks.alike(names, several, kinds, replicas)
    return devices


def spelled(names: Sequence[str], replicas: int) -> list[str]:
    """The names of devices one by one: a kind alone is all of its devices, "local" the one that torchrun means."""
    listed = [_local() if name == "local" else name for name in names]
    if len(listed) == 1 and ":" not in listed[0] and listed[0] != "cpu":
        return _all_of(listed[0], replicas)
    return listed


def available() -> list[tuple[str, str, str]]:
    """Each device that torch can use here: name, what it is, "". Without an accelerator: what that needs."""
    rows = [("cpu", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads", "")]
    kind, count = accelerator()
    if kind is None:
        build = f"no accelerator that torch {torch.__version__} can use; builds for CUDA, ROCm and XPU: see pytorch.org"
        return [*rows, ("cuda", "", build)]
    names = [f"{kind}:{number}" for number in range(count)]
    return rows + [(name, facts([name]).get("names", kind), "") for name in names]


def accelerator() -> tuple[str | None, int]:
    """The kind of accelerator of this machine, and how many there are; None without one. Starts none of them.

    Whether CUDA is available is not asked: that starts it, after which no child process could use it.
    """
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None, 0
    count = getattr(torch.get_device_module(device), "device_count", lambda: 1)()
    return (device.type if count else None), count


def facts(names: Sequence[str]) -> dict[str, str]:
    """What torch says of these devices."""
    devices = [torch.device(name) for name in names]
    kind = torch.get_device_module(devices[0])
    description = {"devices": ", ".join(names)}
    if hasattr(kind, "get_device_name"):
        description["names"] = ", ".join(sorted({kind.get_device_name(device) for device in devices}))
    return description


def can_pin() -> bool:
    """Whether torch has pinned memory here."""
    try:
        torch.empty(1, device="cpu").pin_memory()
    except RuntimeError:
        return False
    return True


def named_device(name: str) -> torch.device:
    """The named device, in use from here on (its random generators can be saved).

    Raises
    ------
    UsageError
        torch cannot use it here.
    """
    try:
        device, asked = torch.empty(0, device=name).device, torch.device(name)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise _unusable(name, reason) from error
    if device.type == "meta":
        raise _unusable(name, "it has no values")
    if asked.index is not None and asked.index != (device.index or 0):  # torch takes any number for the CPU
        raise _unusable(name, f"there is one {device.type}")
    return device


def listed_device(name: str) -> torch.device:
    """The named device, as ``named_device``, which finds out more; but an accelerator is not used."""
    kind, count = accelerator()
    if kind is None or name.partition(":")[0] != kind:
        return named_device(name)  # says why, if it is an accelerator
    try:
        index = torch.device(name).index or 0
    except RuntimeError as error:
        raise _unusable(name, str(error).strip().splitlines()[0]) from error
    if index >= count:
        raise _unusable(name, f"there are {count} of this kind")
    return torch.device(kind, index)


def _unusable(name: str, reason: str) -> UsageError:
    return UsageError(f"devices names {name!r}, which torch cannot use here ({reason}); use ['cpu'], or leave it out")


def _all_of(kind: str, replicas: int) -> list[str]:
    """All visible devices of a kind, at most one per replica."""
    listed_device(kind)  # says why it cannot be used
    count = getattr(torch.get_device_module(kind), "device_count", lambda: 1)()
    if count > replicas:
        _mention(
            "more than replicas",
            f"devices is {kind!r}: {replicas} of {count} devices are used, as replicas is {replicas}; raise it "
            "(which is part of the answer) to use more",
        )
    return [f"{kind}:{number}" for number in range(min(count, replicas))]


def _local() -> str:
    """The accelerator that the launcher means for this process: the only one here, or the one with its number."""
    (kind, count), rank = accelerator(), _local_rank()
    if kind is None or (rank is None and count > 1):
        missing = "torch has no accelerator here" if kind is None else f"none of {', '.join(LOCAL_RANKS)} is set"
        raise UsageError(f"devices names 'local', but {missing}; name the device, as in devices=['cuda:0']")
    return f"{kind}:{0 if count == 1 else rank}"


def _local_rank() -> str | None:
    """The number of this process on its host, as launchers tell it."""
    return next((os.environ[name] for name in LOCAL_RANKS if os.environ.get(name, "").isdigit()), None)


def chosen(names: Sequence[str], home: torch.device) -> Sequence[str]:
    """The device of one process of a world: named, else where the model is made, else the launcher's, else the CPU."""
    if not names and home.type != "cpu":
        return [str(home)]
    kind, count = accelerator()
    if names and names not in ([kind], (kind,)):
        return names
    if kind is None or (not names and count > 1 and _local_rank() is None):
        return ["cpu"]
    name = _local()
    _mention("local", f"this process trains on {name}, one of {checks.counted(count, 'device')}")
    return [name]


def _mention(topic: str, text: str) -> None:
    if topic not in MENTIONED:
        MENTIONED.add(topic)
        checks.warn(text)
