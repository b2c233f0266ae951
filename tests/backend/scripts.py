"""Training scripts as their authors write them, for whatever backend: each ends by saving rank 0's weights."""

import contextlib
import copy
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
LOADED = (
    "torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.checkpoint", "lightning_fabric",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "accelerate", "torch._dynamo",
)  # fmt: skip  # what scripts import, so that ranks of scripts have it when they are forked


class Sometimes(nn.Module):
    """Uses one of two layers, by the sign of its input."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return (self.left if x.sum() > 0 else self.right)(x)


class Signs(nn.Module):
    """A number for each of five signs."""

    def forward(self, x):
        return (x > 0).long() + 2 * torch.arange(5)


def mlp():
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))


def embedding():
    """Tokens out of the signs of five numbers; gradients of the table are sparse."""
    return nn.Sequential(Signs(), nn.EmbeddingBag(10, 8, mode="sum", sparse=True), nn.Linear(8, 3))


def lenet():
    return nn.Sequential(nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 4, (1, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


class Transformer(nn.Module):
    """A causal block over five numbers."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(1, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.block(self.up(x[..., None])).mean(1))


def batch(rank, step, rows=8):
    """A rank's batch."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 5, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def train(model, optimizer, rank, steps=STEPS, backward=torch.Tensor.backward):
    """The plain loop."""
    for step in range(steps):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()


def ddp(make, **options):
    """A script that wraps its model and trains it."""

    def script(rank, size):
        model = DistributedDataParallel(make(), **options)
        train(model, torch.optim.AdamW(model.parameters(), 0.01), rank)
        return model.module.state_dict()

    return script


def compiled(backend, rank, size, shift=0):
    """DDP under torch's compiler, which follows a step down to the group; by itself for ``backend`` "none"."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    trained = model if backend == "none" else torch.compile(model, backend=backend)
    train(trained, torch.optim.SGD(model.parameters(), 0.1), rank + shift)
    return model.module.state_dict()


def reduced(backend, rank, size, shift=0):
    """Compiled code that calls a collective by itself."""

    def mean(x):
        dist.all_reduce(x)
        return x / size

    called = mean if backend == "none" else torch.compile(mean, backend=backend)
    return {str(step): called(batch(rank + shift, step)[0].sin()) for step in range(STEPS)}


def join(rank, size):
    """Ranks have different numbers of batches."""
    model = DistributedDataParallel(mlp())
    with Join([model]):
        train(model, torch.optim.SGD(model.parameters(), 0.1), rank, STEPS + 2 * rank)
    return model.module.state_dict()


def sparse(rank, size):
    """An embedding whose gradients are sparse."""
    model = DistributedDataParallel(embedding())
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank)
    return model.module.state_dict()


def no_sync(rank, size):
    """Gradients are added up over two batches before they are shared."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        for part in range(2):
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                x, y = batch(rank, 2 * step + part)
                F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module.state_dict()


def hooked(hook):
    """Gradients travel in a narrow dtype."""

    def script(rank, size):
        model = DistributedDataParallel(mlp())
        model.register_comm_hook(None, hook)
        train(model, torch.optim.SGD(model.parameters(), 0.1), rank)
        return model.module.state_dict()

    return script


def mixed(rank, size):
    """Autocast to bfloat16."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        x, y = batch(rank, step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.module.state_dict()


def compressed(rank, size):
    """PowerSGD sends factors of gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3)))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank)
    return model.module.state_dict()


def buffers(rank, size):
    """BatchNorm's statistics are rank 0's."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank)
    return model.module.state_dict()


def zero(rank, size):
    """Each rank keeps the optimizer state of some parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(mlp())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01), rank)
    return model.module.state_dict()


def sharded(rank, size):
    """FSDP2."""
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    train(model, torch.optim.AdamW(model.parameters(), 0.01), rank)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def sharded_wide(rank, size):
    """FSDP2 of the whole model at once, in bfloat16, clipped."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Transformer()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        x, y = batch(rank, step)
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def checkpointed(rank, size):
    """torch.distributed.checkpoint, which pickles objects through collectives."""
    import tempfile

    import torch.distributed.checkpoint as dcp

    model = DistributedDataParallel(mlp())
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    state = {"model": model.module.state_dict()}
    dcp.save(state, checkpoint_id=folder[0])
    other = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    dcp.load(other, checkpoint_id=folder[0])
    return other["model"]


def fabric(rank, size):
    """Lightning Fabric, in a process group that is there already."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import DDPStrategy

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "NODE_RANK": "0", "LOCAL_RANK": str(rank)}
    environment = LightningEnvironment()
    environment.set_global_rank(rank)
    environment.set_world_size(size)
    environment._main_port = 29400
    strategy = DDPStrategy(cluster_environment=environment, process_group_backend=dist.get_backend())
    running = Fabric(accelerator="cpu", devices=size, strategy=strategy)
    running.launch()
    model = mlp()
    model, optimizer = running.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    train(model, optimizer, rank, backward=running.backward)
    assert running.all_reduce(torch.tensor(float(rank)), reduce_op="sum").item() == sum(range(size))
    return model.module.state_dict()


def accelerated(rank, size):
    """Accelerate, in a process group that is there already."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == size
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    train(model, optimizer, rank, backward=accelerator.backward)
    gathered = accelerator.gather(torch.tensor([float(rank)]))
    assert gathered.tolist() == list(range(size))
    accelerator.wait_for_everyone()
    return accelerator.unwrap_model(model).state_dict()


SCRIPTS = {
    "MLP under DDP": ddp(mlp),
    "LeNet under DDP, gradient_as_bucket_view": ddp(lenet, gradient_as_bucket_view=True),
    "transformer under DDP, small buckets": ddp(Transformer, bucket_cap_mb=0.0005),
    "static_graph": ddp(mlp, static_graph=True),
    "find_unused_parameters": ddp(Sometimes, find_unused_parameters=True),
    "BatchNorm and its buffers": buffers,
    "sparse gradients of an embedding": sparse,
    "Join with uneven inputs": join,
    "no_sync": no_sync,
    "fp16_compress_hook": hooked(default_hooks.fp16_compress_hook),
    "PowerSGD hook": compressed,
    "autocast to bfloat16": mixed,
    "ZeroRedundancyOptimizer": zero,
    "fully_shard (FSDP2), by layer": sharded,
    "fully_shard (FSDP2), bfloat16, clipped": sharded_wide,
    "torch.distributed.checkpoint": checkpointed,
    "Lightning Fabric": fabric,
    "Accelerate": accelerated,
}
COMPILED = {
    f"{make.__name__} {backend}": functools.partial(make, backend)
    for make in (compiled, reduced)
    for backend in ("none", "eager", "inductor")
} | {f"{make.__name__} of other data": functools.partial(make, "none", shift=1) for make in (compiled, reduced)}


def run(rank, size, name, targets):
    """Run a script, once for each target; rank 0 saves there what it returns."""
    for target in targets:
        torch.manual_seed(1)
        script = (SCRIPTS | COMPILED)[name]
        state = {key: value.detach().clone() for key, value in copy.copy(script(rank, size)).items()}
        if rank == 0:
            torch.save(state, target)
