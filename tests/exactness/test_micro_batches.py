"""A replica's share in micro-batches: the bits of a loop that adds up their gradients in ``.grad``, for any W."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests import by_hand
from tests.families import DATA, FAMILIES, normal, terms
from tests.jax import by_hand as jax_by_hand
from tests.jax import families as jax_families

NAMES = ["mlp", "conv_norm", "transformer", "masked_tokens", "shared_grad", "counting", "tied"]


def trained(recipe, workers=1):
    result = recipe.train(workers=workers, engine="inline" if workers == 1 else "processes")
    return result.digest, result.loss_history


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_torch(name, replicas):
    """Parts of unlike sizes, running statistics, dropout, weights that the loss tells, gradients in shared memory."""
    recipe = FAMILIES[name].recipe(replicas, micro_batches=2, batch_size=11)
    assert trained(recipe) == by_hand.answer(recipe)


@pytest.mark.parametrize(
    "data", ["dict", "dataset", "dataset_and_drawing_collate", "columns_and_drawing_collate", "list_of_dicts"]
)
def test_forms_of_data(data):
    """Samples are read before the replica's generators are seeded, and collated part by part."""
    recipe = FAMILIES["mlp"].recipe(2, micro_batches=3, **DATA[data])
    assert trained(recipe) == by_hand.answer(recipe)


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", ["dropout", "masked_tokens"])
def test_jax(name, replicas):
    """The same in jax; each part has a random key of its own."""
    recipe = jax_families.FAMILIES[name].recipe(replicas, micro_batches=2)
    assert trained(recipe) == jax_by_hand.answer(recipe)


@pytest.mark.long
@pytest.mark.parametrize("kit", [FAMILIES["conv_norm"], jax_families.FAMILIES["dropout"]], ids=["torch", "jax"])
def test_workers(kit):
    """Two or three workers have the bits of one."""
    recipe = kit.recipe(3, micro_batches=2, max_norm=0.5)
    assert len({trained(recipe, workers)[0] for workers in (1, 2, 3)}) == 1


@pytest.mark.parametrize("fault", ["mean_of_parts", "parts_reversed"])
def test_faults_are_noticed(fault):
    """Means of parts that ignore their sizes, and parts that draw in another order, have other bits."""
    recipe = FAMILIES["transformer"].recipe(2, micro_batches=3, batch_size=11)
    assert trained(recipe)[0] != by_hand.answer(recipe, fault)[0]


@pytest.mark.parametrize("parts", [3, 4, 5])
def test_another_order_of_parts_is_noticed(parts):
    """Gradients of parts that are added from the last to the first have other bits, where nothing is drawn."""
    recipe = terms(1, parts, micro_batches=parts)
    expected = trained(recipe)
    assert expected == by_hand.answer(recipe)
    assert expected[0] != by_hand.answer(recipe, "parts_reversed")[0]


@pytest.mark.long
def test_one_key_for_all_parts_is_noticed():
    """Parts that drop the same units have other bits."""
    recipe = jax_families.FAMILIES["dropout"].recipe(2, micro_batches=2)
    assert trained(recipe)[0] != jax_by_hand.answer(recipe, "one_key")[0]


def test_gradients_in_one_memory():
    """Torch adds twice where two gradients are views of one tensor, so they are taken apart before that."""
    recipe = FAMILIES["shared_grad"].recipe(1, micro_batches=2)
    assert trained(recipe)[0] != by_hand.answer(recipe, "one_memory")[0]


def test_power_of_two_equals_the_usual_loop():
    """With equal parts, two to a power, it is the loop that calls ``(loss / k).backward()``."""
    recipe = FAMILIES["mlp"].recipe(1, micro_batches=4, batch_size=8, max_norm=math.inf)
    model, (optimizer,), _ = by_hand.start(recipe)
    for step in range(recipe.plan.steps):
        x, y = by_hand.read(recipe, step, recipe.plan.indices(step))
        optimizer.zero_grad()
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (F.cross_entropy(model(part.clone()), target) / 4).backward()
        optimizer.step()
    assert phalanx.digest(model, optimizer, recipe.plan.steps) == trained(recipe)[0]


def test_a_part_in_which_nothing_counts():
    """A micro-batch of weight 0 is left out, its loss is not looked at; a whole share of them is, too."""

    def masked(output, target):
        counted = target >= 0
        return F.cross_entropy(output, target.clamp(min=0), reduction="none")[counted].mean(), counted.sum()

    y = torch.tensor([-1, -1, 0, 1, -1, -1, -1, -1])
    recipe = phalanx.Recipe(
        lambda: nn.Linear(5, 3), (normal(8, 5), y), masked, replicas=2, batch_size=8, steps=3, micro_batches=2,
        shuffle=False, optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip
    digest, losses = trained(recipe)
    assert all(map(math.isfinite, losses))
    assert (digest, losses) == by_hand.answer(recipe)


def test_devices():
    """Several devices have the bits of one, though losses are not read before all have work."""
    recipe = FAMILIES["conv_norm"].recipe(4, micro_batches=2)
    several = recipe.train(devices=["cpu", "cpu"])
    assert (several.digest, several.loss_history) == trained(recipe)


def test_refused():
    """A number that is none, samples that cannot be cut, and weights told for some parts only are told by name."""
    with pytest.raises(phalanx.UsageError, match="micro_batches is 0"):
        FAMILIES["mlp"].recipe(2, micro_batches=0)
    with pytest.raises(phalanx.UsageError, match="batch_size is None"):
        FAMILIES["mlp"].recipe(2, micro_batches=2, batch_size=None)
    seen = []

    def sometimes(output, target):
        seen.append(None)
        loss = F.cross_entropy(output, target)
        return loss if len(seen) % 2 else (loss, 1.0)

    with pytest.raises(phalanx.UsageError, match="micro-batches"):
        FAMILIES["mlp"].recipe(2, micro_batches=2, loss_fn=sometimes).train(engine="inline")
