"""Scripts of PyTorch's own style under the backend: results as with Gloo, and the same bits on every run."""

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
