"""What is taken of TrainingArguments and of a recipe's fields, and what is refused, by name and with the way out."""

import dataclasses
import sys

import pytest
import torch

import phalanx
from phalanx.integrations import transformers as converter
from tests.integrations.jobs import ACCUMULATED, MARKS, arguments, classes, classifier, here

pytestmark = MARKS
REFUSED = {
    "optim": ("adamw_8bit", "optimizer="),
    "lr_scheduler_type": ("reduce_lr_on_plateau", "schedule_on='eval/loss'"),
    "train_sampling_strategy": ("group_by_length", "batch_sampler=f"),
    "load_best_model_at_end": (True, "SaveBest"),
    "fp16": (True, "bf16=True"),
    "report_to": (["tensorboard"], "Log"),
    "push_to_hub": (True, "result.model.push_to_hub"),
    "torch_compile": (True, "model_init"),
    "neftune_noise_alpha": (5.0, "leave it at its default"),
    "eval_delay": (2, "leave it at its default"),
    "eval_on_start": (True, "run.evaluate"),
    "data_seed": (7, "one seed"),
    "include_for_metrics": (["loss"], "leave it at its default"),
    "predict_with_generate": (True, "leave it at its default"),
    "fsdp": ("full_shard", "one copy of the weights"),
    "sharpness": (0.5, "leave it at its default"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_translated_is_refused(name):
    """By the field's name, with its value and the way out; also a field that a later version adds."""
    import transformers

    kind = dataclasses.make_dataclass(
        "Newer", [("sharpness", float, 0.0)], bases=(transformers.Seq2SeqTrainingArguments,)
    )
    value, way_out = REFUSED[name]
    args = kind("out", use_cpu=True, report_to="none", eval_strategy="epoch")
    converter.recipe(classifier, args, classes(), eval_dataset=classes())
    setattr(args, name, value)
    with pytest.raises(phalanx.UsageError, match=f"^{name} is ") as refused:
        converter.recipe(classifier, args, classes(), eval_dataset=classes())
    assert way_out in str(refused.value)


WRONG = {
    "a field of TrainingArguments": (
        {"weight_decay": 0.1},
        "give it to TrainingArguments, or to the recipe as optimizer=",
    ),
    "one that has another name": ({"learning_rate": 0.1}, "to the recipe as lr="),
    "an argument of the Trainer": ({"compute_loss_func": print}, "it is called loss_fn"),
    "callbacks": ({"callbacks": []}, r"recipe.train\(callbacks=...\)"),
    "the recipe's name": ({"data": []}, "train_dataset"),
    "no arguments": ({"args": None}, "args is a NoneType"),
    "no model": ({"model_init": dict}, "model_init returned a dict"),
    "columns": ({"train_dataset": {"input_ids": torch.zeros(4, 3)}}, "train_dataset is a dict"),
    "columns to evaluate": ({"eval_dataset": {"input_ids": torch.zeros(4, 3)}}, "input_ids is a Tensor"),
    "a short batch": ({"args": {**ACCUMULATED, "dataloader_drop_last": True}}, "leaves out 0 of 22 .* 6 here"),
    "nothing to evaluate": ({"args": {"eval_strategy": "epoch"}}, "pass an eval_dataset"),
    "a stream without end": ({"train_dataset": phalanx.Stream(classes)}, "give max_steps"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told(case):
    """With the argument's name, and phalanx's name for it."""
    given, message = WRONG[case]
    made = {"model_init": classifier, "train_dataset": classes(), **given}
    if isinstance(more := made.get("args", {}), dict):
        made["args"] = arguments(**more)
    with pytest.raises(phalanx.UsageError, match=message):
        converter.recipe(**made)


def test_a_sample_without_labels_is_told():
    """The model returns no loss, and the error says what the batch has."""
    data = [{"input_ids": row["input_ids"]} for row in classes()]
    with pytest.raises(phalanx.UsageError, match="no loss for a batch of input_ids; give samples labels"):
        here(classifier, data, arguments())


def mean_loss(output, target):
    return torch.nn.functional.cross_entropy(output.logits, target)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (
            {},
            {"replicas": 4, "batch_size": 8, "epochs": 2, "steps": None, "seed": 42, "max_norm": 1.0, "shuffle": False},
        ),
        ({"replicas": 2, "batch_size": 6, "max_norm": 2.0}, {"replicas": 2, "batch_size": 6, "max_norm": 2.0}),
        ({"steps": 3}, {"steps": 3, "epochs": None}),
        ({"epochs": 3, "shuffle": True, "seed": 1}, {"epochs": 3, "steps": None, "shuffle": True, "seed": 1}),
        ({"batch_sampler": lambda epoch, generator: [[0, 1]]}, {"batch_size": 32, "total": 2}),
        ({"weights": [1.0] * 22}, {"shuffle": True}),
        ({"loss_fn": mean_loss}, {"loss_fn": mean_loss, "forward_fn": None}),
        ({"scheduler": None, "lr": 0.5}, {"scheduler": None, "lr": 1e-3}),
    ],
    ids=lambda value: ",".join(value) or "none",
)
def test_fields_of_the_recipe_count(fields, wanted):
    """Whatever TrainingArguments say."""
    recipe, _ = converter.recipe(classifier, arguments(**ACCUMULATED), classes(), **fields)
    assert {name: getattr(recipe, name) for name in wanted} == wanted
    assert recipe.train(engine="inline", progress=False).steps == recipe.total


def test_without_transformers_it_says_what_to_install(monkeypatch):
    """With the name of the extra."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(phalanx.UsageError, match=r"pip install 'phalanx\[transformers\]'"):
        converter.recipe(classifier, None, [])
