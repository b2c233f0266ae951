"""Which devices tinygrad can use here, and what others need."""

from __future__ import annotations

import ctypes
import re
import shutil
from typing import Any

from tinygrad.device import ALL_DEVICES, Device
from tinygrad.helpers import getenv

from phalanx.errors import UsageError
from phalanx.frameworks.tinygrad.environment import described

OPENCL = "CL"
KINDS = [kind for kind in ALL_DEVICES if kind != "DSP"]


def opened(name: str) -> str:
    """A device by its name, ready to compute, as tinygrad spells it.

    Raises
    ------
    UsageError
        tinygrad cannot use it here; says what it needs.
    """
    try:
        if name.split(":")[0] == OPENCL:
            see_all_opencl()
        if not re.fullmatch(r"[A-Za-z]+(:\d+)?", name):
            raise ValueError("after the kind comes a number or nothing, as in CL:1")
        device = Device.canonicalize(name)
        if device.split(":")[0] not in KINDS:
            raise ValueError(f"its kinds are {', '.join(KINDS)}")
        if device.split(":")[0] == "CPU" and shutil.which(compiler := getenv("CC", "clang")) is None:
            raise FileNotFoundError(compiler)  # what was compiled before could be had, so opening it proves nothing
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
    "METAL": "it needs macOS on a Mac with a GPU",
    "AMD": "it needs an AMD GPU of the RDNA or CDNA families, and the kernel's amdgpu driver",
    "NV": "it needs an NVIDIA GPU, and the kernel's driver",
    "CUDA": "it needs an NVIDIA GPU, and CUDA's driver",
    "QCOM": "it needs an Adreno GPU",
}


def missing(name: str) -> str:
    """What a kind of device needs, as a sentence."""
    return MISSING.get(name.split(":")[0], "tinygrad writes names as CPU, CL:1, WEBGPU, METAL or AMD:0")


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
    """Let tinygrad see all OpenCL devices of the first platform where none is a GPU; it would see one.

    Of a platform that has GPUs it sees all of those by itself.
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
