"""jax over streams, and with readers: the bits that the same rows have as columns."""

import numpy as np
import pytest

import phalanx
from tests.jax.families import FEATURES, cross_entropy, mlp, mlp_forward

PLACES = [
    {"engine": "inline"},
    {"engine": "inline", "readers": 2},
    pytest.param({"engine": "processes", "workers": 2}, marks=pytest.mark.long),
    pytest.param({"engine": "processes", "workers": 2, "readers": 2}, marks=pytest.mark.long),
]


class Rows:
    """The rows of columns, as numpy has them."""

    def __len__(self):
        return len(FEATURES[0])

    def __getitem__(self, number):
        return tuple(np.asarray(column[number]) for column in FEATURES)


def rows():
    """The same, in order."""
    data = Rows()
    return (data[number] for number in range(len(data)))


def recipe(data):
    return phalanx.Recipe(mlp, data, cross_entropy, mlp_forward, replicas=3, batch_size=9, epochs=2, shuffle=False)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:readers is")  # streams have none
@pytest.mark.parametrize("data", [Rows(), phalanx.Stream(rows)], ids=["dataset", "stream"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_streams_and_readers(data, place):
    """A run over a dataset or a stream ends in the bits of the columns, whoever reads."""
    expected = recipe(FEATURES).train(engine="inline", workers=1)
    result = recipe(data).train(**place)
    assert (result.digest, result.loss_history) == (expected.digest, expected.loss_history)
    assert recipe(phalanx.Stream(lambda: list(rows())[::-1])).train(engine="inline").digest != expected.digest


def accuracy(output, target):
    return (output.argmax(1) == target).mean()


@pytest.mark.long
@pytest.mark.parametrize("place", [{"engine": "inline"}, pytest.param({"workers": 2}, marks=pytest.mark.long)], ids=str)
def test_functions_of_an_evaluation(place):
    """They stand in for the recipe's in this evaluation alone; labels of a dict are its target."""
    x, y = FEATURES
    due = {
        "plain": phalanx.Evaluation(accuracy, FEATURES, batch_size=7),
        "turned": phalanx.Evaluation(
            accuracy, FEATURES, batch_size=7, forward_fn=lambda params, x: -mlp_forward(params, x),
        ),
    }  # fmt: skip
    labelled = phalanx.Recipe(
        mlp, {"x": x, "labels": y}, cross_entropy, lambda params, batch: mlp_forward(params, batch["x"]),
        replicas=3, batch_size=9, epochs=2, shuffle=False,
    )  # fmt: skip
    result = recipe(FEATURES).train(evaluation=due, **place)
    assert labelled.train(**place).digest == result.digest == recipe(FEATURES).train(engine="inline").digest
    by_name = {item.name: item.value for item in result.metric_history}
    with recipe(FEATURES).start(engine="inline") as run:
        run.finish()
        turned = run.evaluate(lambda output, target: accuracy(-output, target), FEATURES, batch_size=7)
        assert by_name["turned/accuracy"] == turned != by_name["plain/accuracy"]
