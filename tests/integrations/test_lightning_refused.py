"""What a recipe does not translate of a LightningModule, its trainer and its loaders is refused by its name."""

import re
import threading

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils import data as loading

import phalanx

pytest.importorskip("lightning")
from lightning import pytorch as pl
from torchmetrics import PearsonCorrCoef

from phalanx.integrations import lightning
from tests.integrations.test_lightning import Classifier, Digits, X, Y, loader, recipe_of


def hooks(kind):
    """All methods of a class of Lightning's that somebody may override."""
    return [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]


def overriding(kind, name):
    """An instance of a subclass that has this method of its own."""
    own = getattr(kind, name)
    return type("Own", (kind,), {name: lambda self, *given, **named: own(self, *given, **named)})()


ALLOWED = set[str]().union(  # called
    ("training_step", "validation_step", "configure_optimizers", "configure_model", "prepare_data", "setup"),
    ("train_dataloader", "val_dataloader"),
    ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    # no part of training
    ("test_step", "predict_step", "test_dataloader", "predict_dataloader", "teardown", "freeze", "unfreeze"),
    ("to_onnx", "to_torchscript", "to_tensorrt", "on_load_checkpoint", "on_save_checkpoint"),
)
THEIRS = [
    name for name in hooks(pl.LightningModule) if not hasattr(torch.nn.Module, name) and name != "load_from_checkpoint"
]


@pytest.mark.parametrize("name", THEIRS)
def test_hooks(name):
    """Whatever method of Lightning's a module overrides: it is called, it has no part in training, or it is refused."""
    free = name in ALLOWED or re.match("on_(test|predict)_", name)
    module = overriding(Classifier, name)
    if free:
        assert recipe_of(module)[0].train(engine="inline").steps == 9
    else:
        with pytest.raises(phalanx.UsageError, match=f"overrides {name}, which would not be called"):
            recipe_of(module)


@pytest.mark.parametrize("end", ["step_end", "epoch_end"])
@pytest.mark.parametrize("stage", ["training", "validation"])
def test_hooks_of_lightning_1(stage, end):
    """Methods that Lightning 2 refuses, as it calls them no more, are refused here, too."""
    module = type("Own", (Classifier,), {f"{stage}_{end}": lambda self, outputs: None})()
    with pytest.raises(phalanx.UsageError, match=f"overrides {stage}_{end}, which would not be called"):
        recipe_of(module)


@pytest.mark.parametrize("name", ["on_before_batch_transfer", "prepare_data_per_node_", "configure_callbacks"])
def test_a_datamodule_has_hooks_too(name):
    """Those of a datamodule that would not be called are refused; other methods are its own."""
    datamodule = type("Own", (Digits,), {name: lambda self, *given: given[0]})()
    if hasattr(pl.LightningDataModule, name):
        with pytest.raises(phalanx.UsageError, match=name):
            lightning.recipe(Classifier(), datamodule, epochs=1)
    else:
        lightning.recipe(Classifier(), datamodule, epochs=1)


CONFIGURED = {
    "returned NoneType": lambda module, optimizer: None,
    "returned AdamW, AdamW": lambda module, optimizer: [optimizer, optimizer],
    "returned AdamW, StepLR": lambda module, optimizer: (optimizer, lr_scheduler.StepLR(optimizer, 1)),
    "returned AdamW, interval": lambda module, optimizer: {"optimizer": optimizer, "interval": "step"},
    "of several": lambda module, optimizer: ([optimizer], [lr_scheduler.StepLR(optimizer, 1)] * 2),
    "frequency that is not 1": lambda module, optimizer: lr_of(optimizer, frequency=2),
    "interval that is neither": lambda module, optimizer: lr_of(optimizer, interval="batch"),
    "unknown keys": lambda module, optimizer: lr_of(optimizer, every=2),
    "no ReduceLROnPlateau": lambda module, optimizer: lr_of(optimizer, reduce_on_plateau=True),
    "without a monitor": lambda module, optimizer: ([optimizer], [lr_scheduler.ReduceLROnPlateau(optimizer)]),
    "monitor is 'train_loss'": lambda module, optimizer: {
        "optimizer": optimizer, "lr_scheduler": lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "train_loss",
    },
    "self.trainer.strategy was read": lambda module, optimizer: module.optimizers(),
    "self.trainer.lr_scheduler_configs": lambda module, optimizer: module.lr_schedulers(),
    "self.trainer.callback_metrics": lambda module, optimizer: module.trainer.callback_metrics["loss"],
}  # fmt: skip


def lr_of(optimizer, **options):
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler.StepLR(optimizer, 1), **options}}


@pytest.mark.parametrize("message", CONFIGURED)
def test_optimizers(message):
    """Several optimizers, foreign forms of schedules, and what a trainer would have to be asked for."""
    with pytest.raises(phalanx.UsageError, match=re.escape(message)):
        recipe_of(Classifier(CONFIGURED[message]))


def test_the_stand_in_for_the_trainer():
    """What it does not have is told by name; ``hasattr`` and a default work, and what it has is true."""
    found = []

    def asked(module, optimizer):
        trainer = module.trainer
        found.append((trainer.max_epochs, trainer.max_steps, trainer.num_training_batches, trainer.num_val_batches))
        found.append((trainer.estimated_stepping_batches, trainer.world_size, trainer.logger, module.global_rank))
        found.append((hasattr(trainer, "callback_metrics"), getattr(trainer, "strategy", None)))
        return optimizer

    recipe_of(Classifier(asked))
    assert found == [(3, -1, 3, [2]), (9, 1, None, 0), (False, None)]


def stepping(step):
    """A module with another ``training_step``."""
    return type("Own", (Classifier,), {"training_step": step})()


def own_loss(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


def logging(*given, **named):
    """A ``training_step`` that logs this."""

    def training_step(self, batch, batch_idx):
        loss = own_loss(self, batch)
        for name in given[0].split():
            self.log(name, loss * 2 if given[1:] == () else given[1], **named)
        return loss

    return training_step


STEPS = {
    "training_step returned NoneType": lambda self, batch, batch_idx: None,
    "returned dict(acc float32[])": lambda self, batch, batch_idx: {"acc": own_loss(self, batch)},
    "logged another 'loss'": logging("loss"),
    "'twice') was called twice": logging("twice twice"),
    "reduce_fx='max'": logging("high", reduce_fx="max"),
    "got Tensor": logging("several", torch.ones(2)),
    "got dict": logging("several", {"a": 1.0}),
    "9 named losses|8 named losses": logging("a b c d e f g h i"),
    "takes dataloader_iter": lambda self, dataloader_iter: None,
    "docs/steps.md": lambda self, batch, batch_idx, optimizer_idx: None,
}


@pytest.mark.parametrize("message", STEPS)
def test_steps(message):
    """A step without a loss, values that cannot be averaged, and other arguments."""
    pattern = message if "|" in message else re.escape(message)
    with pytest.raises(phalanx.UsageError, match=pattern):
        recipe_of(stepping(STEPS[message]))[0].train(engine="inline")


def test_values_with_a_weight():
    """A value that is logged with ``batch_size`` is averaged with that weight; the loss itself may be logged."""

    def training_step(self, batch):
        loss = own_loss(self, batch)
        positive = batch[1].sum()
        self.log("loss", loss)
        self.log("near", batch[0][batch[1] == 1, 0].mean().nan_to_num(), batch_size=int(positive))
        return loss

    seen = []
    recipe = recipe_of(stepping(training_step), replicas=4)[0]
    recipe.train(engine="inline", callbacks=[lambda report: seen.append(report.losses["near"])])
    assert seen[0] == pytest.approx(X[:16][Y[:16] == 1, 0].mean().item(), rel=1e-6)


def test_names_that_differ_from_batch_to_batch():
    """A validation step logs the same names for each batch; one that logs nothing is refused at once."""

    def validation_step(self, batch, batch_idx):
        self.log(f"loss of {batch_idx}", own_loss(self, batch))

    recipe, evaluation = recipe_of(type("Own", (Classifier,), {"validation_step": validation_step})())
    with pytest.raises(phalanx.UsageError, match=r"logged \['loss of 1'\] for batch 1"):
        recipe.train(engine="inline", evaluation=evaluation)
    silent = type("Own", (Classifier,), {"validation_step": lambda self, batch: own_loss(self, batch)})()
    with pytest.raises(phalanx.UsageError, match="validation_step logs nothing"):
        recipe_of(silent)


class Correlated(Classifier):
    """Logs a metric that torchmetrics does not merge."""

    def __init__(self):
        super().__init__()
        self.near = PearsonCorrCoef()

    def validation_step(self, batch, batch_idx):
        self.near.update(self(batch[0])[:, 0], batch[1].float())
        self.log("near", self.near)


def test_metrics_that_are_not_merged():
    """An object of torchmetrics that has to see all in order is refused at once, but for a single batch."""
    with pytest.raises(phalanx.UsageError, match="has a PearsonCorrCoef, whose states its library does not merge"):
        recipe_of(Correlated())
    recipe, evaluation = recipe_of(Correlated(), val_dataloaders=loader(48, 70, batch_size=22))
    assert [one.name for one in recipe.train(engine="inline", evaluation=evaluation).metric_history] == ["near"] * 3


@pytest.mark.parametrize(("changes", "steps"), [({"epochs": 4}, 9), ({"batch_size": 8}, 3)])
def test_a_recipe_that_was_changed(changes, steps):
    """The module was told of epochs and steps: one that it does not know of is refused, with the way out."""
    recipe = recipe_of(Classifier())[0].replace(**changes)
    with pytest.raises(phalanx.UsageError, match=f"step {steps} in epoch .*call lightning.recipe again") as caught:
        recipe.train(engine="inline")
    assert caught.value.result.steps == steps


class Endless(loading.IterableDataset):
    """Read in its own order."""

    def __iter__(self):
        yield X[0], Y[0]


SAMPLER = loading.WeightedRandomSampler(torch.ones(48), 48)
LOADERS = {
    "train_dataloaders is a list": [loader(), loader()],
    "train_dataloaders is a dict": {"a": loader()},
    "has an IterableDataset": loading.DataLoader(Endless(), batch_size=4),
    "has batch_size None": loader(batch_size=None),
    "has a generator": loader(shuffle=True, generator=torch.Generator()),
    "has a worker_init_fn": loader(worker_init_fn=print),
    "has a SubsetRandomSampler": loader(sampler=loading.SubsetRandomSampler([0, 1])),
    "has a RandomSampler": loader(sampler=loading.RandomSampler(range(48), replacement=True)),
    "has a SequentialSampler": loader(sampler=loading.SequentialSampler(range(16))),
    "has a RandomSampler that": loader(sampler=loading.RandomSampler(range(16), num_samples=48)),
    "has a WeightedRandomSampler": loader(sampler=loading.WeightedRandomSampler(torch.ones(48), 10)),
}


@pytest.mark.parametrize("message", LOADERS)
def test_loaders(message):
    """Loaders with an order or with batches of their own."""
    with pytest.raises(phalanx.UsageError, match=message):
        recipe_of(Classifier(), train_dataloaders=LOADERS[message])


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (loader(), {"shuffle": False, "drop_last": False, "batch_size": 16, "weights": None}),
        (loader(shuffle=True, drop_last=True), {"shuffle": True, "drop_last": True}),
        (loader(collate_fn=loading.default_convert, num_workers=2), {"collate_fn": loading.default_convert}),
        ([loader(batch_size=8)], {"batch_size": 8}),
    ],
)
def test_fields(given, fields):
    """What a loader says is in the recipe's fields."""
    recipe, _ = recipe_of(Classifier(), train_dataloaders=given)
    assert {name: getattr(recipe, name) for name in fields} == fields


def test_weights():
    """A WeightedRandomSampler over all samples becomes weights."""
    assert recipe_of(Classifier(), train_dataloaders=loader(sampler=SAMPLER))[0].weights.tolist() == [1.0] * 48


ARGUMENTS = {
    "max_epochs": "it is called epochs", "gradient_clip_val": "it is called max_norm", "devices": "but an option",
    "accumulate_grad_batches": "replicas are that", "callbacks": "but an option", "loss_fn": "the module says that",
    "check_val_every_n_epoch": "every_epochs=2", "limit_train_batches": "Subset", "strategy": "workers=4",
    "limit_val_batches": r"a loader with fewer data: DataLoader\(torch.utils.data.Subset",
    "fast_dev_run": "steps=1", "logger": "callbacks", "gradient_clip_algorithm": "max_norm", "num_sanity": "there are",
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    """An argument of the trainer's is answered with the name that phalanx has for it."""
    with pytest.raises(phalanx.UsageError, match=f"{name} is not an argument.*{ARGUMENTS[name]}"):
        recipe_of(Classifier(), **{name: 1})


def uncopied():
    module = Classifier()
    module.lock = threading.Lock()
    return module


CALLS = {
    "a Linear is no LightningModule; pass a module": lambda: recipe_of(torch.nn.Linear(1, 1)),
    "a DataLoader is no LightningDataModule.*loaders by name": lambda: lightning.recipe(
        Classifier(), loader(), epochs=1
    ),
    "epochs .* is missing": lambda: recipe_of(Classifier(), epochs=None),
    "train_dataloaders is missing": lambda: lightning.recipe(Classifier(), epochs=1),
    "pass the one or the other": lambda: lightning.recipe(Classifier(), Digits(), train_dataloaders=[], epochs=1),
    "scheduler is given": lambda: recipe_of(
        Classifier(lambda _, optimizer: ([optimizer], [lr_scheduler.StepLR(optimizer, 1)])), scheduler=print
    ),
    "val_dataloaders has no batch": lambda: recipe_of(
        Classifier(), val_dataloaders=loader(batch_size=100, drop_last=True)
    ),
    "cannot be copied": lambda: recipe_of(uncopied()),
    "in eval mode": lambda: recipe_of(Classifier().eval())[0].train(engine="inline"),
}


@pytest.mark.parametrize("message", CALLS)
def test_calls(message):
    """Wrong objects, and arguments that exclude each other."""
    with pytest.raises(phalanx.UsageError, match=message):
        CALLS[message]()


def test_optimization_by_hand():
    """A module that steps its optimizers itself is refused."""
    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(phalanx.UsageError, match="automatic_optimization is False"):
        recipe_of(module)


def test_the_other_package():
    """Modules of ``pytorch_lightning`` are LightningModules, too, and their hooks are found."""
    other = pytest.importorskip("pytorch_lightning")

    class Small(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 2)

        def training_step(self, batch, batch_idx):
            self.log("epoch", float(self.current_epoch))
            return F.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    seen = []
    recipe, evaluation = recipe_of(Small(), val_dataloaders=None)
    recipe.train(engine="inline", callbacks=[lambda report: seen.append(report.losses["epoch"])])
    assert (seen[::3], evaluation) == ([0, 1, 2], None)
    with pytest.raises(phalanx.UsageError, match="overrides on_fit_start"):
        recipe_of(overriding(Small, "on_fit_start"))
