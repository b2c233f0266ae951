"""The job in torchft: a lighthouse, and ``torchrun --nproc-per-node 1 --max-restarts 3 torchft_job.py`` per worker."""

import datetime
import os

import torch
from parts import BATCH, EPOCHS, FOLDER, LR, MOMENTUM, PER_EPOCH, WORKERS, Net, report, x, y
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

replica = int(os.environ["REPLICA_GROUP_ID"])
torch.manual_seed(replica)
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, replica, WORKERS, group_rank=0, num_replicas=1, shuffle=True)
loader = DataLoader(dataset, batch_size=BATCH // WORKERS, sampler=sampler)


def state():
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def load(saved):
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=state,
    replica_id=f"job_{replica}",
    hostname="127.0.0.1",
    timeout=datetime.timedelta(seconds=30),
)
net = Net()
model = DistributedDataParallel(manager, net, gradient_as_bucket_view=True)
optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM))
path = FOLDER / "checkpoint.pt"
if path.exists():
    saved = torch.load(path)
    load(saved)
    manager.load_state_dict(saved["manager"])
while manager.current_step() < EPOCHS * PER_EPOCH:
    sampler.set_epoch(manager.current_step() // PER_EPOCH)
    for inputs, target in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        if manager.current_step() % PER_EPOCH == 0:
            if manager.participating_rank() == 0:
                torch.save({**state(), "manager": manager.state_dict()}, FOLDER / "checkpoint.new")
                os.replace(FOLDER / "checkpoint.new", path)
            break
if manager.participating_rank() == 0:
    report(net.state_dict())
manager.shutdown(wait=False)
