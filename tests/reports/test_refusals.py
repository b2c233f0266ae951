"""What is not computed is answered with a sentence, in every engine, and what the sentence advises works."""

import functools
import os
import shutil
import tempfile

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.reports.hand import X, Y, batches, entropy, fixed, net, plain, recipe
from tests.reports.report import ROUNDING, differences, here, in_workers, not_yet, report, wrong
from tests.state.runs import folder_of

pytestmark = pytest.mark.long
EACH = pytest.mark.parametrize("options", [{"engine": "inline"}, in_workers(2)], ids=["inline", "two workers"])
LOSSES = plain(net(), entropy, batches(X, Y))["losses"]


def works(advised, right=LOSSES, **options):
    """What the sentence advises comes to the right losses, inline and in workers."""
    for engine in ({"engine": "inline"}, in_workers(2)):
        assert differences(advised.train(**engine, **options).loss_history, right, ROUNDING) == []


def refuses(asked, error, match, **options):
    """Training ends with this error and sentence; returns the error."""
    with pytest.raises(error, match=match) as caught:
        asked.train(**options)
    return caught.value


def test_what_works_is_not_taken_for_a_refusal():
    """Negative twins: a recipe without a fault is not refused, and a wrong value is no right one."""
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refuses(recipe(), phalanx.PhalanxError, ".", engine="inline")
    with pytest.raises(AssertionError):
        works(recipe(optimizer=functools.partial(torch.optim.SGD, lr=0.1250001)))


class Rows(torch.utils.data.Dataset):
    """Holds an open file; ``left``: it is left out of what is sent."""

    def __init__(self, left, file):
        self.left, self.file = left, file

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]

    def __getstate__(self):
        return {**vars(self), "file": None} if self.left else vars(self)


@report("Errors", None, "Lightning-AI/pytorch-lightning#1005")
@wrong("An open file somewhere in the program ended the start with a TypeError that did not say where.")
@here("The error says which attribute holds it, and how to leave it out of what is sent.")
def test_an_open_file():
    """The path to what cannot travel is in the sentence."""
    with tempfile.TemporaryFile() as file:
        asked = recipe(data=Rows(False, file))
        error = refuses(asked, phalanx.UsageError, "cannot be sent to a worker process", **in_workers(2))
        assert "data.file" in str(error)
        assert "__getstate__" in str(error)
        works(recipe(data=Rows(True, file)))


class NoImage(LookupError):
    """An error of the user's own."""


class Broken(torch.utils.data.Dataset):
    """A sample cannot be read, unless it is ``mended``."""

    def __init__(self, mended):
        self.mended = mended

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        if index == 13 and not self.mended:
            raise NoImage(index)
        return X[index], Y[index]


@EACH
@report("Errors", None, "Vision-CAIR/MiniGPT-4#237 yangjianxin1/Firefly#32 Facico/Chinese-Vicuna#113")
@wrong("The error was `ChildFailedError`, with `error_file: <N/A>` and without the cause.")
@here("The error is raised from your own exception, and names step, replica and sample.")
def test_an_error_of_the_users_own(options):
    """Type, text and address arrive, and the state before."""
    error = refuses(recipe(data=Broken(False)), phalanx.WorkerError, "NoImage.*13", **options)
    assert isinstance(error.__cause__, NoImage)
    assert (error.step, error.replica, error.result.steps) == (1, 2, 1)
    works(recipe(data=Broken(True)))


@EACH
@report("Errors", None, "Project-MONAI/monai-physio#137")
@wrong("A rank whose loss was not finite left the step, and the others waited.")
@here("By default the run ends before the update. The error names step, replica and samples.")
def test_a_loss_that_is_not_finite(options):
    """Nothing was updated; ``max_norm`` or "skip" are the ways out."""
    x = X.clone()
    x[14] = torch.nan
    error = refuses(recipe(data=(x, Y)), phalanx.NonFiniteError, "skip", **options)
    assert (error.step, error.replica, list(error.samples)) == (1, 3, [14, 15])
    assert differences(error.result.loss_history, LOSSES[:1], ROUNDING) == []
    assert recipe(data=(x, Y), on_nonfinite="skip").train(**options).steps == 6


class Calls(nn.Module):
    """Counts its calls in an attribute."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) / (1 + self.calls)


@EACH
@report("Errors", None, "pytorch/pytorch#2864 pytorch/pytorch#11476")
@wrong("What forward kept in attributes was lost with the copies of the model, and nothing was said.")
@here("State outside of buffers is found in the first step, and named. A function of the step works.")
def test_state_of_ones_own(options):
    """A StateError before the update."""
    refuses(recipe(lambda: fixed(Calls())), phalanx.StateError, "calls", **options)
    forward = lambda model, batch: model(batch[0]) / (2 + phalanx.current_step())  # noqa: E731
    model, steps = fixed(nn.Linear(4, 3)), iter(range(6))
    right = plain(model, lambda made, x, y: F.cross_entropy(made(x) / (2 + next(steps)), y), batches(X, Y))
    works(recipe(lambda: fixed(nn.Linear(4, 3)), forward_fn=forward), right["losses"])


@EACH
@report("Errors", None, "pytorch/pytorch#80496 OpenNMT/OpenNMT-py#1015")
@wrong("Sparse gradients failed with unused tables, and with several devices.")
@here("They are refused by name. `sparse=False` trains the table.")
def test_sparse_gradients(options):
    """The parameter is named, and the way out."""

    def make(sparse):
        return fixed(nn.Sequential(nn.Embedding(3, 4, sparse=sparse), nn.Linear(4, 3)))

    data = Y, Y.roll(1)
    refuses(recipe(lambda: make(True), data), phalanx.PhalanxError, "0.weight.*sparse", **options)
    works(recipe(lambda: make(False), data), plain(make(False), entropy, batches(*data))["losses"])


@report("Errors", None, "yoshitomo-matsubara/torchdistill#77")
@wrong("A model without anything to train failed when it was wrapped.")
@here("It is refused before the first step, with the reason.")
def test_nothing_to_train():
    """A model whose parameters are all frozen."""
    refuses(recipe(lambda: net().requires_grad_(False)), phalanx.PhalanxError, "requires_grad", engine="inline")
    works(recipe())


@EACH
@report("Resuming", None, "pytorch/examples#816 mapbox/robosat#169 huggingface/transformers#21271")
@wrong("A resume took the old learning rate, or another batch size, and said nothing.")
@here(
    'A changed recipe is refused, and what differs is named. `resume="anyway"` goes on with the old rate, and says so.'
)
def test_a_changed_recipe(options, tmp_path):
    """Rate and batch size; the same recipe goes on."""
    with recipe().start(**options, run_dir=tmp_path) as run:
        next(run)
    slower = recipe(optimizer=functools.partial(torch.optim.SGD, lr=0.0625))
    refuses(slower, phalanx.UsageError, r"lr|optimizer", **options, run_dir=tmp_path)
    refuses(recipe(batch_size=6), phalanx.UsageError, "batch_size", **options, run_dir=tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy")
    with pytest.warns(UserWarning, match="going on with another recipe .* rates too, stays that of the snapshot"):
        anyway = slower.train(**options, run_dir=tmp_path / "copy", resume="anyway")
    assert differences(anyway.loss_history, LOSSES, ROUNDING) == []
    assert differences(recipe().train(**options, run_dir=tmp_path).loss_history, LOSSES, ROUNDING) == []


@EACH
@report("Resuming", None, "Lightning-AI/pytorch-lightning#688 Lightning-AI/pytorch-lightning#21431")
@wrong("A checkpoint was half written when the run was killed, and nothing could be resumed.")
@here("A snapshot is whole or not there. A damaged one is named, and the one before is used.")
def test_a_damaged_checkpoint(options, tmp_path):
    """The newest file is cut off in its middle: the run goes on from the older one, to the same losses."""
    with recipe().start(**options, run_dir=tmp_path, snapshot_every=1) as run:
        for told in run:
            if told.step == 3:
                break
    damaged = max(folder_of(tmp_path, 4).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    os.truncate(damaged, damaged.stat().st_size // 2)
    with pytest.warns(UserWarning, match="damaged|bytes"):
        result = recipe().train(**options, run_dir=tmp_path)
    assert differences(result.loss_history, LOSSES, ROUNDING) == []


@report("Buffers", None, "pytorch/pytorch#2584 open-mmlab/mmdetection#3621 google-research/simclr#114")
@wrong("BatchNorm took its statistics from the few samples of one device, and results were worse than on one device.")
@here("SyncBatchNorm is taken as BatchNorm: statistics are those of a share. R = 1 has those of the batch.")
@not_yet("No statistics over all replicas are computed.")
def test_statistics_over_the_batch():
    """Both layers come to the same bits at R = 3, and R = 1 to the loop on one device."""

    def make(kind):
        return fixed(nn.Sequential(nn.Linear(4, 3), kind(3)))

    right = plain(make(nn.BatchNorm1d), entropy, batches(X, Y))["losses"]
    local = recipe(lambda: make(nn.BatchNorm1d)).train(engine="inline")
    assert recipe(lambda: make(nn.SyncBatchNorm)).train(engine="inline").loss_history == local.loss_history
    assert differences(local.loss_history, right, 1e-3) != []
    alone = recipe(lambda: make(nn.BatchNorm1d), replicas=1).train(engine="inline")
    assert differences(alone.loss_history, right, ROUNDING) == []


@report("Gradients", None, "pytorch/pytorch#37359")
@wrong("The mean over devices was taken of a loss that is a sum, which made it too small.")
@here('A sum that phalanx can see is refused. With `loss_over="batch"` it is trained on as it is.')
@not_yet("A sum in a lambda is only warned of: its shares are averaged, so R changes the loss.")
def test_a_loss_that_is_a_sum():
    """By its name it is refused; in a lambda its loss is a fourth of the right one, with a warning."""
    with pytest.raises(phalanx.UsageError, match="reduction='sum'"):
        recipe(loss_fn=nn.CrossEntropyLoss(reduction="sum"))
    total = lambda output, target: F.cross_entropy(output, target, reduction="sum")  # noqa: E731
    with pytest.warns(UserWarning, match="the mean of what it comes to for two parts"):
        loss = recipe(loss_fn=total).train(engine="inline").loss_history[0]
    assert differences(loss, LOSSES[0] * 8 / 4, ROUNDING) == []
    right = plain(net(), lambda model, x, y: total(model(x), y), batches(X, Y))["losses"]
    works(recipe(loss_fn=total, loss_over="batch"), right)
