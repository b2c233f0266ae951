"""Which learning rate a recipe may take."""

import pytest
import torch
from torch.nn import functional as F

import phalanx
from tests.callbacks.jobs import recipe


def below(output, target):
    return F.cross_entropy(output, target) - 3


def test_a_rate_is_found_and_drawn():
    """Rates grow by one factor, the suggestion is one of them below the lowest loss; the same for any workers."""
    found = phalanx.find_lr(recipe(), steps=60)
    ratios = [later / earlier for earlier, later in zip(found.lrs, found.lrs[1:], strict=False)]
    assert max(ratios) == pytest.approx(min(ratios))
    assert found.lrs[0] == 1e-7
    assert found.suggestion in found.lrs
    assert 1e-5 < found.suggestion < 0.5
    assert found == phalanx.find_lr(recipe(), steps=60, workers=2)
    assert found.plot().get_xlabel() == "learning rate"
    assert found.plot()._repr_png_().startswith(b"\x89PNG")


def test_what_has_no_rate_to_find_is_refused():
    """Rates in the wrong order, and a loss that never falls."""
    with pytest.raises(phalanx.UsageError, match="lowest < highest"):
        phalanx.find_lr(recipe(), lowest=1.0, highest=0.1)
    with pytest.raises(phalanx.UsageError, match="never fell"):
        phalanx.find_lr(recipe(optimizer=torch.optim.SGD, lr=1e-3), lowest=1e3, highest=1e5, steps=20)


def test_a_loss_may_be_below_zero():
    """A likelihood's loss is; four times the lowest was above each of its values, so the first step was the last."""
    found = phalanx.find_lr(recipe().replace(loss_fn=below), steps=60)
    assert len(found.lrs) > 30
    assert found.suggestion in found.lrs
