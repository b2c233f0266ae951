"""Right values: the loop on one device over whole batches, with torch alone, and models that tell what they saw."""

import contextlib
import functools

import torch
from torch import nn
from torch.nn import functional as F

import phalanx

SGD = functools.partial(torch.optim.SGD, lr=0.125)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.125, momentum=0.5, weight_decay=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


def made(*shape, seed=0):
    """Numbers as of a normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = made(24, 4)
Y = (X @ made(4, 3, seed=1)).argmax(1)
TARGET = X[:, :1] * 2 - X[:, 1:2]


def fixed(model):
    """A model in float64 whose weights are no random numbers."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.75, parameter.numel()).reshape(parameter.shape))
    return model.double()


def line():
    """A line through points."""
    return fixed(nn.Linear(4, 1))


def net():
    """Two layers for three classes."""
    return fixed(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))


def normed():
    """Pictures of four pixels, with BatchNorm."""
    return fixed(nn.Sequential(nn.Unflatten(1, (1, 4)), nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(4, 3)))


def recipe(make_model=net, data=(X, Y), loss_fn=F.cross_entropy, **changes):
    """Six steps of eight samples in their order, in four shares."""
    given = {"replicas": 4, "batch_size": 8, "steps": 6, "shuffle": False, "optimizer": SGD}
    if "epochs" in changes:
        del given["steps"]
    if "batch_sampler" in changes:
        del given["batch_size"], given["shuffle"]
    return phalanx.Recipe(make_model, data, loss_fn, **(given | changes))


def batches(*columns, size=8, steps=6):
    """What a loader without shuffling brings: the last batch of an epoch may be short."""
    cut = [[column[start : start + size] for column in columns] for start in range(0, len(columns[0]), size)]
    return [cut[step % len(cut)] for step in range(steps)]


def plain(model, loss, data, optimizer=SGD, *, max_norm=0.0, scheduler=None, before=None, skip=False):
    """Train on one device; returns losses, weights, learning rates and norms by name.

    ``before(step)`` may change the model. ``skip``: a step with a loss that is not finite changes nothing.
    """
    rule = optimizer(model.parameters())
    schedule = scheduler(rule) if scheduler else None
    losses, rates, norms = [], [], []
    for step, batch in enumerate(data):
        if before:
            before(step)
        rule.zero_grad()
        value = loss(model, *batch)
        value.backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        rates.append(rule.param_groups[0]["lr"])
        losses.append(float(value.detach()))
        if not skip or value.isfinite():
            rule.step()
        if schedule:
            schedule.step(*([losses[-1]] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"losses": losses, "weights": weights, "rates": rates, "norms": norms}


def told(facts):
    """Losses and weights."""
    return {name: facts[name] for name in ("losses", "weights")}


def entropy(model, x, y):
    """The mean over the whole batch."""
    return F.cross_entropy(model(x), y)


def by_shares(model, loss, data, shares=4):
    """As ``plain``, where each share has its own statistics: weights, and buffers as means over samples."""
    rule = SGD(model.parameters())
    losses = []
    for batch in data:
        begun = {name: each.clone() for name, each in model.named_buffers()}
        rule.zero_grad()
        total, after, count = 0.0, {name: each * 0.0 for name, each in begun.items()}, len(batch[0])
        for share in zip(*(torch.tensor_split(column, shares) for column in batch), strict=True):
            for name, each in model.named_buffers():
                each.data.copy_(begun[name])
            part = loss(model, *share) * (len(share[0]) / count)
            part.backward()
            total += float(part.detach())
            for name, each in model.named_buffers():
                after[name] += each * (len(share[0]) / count)
        for name, each in model.named_buffers():
            each.data.copy_(after[name])
        rule.step()
        losses.append(total)
    return losses


class Sightings(nn.Module):
    """A weight for each sample and step, which SGD with lr=1 raises by 1 / batch when the sample is seen."""

    def __init__(self, samples, steps):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(samples, steps, dtype=torch.float64))


def sightings(samples, steps, data=None, **changes):
    """A recipe that tells which samples it saw; ``data`` yields their numbers."""
    data = torch.arange(samples) if data is None else data
    return recipe(
        functools.partial(Sightings, samples, steps),
        (data,) if isinstance(data, torch.Tensor) else data,
        lambda output, target: -output.mean(),
        forward_fn=lambda model, batch: model.seen[batch[0], phalanx.current_step()],
        target_fn=lambda batch: batch[0],
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        **{"steps": steps, **changes},
    )


def times(model, sizes):
    """How often each sample was seen in each step, as a list for each step; ``sizes`` are those of batches."""
    counts = model.seen.detach() * torch.tensor(sizes, dtype=torch.float64)
    assert ((counts - counts.round()).abs() < 1e-9).all()
    return counts.round().int().T.tolist()


def epochs(counts, per_epoch):
    """How often each sample was seen in each epoch."""
    parts = [counts[start : start + per_epoch] for start in range(0, len(counts), per_epoch)]
    return [[sum(column) for column in zip(*part, strict=True)] for part in parts]


@contextlib.contextmanager
def evaluating(model):
    """In evaluation mode, without gradients."""
    model.eval()
    with torch.no_grad():
        yield model
    model.train()
