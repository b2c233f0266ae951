"""R = 8 has the gradient of one big batch, up to float64 rounding: uneven and weighted batches too."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.by_hand import folded
from tests.families import Recurrent, Tied, double, lenet, normal, token_count, token_loss, whole

REPLICAS = 8
TOLERANCE = 1e-12
CLASSES = 3
STEP = functools.partial(torch.optim.SGD, lr=1.0)  # one step moves the weights by exactly the gradient

MODELS = {
    "mlp": (double, (5,)),
    "lenet": (lambda: lenet().double(), (1, 12, 12)),
    "lstm": (lambda: Recurrent(nn.LSTM).double(), (6, 4)),
}
SIZES = {"equal": 24, "uneven": 21, "one_each": 8, "one_short": 7, "single": 1}


def recipe_for(make_model, data, loss_fn, **changes):
    """One step of 8 replicas over all of the data."""
    return phalanx.Recipe(
        make_model, data, loss_fn, replicas=REPLICAS, batch_size=len(data[0]), steps=1, optimizer=STEP, **changes
    )


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def begun(recipe):
    torch.manual_seed(recipe.seed)
    return recipe.make_model()


def big_batch(recipe, loss_fn):
    """Loss and gradient of all samples at once, with plain torch."""
    model = begun(recipe)
    loss = loss_fn(model(recipe.data[0]), recipe.data[1])
    loss.backward()
    return loss.item(), flat(parameter.grad for parameter in model.parameters())


def moved(recipe, model):
    """By how much one step moved the weights."""
    return flat(begun(recipe).parameters()) - flat(model.parameters())


def distance(left, right):
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_shares_of_samples(name, size):
    """Equal shares, uneven ones, and fewer samples than replicas give the big batch's loss and gradient."""
    make_model, shape = MODELS[name]
    data = (normal(SIZES[size], *shape, dtype=torch.float64), whole(CLASSES, SIZES[size]))
    recipe = recipe_for(make_model, data, F.cross_entropy)
    result = recipe.train(engine="inline")
    loss, gradient = big_batch(recipe, F.cross_entropy)
    assert distance(moved(recipe, result.model), gradient) < TOLERANCE
    assert result.loss == pytest.approx(loss, rel=TOLERANCE)


def tokens(samples):
    """Token data where samples have from 0 to 6 targets; the second share of 8 has none at all."""
    x, y = whole(11, samples, 6), whole(11, samples, 6, seed=2)
    keep = torch.arange(samples) * 5 % 7
    size = -(-samples // REPLICAS)
    keep[size : 2 * size] = 0
    return x, torch.where(torch.arange(6) < keep[:, None], y, -100)


def tied():
    return Tied().double()


@pytest.mark.parametrize("samples", [24, 21, 8])
def test_shares_of_tokens(samples):
    """Token-weighted shares, one of them fully masked, give the gradient of the mean over all tokens."""
    loss_fn = phalanx.weighted(token_loss, token_count)
    recipe = recipe_for(tied, tokens(samples), loss_fn, shuffle=False)
    counts = [token_count(None, recipe.data[1][torch.from_numpy(share)]) for share in recipe.plan.shares(0)]
    assert counts[1] == 0
    assert len(set(map(int, counts))) > 3
    result = recipe.train(engine="inline")
    loss, gradient = big_batch(recipe, token_loss)
    assert distance(moved(recipe, result.model), gradient) < TOLERANCE
    assert result.loss == pytest.approx(loss, rel=TOLERANCE)


def test_the_norm_is_the_big_batch_s():
    """The reported norm is that of the big batch's gradient, and clipping scales by it."""
    data, seen = (normal(21, 5, dtype=torch.float64), whole(CLASSES, 21)), []
    recipe = recipe_for(double, data, F.cross_entropy, max_norm=0.01)
    result = recipe.train(engine="inline", callbacks=[seen.append])
    _, gradient = big_batch(recipe, F.cross_entropy)
    assert seen[0].grad_norm == pytest.approx(float(gradient.norm()), rel=TOLERANCE)
    assert distance(moved(recipe, result.model), gradient * (0.01 / (gradient.norm() + 1e-6))) < TOLERANCE


# What would go wrong is noticed.


@pytest.mark.parametrize("size", ["equal", "uneven"])
def test_a_mean_of_means_is_off_where_shares_differ(size):
    """An unweighted mean of the shares' means is the big batch's gradient only where the shares are equal."""
    data = (normal(SIZES[size], 5, dtype=torch.float64), whole(CLASSES, SIZES[size]))
    recipe = recipe_for(double, data, F.cross_entropy)
    model, _, _ = folded(recipe, 1, "mean_of_means")
    off = distance(moved(recipe, model), big_batch(recipe, F.cross_entropy)[1])
    assert off < TOLERANCE if size == "equal" else off > 1e-3


def test_a_loss_that_hides_its_weight_is_off():
    """The mean over each share's tokens, weighted by samples, is not the mean over all tokens; phalanx warns of it."""
    x, y = tokens(24)
    y[:, 0] = 1  # no share without a token: this loss could not say so
    recipe = recipe_for(tied, (x, y), token_loss, shuffle=False)
    with pytest.warns(UserWarning, match="weighted"):
        result = recipe.train(engine="inline")
    assert distance(moved(recipe, result.model), big_batch(recipe, token_loss)[1]) > 1e-3


def test_float32_is_not_exact_to_that_tolerance():
    """A run in float32 is off from the big batch in float64 by more, so the tolerance does look at rounding."""
    x, y = normal(21, 5), whole(CLASSES, 21)
    recipe = recipe_for(lambda: double().float(), (x, y), F.cross_entropy)
    exact = recipe_for(double, (x.double(), y), F.cross_entropy)
    model = recipe.train(engine="inline").model
    off = distance(moved(recipe, model).double(), big_batch(exact, F.cross_entropy)[1])
    assert TOLERANCE < off < 1e-5
