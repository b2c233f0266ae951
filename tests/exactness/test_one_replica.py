"""R = 1 has the bits of the plain PyTorch loop: for every family, optimizer, scheduler and kind of data."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.by_hand import answer, folded, one
from tests.families import (
    DATA,
    FAMILIES,
    FEATURES,
    SAMPLES,
    mlp,
)  # fmt: skip
from tests.sampling import cover

MLP = FAMILIES["mlp"]


def trained(recipe):
    """Digest and loss history of a run."""
    result = recipe.train(engine="inline")
    assert result.steps == len(result.loss_history) == recipe.plan.steps
    return result.digest, result.loss_history


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    """Every family ends in the bits and losses of the plain loop."""
    recipe = FAMILIES[name].recipe(1)
    assert trained(recipe) == answer(recipe)


def body_only(named):
    return torch.optim.SGD([(name, parameter) for name, parameter in named if name.startswith("0.")], lr=0.1)


@pytest.mark.parametrize("max_norm", [0.05, float("inf")])
def test_parameters_without_an_optimizer(max_norm):
    """Parameters that no optimizer was given stay as they are; their gradients count in the norm, step by step."""
    recipe = MLP.recipe(1, optimizer=body_only, max_norm=max_norm)
    assert trained(recipe) == answer(recipe)


@pytest.mark.parametrize(
    ("name", "max_norm"),
    cover("clipping by hand", [name for name in FAMILIES if name != "shared_grad"], [0.05, 1.0, 1e6]),
)
def test_clipping(name, max_norm):
    """Clipping, far below, near and far above the norm, has the bits of ``clip_grad_norm_``."""
    recipe = FAMILIES[name].recipe(1, max_norm=max_norm)
    assert trained(recipe) == answer(recipe)


def test_the_reported_norm_is_the_one_before_clipping():
    """A report's norm is what ``clip_grad_norm_`` returned by hand."""
    seen = []
    MLP.recipe(1, max_norm=0.05, steps=1).train(engine="inline", callbacks=[seen.append])
    model = one(MLP.recipe(1, steps=1), 1)[0]
    assert seen[0].grad_norm == float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))


@pytest.mark.parametrize("changes", [{"shuffle": False}, {"drop_last": True}, {"batch_size": 3}, {"batch_size": 64}])
def test_order_and_last_batch(changes):
    """Unshuffled data, a dropped last batch, one of two samples, and one larger than the data are as by hand."""
    recipe = MLP.recipe(1, steps=8, **changes)
    assert trained(recipe) == answer(recipe)


def test_the_last_batch_is_short():
    """The data is not a multiple of the batch: the family tests do see an uneven last batch."""
    assert [len(MLP.recipe(1).plan.indices(step)) for step in range(4)] == [8, 8, 4, 8]


def test_a_model_that_is_passed_in():
    """A module instead of a factory is copied, trained as by hand, and left as it was."""
    model = mlp()
    before = copy.deepcopy(model)
    recipe = phalanx.Recipe(model, FEATURES, F.cross_entropy, replicas=1, batch_size=8, steps=4)
    assert trained(recipe) == answer(recipe)
    assert phalanx.digest(model) == phalanx.digest(before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_augmentation_is_new_in_every_epoch():
    """A sample is jittered the same way when read again in its epoch, and another way in the next."""
    recipe = MLP.recipe(1, **DATA["dataset"], shuffle=False, batch_size=SAMPLES, steps=2)
    drawn = []
    for step in (0, 0, 1):
        with recipe.plan.seeded_sample(step, 3):
            drawn.append(recipe.data[3][0].tolist())
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(trained(recipe)[1])) == 2


def test_tied_weights_stay_tied():
    """The trained model has one parameter where the made one had one."""
    model = FAMILIES["tied"].recipe(1).train(engine="inline").model
    assert model.head.weight is model.embedding.weight


def test_frozen_parts_and_modes_stay():
    """Frozen parameters, a BatchNorm left in evaluation mode, and all modes are as ``make_model`` left them."""
    family = FAMILIES["frozen"]
    torch.manual_seed(0)
    begun, model = family.make_model(), family.recipe(1).train(engine="inline").model
    assert phalanx.digest(model[:2]) == phalanx.digest(begun[:2])
    assert [module.training for module in model.modules()] == [module.training for module in begun.modules()]
    assert not torch.equal(model[3].weight, begun[3].weight)


# What would go wrong is noticed: each mistake below ends in other bits.


@pytest.mark.parametrize(
    ("fault", "name"), [("unseeded", "transformer"), ("zeros", "unused"), ("zeros", "negative_zero")]
)
def test_faults_in_the_loop(fault, name):
    """A loop without keyed seeds, or with gradients that start as zeros, ends in another digest."""
    recipe = FAMILIES[name].recipe(1)
    assert answer(recipe, fault)[0] != trained(recipe)[0]


def doubled_if_channels_last(model, batch):
    last = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    return model(batch[0]) * (2.0 if last else 1.0)


def test_channels_last_is_kept():
    """A model comes to forward in the memory format that it was made in, after updates too."""
    last, first = (FAMILIES[n].recipe(1, forward_fn=doubled_if_channels_last) for n in ("channels_last", "conv_norm"))
    assert trained(last) == answer(last) != trained(first)


def state():
    """A model with buffers, and an optimizer with state, after two steps by hand."""
    recipe = FAMILIES["conv_norm"].recipe(1)
    model, (optimizer,), _ = one(recipe, 2)
    return model, optimizer


def flip_weight(model, optimizer):
    model[0].weight.data.view(torch.int32)[0, 0, 0, 0] ^= 1


def flip_buffer(model, optimizer):
    model[1].running_mean.view(torch.int32)[3] ^= 1


def flip_momentum(model, optimizer):
    optimizer.state[model[5].bias]["momentum_buffer"].view(torch.int32)[0] ^= 1


def negate_zero(model, optimizer):
    model[5].bias.data[0] = -0.0


def forget_momentum(model, optimizer):
    del optimizer.state[model[5].bias]


@pytest.mark.parametrize("change", [flip_weight, flip_buffer, flip_momentum, negate_zero, forget_momentum])
def test_one_bit_changes_the_digest(change):
    """One bit in a weight, a buffer or an optimizer's state, or the sign of a zero, changes the digest."""
    model, optimizer = state()
    model[5].bias.data[0] = 0.0
    before = phalanx.digest(model, optimizer, 2)
    assert phalanx.digest(model, optimizer, 2) == before
    change(model, optimizer)
    assert phalanx.digest(model, optimizer, 2) != before


def test_the_step_is_in_the_digest():
    """Equal weights after another number of steps are another state."""
    model, optimizer = state()
    digests = {phalanx.digest(model, optimizer, step) for step in (None, 0, 2, 3)}
    assert len(digests) == 4


def test_shared_gradients_are_clipped_once():
    """Three gradients in one storage are each scaled once, where torch's own clipping scales that storage thrice."""
    recipe = FAMILIES["shared_grad"].recipe(1, max_norm=0.05)
    model, optimizers, losses = folded(recipe, recipe.plan.steps)  # keeps a copy of each gradient
    assert trained(recipe) == (phalanx.digest(model, optimizers, recipe.plan.steps), losses) != answer(recipe)
