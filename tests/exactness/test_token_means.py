"""Models that return their own mean over labels that are not -100: weighted by themselves, exactly, or warned of."""

import functools
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx

RANDOM = torch.Generator().manual_seed(0)
IDS = torch.randint(5, 60, (16, 12), generator=RANDOM)
MASK = torch.arange(12) < torch.randint(2, 13, (16, 1), generator=RANDOM)
LABELS = torch.where(MASK, IDS, -100)
SGD = functools.partial(torch.optim.SGD, lr=1.0)
CLOSE = 1e-5  # float32 rounds to 4e-7 here


class Language(nn.Module):
    """Takes and returns what models of Hugging Face do; ``shift``: each position predicts the next."""

    def __init__(self, shift, reduction="mean"):
        super().__init__()
        self.embed, self.head, self.shift, self.reduction = nn.Embedding(64, 16), nn.Linear(16, 64), shift, reduction

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        shown, wanted = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        loss = F.cross_entropy(shown.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction=self.reduction)
        return SimpleNamespace(loss=loss if self.reduction == "mean" else loss / 100, logits=logits)


def first_step(make_model, replicas, labels=LABELS, forward_fn=None, **options):
    """The gradient of the first step, as SGD with lr=1 shows it, and its loss."""
    data = {"input_ids": IDS, "labels": labels}
    recipe = phalanx.Recipe(
        make_model, data, None, forward_fn, replicas=replicas, batch_size=16, steps=1, optimizer=SGD
    )
    before = recipe.start(engine="inline").result().params
    result = recipe.train(**options)
    return torch.cat([(before[name] - value).flatten() for name, value in result.params.items()]), result


@pytest.mark.parametrize("shift", [False, True])
def test_the_gradient_is_that_of_the_whole_batch(shift):
    """With padded shares, also one without any label, R = 8 gives the mean over tokens, as one big batch does."""
    labels = LABELS.clone()
    labels[4:6] = -100
    labels[7, 1:] = -100  # where positions predict the next, this row has nothing to predict
    whole, alone = first_step(lambda: Language(shift), 1, labels)
    parts, result = first_step(lambda: Language(shift), 8, labels)
    assert float((whole - parts).norm() / whole.norm()) < CLOSE
    assert result.loss == pytest.approx(alone.loss, rel=1e-6)
    assert first_step(lambda: Language(shift), 8, labels, workers=3)[1].digest == result.digest


def test_a_mean_of_means_would_be_another_gradient():
    """Negative twin: the same model through forward_fn, which tells no weight, differs by percents, and warns."""
    whole, _ = first_step(lambda: Language(True), 1)
    data = {"input_ids": IDS, "labels": LABELS}
    recipe = phalanx.Recipe(lambda: Language(True), data, None, lambda model, batch: model(**batch).loss,
                            replicas=8, batch_size=16, steps=1, optimizer=SGD)  # fmt: skip
    before = recipe.start(engine="inline").result().params
    with pytest.warns(UserWarning, match=r"targets of -100.*returns the whole output, not its loss"):
        after = recipe.train(engine="inline").params
    parts = torch.cat([(before[name] - value).flatten() for name, value in after.items()])
    assert float((whole - parts).norm() / whole.norm()) > 0.01


def test_a_loss_that_is_no_such_mean_is_warned_of():
    """A sum over a constant (num_items_in_batch, say) is not taken for a mean over labels."""
    with pytest.warns(
        UserWarning, match=r"the model's own loss seems to ignore targets of -100.*num_items_in_batch: leave that out"
    ):
        first_step(lambda: Language(True, "sum"), 8)


class Summed(nn.Module):
    """Divides by what it is told, as models of Hugging Face do with ``num_items_in_batch``."""

    def __init__(self):
        super().__init__()
        self.inner = Language(True, "sum")

    def forward(self, input_ids, labels, num_items_in_batch):
        output = self.inner(input_ids, labels)
        return SimpleNamespace(loss=output.loss * 100 / num_items_in_batch, logits=output.logits)


def counted(model, batch):
    return model(**batch, num_items_in_batch=(batch["labels"][:, 1:] != -100).sum())


@pytest.mark.long
def test_the_whole_output_of_forward_fn_is_recognised():
    """What the warning says to return is weighted exactly, whatever R and W are, also a sum over the share's count."""
    whole, _ = first_step(Summed, 1, forward_fn=counted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts, result = first_step(Summed, 8, forward_fn=counted)
    assert float((whole - parts).norm() / whole.norm()) < CLOSE
    assert first_step(Summed, 8, forward_fn=counted, workers=3)[1].digest == result.digest


def test_nothing_is_said_where_nothing_is_wrong():
    """Without padding, and with labels of which all count, there is no warning and the gradient is the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, _ = first_step(lambda: Language(True), 1, IDS)
        parts, _ = first_step(lambda: Language(True), 8, IDS)
    assert float((whole - parts).norm() / whole.norm()) < CLOSE


class Lazy(dict):
    """A dict that loads what it is asked for, as registries of libraries do."""

    def items(self):
        raise AssertionError("somebody asked for everything")


LAZY = Lazy(a=1)


def test_looking_for_generators_asks_no_lazy_dict_for_everything():
    """Code that names such a registry can be trained: it is looked into without its own methods."""

    def loss_fn(output, target):
        assert LAZY["a"] == 1
        return F.mse_loss(output, target)

    x = torch.randn(8, 4)
    assert phalanx.train(lambda: nn.Linear(4, 4), (x, x), loss_fn, steps=1, engine="inline").steps == 1
