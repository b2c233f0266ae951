"""The job in Lightning."""

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from parts import make_model, test, train
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningModule):  # noqa: D101
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = make_model()

    def training_step(self, batch, index):
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        correct = (self.model(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", correct, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


L.seed_everything(0)
loaders = (
    DataLoader(TensorDataset(*train), batch_size=8, shuffle=True),
    DataLoader(TensorDataset(*test), batch_size=256),
)
best = ModelCheckpoint("runs/lightning/best", monitor="accuracy", mode="max")
average = WeightAveraging(avg_fn=get_ema_avg_fn(0.99))
trainer = L.Trainer(
    accelerator="cpu", devices=1, precision="bf16-mixed", max_epochs=100, accumulate_grad_batches=8,
    logger=CSVLogger("runs/lightning"), enable_progress_bar=False, log_every_n_steps=1,
    callbacks=[EarlyStopping("accuracy", patience=5, mode="max"), best, average],
)  # fmt: skip
trainer.fit(Digits(), *loaders)
print("best accuracy", float(best.best_model_score), "of", trainer.global_step, "steps")
finder = L.Trainer(accelerator="cpu", devices=1, precision="bf16-mixed", logger=False, enable_checkpointing=False)
print("suggested rate", Tuner(finder).lr_find(Digits(), *loaders, attr_name="lr").suggestion())
