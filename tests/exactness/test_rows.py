"""Losses over the whole batch: what they may not be given, return or keep, with each message's way out; and proofs."""

import collections
import functools
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests import by_hand
from tests.over_batch import KINDS, LABELS, Clip, Moco, Noisy, X, clip_loss, mlp, recipe, towers, trained

Pair = collections.namedtuple("Pair", "one two")


class Holder:
    """No tensor, and no tree of them."""

    def __init__(self, value):
        self.value = value


def spread(output, target):
    """A loss of any output."""
    return torch.cat([leaf.reshape(len(leaf), -1) for leaf in output] if type(output) is tuple else [output]).std()


def of_one(output, target):
    return (output["one"] if isinstance(output, dict) else output.one).std()


def mine(x):
    """A number that differs from share to share."""
    return int(x.abs().sum() * 1000) % 5 + 1


def scaled(model, batch):
    return (*towers(model, batch), model.logit_scale)


def padded(model, batch, length=8):
    z = model(batch[0])
    return F.pad(z[:, : mine(batch[0])], (0, length - mine(batch[0])))


def first_or_second(model, batch):
    z = model(batch[0])
    return {"one": z, "two": z} if mine(batch[0]) % 2 else {"two": z, "one": z}


OUTPUT = {"make_model": mlp, "loss_fn": spread}
TARGET = {"make_model": mlp, "loss_fn": lambda output, target: output.std()}
CLIP = {"loss_takes": "model"}
REFUSED = {  # what is wrong, the message, and what it advises
    "scale": (
        CLIP | {"make_model": Clip, "forward_fn": scaled, "loss_fn": clip_loss},
        r"output\[2\] is float32\[\].*one row for each sample \(7 here\).*stays in the model",
        CLIP | {"make_model": Clip, "forward_fn": towers, "loss_fn": clip_loss},
    ),
    "views below each other": (
        OUTPUT | {"forward_fn": lambda model, batch: model(torch.cat([batch[0], batch[0] + 1]))},
        r"output is float32\[14, 8\].*two views of a sample as two of them",
        OUTPUT | {"forward_fn": lambda model, batch: (model(batch[0]), model(batch[0] + 1))},
    ),
    "lengths": (
        OUTPUT | {"forward_fn": lambda model, batch: model(batch[0])[:, : mine(batch[0])]},
        r"output is float32\[7, \d\] and float32\[7, \d\].*pad to one length",
        OUTPUT | {"forward_fn": padded},
    ),
    "a list": (
        OUTPUT | {"forward_fn": lambda model, batch: list(model(batch[0]))},
        r"output\[0\] is float32\[8\].*return such ones from forward_fn",
        OUTPUT | {"forward_fn": lambda model, batch: torch.stack(list(model(batch[0])))},
    ),
    "an object": (
        OUTPUT | {"forward_fn": lambda model, batch: Holder(model(batch[0]))},
        "output is Holder.*return such ones from forward_fn",
        OUTPUT | {"forward_fn": lambda model, batch: Pair(*[model(batch[0])] * 2), "loss_fn": of_one},
    ),
    "unlike trees": (
        OUTPUT | {"forward_fn": first_or_second},
        r"output is dict\(one .*\) and dict\(two|output is dict\(two .*\) and dict\(one",
        TARGET | {"forward_fn": lambda model, batch: {"one": model(batch[0])}, "loss_fn": of_one},
    ),
    "a target that is an object": (
        TARGET | {"target_fn": lambda batch: {"of": Holder(batch[1])}},
        r"target\['of'\] is Holder.*pass target_fn=",
        TARGET | {"target_fn": lambda batch: {"of": batch[1]}},
    ),
    "objects in a list": (
        TARGET | {"target_fn": lambda batch: [Holder(y) for y in batch[1]]},
        r"target\[0\] is Holder, which does not travel.*a list with an item for each sample",
        TARGET | {"target_fn": lambda batch: [{"name": str(int(y)), "of": y, "at": [1, None]} for y in batch[1]]},
    ),
    "objects of numpy": (
        TARGET | {"target_fn": lambda batch: np.array([None] * len(batch[1]))},
        r"target is object\[7\], which does not travel",
        TARGET | {"target_fn": lambda batch: np.array([str(int(y)) for y in batch[1]])},
    ),
    "keys": (
        TARGET | {"target_fn": lambda batch: {(0, 1): batch[1]}},
        r"target is dict\(\(0, 1\) int64\[7\]\), which does not travel",
        TARGET | {"target_fn": lambda batch: {0: batch[1], "1": batch[1].bool(), None: True}},
    ),
    "a number of each share": (
        TARGET | {"target_fn": lambda batch: (batch[1], float(batch[0].sum()))},
        r"target\[1\] is float",
        TARGET | {"target_fn": lambda batch: (batch[1], 0.5)},
    ),
    "a scalar target": (
        TARGET | {"target_fn": lambda batch: batch[1].sum()},
        r"target is int64\[\], .*\(7 here\)",
        TARGET | {"target_fn": lambda batch: batch[1].sum().expand(len(batch[1]))},
    ),
    "weighed": (
        OUTPUT | {"loss_fn": lambda output, target: (output.std(), 2.0)},
        r"loss_fn returned \(loss, weight\).*return the loss alone",
        OUTPUT,
    ),
    "no gradient": (
        OUTPUT | {"forward_fn": lambda model, batch: model(batch[0]).detach()},
        "a loss without a gradient",
        OUTPUT,
    ),
    "pairs by mistake": (
        {"make_model": lambda: mlp(1), "loss_fn": F.mse_loss, "target_fn": lambda batch: batch[1].float()},
        r"\[14, 1\].*\[14\]|\[14\].*\[14, 1\]",
        {"make_model": lambda: mlp(1), "loss_fn": F.mse_loss, "target_fn": lambda batch: batch[1].float()[:, None]},
    ),
    "small classes": (
        {"make_model": mlp, "loss_fn": F.cross_entropy, "target_fn": lambda batch: batch[1].int()},
        "classes are numbered in int64",
        {"make_model": mlp, "loss_fn": F.cross_entropy, "target_fn": lambda batch: batch[1].long()},
    ),
    "one sample for a norm": (
        {"make_model": Noisy, "batch_size": 3, "loss_fn": spread},
        "BatchNorm cannot normalise a share of 1 sample",
        {"make_model": Noisy, "batch_size": 4, "loss_fn": spread},
    ),
}  # fmt: skip


def bad(replicas=2, **changes):
    given = {"data": KINDS["clip"]["data"] if changes["make_model"] is Clip else (X, LABELS), "steps": 1}
    return phalanx.Recipe(replicas=replicas, **{"batch_size": 14, "loss_over": "batch", **given, **changes})


@pytest.mark.parametrize("options", [{"engine": "inline"}, pytest.param({"workers": 2}, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, options):
    """What cannot be joined is refused with path, shapes and a way out, in its step; the way out works."""
    wrong, message, right = REFUSED[name]
    with pytest.raises(phalanx.UsageError, match=message) as caught:
        bad(**wrong).train(progress=False, **options)
    assert "at step 0" in "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    bad(**right).train(progress=False, **options)


FIELDS = {
    "other": ({"loss_over": "all"}, "loss_over is 'all'.*'share', 'batch'"),
    "no loss": ({"loss_fn": None}, "there is no loss_fn.*let it return outputs"),
    "beside phases": ({"loss_fn": None, "phases": [phalanx.Phase(spread, loss_over="batch")]}, "loss_over"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name):
    """A word that is none, no loss_fn, and a field beside phases are refused at once."""
    changes, message = FIELDS[name]
    with pytest.raises(phalanx.UsageError, match=message):
        bad(**OUTPUT | changes)


def test_a_phase_and_a_sum():
    """A phase refuses such a word, too; a loss that sums is refused over the share, and its advice is the whole sum."""
    with pytest.raises(phalanx.UsageError, match="loss_over is 'all'"):
        phalanx.Phase(spread, loss_over="all")
    total = {"make_model": mlp, "loss_fn": nn.CrossEntropyLoss(reduction="sum")}
    with pytest.raises(phalanx.UsageError, match="or loss_over='batch'"):
        bad(loss_over="share", **total)
    sums = [bad(replicas, **total).train(engine="inline", progress=False).loss for replicas in (1, 4)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_outputs_may_be_written():
    """A loss may write outputs in place, and targets that are strings, as on one device."""

    def halved(output, target):
        assert all(isinstance(name, str) for name in target)
        return output.mul_(0.5).std()

    def copied(output, target):
        return (output * 0.5).std()

    def names(batch):
        return [str(int(y)) for y in batch[1]]

    written, plain = (bad(3, make_model=mlp, loss_fn=loss, target_fn=names) for loss in (halved, copied))
    assert trained(written) == trained(plain)


# What a loss keeps, draws, or takes from elsewhere.


class Keeping:
    """A loss that counts its calls in Python."""

    calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return output.std() * self.calls


class Different:
    """A loss, or a write, that is another one in each process."""

    def __init__(self, what):
        self.what = what

    def __call__(self, model, output, target):
        loss = output.std()
        if self.what == "write":
            model.at.fill_(os.getpid())
        return loss * os.getpid() if self.what == "loss" else loss


@pytest.mark.long
@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}])
def test_state_in_python(options):
    """A loss that keeps state in Python is refused by name, as it would differ after a resume."""
    with pytest.raises(phalanx.StateError, match=r"the loss over the whole batch of step 0 came to.*loss_fn\.calls"):
        bad(make_model=mlp, loss_fn=Keeping()).train(progress=False, **options)
    with pytest.warns(UserWarning, match="came to something else") as told:
        bad(make_model=mlp, loss_fn=Keeping()).train(progress=False, nondeterministic="allow", **options)
    assert len(told) == 1


@pytest.mark.long
@pytest.mark.parametrize("what", ["loss", "write", "neither"])
@pytest.mark.parametrize("options", [{"workers": 2}, {"devices": ["cpu", "cpu"]}])
def test_differing_workers(what, options):
    """A loss that has another value in each worker, or writes another one, is refused; its twin is not."""
    job = bad(make_model=Moco, loss_fn=Different(what), loss_takes="model")
    if what == "neither":
        assert trained(job, **options) == trained(job)
        return
    with pytest.raises(phalanx.UsageError, match="workers came to different losses of one batch, or wrote"):
        job.train(progress=False, **options)


def shrinking(model, output, target):
    model.queue = model.queue[:, :3]
    return output.std()


def writing(model, output, target):
    with torch.no_grad():
        model.body[0].weight.mul_(0.9)
    return output.std()


def raising(model, output, target):
    raise KeyError("temperature")


def nothing(model, output, target):
    return output.std() * torch.nan


WRONG = {
    "shape": (shrinking, phalanx.UsageError, r"buffer 'queue' went from .* in loss_fn"),
    "weights": (writing, phalanx.UsageError, "parameter 'body.0.weight' was written in place in loss_fn"),
    "error": (raising, phalanx.WorkerError, "KeyError in user code at step 0, in the loss over the whole batch"),
    "nan": (nothing, phalanx.NonFiniteError, r"the loss is nan at step 0, samples \["),
}  # fmt: skip


@pytest.mark.parametrize("options", [{"engine": "inline"}, pytest.param({"workers": 2}, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", WRONG)
def test_what_a_loss_may_not_do(name, options):
    """A buffer of another shape, a weight that is written, errors and NaNs end the run, with the state of before."""
    loss_fn, kind, message = WRONG[name]
    job = bad(make_model=Moco, loss_fn=loss_fn, loss_takes="model")
    with pytest.raises(kind, match=message) as caught:
        job.train(progress=False, **options)
    with job.start(engine="inline", progress=False) as run:
        assert (caught.value.result.digest == run.result().digest) is (name != "weights")  # which are not copied


# Proofs.


@pytest.mark.long
def test_proofs(tmp_path):
    """replay, verify and diff of such a run, on an engine other than it had; and an audit of it in each step."""
    job = recipe("moco", 4, steps=4)
    wanted = job.train(engine="inline", progress=False, run_dir=tmp_path / "one", snapshot_every=2)
    other = job.train(workers=2, progress=False, run_dir=tmp_path / "two", snapshot_every=2, audit=1.0)
    assert wanted.digest == other.digest
    found = phalanx.replay(job, tmp_path / "two", step=3, replica=1)
    with job.start(engine="inline", progress=False) as run:
        report = [next(run) for _ in range(4)][3]
    assert (found.loss, found.samples) == (report.loss, tuple(job.plan.shares(3)[1].tolist()))
    for name in ("one", "two"):
        verified = phalanx.verify(job, tmp_path / name, progress=False)
        assert (verified.status, verified.steps) == (0, 4), verified.text
    assert phalanx.diff(tmp_path / "one", tmp_path / "two", recipes=(job, job)) is None


def test_replayed_gradients():
    """Those of all replicas, folded, are what the step took from the weights; the loss's own is in the last one's."""
    job = recipe("clip", 3, steps=1, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
    parts = [phalanx.replay(job, step=0, replica=replica).gradients for replica in range(3)]
    assert [part.get("logit_scale") is not None for part in parts] == [False, False, True]
    torch.manual_seed(job.seed)
    begun = dict(job.make_model().named_parameters())
    for name, value in job.train(engine="inline", progress=False).model.named_parameters():
        assert torch.equal(value, begun[name] - by_hand.fold([part.get(name) for part in parts]))
