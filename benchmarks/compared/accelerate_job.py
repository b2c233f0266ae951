"""The job in Accelerate: ``torchrun --standalone --nproc-per-node 2 --max-restarts 3 accelerate_job.py``."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from parts import BATCH, EPOCHS, FOLDER, LR, MOMENTUM, Net, report, x, y
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(
    cpu=True,
    dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
    kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)],
)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
saved, begin = sorted(FOLDER.glob("epoch_*")), 0
if saved:
    accelerator.load_state(saved[-1])
    begin = int(saved[-1].name.removeprefix("epoch_")) + 1
for epoch in range(begin, EPOCHS):
    loader.set_epoch(epoch)
    for inputs, target in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(inputs), target))
        optimizer.step()
    accelerator.save_state(FOLDER / f"epoch_{epoch:04}")
if accelerator.is_main_process:
    report(accelerator.unwrap_model(model).state_dict())
accelerator.end_training()
