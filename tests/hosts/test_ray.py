"""A recipe under Ray: actors that fall and come back, a TorchTrainer; tried where ray is installed (extra ``ray``)."""

import json
import os
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
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=True, runtime_env={"env_vars": paths})

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


ACTORS = """
import json, os, signal, socket, sys, time
import ray

folder, root = sys.argv[1:]
paths = {"PYTHONPATH": f"{root}/src:{root}", "OMP_NUM_THREADS": "1"}
ray.init("local", num_cpus=3, include_dashboard=False, runtime_env={"env_vars": paths})

@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Host:
    def run(self, env):
        os.environ.update(env)
        from tests.families import FAMILIES
        me, told = env["RANK"], []
        class Tell:
            everywhere = True
            def step(self, report):
                told.append(report.step)
                with open(os.path.join(folder, f"step-{me}"), "w") as file:
                    file.write(f"{os.getpid()} {report.step}")
                time.sleep(0 if os.path.exists(os.path.join(folder, "enough")) else 0.5)
        result = FAMILIES["conv_norm"].recipe(6, steps=90).train(workers=3, callbacks=[Tell()], lost_after=5.0)
        return result.digest, told, os.getpid(), [each.kind for each in result.incidents]

def read(rank):
    path = os.path.join(folder, f"step-{rank}")
    return open(path).read().split() if os.path.exists(path) else []

try:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    hosts = [Host.remote() for _ in range(3)]
    runs = [host.run.remote({**world, "RANK": str(rank)}) for rank, host in enumerate(hosts)]
    while len(read(2)) < 2 or int(read(2)[1]) < 4:
        time.sleep(0.1)
    pid = int(read(2)[0])
    os.kill(pid, signal.SIGKILL)
    while len(read(2)) < 2 or int(read(2)[0]) == pid:
        time.sleep(0.1)
    open(os.path.join(folder, "enough"), "w").close()
    print("told", json.dumps(ray.get(runs, timeout=120)))
finally:
    ray.shutdown()
"""


ELASTIC = """
import json, os, sys, threading, time
import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

folder, root = sys.argv[1:]
paths = {"PYTHONPATH": f"{root}/src:{root}", "OMP_NUM_THREADS": "1"}
lost = os.path.join(folder, "lost")
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
node = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, runtime_env={"env_vars": paths})

def train():
    import torch.distributed
    from tests.families import FAMILIES
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    first = not os.path.exists(lost)
    class Slow:
        everywhere = True
        def step(self, report):
            if first and report.step >= 25:
                open(os.path.join(folder, f"far{rank}"), "w").close()
                time.sleep(2)
    options = {"run_dir": os.path.join(folder, "run"), "snapshot_every": 10, "callbacks": [Slow()]}
    result = FAMILIES["conv_norm"].recipe(6, steps=60).train(workers=6, deadline_seconds=60, **options)
    with open(os.path.join(folder, f"rank{rank}"), "w") as file:
        json.dump([result.digest, result.loss_history, size, result.resumed_from], file)

def strike():
    while not os.path.exists(os.path.join(folder, "far1")):
        time.sleep(0.1)
    open(lost, "w").close()
    cluster.remove_node(node, allow_graceful=False)

try:
    run_config = RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=-1))
    facts = {"scaling_config": ScalingConfig(num_workers=(2, 8)), "torch_config": TorchConfig(backend="gloo")}
    threading.Thread(target=strike, daemon=True).start()
    TorchTrainer(train, **facts, run_config=run_config).fit()
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_actor_that_is_restarted(tmp_path):
    """The process of an actor is killed: the others go on, Ray starts it again, and it joins the run."""
    pytest.importorskip("ray")
    (tmp_path / "job.py").write_text(ACTORS)
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path), str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("told"))[5:])
    wanted = FAMILIES["conv_norm"].recipe(6, steps=90).train(engine="inline").digest
    assert [digest for digest, *_ in told] == [wanted] * 3
    assert all(steps == list(range(steps[0], 90)) for _, steps, *_ in told)
    assert [steps[0] > 0 for _, steps, *_ in told] == [False, False, True]
    assert told[0][3] == told[1][3] == ["lost", "joined"]


@pytest.mark.longest
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


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_elastic_torch_trainer(tmp_path):
    """A node is lost; Ray starts all workers again from the snapshot, one less: the digest of one process."""
    pytest.importorskip("ray.train")
    (tmp_path / "job.py").write_text(ELASTIC)
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path), str(ROOT)]
    patience = {**os.environ, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15"}  # until Ray tries with fewer workers
    done = subprocess.run(command, cwd=tmp_path, env=patience, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = FAMILIES["conv_norm"].recipe(6, steps=60).train(engine="inline")
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}").read_text())
        assert told[:3] == [wanted.digest, wanted.loss_history, 2]
        assert 20 <= told[3] < 60
