"""What code keeps from chunk to chunk of an evaluation is found for jax, too."""

import warnings

import pytest

import phalanx
from tests.jax.families import FAMILIES, cross_entropy

RECIPE = FAMILIES["mlp"].recipe(2)


class Running:
    """A mean over all that it was ever called with."""

    def __init__(self):
        self.total = self.count = 0

    def __call__(self, output, target):
        self.total, self.count = self.total + float(cross_entropy(output, target)), self.count + 1
        return self.total / self.count


@pytest.mark.long
@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}], ids=str)
def test_a_running_mean(options):
    """By EarlyStopping it ends the run; a plain loss is not warned of."""
    stops = [phalanx.callbacks.EarlyStopping("loss")]
    for metric, refused in ((Running(), True), (lambda output, target: float(cross_entropy(output, target)), False)):
        evaluation = phalanx.Evaluation({"loss": metric}, RECIPE.data, batch_size=20, every_steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if refused:
                with pytest.raises(phalanx.StateError, match=r"metric 'loss' of samples .*: total, count"):
                    RECIPE.train(evaluation=evaluation, callbacks=stops, progress=False, **options)
            else:
                RECIPE.train(evaluation=evaluation, callbacks=stops, progress=False, **options)
