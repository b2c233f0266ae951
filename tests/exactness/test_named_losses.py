"""Named losses: what a loss returns beside itself is a mean with the same bits, whoever computes it."""

import json
import os
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx import step
from phalanx.callbacks import Log
from phalanx.lab import pages
from tests.engines.deaths import Trapped, sprung
from tests.families import FAMILIES, mlp, normal
from tests.sampling import sample
from tests.state.runs import engine_of, killed

STEPS = 6
ORDER = torch.tensor([[1e16], [1.0], [-1e16], [1.0]], dtype=torch.float64)  # of sums, which shows in float64


def parts_of(output, target):
    """A loss of two terms, and an accuracy over some of the samples."""
    ce, size = F.cross_entropy(output, target), output.pow(2).mean()
    counted = target > 0
    hits = (output.argmax(-1) == target)[counted].float().sum() / counted.sum().clamp(min=1)
    return {"loss": ce + 0.01 * size, "size": size, "ce": ce, "hits": (hits, counted.sum()), "two": 2}


def alone(output, target):
    return parts_of(output, target)["loss"]


def recipe(loss_fn=parts_of, replicas=4, **changes):
    """Shares of unlike sizes: 11 samples over 4 replicas."""
    return FAMILIES["mlp"].recipe(replicas, **({"loss_fn": loss_fn, "batch_size": 11, "steps": STEPS} | changes))


def seen(recipe, workers=1, **options):
    """The named losses of each step, as exact text, with the digest."""
    rows = []
    result = recipe.train(callbacks=[lambda report: rows.append(dict(report.losses))], **engine_of(workers), **options)
    return json.dumps(rows), result.digest


def planted(*values):
    """Named losses of each replica's own: one sample each, whose named loss is its number."""
    data = (ORDER.float(), torch.tensor(values, dtype=torch.float64))

    def loss_fn(output, target):
        return {"loss": output.mean(), "value": target[0]}

    return phalanx.Recipe(lambda: nn.Linear(1, 1), data, loss_fn, replicas=4, batch_size=4, steps=1, shuffle=False)


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changes", [{}, {"micro_batches": 2}, {"batch_size": 3}, {"replicas": 3}], ids=["plain", "micro", "empty", "three"]
)
def test_any_workers(changes):
    """One process, two workers, three, and two devices have the same named losses, and the digest of the loss alone."""
    answers = {seen(recipe(**changes), workers) for workers in (1, 2, 3)} | {
        seen(recipe(**changes), 2, devices=["cpu"] * 2)
    }
    assert len(answers) == 1
    assert {digest for _, digest in answers} == {recipe(alone, **changes).train(engine="inline").digest}


def test_means_are_those_by_hand():
    """Means over replicas, weighted with their samples, or with the weight that was returned."""
    rows = []
    made = recipe(steps=1)
    made.train(engine="inline", callbacks=[lambda report: rows.append(report.losses)])
    torch.manual_seed(made.seed)
    model = mlp()
    x, y = (torch.as_tensor(column) for column in FAMILIES["mlp"].data)
    shares = list(map(torch.as_tensor, np.array_split(made.plan.indices(0), 4)))
    with torch.no_grad():
        losses = [parts_of(model(x[share]), y[share]) for share in shares]
    sizes = [len(share) / len(shares[0]) for share in shares]

    def mean(values, weights):
        a, b, c, d = (float(weight) * float(value) for weight, value in zip(weights, values, strict=True))
        return ((a + b) + (c + d)) / float((weights[0] + weights[1]) + (weights[2] + weights[3]))

    wanted = {name: mean([one[name] for one in losses], sizes) for name in ("ce", "size", "two")}
    wanted["hits"] = mean(*zip(*(one["hits"] for one in losses), strict=True))
    assert rows == [wanted]
    assert list(rows[0]) == sorted(wanted)


def test_values_are_added_in_the_order_of_the_fold(monkeypatch):
    """A mean is the fold's; one that adds in turn is another number."""
    values = ORDER.flatten().tolist()
    rows, digest = seen(planted(*values))
    assert json.loads(rows) == [{"value": 0.0}]
    assert seen(planted(*values), 2) == (rows, digest)
    in_turn = lambda values, add: sum(value for value in values if value is not None) or None  # noqa: E731
    monkeypatch.setattr(step, "fold_values", in_turn)  # planted
    assert json.loads(seen(planted(*values))[0]) == [{"value": 0.25}]


def test_a_process_that_shows_is_refused():
    """A named loss that differs from process to process ends the run in its first step."""

    def loss_fn(output, target):
        return {"loss": F.cross_entropy(output, target), "pid": float(os.getpid())}

    with pytest.raises(phalanx.StateError, match="came to something else in worker"):
        recipe(loss_fn).train(**engine_of(2))


def test_values_that_are_not_finite_do_not_stop_a_run():
    """The mean is not finite either; without any weight it is NaN."""

    def loss_fn(output, target):
        return {"loss": F.cross_entropy(output, target), "none": (1.0, 0), "inf": torch.tensor(torch.inf)}

    rows = {seen(recipe(loss_fn), workers)[0] for workers in (1, 2)}
    assert rows == {json.dumps([{"inf": torch.inf, "none": torch.nan}] * STEPS)}


@pytest.mark.parametrize("place", sample("deaths with named losses", ["COMPUTING", "COMPUTED", "UPDATING"], 1))
def test_a_worker_that_dies(tmp_path, place):
    """A worker that is killed changes no named loss."""
    trapped = recipe(make_model=Trapped(mlp, tmp_path, 0, 3, place))
    assert seen(trapped, 2) == seen(recipe())
    assert sprung(tmp_path) == 1


@pytest.mark.long
def test_runs_that_go_on(tmp_path):
    """A run that was stopped, or killed, goes on with the same named losses; logs, pages and the chain know them."""
    wanted, digest = seen(recipe(), run_dir=tmp_path / "whole", snapshot_every=2)
    rows = json.loads(wanted)
    killed(tmp_path / "whole")
    assert seen(recipe(), 2, run_dir=tmp_path / "whole", snapshot_every=2) == (json.dumps(rows[2:]), digest)
    recipe(steps=2).train(run_dir=tmp_path / "part", callbacks=[Log("csv")], **engine_of(2))
    recipe().train(run_dir=tmp_path / "part", callbacks=[Log("csv")], engine="inline")
    log = (tmp_path / "part" / "log.csv").read_text().splitlines()
    columns = log[0].split(",")
    assert [float(line.split(",")[columns.index("loss/ce")]) for line in log[1:]] == [row["ce"] for row in rows]
    history = pages.read(tmp_path / "part")
    assert history.curves["loss/hits"] == [(step, row["hits"]) for step, row in enumerate(rows)]
    assert "last loss/hits" not in history.row()
    roots = {(tmp_path / name / "chain.jsonl").read_text().splitlines()[-1] for name in ("whole", "part")}
    recipe(alone).train(run_dir=tmp_path / "alone", engine="inline")
    assert roots == {(tmp_path / "alone" / "chain.jsonl").read_text().splitlines()[-1]}


def test_phases(tmp_path):
    """Each phase has its own; those of a step are those of its main phase."""

    def phase(factor):
        def loss_fn(output, target):
            loss = F.cross_entropy(output, target) * factor
            return {"loss": loss, "ce": loss, **({"double": 2 * loss} if factor > 1 else {})}

        return phalanx.Phase(loss_fn, optimizer=torch.optim.SGD, every=int(factor), name=f"by{factor}")

    def run(workers):
        rows = []
        made = FAMILIES["mlp"].recipe(3, loss_fn=None, optimizer=None, phases=[phase(1), phase(2)])
        folder = tmp_path / str(workers)
        callbacks = [rows.append, Log("csv")]
        result = made.train(callbacks=callbacks, run_dir=folder, **engine_of(workers))
        return result.digest, [(row.losses, row.phases) for row in rows], (folder / "log.csv").read_text()

    one, two = run(1), run(2)
    assert one == two
    losses, phases = one[1][0]
    assert losses == phases["by1"].losses == {"ce": phases["by1"].loss}
    assert list(phases["by2"].losses) == ["ce", "double"]
    assert "loss/by2/double" in one[2].splitlines()[0]


@pytest.mark.long
def test_weighted_losses_and_outputs():
    """``phalanx.weighted`` takes such a loss; a dict with more than numbers, or of a class, is a model's output."""
    counted = phalanx.weighted(parts_of, lambda output, target: (target > 0).sum())
    rows, digest = seen(recipe(counted))
    assert (rows, digest) == seen(recipe(counted), 2)
    assert rows != seen(recipe())[0]

    def output(kind):
        return lambda output, target: kind({"loss": alone(output, target), "logits": output})

    for loss_fn in (output(dict), output(OrderedDict), lambda *both: OrderedDict(parts_of(*both))):
        assert seen(recipe(loss_fn)) == (json.dumps([{}] * STEPS), seen(recipe(alone))[1])


OFTEN = {f"part{number}": 1.0 for number in range(9)}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (lambda target: OFTEN, "beside 'loss' there may be 8 named losses"),
        (lambda target: {"x" * 63: 1.0}, "strings of at most 62 characters"),
        (lambda target: {1: 1.0}, "whose names are strings"),
        (lambda target: {"kl": (1.0, -1)}, "loss_fn, for 'kl', returned the weight -1"),
        (lambda target: {"kl": 1.0} if len(target) == 3 else {}, r"returned \['kl'\] beside 'loss' for one replica"),
        (lambda target: {"kl": 1.0 if len(target) == 3 else (1.0, 1)}, "or a weight for one only"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_refusals(workers, more, message):
    """Too many, too long, no strings, wrong weights, and names that differ between replicas."""

    def loss_fn(output, target):
        return {"loss": F.cross_entropy(output, target), **more(target)}

    with pytest.raises(phalanx.UsageError, match=message):
        recipe(loss_fn).train(**engine_of(workers))


def test_micro_batches_with_other_names_are_refused():
    """A named loss of some micro-batches only has no mean."""

    def loss_fn(output, target):
        return {"loss": F.cross_entropy(output, target), **({"kl": 1.0} if len(target) == 2 else {})}

    with pytest.raises(phalanx.UsageError, match="for one micro-batch"):
        recipe(loss_fn, micro_batches=2).train(engine="inline")


def test_longest_names_fit():
    """Eight named losses of the longest names, values and weights go through shared memory."""

    def loss_fn(output, target):
        value = (-2.2250738585072014e-308, 2.2250738585072014e-308)
        return {"loss": F.cross_entropy(output, target), **{f"{name}" * 62: value for name in "abcdefgh"}}

    assert seen(recipe(loss_fn, steps=2), 2) == seen(recipe(loss_fn, steps=2))


def test_arrays_refuse_them():
    """Frameworks of arrays say that named losses are for torch."""
    pytest.importorskip("jax")
    jax = pytest.importorskip("jax.numpy")

    def loss_fn(output, target):
        return {"loss": ((output - target) ** 2).mean(), "kl": 1.0}

    made = phalanx.Recipe(
        lambda: {"w": jax.zeros((3, 1))}, (normal(8, 3).numpy(), normal(8, 1).numpy()), loss_fn,
        forward_fn=lambda params, x: x @ params["w"], optimizer=pytest.importorskip("optax").sgd(0.1), steps=1,
    )  # fmt: skip
    with pytest.raises(phalanx.UsageError, match="named losses are for torch alone"):
        made.train(engine="inline")
