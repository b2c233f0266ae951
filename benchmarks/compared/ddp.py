"""The job in DistributedDataParallel: ``torchrun --standalone --nproc-per-node 2 --max-restarts 3 ddp.py``."""

import os

import torch
from parts import BATCH, EPOCHS, FOLDER, LR, MOMENTUM, Net, report, x, y
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(rank)
model = DistributedDataParallel(Net(), gradient_as_bucket_view=True, static_graph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=BATCH // world, sampler=sampler)
path, begin = FOLDER / "checkpoint.pt", 0
if path.exists():
    saved = torch.load(path)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begin = saved["epoch"] + 1
for epoch in range(begin, EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, target in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
    if rank == 0:
        saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(saved, FOLDER / "checkpoint.new")
        os.replace(FOLDER / "checkpoint.new", path)
if rank == 0:
    report(model.module.state_dict())
distributed.destroy_process_group()
