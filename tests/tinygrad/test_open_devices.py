"""OpenCL and WebGPU devices, where their drivers are installed: the digest is the same for any number of them."""

import ctypes.util
import os
import pathlib

import pytest

from tests.tinygrad.scripts import run

POCL = any(pathlib.Path("/etc/OpenCL/vendors").glob("pocl*.icd")) and ctypes.util.find_library("OpenCL") is not None
opencl = pytest.mark.skipif(not POCL, reason="pocl is not installed: apt-get install pocl-opencl-icd")
webgpu = pytest.mark.skipif(
    not os.environ.get("WEBGPU_PATH"),
    reason="WEBGPU_PATH does not name Dawn's library: pip install dawn-python (elsewhere, if it does not fit), "
    "apt-get install mesa-vulkan-drivers",
)


def asked(what):
    """What a process with two OpenCL devices tells; without pocl, one with the CPU."""
    orders = ["CL:0", "CL:1,CL:0", "CL:0,CL:1"] if POCL else []
    return run(what, "CL" if POCL else "CPU", *orders, POCL_DEVICES=os.environ.get("POCL_DEVICES", "pthread pthread"))


def compare(told):
    """All have one digest, `phalanx check` says so too, and another seed is another digest."""
    assert all(answer == told["same"][0] for answer in told["same"])
    assert told["other"] != told["same"][0][0]
    assert told["check"][0] is True


@pytest.mark.longest
@opencl
def test_two_opencl_devices():
    """One OpenCL device, or two in any order: the same digest and losses, and `phalanx check` says so."""
    told = asked("same")
    compare(told)
    assert told["check"][1] == "CL, CL:1"


@pytest.mark.longest
@opencl
def test_the_documented_example():
    """What docs/open_devices.md shows as the way to two OpenCL devices runs as it stands there."""
    assert len(asked("documented")) == 64


@pytest.mark.long
def test_the_list_of_devices():
    """`phalanx devices` names every framework's devices, or says what is missing for them."""
    rows = asked("listed")
    assert {row["framework"] for row in rows} == {"torch", "jax", "tinygrad"}
    assert all(bool(row["what"]) != bool(row["missing"]) for row in rows)
    usable = {row["device"] for row in rows if row["framework"] == "tinygrad" and row["what"]}
    assert not POCL or {"CL", "CL:1"} <= usable


@pytest.mark.long
@webgpu
def test_webgpu():
    """One WebGPU device, or two that Dawn opens on one adapter: the same digest."""
    compare(run("same", "WEBGPU", "WEBGPU", "WEBGPU,WEBGPU:1", "WEBGPU:1,WEBGPU"))
