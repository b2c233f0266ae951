"""Ray Train's TorchTrainer runs a recipe on two workers; tried where ray is installed (pip install 'ray[train]')."""

import json
import subprocess
import sys

import pytest

from tests.families import FAMILIES
from tests.state.runs import ROOT

SCRIPT = """
import json, os, sys
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

folder, root = sys.argv[1:]
paths = {"PYTHONPATH": f"{root}/src:{root}"}
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True, runtime_env={"env_vars": paths})

def train():
    import torch.distributed
    from tests.families import FAMILIES
    result = FAMILIES["conv_norm"].recipe(4).train(deadline_seconds=60)
    with open(os.path.join(folder, f"rank{torch.distributed.get_rank()}"), "w") as file:
        json.dump([result.digest, result.loss_history, result.workers], file)

try:
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2), torch_config=TorchConfig(backend="gloo")).fit()
finally:
    ray.shutdown()
"""


@pytest.mark.timeout(240)
def test_a_torch_trainer(tmp_path):
    """Both workers of a TorchTrainer end in the digest of one process."""
    pytest.importorskip("ray.train")
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path), str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = FAMILIES["conv_norm"].recipe(4).train(engine="inline")
    for rank in range(2):
        digest, losses, workers = json.loads((tmp_path / f"rank{rank}").read_text())
        assert (digest, losses, workers) == (wanted.digest, wanted.loss_history, 2)
