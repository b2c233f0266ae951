"""What a run depends on in tinygrad: settings, random streams, and devices, with what missing ones need."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

from tinygrad import helpers
from tinygrad.device import ALL_DEVICES, Device
from tinygrad.helpers import Context, getenv
from tinygrad.tensor import Tensor

from phalanx.definition import checks, generators
from phalanx.errors import UsageError

# Settings of tinygrad's that choose other programs, and so other bits, or other defaults of dtypes.
SETTINGS = (
    "NOOPT", "IMAGE", "FLOAT16", "WINO", "USE_TC", "TC_OPT", "TRANSCENDENTAL", "NOLOCALS", "SPLIT_REDUCEOP",
    "DISABLE_FAST_IDIV", "FUSE_OPTIM", "EMULATED_DTYPES", "DEFAULT_FLOAT", "DEFAULT_INT", "ALLOW_TF32", "PCONTIG",
    "USE_ATOMICS", "NUM_CPU_THREADS",
)  # fmt: skip


RANDOM = ("_seed", "_device_seeds", "_device_rng_counters")  # where ``Tensor`` keeps the state of its generators


def kept() -> Callable[[], None]:
    """A function that puts tinygrad's generators back into their present state."""
    return functools.partial(put_back, [(name, getattr(Tensor, name)) for name in RANDOM])


def put_back(state: Iterable[tuple[str, Any]]) -> None:
    """Put tinygrad's generators into a state, by the names of its parts."""
    for name, value in state:
        setattr(Tensor, name, value)


GENERATOR = generators.Global(Tensor.manual_seed, kept)


@contextlib.contextmanager
def settings(threads: int) -> Iterator[None]:
    """Inside, random streams begin anew, and programs are chosen by fixed rules.

    They are never timed (``BEAM``): then chance would choose the program, and with it the bits. Programs are compiled
    in this process (``PARALLEL``): processes that tinygrad starts for it run the caller's script again. Schedules that
    were made under other settings are not reused (``SCACHE``). ``threads`` share an operation on the CPU.
    """
    if helpers.getenv("JITBEAM", 0):
        raise UsageError(
            "JITBEAM is set in the environment: tinygrad would choose programs by timing them, and bits with them; "
            "unset it"
        )
    Tensor.manual_seed(0)
    with Context(BEAM=0, PARALLEL=0, SCACHE=0, NUM_CPU_THREADS=threads):
        yield


def recorded(device: str) -> dict[str, str]:
    """What changes bits and is not in a recipe, as text; the device by what it is, not by its number."""
    settings = {name: str(getattr(helpers, name).value) for name in SETTINGS}
    compiler = {"compiler": _compiler()} if device.split(":")[0] == "CPU" else {}
    return {"tinygrad": version("tinygrad"), **settings, **compiler, "device": described(device)}


@functools.cache
def _compiler() -> str:
    """The first line of the version that the C compiler for the CPU prints."""
    completed = subprocess.run(
        [helpers.getenv("CC", "clang"), "--version"], capture_output=True, text=True, check=False
    )
    return completed.stdout.partition("\n")[0]


def described(device: str) -> str:
    """A device's kind, its program compiler, and what it says of itself."""
    opened: Any = Device[device]
    attributes = [getattr(opened, name, None) for name in ("device_name", "driver_version", "arch")]
    known = [str(text) for text in attributes[:2] if text] or [str(text) for text in attributes[2:] if text]
    return " ".join([device.split(":")[0], type(opened.renderer).__name__, *known])


def devices_of(names: Sequence[str], replicas: int) -> list[str]:
    """The devices with these names, opened, as tinygrad spells them: "CL:0" is "CL".

    Raises
    ------
    UsageError
        tinygrad cannot use one here, one comes twice, they are of several kinds, or there are more than replicas.
    """
    devices = [opened(name) for name in names]
    checks.alike(names, devices, [described(device) for device in devices], replicas)
    return devices


def facts(names: Sequence[str]) -> dict[str, str]:
    """What tinygrad says of these devices, for a report."""
    devices = [opened(name) for name in names]
    return {"devices": ", ".join(devices), "tinygrad": "; ".join(sorted({str(recorded(name)) for name in devices}))}


KINDS = [kind for kind in ALL_DEVICES if kind != "DSP"]


def opened(name: str) -> str:
    """A device by its name, ready to compute, as tinygrad spells it.

    Raises
    ------
    UsageError
        tinygrad cannot use it here; says what it needs.
    """
    try:
        if name.split(":")[0] == "CL":
            see_all_opencl()
        if not re.fullmatch(r"[A-Za-z]+(:\d+)?", name):
            raise ValueError("after the kind comes a number or nothing, as in CL:1")
        device = Device.canonicalize(name)
        kind = device.split(":")[0]
        if kind not in KINDS:
            raise ValueError(f"its kinds are {', '.join(KINDS)}")
        if kind == "CPU" and shutil.which(compiler := getenv("CC", "clang")) is None:
            raise FileNotFoundError(compiler)  # the CPU opens with cached programs alone, so opening proves nothing
        Device[device].renderer  # noqa: B018  says why it cannot be used
        return device
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(
            f"devices: tinygrad cannot use {name!r} here ({type(error).__name__}: {reason}); {missing(name)}. `phalanx "
            "devices` lists what there is"
        ) from error


MISSING = {
    "CPU": "it needs clang: install it (Debian: clang), or name another by CC=clang-15 in the environment",
    "CL": "it needs an OpenCL driver: that of your GPU, or for the CPU Debian's pocl-opencl-icd; two devices on one "
    'CPU are POCL_DEVICES="pthread pthread" in the environment (with pocl 4 and later, "cpu cpu")',
    "WEBGPU": "it needs Dawn (pip install dawn-python, and WEBGPU_PATH at its library), and a driver for Vulkan "
    "(Debian: mesa-vulkan-drivers), Metal or Direct3D",
}


def missing(name: str) -> str:
    """What a kind of device needs, as a sentence."""
    kind = name.split(":")[0]
    if kind not in KINDS:
        return "tinygrad writes names as CPU, CL:1, WEBGPU, METAL or AMD:0"
    return MISSING.get(kind, "it needs such a device, and a driver that tinygrad can use")


def available() -> list[tuple[str, str, str]]:
    """Each device that tinygrad can use here: name, what it is, "". Each other kind: name, "", what it needs."""
    rows: list[tuple[str, str, str]] = []
    for kind in KINDS:
        try:
            first = opened(kind)
            count = max(1, Device[first].count())
            names = [kind, *(f"{kind}:{number}" for number in range(1, count))]
            rows += [(name, described(opened(name)), "") for name in names]
        except UsageError:
            rows.append((kind, "", missing(kind)))
    return rows


def see_all_opencl() -> None:
    """Let tinygrad see all OpenCL devices of the first platform. Without a GPU there it would see only one.

    If the platform has GPUs, tinygrad sees all of those by itself.
    """
    from tinygrad.runtime import ops_cl

    opencl: Any = ops_cl
    cl, check = opencl.cl, opencl.check

    check(cl.clGetPlatformIDs(1, platforms := (cl.cl_platform_id * 1)(), None))
    count = ctypes.c_uint32()
    if cl.clGetDeviceIDs(platforms[0], cl.CL_DEVICE_TYPE_GPU, 0, None, count) == 0 and count.value:
        return
    check(cl.clGetDeviceIDs(platforms[0], cl.CL_DEVICE_TYPE_ALL, 0, None, count))
    if len(opencl.CLDevice.device_ids or ()) < count.value:  # the one that it would see is the first of them
        devices = (cl.cl_device_id * count.value)()
        check(cl.clGetDeviceIDs(platforms[0], cl.CL_DEVICE_TYPE_ALL, count.value, devices, None))
        opencl.CLDevice.device_ids = devices
