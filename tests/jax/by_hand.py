"""The specification for jax: loops that anyone could write, with jax, optax and ``recipe.plan`` alone.

Two compiled functions: loss with gradient, and update with apply. ``one`` is the plain loop, which R = 1 must equal;
``folded`` computes R shares alone and adds them in the fixed order with numpy. A ``fault`` plants a named mistake.
"""

import inspect
import math
import operator

import jax
import numpy as np
import optax

import phalanx


def answer(recipe, fault=None):
    """Digest and loss history of the recipe's whole length, by the loop for its R."""
    steps = recipe.plan.steps
    params, state, losses = (one if recipe.replicas == 1 else folded)(recipe, steps, fault)
    return phalanx.digest(params, state, steps), losses


def one(recipe, steps, fault=None):
    """R = 1. Returns parameters, the optimizer's state, and the loss of every step."""
    params, state, value_and_grad, update = start(recipe)
    losses = []
    for step in range(steps):
        key, indices = random_key(recipe, step, 0), recipe.plan.indices(step)
        if recipe.micro_batches > 1:
            loss, _, leaves = in_parts(recipe, value_and_grad, params, indices, key, fault)
            gradient = jax.tree.unflatten(jax.tree.structure(params), leaves)
        else:
            (loss, _), gradient = value_and_grad(params, rows(recipe, indices), key)
        params, state = update(gradient, state, params)
        losses.append(float(loss))
    return params, state, losses


def folded(recipe, steps, fault=None):
    """R = k. Returns parameters, the optimizer's state, and the mean loss of every step."""
    params, state, value_and_grad, update = start(recipe)
    structure, losses = jax.tree.structure(params), []
    for step in range(steps):
        shares = recipe.plan.shares(step)
        computed = []
        for replica, indices in enumerate(shares):
            if len(indices) == 0:
                computed.append((None, 0.0, [None] * structure.num_leaves))
                continue
            key = random_key(recipe, step, 0 if fault == "one_key" else replica)
            if recipe.micro_batches > 1:
                loss, weight, leaves = in_parts(recipe, value_and_grad, params, indices, key, fault)
                gradient = jax.tree.unflatten(structure, leaves)
            else:
                (loss, weight), gradient = value_and_grad(params, rows(recipe, indices), key)
            known = len(indices) / max(map(len, shares))
            weight = known if weight is None else float(weight)
            computed.append((float(loss), weight, [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]))
        weights = [weight for _, weight, _ in computed]
        losses.append(mean([loss for loss, _, _ in computed], weights, fault))
        leaves = [mean(column, weights, fault) for column in zip(*(parts for _, _, parts in computed), strict=True)]
        params, state = update(jax.tree.unflatten(structure, leaves), state, params)
    return params, state, losses


def start(recipe):
    """Parameters, the optimizer's state, and the two compiled functions."""
    np.random.seed(recipe.seed & 0xFFFFFFFF)
    takes = inspect.signature(recipe.make_model).parameters
    params = recipe.make_model(jax.random.key(recipe.seed)) if takes else recipe.make_model()
    optimizer = recipe.optimizer or optax.adam(recipe.lr)
    if math.isfinite(recipe.max_norm):
        optimizer = optax.chain(optax.clip_by_global_norm(recipe.max_norm), optimizer)

    def loss(params, batch, key):
        if recipe.loss_fn is None:
            return recipe.forward_fn(params, batch), None
        x, y = batch
        takes = inspect.signature(recipe.forward_fn).parameters
        output = recipe.forward_fn(params, x, key) if "key" in takes else recipe.forward_fn(params, x)
        value = recipe.loss_fn(output, y)
        return value if isinstance(value, tuple) else (value, None)

    def update(gradient, state, params):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return params, optimizer.init(params), jax.jit(jax.value_and_grad(loss, has_aux=True)), jax.jit(update)


def in_parts(recipe, value_and_grad, params, indices, key, fault=None):
    """Loss, returned weight and gradient of a share out of those of its micro-batches, each with a key of its own."""
    pieces = [piece for piece in np.array_split(indices, recipe.micro_batches) if len(piece)]
    total, counted, summed = 0.0, 0.0, []
    for part, piece in enumerate(pieces):
        folded_in = key if fault == "one_key" else jax.random.fold_in(key, part)
        (loss, returned), gradient = value_and_grad(params, rows(recipe, piece), folded_in)
        weight = len(piece) / max(map(len, pieces)) if returned is None else float(returned)
        if not weight:
            continue
        leaves = [times(np.asarray(leaf), weight) for leaf in jax.tree.leaves(gradient)]
        summed = [a + b for a, b in zip(summed, leaves, strict=True)] if summed else leaves
        total, counted = total + weight * float(loss), counted + weight
    if not counted:
        return 0.0, 0.0, jax.tree.leaves(gradient)
    mean_gradient = [times(leaf, counted, operator.truediv) for leaf in summed]
    return total / counted, None if returned is None else counted, mean_gradient


def rows(recipe, indices):
    return tuple(np.asarray(column)[indices] for column in recipe.data)


def random_key(recipe, step, replica):
    """The plan's key as jax has it."""
    key = recipe.plan.key(step, replica)
    return jax.random.wrap_key_data(np.array([key >> 32, key % 2**32], np.uint32))


def mean(values, weights, fault=None):
    """fold(c_r v_r) / fold(c_r); weights that are all 1 scale nothing."""
    terms = [times(v, c) if c else None for v, c in zip(values, weights, strict=True)]
    total, weight = fold(terms, fault), fold([c or None for c in weights])
    return times(total, weight, operator.truediv)


def times(value, factor, operation=operator.mul):
    """In float32 at least, and rounded once."""
    if factor == 1:
        return value
    if isinstance(value, float):
        return operation(value, factor)
    wide = value.astype(np.float32) if value.dtype.itemsize < 4 else value
    return operation(wide, wide.dtype.type(factor)).astype(value.dtype)


def fold(values, fault=None):
    """Add by stride doubling: (0,1) (2,3) .., then (0,2) (4,6) .., and so on; what is absent is skipped."""
    values, stride = list(values), 1
    if fault == "left_to_right":
        values = [value for value in values if value is not None]
        return sum(values[1:], values[0])
    while stride < len(values):
        for i in range(0, len(values) - stride, 2 * stride):
            left, right = values[i], values[i + stride]
            values[i] = right if left is None else left if right is None else left + right
        stride *= 2
    return values[0]
