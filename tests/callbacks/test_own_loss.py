"""``Evaluation("loss", data)``: the recipe's own loss over held-out samples, for every kind of recipe."""

import copy
import pickle
import sys

import pandas
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.callbacks import EMA
from phalanx.surroundings import presence
from tests.callbacks.jobs import HELD_OUT, TARGETS, X, Y, accuracy, recipe

WEIGHT = torch.tensor([1.0, 3.0])


def weighed(output, target):
    return F.cross_entropy(output, target, weight=WEIGHT)


def twice(output, target):
    return 2 * F.cross_entropy(output, target)


def without_forward(model, batch):
    raise AssertionError("a loss that calls the model itself needs no output")


def of_rows(model, output, batch):
    return F.cross_entropy(output, batch[1])


CASES = {
    "a function": ({}, F.cross_entropy),
    "weighted": ({"loss_fn": phalanx.weighted(weighed, lambda output, target: WEIGHT[target].sum())}, weighed),
    "named": ({"loss_fn": lambda output, target: {"loss": F.cross_entropy(output, target), "z": 1.0}}, F.cross_entropy),
    "of the model": (
        {"loss_fn": lambda m, b: F.cross_entropy(m(b[0]), b[1]), "loss_takes": "model", "forward_fn": without_forward},
        F.cross_entropy,
    ),
    "of the model, beside a target": (
        {"loss_fn": lambda m, b: F.cross_entropy(m(b[0]), b[1]), "loss_takes": "model", "target_fn": lambda b: b[1]},
        F.cross_entropy,
    ),
    "forward_fn returns it": (
        {"loss_fn": None, "forward_fn": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])},
        F.cross_entropy,
    ),
    "over the batch": ({"loss_over": "batch"}, F.cross_entropy),
    "over the batch, of the model": (
        {"loss_fn": of_rows, "loss_takes": "model", "loss_over": "batch"},
        F.cross_entropy,
    ),
    "of one sample": ({"batch_size": None, "loss_fn": lambda o, t: F.cross_entropy(o[None], t[None])}, F.cross_entropy),
    "phases": (
        {"loss_fn": None, "phases": [phalanx.Phase(twice, every=2), phalanx.Phase(F.cross_entropy)]},
        F.cross_entropy,
    ),
}  # fmt: skip


def plain():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def job(changes):
    return phalanx.Recipe(
        plain, (X, Y), **{"loss_fn": F.cross_entropy, "replicas": 3, "epochs": 1, "lr": 1e-2} | changes
    )


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_loss_over_all_samples(case):
    """Chunks of seven, the last of four: the value is that of one call on all of them, for any number of workers."""
    changes, loss = CASES[case]
    found = []
    for workers in (1, 2, 3):
        due = phalanx.Evaluation("loss", (HELD_OUT, TARGETS), batch_size=7)
        result = job(changes).train(workers=workers, evaluation=due, callbacks=[EMA(0.9)])
        found.append(result.metrics["loss"])
    assert found == found[:1] * 3
    model = result.model.eval()
    model.load_state_dict({**model.state_dict(), **result.averaged})
    with torch.no_grad():
        assert found[0] == pytest.approx(float(loss(model(HELD_OUT), TARGETS)), rel=1e-5)
        means = [float(loss(model(HELD_OUT[n : n + 7]), TARGETS[n : n + 7])) for n in range(0, 60, 7)]
    assert found[0] != pytest.approx(sum(means) / len(means), rel=1e-5)


def test_it_stands_beside_other_metrics_and_has_its_own_forward_pass():
    """A dict gives it another name; ``forward_fn`` of the evaluation is that of the loss, too."""
    with job({}).start() as run:
        run.finish()
        both = run.evaluate({"own": "loss", "accuracy": accuracy}, (HELD_OUT, TARGETS))
        assert both == {"own": run.evaluate("loss", (HELD_OUT, TARGETS)), "accuracy": run.metric_history[1].value}
        zeros = run.evaluate("loss", (HELD_OUT, TARGETS), forward_fn=lambda model, batch: 0 * model(batch[0]))
        assert zeros == pytest.approx(0.6931, abs=1e-4)
        with pytest.raises(phalanx.UsageError, match=r"metric_fn is 'accuracy'; .* or 'loss' for the recipe's own"):
            run.evaluate("accuracy", (HELD_OUT, TARGETS))


@pytest.mark.parametrize("case", ["of the model", "over the batch, of the model"])
def test_a_loss_that_takes_the_batch_takes_no_target(case):
    """What ``target_fn`` of an evaluation returns is for the other metrics."""
    with job(CASES[case][0] | {"forward_fn": None}).start(engine="inline") as run:
        run.finish()
        metrics, data = {"loss": "loss", "accuracy": accuracy}, (HELD_OUT, TARGETS)
        assert run.evaluate(metrics, data, target_fn=lambda batch: batch[1]) == run.evaluate(metrics, data)


@pytest.mark.long
def test_a_models_own_loss_is_a_mean_over_its_labels():
    """Rows have three to eleven labels that count; every replica count and worker count gives the whole mean."""
    from transformers import GPT2Config, GPT2LMHeadModel  # it takes seconds to import, in workers, too

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    tokens = torch.randint(1, 50, (40, 12), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(12) < 3 + torch.arange(40)[:, None] % 9, tokens, -100)
    data, found = {"input_ids": tokens, "labels": labels}, []
    for workers, metrics in (
        (1, "loss"),
        (2, "loss"),
        (2, {"loss": "loss", "size": lambda output, _: output.logits.mean()}),
    ):
        job = phalanx.Recipe(lambda: GPT2LMHeadModel(config), data, None, epochs=1, batch_size=8)
        due = phalanx.Evaluation(metrics, data, batch_size=7)
        result = job.train(workers=workers, evaluation=due)
        found.append(result.metrics["loss"])
    assert found == found[:1] * 3
    with torch.no_grad():
        model = result.model.eval()
        assert found[0] == pytest.approx(float(model(**data).loss), rel=1e-5)
        parts = [{name: column[n : n + 7] for name, column in data.items()} for n in range(0, 40, 7)]
        means = [float(model(**part).loss) * len(part["labels"]) for part in parts]
    assert found[0] != pytest.approx(sum(means) / 40, rel=1e-5)  # by rows


def test_a_step_tells_its_loss_as_a_float():
    """It has what the report has; a copy, and what is pickled, is a float and nothing else."""
    with phalanx.Recipe(plain, None, lambda o, t: {"loss": F.cross_entropy(o, t), "z": o.mean()}).start() as run:
        loss = run.step((X, Y))
        report = (loss.step, loss.losses, loss.lr, loss.samples)
        assert report == (0, {"z": pytest.approx(loss.losses["z"])}, 1e-3, 150)
        assert loss == run.result().loss_history[0]
        assert loss.norm > 0
        assert repr(loss) == repr(float(loss))
        for one in (pickle.loads(pickle.dumps(loss)), copy.copy(loss), copy.deepcopy([loss])[0], float(loss)):  # noqa: S301
            assert (type(one), one) == (float, loss)


def test_a_result_shows_loss_and_metrics():
    """``result.metrics`` has the newest value of each; so has what a notebook shows."""
    result = recipe(epochs=2).train(evaluation=phalanx.Evaluation(accuracy, (HELD_OUT, TARGETS)))
    assert result.metrics == {"accuracy": result.metric_history[-1].value}
    assert f"metrics={{'accuracy': {result.metrics['accuracy']:.6g}}}" in repr(result)
    assert f"Result(loss={result.loss:.6g}" in repr(result)


def test_columns_of_data_frames():
    """They are the arrays that they have; a whole frame does not say what the target is."""
    frame = pandas.DataFrame(X.numpy(), columns=list("abcdef")).assign(y=Y.numpy())
    inputs, held_out = frame[list("abcdef")], pandas.DataFrame(HELD_OUT.numpy())
    due = phalanx.Evaluation("loss", (held_out, pandas.Series(TARGETS.numpy())))
    result = phalanx.Recipe(plain, (inputs, frame["y"]), F.cross_entropy, epochs=1).train(workers=2, evaluation=due)
    wanted = phalanx.Recipe(plain, (X, Y), F.cross_entropy, epochs=1)
    assert result.digest == wanted.train().digest
    assert result.digest != wanted.replace(data=(X, 1 - Y)).train().digest
    assert torch.equal(result.predict((held_out, pandas.Series(TARGETS.numpy()))), result.predict(HELD_OUT))
    with pytest.raises(phalanx.UsageError, match=r"data is a DataFrame.*pass columns: \(frame\["):
        phalanx.Recipe(plain, frame, F.cross_entropy, epochs=1)
    with pytest.raises(phalanx.UsageError, match=r"data\[0\] is a numpy array of object_"):
        phalanx.Recipe(plain, (inputs.assign(a="text"), frame["y"]), F.cross_entropy, epochs=1)


def test_a_notebooks_output_shows_a_bar(monkeypatch):
    """Its stream is no terminal, and draws a bar again and again all the same; another stream does not."""
    stream = type("OutStream", (), {"__module__": "ipykernel.iostream", "isatty": lambda own: False})()
    monkeypatch.setattr(sys, "stderr", stream)
    assert presence.terminal()
    monkeypatch.setattr(sys, "stderr", type("Other", (), {"isatty": lambda own: False})())
    assert not presence.terminal()
