"""OpenCL and WebGPU devices, where their drivers are installed: the digest is the same for any number of them."""

import ctypes.util
import json
import os
import pathlib
import re

import pytest

from tests.state.runs import ROOT
from tests.tinygrad.scripts import DIGESTS, run

POCL = any(pathlib.Path("/etc/OpenCL/vendors").glob("pocl*.icd")) and ctypes.util.find_library("OpenCL") is not None
TWO = {"POCL_DEVICES": os.environ.get("POCL_DEVICES", "pthread pthread")}
opencl = pytest.mark.skipif(not POCL, reason="pocl is not installed: apt-get install pocl-opencl-icd")
webgpu = pytest.mark.skipif(
    not os.environ.get("WEBGPU_PATH"),
    reason="WEBGPU_PATH does not name Dawn's library: pip install dawn-python (elsewhere, if it does not fit), "
    "apt-get install mesa-vulkan-drivers",
)
BLOCK = re.compile(r"```py\n(.*?)```", re.DOTALL)


def compare(told):
    """All have one digest, `phalanx check` says so too, and another seed is another digest."""
    assert all(answer == told["same"][0] for answer in told["same"])
    assert told["other"] != told["same"][0][0]
    assert told["check"][0] is True


@opencl
def test_two_opencl_devices():
    """One OpenCL device, or two in any order: the same digest and losses, and `phalanx check` says so."""
    told = json.loads(run(["-c", DIGESTS, "CL", "CL:0", "CL:1,CL:0", "CL:0,CL:1"], **TWO))
    compare(told)
    assert told["check"][1:] == [4, "CL, CL:1"]


@opencl
def test_the_documented_example():
    """What docs/open_devices.md shows as the way to two OpenCL devices runs as it stands there."""
    (block, *_) = BLOCK.findall((ROOT / "docs" / "open_devices.md").read_text(encoding="utf-8"))
    assert len(run(["-c", block], **TWO).strip()) == 64


def test_the_list_of_devices():
    """`phalanx devices` names every framework's devices, or says what is missing for them."""
    rows = json.loads(run(["-m", "phalanx", "devices", "--json"], **TWO))
    assert {row["framework"] for row in rows} == {"torch", "jax", "tinygrad"}
    assert all(bool(row["what"]) != bool(row["missing"]) for row in rows)
    usable = {row["device"] for row in rows if row["framework"] == "tinygrad" and row["what"]}
    assert not POCL or {"CL", "CL:1"} <= usable


@webgpu
def test_webgpu():
    """One WebGPU device, or two that Dawn opens on one adapter: the same digest."""
    compare(json.loads(run(["-c", DIGESTS, "WEBGPU", "WEBGPU", "WEBGPU,WEBGPU:1", "WEBGPU:1,WEBGPU"])))
