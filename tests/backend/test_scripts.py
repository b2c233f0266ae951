"""Scripts of PyTorch's own style under the backend: results as with Gloo, and the same bits on every run."""

import shutil
import subprocess
import sys

import pytest
import torch

from tests.backend import scripts
from tests.sampling import sample

NEEDS = {"Lightning Fabric": "lightning_fabric", "Accelerate": "accelerate"}


@pytest.mark.long
@pytest.mark.parametrize("name", sample("scripts", scripts.SCRIPTS, 8))
def test_script(right, tmp_path, name):
    """Two runs end in equal bits, and near to what Gloo gives."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    paths = [str(tmp_path / name) for name in ("one", "again", "gloo")]
    right(2, "scripts.run", name, paths[:2], backend="phalanx")
    right(2, "scripts.run", name, paths[2:], backend="gloo")
    one, again, gloo = (torch.load(path, weights_only=True) for path in paths)
    assert all(torch.equal(one[key], again[key]) for key in one)
    narrow = any(word in name for word in ("16", "PowerSGD"))
    for key, value in one.items():
        torch.testing.assert_close(value, gloo[key], rtol=1e-2 if narrow else 1e-5, atol=1e-2 if narrow else 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("make", ["compiled", "reduced"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.longest)])
def test_under_the_compiler(right, tmp_path, make, backend):
    """Compiled code ends in the bits of the same code by itself, and in Gloo's; other data in others."""
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor needs a compiler of C++")
    ended = []
    for way, group in (("none", "phalanx"), (backend, "phalanx"), (backend, "gloo"), ("of other data", "phalanx")):
        path = str(tmp_path / f"{way} {group}")
        right(2, "scripts.run", f"{make} {way}", [path], backend=group)
        ended.append(torch.load(path, weights_only=True))
    plain, ours, gloo, other = ended
    assert all(torch.equal(value, ours[key]) and torch.equal(value, gloo[key]) for key, value in plain.items())
    assert not any(torch.equal(value, other[key]) for key, value in plain.items() if value.is_floating_point())


@pytest.mark.long
def test_a_group_loads_no_compiler():
    """Keeping the compiler out does not load it, which takes 0.7 s."""
    code = "import sys, phalanx.backend; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
