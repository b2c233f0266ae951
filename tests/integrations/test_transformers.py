"""Jobs of the Trainer as recipes: its losses and weights, step by step, and one answer for any number of workers."""

import dataclasses
import importlib.util
import os
import signal
import sys

import pytest
import torch

import phalanx
from phalanx.integrations import transformers as converter
from phalanx.integrations.transformers.loss import Loss

pytestmark = [
    pytest.mark.long,  # importing transformers takes seconds, so it is imported where it is used
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
WORDS, LENGTH = 31, 12
SCHEDULED = {"weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.1}
SMALL = {"vocab_size": WORDS, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
GPT2 = {
    "vocab_size": WORDS,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def gpt2_with_dropout(**more):
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **more))


def gpt2():
    return gpt2_with_dropout(**dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0))


def llama():
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_hidden_layers=1))


def bert(kind="BertForSequenceClassification", **more):
    import transformers

    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(**SMALL, num_hidden_layers=1, max_position_embeddings=16, **rates, **more)
    return getattr(transformers, kind)(config)


def classifier():
    return bert(num_labels=3)


def regressor():
    return bert(num_labels=1)


def masked():
    return bert("BertForMaskedLM")


def partly_frozen():
    model = classifier()
    model.bert.embeddings.requires_grad_(False)
    return model


def seq2seq():
    import transformers

    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, **shape)
    return transformers.T5ForConditionalGeneration(config)


def rows(count=22, label=None):
    """Samples of unlike numbers of tokens, padded; ``label``: one for each, in place of tokens."""
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(count):
        ids = torch.randint(3, WORDS, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (), generator=generator)).long()
        labels = {"labels": ids.where(mask > 0, -100)} if label is None else {"label": label(number)}
        found.append({"input_ids": ids, "attention_mask": mask, "source": f"line {number}", **labels})
    return found


def words():
    return rows()


def classes():
    return rows(label=lambda number: number % 3)


def numbers():
    return rows(label=lambda number: number / 10)


def sources():
    return [{name: row[name] for name in ("input_ids", "labels")} for row in rows()]


def cut(samples):
    """A collator that pads to the longest sample of the batch only."""
    longest = max(int(sample["attention_mask"].sum()) for sample in samples)
    return {name: torch.stack([sample[name][:longest] for sample in samples]) for name in samples[0]}


def arguments(**more):
    import transformers

    usual = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "train_sampling_strategy": "sequential"}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return transformers.TrainingArguments("out", use_cpu=True, **(usual | quiet | {"num_train_epochs": 2} | more))


def by_the_trainer(make_model, data, args, **more):
    """The Trainer after its training, and the loss of each step."""
    import transformers

    trainer = transformers.Trainer(model_init=make_model, args=args, train_dataset=data, **more)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def here(make_model, data, args, **more):
    recipe, evaluation = converter.recipe(make_model, args, data, **more)
    return recipe.train(engine="inline", evaluation=evaluation)


def furthest(one, other):
    """The largest difference of two models' parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


@pytest.mark.parametrize(
    ("make_model", "make_data", "more"),
    [
        (gpt2, words, SCHEDULED),
        (llama, words, {"lr_scheduler_type": "constant", "max_grad_norm": 0}),
        (masked, words, {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6}),
        (seq2seq, sources, {"max_steps": 4, "num_train_epochs": 9}),
        (classifier, classes, {**SCHEDULED, "label_smoothing_factor": 0.1}),
        (classifier, classes, {"bf16": True, "num_train_epochs": 1.5}),
        (partly_frozen, classes, {"optim": "sgd", "optim_args": "momentum=0.9", "weight_decay": 0.1}),
        (regressor, numbers, {"optim": "adafactor", "per_device_train_batch_size": 5}),
        (classifier, classes, {"optim": "rmsprop", "activation_checkpointing": True, "dataloader_drop_last": True}),
        (gpt2, words, {"label_smoothing_factor": 0.1, "optim": "adagrad", "seed": 3}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or ",".join(value),
)
def test_one_replica_has_the_bits_of_the_trainer(make_model, make_data, more):
    """From the same seed: model, groups, schedule, clipping and smoothing are the same, and so is each loss."""
    args, data = arguments(**more), make_data()
    result, (trainer, losses) = here(make_model, data, args), by_the_trainer(make_model, data, args)
    assert list(result.loss_history) == losses
    assert phalanx.digest(result.model) == phalanx.digest(trainer.model)
    other = here(make_model, data, args, seed=5)
    assert phalanx.digest(other.model) != phalanx.digest(trainer.model)


ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
ROUNDING = 2e-6  # of losses of about 3, and of weights below 1


@pytest.mark.parametrize(
    ("make_model", "make_data", "more"),
    [
        (gpt2, words, SCHEDULED),
        (llama, words, {}),
        (llama, words, {"label_smoothing_factor": 0.1}),
        (classifier, classes, {**SCHEDULED, "label_smoothing_factor": 0.1}),
    ],
    ids=["gpt2", "llama", "llama, smoothed", "classifier, smoothed"],
)
def test_four_replicas_come_to_the_losses_of_accumulation(make_model, make_data, more):
    """To rounding, also where shares have unlike numbers of tokens, and in a last batch with fewer of them."""
    args, data = arguments(**ACCUMULATED, **more), make_data()
    result, (trainer, losses) = here(make_model, data, args), by_the_trainer(make_model, data, args)
    assert result.loss_history == pytest.approx(losses, abs=ROUNDING)
    assert furthest(result.model, trainer.model) < ROUNDING


def test_a_weight_that_counts_padding_is_seen(monkeypatch):
    """It has another loss than the Trainer, by more than rounding."""
    args, data = arguments(**ACCUMULATED, max_steps=1), words()
    _, losses = by_the_trainer(llama, data, args)
    monkeypatch.setattr(Loss, "_count", lambda loss, batch: batch["labels"].numel())  # planted
    assert abs(here(llama, data, args).loss - losses[0]) > 100 * ROUNDING


def test_where_the_trainer_multiplies_by_the_accumulation_the_mean_is_taken():
    """A model that takes the number of labels and leaves it unused: the Trainer trains on the sum of four means."""
    args, data = arguments(**ACCUMULATED, max_steps=1), classes()
    _, losses = by_the_trainer(classifier, data, args)
    assert 4 * here(classifier, data, args).loss == pytest.approx(losses[0], abs=4 * ROUNDING)


def test_any_number_of_workers(tmp_path):
    """With dropout, a shuffled order, a worker that is killed, and a run that goes on; another seed differs."""
    import transformers

    args = arguments(**ACCUMULATED, train_sampling_strategy="random")
    recipe, _ = converter.recipe(gpt2_with_dropout, args, words(), data_collator=cut)
    one = recipe.train(engine="inline")
    with recipe.start(workers=2, engine="processes", run_dir=tmp_path / "run", snapshot_every=1) as run:
        for report in run:
            if report.step == 1:
                os.kill(run.worker_pids[0], signal.SIGKILL)
            if report.step == 3:
                break
    result = recipe.train(engine="inline", run_dir=tmp_path / "run")
    assert (result.digest, result.loss_history) == (one.digest, one.loss_history)
    assert recipe.replace(seed=1).train(engine="inline").digest != one.digest
    result.model.save_pretrained(tmp_path / "saved")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert phalanx.digest(again) == phalanx.digest(one.model)
    assert again.lm_head.weight is again.transformer.wte.weight


class NoTrainer:
    """A collator that fails in a process that has imported the Trainer."""

    def __call__(self, samples):
        import transformers

        assert "transformers.trainer" not in sys.modules
        return transformers.default_data_collator(samples)


def test_workers_import_no_trainer():
    """Readers and workers import the model, and not what the caller's process needs of the Trainer."""
    recipe, _ = converter.recipe(classifier, arguments(max_steps=2), classes(), NoTrainer(), replicas=2)
    assert recipe.train(workers=2, engine="processes").steps == 2


def test_shares_without_labels_count_nothing():
    """The Trainer's losses, where whole shares are padding."""
    args, data = arguments(**{**ACCUMULATED, "per_device_train_batch_size": 1}, max_steps=3), words()
    for row in data[2:4]:
        row["labels"] = torch.full((LENGTH,), -100)
    result, (trainer, losses) = here(llama, data, args), by_the_trainer(llama, data, args)
    assert result.loss_history == pytest.approx(losses, abs=ROUNDING)
    assert furthest(result.model, trainer.model) < ROUNDING


def test_metrics_see_what_the_trainer_gives_them():
    """Predictions and labels of the whole dataset, padded with -100 where batches have unlike lengths."""
    seen = []

    def compute(predicted):
        seen.append(predicted)
        right = predicted.predictions[:, :-1].argmax(-1) == predicted.label_ids[:, 1:]
        return {"accuracy": right[predicted.label_ids[:, 1:] != -100].mean()}

    args = arguments(eval_strategy="epoch", num_train_epochs=1, per_device_eval_batch_size=4)
    result = here(llama, words(), args, data_collator=cut, eval_dataset=words()[:9], compute_metrics=compute)
    more = {"eval_dataset": words()[:9], "compute_metrics": compute, "data_collator": cut}
    trainer, _ = by_the_trainer(llama, words(), args, **more)
    mine, theirs = seen
    assert (mine.predictions == theirs.predictions).all()
    assert (mine.label_ids == theirs.label_ids).all()
    values = {item.name: item.value for item in result.metric_history}
    assert values["eval/accuracy"] == trainer.state.log_history[-2]["eval_accuracy"]
    assert values.keys() == {"eval/loss", "eval/accuracy"}


def test_evaluation_loss_is_a_mean_over_labels():
    """For classes that of the Trainer. Several datasets have one evaluation each; logits may be replaced."""
    args, data = arguments(num_train_epochs=1, per_device_eval_batch_size=3), classes()
    several = {"some": data[:6], "all": data}
    chosen = {"compute_metrics": lambda predicted: {"chosen": predicted.predictions.mean()}}
    chosen["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    result = here(classifier, data, args, eval_dataset=several, **chosen)
    trainer, _ = by_the_trainer(classifier, data, args, eval_dataset=several, **chosen)
    theirs = trainer.evaluate()
    for name in several:
        values = {item.name: item.value for item in result.metric_history}
        assert values[f"{name}/eval/chosen"] == theirs[f"eval_{name}_chosen"]
        assert values[f"{name}/eval/loss"] == pytest.approx(theirs[f"eval_{name}_loss"], abs=ROUNDING)


@pytest.mark.parametrize(
    ("more", "due"),
    [
        ({"eval_strategy": "epoch"}, [3, 6]),
        ({"eval_strategy": "steps", "eval_steps": 4}, [4, 6]),
        ({"eval_strategy": "steps", "eval_steps": 0.3}, [2, 4, 6]),
        ({"max_steps": 5}, [5]),
    ],
)
def test_evaluations_are_due(more, due):
    """As ``eval_strategy`` says, and after the last step."""
    result = here(classifier, classes(), arguments(**more), eval_dataset=classes()[:4])
    assert [item.steps for item in result.metric_history] == due


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
    "sharpness": (0.5, "leave it at its default"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_translated_is_refused(name):
    """By the field's name, with its value and the way out; also a field that a later version adds."""
    import transformers

    kind = dataclasses.make_dataclass("Newer", [("sharpness", float, 0.0)], bases=(transformers.TrainingArguments,))
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


def test_a_model_is_copied_and_a_wrapper_is_looked_through():
    """What is trained is a copy. The columns are those that the model in a wrapper of PEFT's takes."""

    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = classifier()

        def get_base_model(self):
            return self.base

        def forward(self, *arguments, **options):
            return self.base(*arguments, **options)

    model, args = Wrapper().eval(), arguments(max_steps=2)
    before = phalanx.digest(model)
    wrapped, plain = here(model, classes(), args), here(model.base, classes(), args)
    assert wrapped.loss_history == plain.loss_history
    assert phalanx.digest(model) == before != phalanx.digest(wrapped.model)


def test_gradient_checkpointing_leaves_the_bits():
    """Also with dropout."""
    digests = {here(gpt2_with_dropout, words(), arguments(activation_checkpointing=on)).digest for on in (False, True)}
    assert len(digests) == 1


def test_without_transformers_it_says_what_to_install(monkeypatch):
    """With the name of the extra."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(phalanx.UsageError, match=r"pip install 'phalanx\[transformers\]'"):
        converter.recipe(classifier, None, [])
