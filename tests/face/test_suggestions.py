"""Arguments by the names that other libraries have for them, and where they belong."""

import dataclasses
import inspect

import pytest
import torch
from torch.nn import functional as F

import phalanx
from phalanx import callbacks

X = torch.zeros(8, 4)
CASES = [
    ({"learning_rate": 0.1}, {}, "learning_rate is not an argument here; it is called lr"),
    (
        {"workers": 2},
        {},
        r"workers is not an argument of Recipe, but an option: recipe",
    ),
    ({}, {"epochs": 2}, r"epochs is not an option of train\(\).*Recipe\(\.\.\., epochs="),
    ({"accumulate_grad_batches": 4}, {}, "replicas are that"),
    ({"sead": 4}, {}, "did you mean 'seed'"),
    ({}, {"logger": True}, "logs are callbacks"),
    ({"device": "cuda"}, {}, r"devices, an option of train\(\): devices=\['cuda'\]"),
    ({}, {"device": "cuda"}, r"devices=\['cuda'\]"),
    ({}, {"accelerator": "gpu"}, "it is called devices"),
    ({"val_dataloaders": []}, {}, r"evaluation=phalanx.Evaluation\(metric, data\)"),
    ({"validation_data": []}, {}, r"evaluation=phalanx.Evaluation\(metric, data\)"),
    ({}, {"val_data": []}, r"evaluation=phalanx.Evaluation\(metric, data\)"),
    ({}, {"eval_dataset": []}, r"evaluation=phalanx.Evaluation\(metric, data\)"),
    ({"train_dataset": []}, {}, "it is called data"),
    ({"mixup": 0.4}, {}, "loss_takes='model': docs/cookbook.md"),
    ({"compute_loss": min}, {}, r"loss_fn\(model, batch\) with loss_takes='model'"),
    ({"compute_metrics": min}, {}, r"evaluation=phalanx.Evaluation\(metrics, data\)"),
    ({}, {"ckpt_path": "a"}, "it is called run_dir"),
    ({}, {"resume_from_checkpoint": "a"}, "it is called run_dir"),
    ({"amp": True}, {}, "precision='bfloat16'"),
    ({"grad_clip": 1.0}, {}, "it is called max_norm"),
    ({"gradient_accumulation": 4}, {}, "replicas are that.*docs/guide.md"),
    ({}, {"log_dir": "a"}, "logs are callbacks"),
    ({}, {"patience": 3}, "EarlyStopping"),
    ({}, {"nproc_per_node": 3}, "workers="),
    ({"class_weight": None}, {}, r"CrossEntropyLoss\(weight=.* phalanx.weighted.* weights="),
    ({"weight_decay": 0.1}, {}, "AdamW, weight_decay="),
    ({"warmup_steps": 10}, {}, "LinearLR"),
    ({"fp16": True}, {}, "float16 needs a scaled loss"),
    ({}, {"worker_init_fn": min}, "seeded for each sample"),
    ({}, {"pin_memory": True}, "pinned memory as it is"),
    ({"gradient_checkpointing": True}, {}, "in make_model"),
    ({"clip_value": 1.0}, {}, "docs/cookbook.md"),
    ({}, {"find_unused_parameters": True}, "left as it is"),
    ({}, {"sync_batchnorm": True}, "docs/cookbook.md"),
    ({"validation_split": 0.1}, {}, r"cut the data yourself.*phalanx.Evaluation\(metric, data\)"),
    ({"global_clipnorm": 1.0}, {}, "it is called max_norm"),
    ({"clipnorm": 1.0}, {}, "norm of all gradients together .*docs/cookbook.md"),
    ({}, {"validation_freq": 2}, "every_epochs=2"),
    ({}, {"verbose": 0}, "it is called progress"),
    ({"sampler": None}, {}, "weights=, one number per sample; .* batch_sampler=f"),
]
CLASSES = [
    (
        lambda: callbacks.EarlyStopping(monitor="loss"),
        "monitor is not an argument of EarlyStopping; it is called metric",
    ),
    (lambda: callbacks.EarlyStopping("loss", patients=3), "did you mean 'patience'"),
    (lambda: callbacks.SaveBest("loss", save_top_k=3), "save_top_k is not an argument of SaveBest; it is called keep"),
    (lambda: phalanx.Evaluation(F.mse_loss, (X, X), every=2), "every is not an argument.*every_epochs or every_steps"),
    (lambda: callbacks.Log("wandb"), "to is 'wandb'.*ten lines.*docs/callbacks.md"),
    (lambda: phalanx.Stream(list, shuffle=True), "shuffle is not an argument of Stream; it is called shuffle_buffer"),
    (lambda: phalanx.Phase(F.mse_loss, params="a"), "params is not an argument of Phase; it is called parameters"),
    (lambda: phalanx.Phase(F.mse_loss, color="a"), "color is not an argument of Phase; there are every, loss_fn"),
]


@pytest.mark.parametrize(("fields", "options", "words"), CASES, ids=[str({**a, **b}) for a, b, _ in CASES])
def test_a_name_from_elsewhere_is_answered(fields, options, words):
    """The message has the name that phalanx has for it, or says where it goes."""
    with pytest.raises(phalanx.UsageError, match=words):
        phalanx.Recipe(lambda: torch.nn.Linear(4, 4), (X, X), torch.nn.functional.mse_loss, steps=1, **fields).train(
            **options
        )


@pytest.mark.parametrize(("call", "words"), CLASSES, ids=[words[:20] for _, words in CLASSES])
def test_an_argument_of_a_class_is_answered_too(call, words):
    """What callbacks, evaluations, streams and phases are called with elsewhere is no bare TypeError."""
    with pytest.raises(phalanx.UsageError, match=words):
        call()


def test_a_verb_from_elsewhere_is_answered():
    """recipe.fit and ModelCheckpoint are missing attributes that say what there is; any other says what Python says."""
    recipe = phalanx.Recipe(torch.nn.Linear(4, 4), (X, X), F.mse_loss, steps=1)
    with pytest.raises(AttributeError, match=r"a recipe has no fit; it is called train: recipe.train\(\)"):
        _ = recipe.fit
    with pytest.raises(AttributeError, match="'Recipe' object has no attribute 'color'"):
        _ = recipe.color
    with pytest.raises(AttributeError, match="'ModelCheckpoint'; the best weights are kept by SaveBest"):
        _ = callbacks.ModelCheckpoint
    assert not hasattr(callbacks, "ModelCheckpoint")
    with pytest.raises(ImportError, match="'ModelCheckpoint'; the best weights are kept by SaveBest"):
        exec("from phalanx.callbacks import ModelCheckpoint")
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        exec("from phalanx.callbacks import Nonsense")
    with pytest.raises(AttributeError, match=r"has no attribute 'color'$"):
        _ = callbacks.color
    assert not hasattr(recipe, "fit")
    assert not hasattr(callbacks, "CSVLogger")


def test_a_class_that_answers_is_the_class_that_it_was():
    """Arguments in their order, replacing a field, and what signatures show are as without it."""
    evaluation = phalanx.Evaluation(F.mse_loss, (X, X), 8)
    assert dataclasses.replace(evaluation, name="test").batch_size == 8
    assert list(inspect.signature(phalanx.Phase).parameters)[:2] == ["loss_fn", "parameters"]
    with pytest.raises(TypeError, match="missing 1 required"):
        phalanx.Stream()


def test_a_sample_that_cannot_be_read_is_named():
    """Of a share of many, the message has the one sample."""

    class Broken:
        def __len__(self):
            return 256

        def __getitem__(self, index):
            if index == 77:
                raise OSError("no such file")
            return torch.zeros(4), torch.zeros(4)

    recipe = phalanx.Recipe(torch.nn.Linear(4, 4), Broken(), F.mse_loss, steps=1, batch_size=256, replicas=1)
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": 1}):
        with pytest.raises(phalanx.WorkerError, match=r"no such file \(while phalanx was reading sample 77\)") as told:
            recipe.train(**options)
        assert "reading sample 77" in "".join(told.value.__cause__.__notes__)
