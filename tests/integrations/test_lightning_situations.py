"""Ten situations of public example programs for Lightning, written anew: over in one line, or refused by name.

``docs/lightning.md`` has the same table.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils import data as loading

import phalanx

pytest.importorskip("lightning")
from lightning import pytorch as pl
from torchmetrics.classification import MulticlassJaccardIndex

from phalanx.integrations import lightning

IMAGES = torch.rand(48, 1, 8, 8, generator=torch.Generator().manual_seed(0))
DIGITS = (IMAGES.mean((1, 2, 3)) * 1000).long() % 10
TOKENS = torch.randint(20, (48, 12), generator=torch.Generator().manual_seed(1))
TARGETS = TOKENS.flip(1).contiguous()


class Plain(pl.LightningModule):
    """Adam, and a loss that is logged in both steps."""

    def _loss(self, batch):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam([each for each in self.parameters() if each.requires_grad], lr=1e-3)


class Images(Plain):
    """A classifier of images."""

    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(width, 10))

    def forward(self, x):
        return self.head(self.backbone(x))

    def _loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])


class Annealed(Plain):
    """A variational autoencoder: its divergence counts more from epoch to epoch."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 8), nn.Linear(4, 64)

    def _loss(self, batch):
        mean, spread = self.encoder(batch[0].flatten(1)).chunk(2, 1)
        output = self.decoder(mean + torch.randn_like(mean) * spread.exp())
        divergence = (mean.square() + spread.exp().square() - 2 * spread - 1).sum(1).mean() / 2
        weight = min(1.0, self.current_epoch / 2)
        self.log("weight" if self.trainer.training else "val_weight", weight)
        return F.mse_loss(output, batch[0].flatten(1)) + weight * divergence


class Tuned(Images):
    """A backbone that is frozen, in eval mode; a schedule of epochs."""

    def __init__(self):
        super().__init__()
        self.backbone.requires_grad_(False).eval()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [lr_scheduler.MultiStepLR(optimizer, [1, 2])]


class Language(Plain):
    """A transformer with groups of parameters and a warm-up that is counted in steps; batches are dicts."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def _loss(self, batch):
        return F.cross_entropy(self.head(self.layer(self.embedding(batch["ids"]))).mT, batch["labels"])

    def configure_optimizers(self):
        decayed = [each for each in self.parameters() if each.dim() > 1]
        others = [each for each in self.parameters() if each.dim() < 2]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
        total = self.trainer.estimated_stepping_batches
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 3) * (1 - step / total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Series(Plain):
    """A forecast by a recurrent network, whose rate falls where the validation loss does not."""

    def __init__(self):
        super().__init__()
        self.network, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 8)

    def _loss(self, batch):
        x = batch[0].squeeze(1)
        return F.l1_loss(self.head(self.network(x[:, :-1])[0]), x[:, 1:])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


class Segments(Plain):
    """A mask for each image, and a metric over all of them."""

    def __init__(self):
        super().__init__()
        self.network, self.overlap = nn.Conv2d(1, 2, 3, padding=1), MulticlassJaccardIndex(2)

    def _loss(self, batch):
        return F.cross_entropy(self.network(batch[0]), (batch[0][:, 0] > 0.5).long())

    def validation_step(self, batch, batch_idx):
        self.overlap(self.network(batch[0]), (batch[0][:, 0] > 0.5).long())
        self.log("overlap", self.overlap)


class Contrastive(Images):
    """A loss that compares the samples of a batch."""

    def _loss(self, batch):
        one, other = (F.normalize(self(batch[0] + noise), dim=1) for noise in (0.0, 0.1))
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


class Adversarial(Images):
    """Two optimizers by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Replay(loading.IterableDataset):
    """A buffer that an agent fills while it learns."""

    def __iter__(self):
        yield from zip(IMAGES, DIGITS, strict=True)


class Counted(Images):
    """A metric that is put together after the epoch."""

    def on_validation_epoch_end(self):
        self.log("accuracy", 0.0)


def dicts(samples):
    return {"ids": torch.stack([one for one, _ in samples]), "labels": torch.stack([one for _, one in samples])}


def loaders(x=IMAGES, y=DIGITS, **options):
    dataset = loading.TensorDataset(x, y)
    return {
        "train_dataloaders": loading.DataLoader(dataset, batch_size=16, shuffle=True, num_workers=2, **options),
        "val_dataloaders": loading.DataLoader(dataset, batch_size=16, **options),
    }


OVER = {
    "an image classifier": (Images, {}),
    "a variational autoencoder, annealed by the epoch": (Annealed, {}),
    "transfer learning": (Tuned, {"max_norm": 0.5}),
    "a language model": (Language, {**loaders(TOKENS, TARGETS, collate_fn=dicts), "max_norm": 1.0}),
    "a forecast": (Series, {}),
    "segmentation": (Segments, {"precision": "bfloat16"}),
    "contrastive learning": (Contrastive, {"replicas": 1}),
}
REFUSED = {
    "automatic_optimization": (Adversarial, {}),
    "IterableDataset": (Images, {"train_dataloaders": loading.DataLoader(Replay(), batch_size=16)}),
    "on_validation_epoch_end": (Counted, {}),
}


@pytest.mark.longest
@pytest.mark.parametrize("situation", OVER)
def test_what_goes_over(situation):
    """One line makes a recipe of it, which learns, and ends in the same bits with two workers."""
    kind, given = OVER[situation]
    torch.manual_seed(0)
    recipe, evaluation = lightning.recipe(kind(), **({"epochs": 3, "replicas": 2} | loaders() | given))
    one = recipe.train(engine="inline", evaluation=evaluation)
    two = recipe.train(workers=min(2, recipe.replicas), engine="processes", evaluation=evaluation)
    assert (one.digest, one.metric_history) == (two.digest, two.metric_history)
    assert one.steps == 9
    assert kind().load_state_dict(one.model.state_dict())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    """What would be done by hand, read in its own order or called after an epoch is refused by that name."""
    kind, given = REFUSED[name]
    with pytest.raises(phalanx.UsageError, match=name):
        lightning.recipe(kind(), **({"epochs": 3} | loaders() | given))
