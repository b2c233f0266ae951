"""Jobs of the Trainer as recipes: its losses and weights, step by step, and one answer for any number of workers."""

import os
import random
import signal
import sys

import numpy as np
import pytest
import torch

import phalanx
from phalanx.integrations import transformers as converter
from phalanx.integrations.transformers.loss import Loss
from tests.integrations.jobs import (
    ACCUMULATED,
    LENGTH,
    MARKS,
    arguments,
    classes,
    classifier,
    cut,
    gpt2,
    gpt2_with_dropout,
    here,
    llama,
    masked,
    numbers,
    partly_frozen,
    regressor,
    seq2seq,
    sources,
    words,
)

pytestmark = MARKS
SCHEDULED = {"weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.1}


def by_the_trainer(make_model, data, args, **more):
    """The Trainer after its training, and the loss of each step."""
    import transformers

    trainer = transformers.Trainer(model_init=make_model, args=args, train_dataset=data, **more)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


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


def test_your_generators_are_left_untouched():
    """A ``model_init`` that seeds all of them, as ``set_seed`` does, seeds none of yours."""
    import transformers

    def seeding():
        transformers.set_seed(3)
        return classifier()

    states = []
    for _ in range(2):
        states.append([torch.random.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()])
        converter.recipe(seeding, arguments(max_steps=2), classes())
    assert states[0] == states[1]
