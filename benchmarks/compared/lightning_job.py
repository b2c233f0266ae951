"""The job in Lightning: ``torchrun --standalone --nproc-per-node 2 --max-restarts 3 lightning_job.py``."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from parts import BATCH, EPOCHS, FOLDER, LR, MOMENTUM, WORKERS, Net, report, x, y
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningModule):  # noqa: D101
    def __init__(self):
        super().__init__()
        self.model = Net()

    def training_step(self, batch, index):
        return cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)


L.seed_everything(0)
module = Digits()
trainer = L.Trainer(
    accelerator="cpu",
    devices=WORKERS,
    strategy=DDPStrategy(gradient_as_bucket_view=True, static_graph=True) if WORKERS > 1 else "auto",
    max_epochs=EPOCHS,
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(FOLDER, save_last=True)],
)
loader = DataLoader(TensorDataset(x, y), batch_size=BATCH // WORKERS, shuffle=True)
trainer.fit(module, loader, ckpt_path="last")
if trainer.is_global_zero:
    report(module.model.state_dict())
