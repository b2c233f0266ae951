"""The specification for tinygrad: loops that anyone could write, with tinygrad, numpy and ``recipe.plan`` alone.

``one`` is the plain loop that R = 1 must equal: the model's tensors are realized together, then in every step loss,
gradients and buffers in one call, and the optimizer's step after it. ``folded`` computes R shares alone and adds them
in the fixed order with numpy. A ``fault`` plants a named mistake.
"""

import numpy as np
from tinygrad import Context, Tensor
from tinygrad.nn.state import get_parameters

import phalanx
from tests.jax.by_hand import mean

SETTINGS = {"TRAINING": 1, "BEAM": 0, "PARALLEL": 0, "NUM_CPU_THREADS": 1}


def answer(recipe, fault=None):
    """Digest and loss history of the recipe's whole length, by the loop for its R."""
    steps = recipe.plan.steps
    with Context(**SETTINGS):
        model, optimizer, losses = (one if recipe.replicas == 1 else folded)(recipe, steps, fault)
        return phalanx.digest(model, optimizer, steps), losses


def start(recipe):
    Tensor.manual_seed(recipe.seed)
    model = recipe.make_model()
    everything = get_parameters(model)
    Tensor.realize(*everything)
    return model, recipe.optimizer(everything)


def one(recipe, steps, fault=None):
    """R = 1. Returns the model, the optimizer, and the loss of every step."""
    model, optimizer = start(recipe)
    losses = []
    for step in range(steps):
        Tensor.manual_seed(0 if fault == "unkeyed" else recipe.plan.key(step, 0))
        loss, _ = evaluated(recipe, model, recipe.plan.indices(step))
        if fault == "realized apart":
            loss.backward()
            loss.realize()
        else:
            gradient = loss.gradient(*optimizer.params)
            loss.realize(*gradient, *optimizer.buffers)
            for tensor, entry in zip(optimizer.params, gradient, strict=True):
                tensor.grad = entry
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses


def folded(recipe, steps, fault=None):
    """R = k, for models without buffers. Returns the model, the optimizer, and the mean loss of every step."""
    model, optimizer = start(recipe)
    losses = []
    for step in range(steps):
        shares = recipe.plan.shares(step)
        computed = []
        for replica, indices in enumerate(shares):
            if len(indices) == 0:
                computed.append((None, 0.0, [None] * len(optimizer.params)))
                continue
            Tensor.manual_seed(recipe.plan.key(step, 0 if fault == "one_key" else replica))
            loss, weight = evaluated(recipe, model, indices)
            gradient = loss.gradient(*optimizer.params)
            loss.realize(*gradient, *([weight] if isinstance(weight, Tensor) else []))
            known = len(indices) / max(map(len, shares))
            weight = known if weight is None or fault == "mean_of_means" else float(weight.item())
            if fault == "mean_of_means":
                weight = 1.0
            computed.append((loss.item(), weight, [entry.numpy() for entry in gradient]))
        weights = [weight for _, weight, _ in computed]
        losses.append(mean([loss for loss, _, _ in computed], weights, fault))
        columns = zip(*(gradient for _, _, gradient in computed), strict=True)
        for tensor, column in zip(optimizer.params, columns, strict=True):
            tensor.grad = Tensor(np.ascontiguousarray(mean(column, weights, fault)), device=tensor.device).realize()
        optimizer.step()
    return model, optimizer, losses


def evaluated(recipe, model, indices):
    """Loss and weight of these samples."""
    x, y = (Tensor(np.asarray(column)[indices]) for column in recipe.data)
    if recipe.loss_fn is None:
        return recipe.forward_fn(model, (x, y)), None
    value = recipe.loss_fn(model(x), y)
    return value if isinstance(value, tuple) else (value, None)
