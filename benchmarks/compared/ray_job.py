"""The job in Ray Train: ``python ray_job.py``."""

import pathlib
import tempfile

import ray
import ray.train
import torch
from parts import BATCH, EPOCHS, FOLDER, LR, MOMENTUM, WORKERS, Net, report, x, y
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def train():
    context = ray.train.get_context()
    world, rank = context.get_world_size(), context.get_world_rank()
    torch.manual_seed(rank)
    model = prepare_model(Net(), parallel_strategy_kwargs={"gradient_as_bucket_view": True, "static_graph": True})
    plain = model.module if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    loader = prepare_data_loader(DataLoader(TensorDataset(x, y), batch_size=BATCH // world, shuffle=True))
    begin, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(pathlib.Path(folder) / "checkpoint.pt")
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["epoch"] + 1
    for epoch in range(begin, EPOCHS):
        if world > 1:
            loader.sampler.set_epoch(epoch)
        for inputs, target in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), target).backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                saved = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(saved, pathlib.Path(folder) / "checkpoint.pt")
            ray.train.report({"epoch": epoch}, checkpoint=Checkpoint(folder) if rank == 0 else None)


ray.init("local", num_cpus=WORKERS, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
result = TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=WORKERS),
    torch_config=TorchConfig(backend="gloo"),
    run_config=RunConfig(name="job", storage_path=str(FOLDER), failure_config=FailureConfig(max_failures=3)),
).fit()
with result.checkpoint.as_directory() as folder:
    report(torch.load(pathlib.Path(folder) / "checkpoint.pt")["model"])
