"""A LightningModule as a recipe: Lightning's own losses, the same bits for any workers, and nothing ignored."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils import data as loading

import phalanx
from phalanx.testing import assert_same_run

lightning_package = pytest.importorskip("lightning")
from lightning import pytorch as pl  # noqa: E402
from torchmetrics import MetricCollection  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score  # noqa: E402

from phalanx.integrations import lightning  # noqa: E402

TRAINER = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0,
}  # fmt: skip
X = torch.randn(72, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


def loader(first=0, last=48, **options):
    """Rows of the data in batches of 16, in order."""
    return loading.DataLoader(loading.TensorDataset(X[first:last], Y[first:last]), **({"batch_size": 16} | options))


def net(dropout=0.0):
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(16, 2),
    )


class Classifier(pl.LightningModule):
    """Dropout, BatchNorm, a metric with a state, and a loss that follows the epoch."""

    def __init__(self, configured=None, dropout=0.0, annealed=0.1):
        super().__init__()
        self.save_hyperparameters("dropout", "annealed")
        torch.manual_seed(0)
        self.net, self.configured = net(dropout), configured
        self.accuracy = MulticlassAccuracy(2, average="micro")

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        loss = F.cross_entropy(output, y) + self.hparams.annealed * self.current_epoch * output.square().mean()
        self.log("train_loss", loss, prog_bar=True, on_epoch=True, sync_dist=True)
        self._tell(batch_idx)
        return {"loss": loss, "output": output}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        self.accuracy(output, y)
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(output, y), on_step=False)
        self._tell(batch_idx)

    def _tell(self, batch_idx):
        told = {"epoch": self.current_epoch, "step": self.global_step, "batch": batch_idx}
        self.log_dict({f"at_{name}": float(value) for name, value in told.items()})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return self.configured(self, optimizer) if self.configured else optimizer


def recipe_of(module, **given):
    """Recipe and evaluation of a module over the usual data."""
    return lightning.recipe(
        module,
        **({"train_dataloaders": loader(), "val_dataloaders": loader(48, 70), "epochs": 3, "replicas": 2} | given),
    )


def scheduled(scheduler, **options):
    """``configure_optimizers`` that returns a dict with a scheduler."""
    return lambda module, optimizer: {
        "optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler(module, optimizer), **options},
    }  # fmt: skip


def one_cycle(module, optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=module.trainer.estimated_stepping_batches)


def plateau(module, optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


CONFIGURED = {
    "an optimizer": None,
    "a list": lambda module, optimizer: [optimizer],
    "a pair of lists": lambda module, optimizer: ([optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]),
    "a tuple of a dict": lambda module, optimizer: (scheduled(plateau, monitor="val_loss")(module, optimizer),),
    "a schedule of epochs": scheduled(lambda module, optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5), name="lr"),
    "a schedule of steps": scheduled(one_cycle, interval="step", frequency=1),
    "a schedule of a metric": scheduled(plateau, monitor="val_loss", strict=True),
}  # fmt: skip


class Noted(pl.Callback):
    """What Lightning's own trainer computes: losses and rates of steps, and metrics."""

    def __init__(self):
        self.steps, self.metrics = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append((float(outputs["loss"]), trainer.callback_metrics["at_batch"].item(), module.global_step))

    def on_validation_end(self, trainer, module):
        names = ("val_accuracy", "val_loss", "at_epoch", "at_step", "at_batch")
        self.metrics += [(name, trainer.callback_metrics[name].item()) for name in names]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::Warning:lightning")
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("form", CONFIGURED)
def test_losses_are_those_of_lightning(form, clip):
    """One replica and no shuffling: step by step the losses of Lightning's trainer, and its metrics, to rounding."""
    noted = Noted()
    trainer = pl.Trainer(**TRAINER, max_epochs=3, gradient_clip_val=clip, callbacks=[noted], log_every_n_steps=1)
    trainer.fit(Classifier(CONFIGURED[form]), loader(), loader(48, 70))
    clipped = {} if clip is None else {"max_norm": clip}
    recipe, evaluation = recipe_of(Classifier(CONFIGURED[form]), replicas=1, **clipped)
    result = recipe.train(engine="inline", evaluation=evaluation)
    assert result.loss_history == pytest.approx([loss for loss, *_ in noted.steps], rel=1e-6)
    metrics = {(one.name, one.steps): one.value for one in result.metric_history}
    assert [value for _, value in noted.metrics] == pytest.approx(list(metrics.values()), rel=1e-6)
    assert [name for name, _ in noted.metrics] == [name for name, _ in metrics]


def test_another_interval_has_other_losses():
    """The schedule is seen: stepped once a step, it leads elsewhere than once an epoch."""
    losses = [
        recipe_of(Classifier(scheduled(lambda _, optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5), interval=every)))[0]
        .train(engine="inline")
        .loss_history
        for every in ("epoch", "step")
    ]
    assert losses[0][:2] == losses[1][:1] + losses[0][1:2]
    assert losses[0] != losses[1]


@pytest.mark.long
@pytest.mark.parametrize("form", ["a schedule of epochs", "a schedule of steps"])
def test_workers_and_kills(form):
    """With dropout, BatchNorm and schedules, any workers and two kills leave every bit of the run as it is."""
    recipe, _ = recipe_of(Classifier(CONFIGURED[form], dropout=0.2), train_dataloaders=loader(shuffle=True))
    assert_same_run(recipe, workers=(1, 2), kills=2)


def test_the_module_and_generators_stay_as_they_are():
    """Translating copies the module, and asks its copy with generators that are put back."""

    class Noisy(Classifier):
        def validation_step(self, batch, batch_idx):
            self.net.to(torch.float64)
            self.log("noise", torch.rand(()))

    module, generator = Noisy(), torch.get_rng_state()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    recipe, _ = recipe_of(module)
    assert torch.equal(torch.get_rng_state(), generator)
    trained = recipe.train(engine="inline").model.state_dict()
    after = module.state_dict()
    assert before.keys() == after.keys() == trained.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(trained["net.0.weight"], before["net.0.weight"])


class Counting(Classifier):
    """Counts its steps in an attribute, as a module in one process may."""

    def training_step(self, batch, batch_idx):
        self.calls = getattr(self, "calls", 0) + 1
        return super().training_step(batch, batch_idx)["loss"] * self.calls


def test_a_state_of_its_own_is_seen():
    """A module whose loss follows from what it kept is refused: it would differ with the number of workers."""
    with pytest.raises(phalanx.StateError, match=r"model\.calls"):
        recipe_of(Counting())[0].train(engine="inline")


@pytest.mark.longest
def test_stopped_and_resumed(tmp_path):
    """A run that stops within an epoch, and goes on with other workers, has the same digest, losses and metrics."""
    recipe, evaluation = recipe_of(Classifier(CONFIGURED["a schedule of a metric"], dropout=0.2))
    whole = recipe.train(engine="inline", evaluation=evaluation)
    with recipe.start(run_dir=tmp_path, workers=2, engine="processes", evaluation=evaluation) as run:
        for report in run:
            if report.step == 3:
                break
    resumed = recipe.train(run_dir=tmp_path, engine="inline", evaluation=evaluation)
    assert (resumed.digest, resumed.loss_history) == (whole.digest, whole.loss_history)
    assert resumed.metric_history == whole.metric_history


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_epoch_step_and_batch_are_told(workers):
    """In each engine the steps are told the epoch, the optimizer's steps and the number of the batch, as they are."""
    recipe, evaluation = recipe_of(Classifier(), train_dataloaders=loader(batch_size=20))
    seen = []
    engine = "inline" if workers == 1 else "processes"
    result = recipe.train(
        workers=workers, engine=engine, evaluation=evaluation, callbacks=[lambda report: seen.append(report.losses)]
    )
    steps = [tuple(losses[f"at_{name}"] for name in ("epoch", "step", "batch")) for losses in seen]
    assert steps == [(step // 3, step, step % 3) for step in range(9)]
    metrics = {
        name: [one.value for one in result.metric_history if one.name == name] for name in ("at_epoch", "at_step")
    }
    assert metrics == {"at_epoch": [0, 1, 2], "at_step": [3, 6, 9]}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_loss_over_held_out_data(workers):
    """``Evaluation("loss", data)`` is the mean of ``training_step`` over that data, in the epoch that has ended."""
    x, held_out = X.double(), phalanx.Evaluation("loss", (X[48:70].double(), Y[48:70]), batch_size=8)
    given = {"train_dataloaders": None, "val_dataloaders": None, "data": (x[:48], Y[:48]), "batch_size": 16}
    recipe, _ = recipe_of(Classifier(dropout=0.2).double(), **given)
    engine = "inline" if workers == 1 else "processes"
    result = recipe.train(workers=workers, engine=engine, evaluation=held_out)
    model, total = result.model.eval(), 0.0
    for first in range(48, 70, 8):
        output, y = model(x[first : min(first + 8, 70)]), Y[first : min(first + 8, 70)]
        total += (F.cross_entropy(output, y) + 0.1 * 2 * output.square().mean()).item() * len(y)
    assert result.metric_history[-1].value == pytest.approx(total / 22, rel=1e-12)
    assert [one.steps for one in result.metric_history] == [3, 6, 9]


def test_an_epoch_that_is_not_told_changes_bits():
    """The annealed loss follows the epoch: where that has no part, the first epoch is the same, and not the digest."""
    told, plain = (recipe_of(Classifier(annealed=rate))[0].train(engine="inline") for rate in (0.1, 0.0))
    assert told.loss_history[:3] == plain.loss_history[:3]
    assert told.digest != plain.digest


@pytest.mark.parametrize(
    "given", [{"batch_sampler": lambda epoch, _: [[0, 1], [2, 3], [4, 5]][epoch % 2 :]}, {"steps": 5}]
)
def test_epochs_that_differ_in_length(given):
    """Batches of one's own, and a run that is counted in steps, have numbers of batches within their epochs."""
    given = {"epochs": None if "steps" in given else 2} | given
    seen, recipe = [], recipe_of(Classifier(), replicas=1, **given)[0]
    recipe.train(engine="inline", callbacks=[lambda report: seen.append(report.losses["at_batch"])])
    assert seen == [0, 1, 2, 0, 1]


class Collected(Classifier):
    """Metrics that are no means over batches, logged as objects of torchmetrics."""

    def __init__(self):
        super().__init__()
        metrics = MetricCollection([MulticlassF1Score(2, average="macro"), MulticlassAccuracy(2, average="micro")])
        self.trained, self.validated = metrics.clone(prefix="train/"), metrics.clone(prefix="val/")

    def training_step(self, batch, batch_idx):
        output = self(batch[0])
        self.trained(output, batch[1])
        self.log_dict(self.trained)
        return F.cross_entropy(output, batch[1])

    def validation_step(self, batch, batch_idx):
        self.validated.update(self(batch[0]), batch[1])
        self.log_dict(self.validated)


def test_objects_of_torchmetrics_are_merged():
    """A metric over batches of 16 is that over all samples at once, and nothing is left in the module."""
    recipe, evaluation = recipe_of(Collected())
    seen = []
    result = recipe.train(engine="inline", evaluation=evaluation, callbacks=[lambda report: seen.append(report.losses)])
    output = result.predict(X[48:70])
    wanted = Collected().validated(output, Y[48:70])
    last = {one.name: one.value for one in result.metric_history}
    assert last == {name: value.item() for name, value in wanted.items()}
    assert set(seen[0]) == {"train/MulticlassF1Score", "train/MulticlassAccuracy"}
    assert not any(metric.update_called for metric in result.model.validated.values())


def test_objects_of_torchmetrics_that_are_not_reset_are_seen():
    """Where objects keep what they saw from share to share, the run is refused."""
    module = recipe_of(Collected())[0].make_model
    module.phalanx_facts = dataclasses.replace(module.phalanx_facts, metrics=[])  # planted
    with pytest.raises(phalanx.StateError, match=r"model\.trained"):
        recipe_of(Collected())[0].replace(make_model=module).train(engine="inline")


class Digits(pl.LightningDataModule):
    """Data that are there after ``setup``."""

    def setup(self, stage):
        self.stage, self.classes, self.rate = stage, 2, self.trainer.max_epochs

    def train_dataloader(self):
        return loader(shuffle=True)

    def val_dataloader(self):
        return [loader(48, 70)]


@pytest.mark.long
def test_a_datamodule():
    """Its hooks are called once, and the module finds it in its trainer, in workers, too."""

    class Asking(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1 / self.trainer.datamodule.rate)

    datamodule = Digits()
    recipe, evaluation = lightning.recipe(Asking(dropout=0.2), datamodule, epochs=2, replicas=2)
    assert (datamodule.stage, recipe.shuffle, recipe.batch_size, len(evaluation.data)) == ("fit", True, 16, 22)
    one, two = (recipe.train(workers=workers, evaluation=evaluation) for workers in (1, 2))
    assert (one.digest, one.metric_history) == (two.digest, two.metric_history)
