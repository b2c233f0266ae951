"""The specification: loops that anyone could write, with torch and ``recipe.plan`` alone.

``one`` is the plain PyTorch loop, which R = 1 must equal; ``folded`` computes R shares alone and adds them in the fixed
order, which R = k must equal. A ``fault`` plants one named mistake, to show that the tests would notice it. phalanx
itself is imported for its digest only.
"""

import contextlib
import copy
import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import default_collate

import phalanx


def answer(recipe, fault=None):
    """Digest and loss history of the recipe's whole length, by the loop for its R."""
    steps = recipe.plan.steps
    model, optimizers, losses = (one if recipe.replicas == 1 else folded)(recipe, steps, fault)
    return phalanx.digest(model, optimizers, steps), losses


def one(recipe, steps, fault=None):
    """R = 1. Returns the model, its optimizers, and the loss of every step."""
    model, optimizers, schedulers = start(recipe)
    losses = []
    for step in range(steps):
        samples = read(recipe, step, recipe.plan.indices(step))
        with contextlib.nullcontext() if fault == "unseeded" else recipe.plan.seeded(step, 0):
            model.zero_grad(set_to_none=fault != "zeros")
            if fault == "zeros" and step == 0:
                fill_zeros(model)
            loss, _ = backward(recipe, model, samples, fault)
        losses.append(loss)
        update(recipe, model, optimizers, schedulers, losses[-1])
    return model, optimizers, losses


def folded(recipe, steps, fault=None):
    """R = k. Returns the model, its optimizers, and the mean loss of every step."""
    model, optimizers, schedulers = start(recipe)
    losses = []
    for step in range(steps):
        begun = copies(model.buffers())
        replicas = [compute(recipe, model, begun, step, replica, fault) for replica in range(recipe.replicas)]
        weights = weigh(replicas, fault)
        losses.append(mean([r and r.loss for r in replicas], weights, fault))
        for position, parameter in enumerate(model.parameters()):
            parameter.grad = mean([r and r.gradient[position] for r in replicas], weights, fault)
        for position, buffer in enumerate(model.buffers()):
            buffer.data.copy_(settle([r.buffers[position] for r in replicas if r], shares(replicas), fault))
        update(recipe, model, optimizers, schedulers, losses[-1])
    return model, optimizers, losses


@dataclass
class Replica:
    """What one replica computed in one step: its number of samples, loss, weight, gradients and buffers."""

    samples: int
    loss: float
    weight: float | None
    gradient: list
    buffers: list


def compute(recipe, model, begun, step, replica, fault=None):
    """One share, alone: from the step's buffers, its own seed, and no gradient; None if the share is empty."""
    indices = recipe.plan.shares(step)[replica]
    if len(indices) == 0:
        return None
    if fault != "buffers_not_restored":
        for buffer, value in zip(model.buffers(), begun, strict=True):
            buffer.data.copy_(value)
    model.zero_grad()
    if fault == "zeros":
        fill_zeros(model)
    samples = read(recipe, step, indices)
    key = 0 if fault == "one_seed" else replica
    with contextlib.nullcontext() if fault == "unseeded" else recipe.plan.seeded(step, key):
        loss, weight = backward(recipe, model, samples, fault)
    gradient = copies(parameter.grad for parameter in model.parameters())
    return Replica(len(indices), loss, weight, gradient, copies(model.buffers()))


def backward(recipe, model, samples, fault=None):
    """Leave the gradient of a share in ``.grad``; with micro-batches, the mean of theirs, added up there in order."""
    if recipe.micro_batches == 1:
        loss, weight = evaluate(recipe, model, samples)
        if weight != 0:
            loss.backward()
        return loss.item(), weight
    total = counted = 0.0
    pieces = pieces_of(samples, recipe.micro_batches)
    for piece in reversed(pieces) if fault == "parts_reversed" else pieces:
        loss, returned = evaluate(recipe, model, piece)
        weight = length(piece) / max(map(length, pieces)) if returned is None else float(returned)
        if fault == "mean_of_parts":
            weight = 1.0
        if weight:
            (loss * weight).backward()
            if not counted and fault != "one_memory":  # torch adds twice where two gradients are views of one tensor
                for parameter in model.parameters():
                    parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            total, counted = total + weight * loss.item(), counted + weight
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= counted
    return total / counted if counted else 0.0, None if returned is None else counted


def pieces_of(samples, count):
    """Rows or lists of samples, cut as ``numpy.array_split`` cuts, none empty; each in memory of its own.

    Views would do, but for products of few rows: MKL's bits depend on where their memory begins.
    """
    size, larger = divmod(length(samples), count)
    starts = [part * size + min(part, larger) for part in range(count + 1)]
    bounds = [(start, end) for start, end in itertools.pairwise(starts) if start < end]
    if isinstance(samples, list):
        return [samples[start:end] for start, end in bounds]
    if isinstance(samples, dict):
        return [{name: column[start:end].clone() for name, column in samples.items()} for start, end in bounds]
    return [tuple(column[start:end].clone() for column in samples) for start, end in bounds]


def length(samples):
    if isinstance(samples, list):
        return len(samples)
    return len(next(iter(samples.values() if isinstance(samples, dict) else samples)))


def weigh(replicas, fault=None):
    """c_r per replica: the returned weights, or shares of the largest share; 0 for an empty share."""
    if fault == "mean_of_means":
        return [float(r is not None) for r in replicas]
    if any(r and r.weight is not None for r in replicas):
        return [float(r.weight) if r else 0.0 for r in replicas]
    return shares(replicas)


def shares(replicas):
    """n_r / n_max."""
    sizes = [r.samples if r else 0 for r in replicas]
    return [size / max(sizes) for size in sizes]


def mean(values, weights, fault=None):
    """fold(c_r v_r) / fold(c_r), where weight 0 and None are absent; None if all are."""
    if fault == "divide_first":
        total = fold(weights)
        return fold([v * (c / total) if c and v is not None else None for v, c in zip(values, weights, strict=True)])
    terms = [v * c if c and v is not None else None for v, c in zip(values, weights, strict=True)]
    total = fold(terms, fault)
    return None if total is None else total / fold([c or None for c in weights])


def fold(values, fault=None):
    """Add by stride doubling: (0,1) (2,3) .., then (0,2) (4,6) .., and so on."""
    if fault == "left_to_right":
        return functools.reduce(plus, values)
    if fault == "absent_is_zero" and any(isinstance(value, torch.Tensor) for value in values):
        values = [0.0 if value is None else value for value in values]
    values, stride = list(values), 1
    while stride < len(values):
        for i in range(0, len(values) - stride, 2 * stride):
            values[i] = plus(values[i], values[i + stride])
        stride *= 2
    return values[0]


def plus(left, right):
    """Absent is skipped: x + nothing = x."""
    if left is None:
        return right
    return left if right is None else left + right


def settle(values, weights, fault=None):
    """A buffer after the step, out of those of the replicas that ran: kept if equal, else the mean or the first."""
    first, weights = values[0], [c for c in weights if c]
    equal = all(same_bytes(first, value) for value in values)
    if fault == "buffers_of_the_first" or not (first.is_floating_point() or first.is_complex()):
        return first
    return first if equal and fault != "equal_buffers_averaged" else mean(values, weights)


def same_bytes(left, right):
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def start(recipe):
    """The model made right after seeding, and its optimizers and schedulers, as lists."""
    torch.manual_seed(recipe.seed)
    model = copy.deepcopy(recipe.make_model) if isinstance(recipe.make_model, torch.nn.Module) else recipe.make_model()
    made = (recipe.optimizer or functools.partial(torch.optim.Adam, lr=recipe.lr))(list(model.named_parameters()))
    optimizers = made if isinstance(made, list) else [made]
    schedulers = [recipe.scheduler(optimizer) for optimizer in optimizers] if recipe.scheduler else []
    return model, optimizers, schedulers


def read(recipe, step, indices):
    """The rows of columns, at once; else a list of samples, each read under its own seed. No batch size: the sample."""
    if isinstance(recipe.data, tuple | dict) and recipe.collate_fn is None:
        return take(recipe.data, int(indices[0]) if recipe.batch_size is None else torch.from_numpy(indices))
    samples = []
    for index in indices.tolist():
        with recipe.plan.seeded_sample(step, index):
            samples.append(take(recipe.data, index))
    return samples[0] if recipe.batch_size is None else samples


def take(data, rows):
    if isinstance(data, tuple):
        return tuple(torch.as_tensor(column)[rows] for column in data)
    if isinstance(data, dict):
        return {name: torch.as_tensor(column)[rows] for name, column in data.items()}
    return data[rows]


def evaluate(recipe, model, batch):
    """The loss of a batch and the weight that came with it, or None."""
    if isinstance(batch, list):
        batch = (recipe.collate_fn or default_collate)(batch)
    pair = isinstance(batch, tuple | list)
    with torch.autocast("cpu", torch.bfloat16) if recipe.precision == "bfloat16" else contextlib.nullcontext():
        if recipe.forward_fn is not None:
            output = recipe.forward_fn(model, batch)
        else:
            output = model(batch[0]) if pair else model(**batch)
        target = recipe.target_fn(batch) if recipe.target_fn else batch[1] if pair else batch
        value = output if recipe.loss_fn is None else recipe.loss_fn(output, target)
    return value if isinstance(value, tuple) else (value, None)


def update(recipe, model, optimizers, schedulers, loss):
    """Clip the gradients in ``.grad``, step the optimizers with them, step the schedulers."""
    parameters = list(model.parameters())
    if math.isfinite(recipe.max_norm):
        folded_there = recipe.replicas > 1 and parameters[0].device.type != "cpu"
        (clip_by_pieces if folded_there else clip_grad_norm_)(parameters, recipe.max_norm)
    for optimizer in optimizers:
        optimizer.step()
    for scheduler in schedulers:
        scheduler.step(*[loss] * isinstance(scheduler, ReduceLROnPlateau))


def clip_by_pieces(parameters, max_norm):
    """As ``clip_grad_norm_``, with the norm that accelerators have for R > 1."""
    clip_grads_with_norm_(parameters, max_norm, norm_by_pieces(parameters))


def norm_by_pieces(parameters, length=1 << 16):
    """Of each piece of a gradient, as it lies in memory, the norm that torch has of it alone; of these, in float64."""
    pieces = {}
    for parameter in parameters:
        if parameter.grad is not None and parameter.numel():
            lying = torch.empty_like(parameter).detach().copy_(parameter.grad).as_strided((parameter.numel(),), (1,))
            flat = torch.view_as_real(lying).view(-1) if lying.is_complex() else lying
            starts = range(0, len(flat), length)
            pieces.setdefault(flat.dtype, []).extend(flat[start : start + length].clone() for start in starts)
    ordered = [piece for of_dtype in pieces.values() for piece in of_dtype]
    wide = torch.float64 if torch.float64 in pieces else torch.float32
    norms = [
        torch._foreach_norm([piece], 2, torch.float64 if piece.dtype == torch.float64 else torch.float32)[0].double()
        for piece in ordered
    ]
    return torch.linalg.vector_norm(torch.stack(norms)).to(wide) if norms else torch.zeros(())


def copies(tensors):
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def fill_zeros(model):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
