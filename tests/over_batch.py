"""Losses over the whole batch: models that have one, and the loop by hand that computes it for any R.

``answer`` computes outputs of each share, joins their rows, computes the loss once, and goes back from each share's
rows. A ``fault`` plants one named mistake.
"""

import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.plan.keys import loss_key
from tests import by_hand
from tests.families import normal, whole

SAMPLES, CLASSES = 32, 3
X, OTHER = normal(SAMPLES, 6), normal(SAMPLES, 5, seed=1)
LABELS = whole(CLASSES, SAMPLES)
SEQUENCES = normal(SAMPLES, 4, 6)


class Clip(nn.Module):
    """Two towers and a learned temperature, which the loss alone uses."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Linear(5, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))


def towers(model, batch):
    return F.normalize(model.image(batch[0])), F.normalize(model.text(batch[1]))


def clip_loss(model, output, batch):
    logits = model.logit_scale.exp() * output[0] @ output[1].T
    pairs = torch.arange(len(logits)).to(logits.device)
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def mlp(width=8):
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, width))


def views(model, batch):
    return model(batch[0]), model(batch[0].flip(1) + 0.1)


def simclr(output, target):
    z = F.normalize(torch.cat(output))
    logits = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool).to(z.device), -1e9)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z) // 2).to(z.device))


def barlow(output, target):
    one, two = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in output)
    return (one.T @ two / len(one) - torch.eye(8).to(one)).square().sum()


def named(model, batch):
    return {"z": F.normalize(model(batch[0])), "logits": model(batch[0])}


def contrasted(output, target):
    """Supervised contrast beside cross entropy, with named losses."""
    z, same = output["z"], (target[:, None] == target).to(output["z"])
    contrast = -(same * F.log_softmax(z @ z.T, 1)).sum(1).div(same.sum(1)).mean()
    entropy = F.cross_entropy(output["logits"], target)
    return {"loss": contrast + entropy, "contrast": contrast, "entropy": entropy}


def triplets(output, target):
    """The hardest of each kind in the whole batch."""
    apart, same = (output[:, None] - output).square().sum(2), target[:, None] == target
    return F.relu(1 + (apart * same).amax(1) - apart.masked_fill(same, 1e9).amin(1)).mean()


class Ranker(nn.Module):
    """A recurrent network with one score for each sequence."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.body(x)[0][:, -1]).squeeze(1)


def ranked(output, target):
    """All pairs of unlike classes."""
    pairs = target[:, None] > target
    return (F.softplus(output - output[:, None]) * pairs).sum() / (1 + pairs.sum())


class Noisy(nn.Module):
    """BatchNorm and dropout below an output."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8))

    def forward(self, x):
        return self.body(x)


class Moco(Noisy):
    """A queue of keys, which the loss writes; and DINO's centre."""

    def __init__(self, length=96):
        super().__init__()
        self.key = nn.Linear(6, 8).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, length), dim=0))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("centre", torch.zeros(8))


def queries(model, batch):
    with torch.no_grad():
        keys = F.normalize(model.key(batch[0]))
    return F.normalize(model(batch[0])), keys


def moco_loss(model, output, target):
    query, keys = output
    logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ model.queue.clone()], 1) / 0.2
    teacher = (keys - model.centre).softmax(1)
    loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long).to(logits.device))
    loss = loss - (teacher * query.log_softmax(1)).sum(1).mean()
    with torch.no_grad():
        columns = (model.at + torch.arange(len(keys)).to(keys.device)) % model.queue.shape[1]
        model.queue[:, columns] = keys.T.float()
        model.at += len(keys)
        model.centre.lerp_(keys.float().mean(0), 0.1)
    return loss


def mixed(output, target):
    """A loss that draws: rows against the rows of a permutation."""
    order, factors = torch.randperm(len(output)).to(output.device), torch.rand(len(output)).to(output.device)
    return (output * output[order]).mean() + (factors * output[:, 0]).mean()


KINDS = {
    "clip": {"make_model": Clip, "data": (X, OTHER), "forward_fn": towers, "loss_fn": clip_loss, "loss_takes": "model"},
    "simclr": {"make_model": mlp, "data": (X, LABELS), "forward_fn": views, "loss_fn": simclr},
    "barlow": {"make_model": mlp, "data": (X, LABELS), "forward_fn": views, "loss_fn": barlow},
    "contrasted": {"make_model": mlp, "data": (X, LABELS), "forward_fn": named, "loss_fn": contrasted},
    "triplets": {"make_model": mlp, "data": (X, LABELS), "loss_fn": triplets},
    "ranked": {"make_model": Ranker, "data": (SEQUENCES, LABELS), "loss_fn": ranked},
    "noisy": {"make_model": Noisy, "data": (X, LABELS), "forward_fn": views, "loss_fn": simclr},
    "moco": {"make_model": Moco, "data": (X, LABELS), "forward_fn": queries, "loss_fn": moco_loss,
             "loss_takes": "model"},
    "draws": {"make_model": Noisy, "data": (X, LABELS), "loss_fn": mixed},
}  # fmt: skip
NORMED = ["noisy", "moco", "draws"]  # a share of one sample is too small for them
PLAIN = ["clip", "simclr", "barlow", "contrasted", "triplets", "ranked"]


def recipe(kind, replicas=3, **changes):
    given = {"batch_size": 14, "steps": 5, "loss_over": "batch", "drop_last": kind in NORMED}
    given |= KINDS[kind] | changes
    return phalanx.Recipe(replicas=replicas, **given)


def plain(recipe):
    """The recipe as somebody writes it who has one device: forward_fn returns the loss."""
    forward = recipe.forward_fn or (lambda model, batch: model(batch[0]))

    def whole(model, batch):
        output = forward(model, batch)
        value = (
            recipe.loss_fn(model, output, batch) if recipe.loss_takes == "model" else recipe.loss_fn(output, batch[1])
        )
        return value["loss"] if isinstance(value, dict) else value

    return recipe.replace(loss_fn=None, loss_takes="output", loss_over="share", forward_fn=whole)


def answer(recipe, fault=None):
    """Digest and losses, by hand, for any R."""
    model, optimizers, schedulers = by_hand.start(recipe)
    losses = [step_by_hand(recipe, model, optimizers, schedulers, step, fault) for step in range(recipe.plan.steps)]
    return phalanx.digest(model, optimizers, recipe.plan.steps), losses


def step_by_hand(recipe, model, optimizers, schedulers, step, fault=None):
    begun, ran = by_hand.copies(model.buffers()), [r for r, s in enumerate(recipe.plan.shares(step)) if len(s)]
    passed = [list(passes(recipe, model, begun, step, replica)) for replica in ran]
    lefts = [parts[-1][-1] for parts in passed]
    counts = [[len(first(batch)) for _, batch, _ in parts] for parts in passed]
    sizes = by_hand.shares([by_hand.Replica(sum(count), 0, None, [], []) for count in counts])
    for position, buffer in enumerate(model.buffers()):
        buffer.data.copy_(by_hand.settle([left[position] for left in lefts], sizes))
    loss, seeds, own = loss_by_hand(recipe, model, [part for parts in passed for part in parts], step)
    settled = by_hand.copies(model.buffers())
    cut = iter(zip(*[seed.split([c for count in counts for c in count]) for seed in seeds], strict=True))
    cut = [[next(cut) for _ in count] for count in counts]
    if fault == "wrong slice":
        cut = cut[1:] + cut[:1]
    gradients = []
    for replica, parts in zip(ran, cut, strict=True):
        with_own = fault == "own per replica" or replica == ran[-1]
        for parameter, entry in zip(model.parameters(), own, strict=True):
            parameter.grad = entry.clone() if with_own and entry is not None else None
        for (output, _, _), part in zip(passes(recipe, model, begun, step, replica), parts, strict=True):
            pairs = [(leaf, seed) for leaf, seed in zip(leaves(output), part, strict=True) if leaf.requires_grad]
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        gradients.append(by_hand.copies(parameter.grad for parameter in model.parameters()))
    for parameter, *grads in zip(model.parameters(), *gradients, strict=True):
        parameter.grad = by_hand.fold(grads)
    for buffer, value in zip(model.buffers(), settled, strict=True):
        buffer.data.copy_(value)
    by_hand.update(recipe, model, optimizers, schedulers, loss)
    return loss


def passes(recipe, model, begun, step, replica):
    """Output, batch and buffers of each part of a share: from the step's buffers and the replica's key."""
    for buffer, value in zip(model.buffers(), begun, strict=True):
        buffer.data = value.clone()  # the graph may hold the old one
    samples = by_hand.read(recipe, step, recipe.plan.shares(step)[replica])
    parts = recipe.micro_batches
    with recipe.plan.seeded(step, replica):
        for batch in [samples] if parts == 1 else by_hand.pieces_of(samples, parts):
            with autocast(recipe):
                output = recipe.forward_fn(model, batch) if recipe.forward_fn else model(batch[0])
            yield output, batch, by_hand.copies(model.buffers())


def loss_by_hand(recipe, model, passed, step):
    """The loss of all rows, and its gradients with respect to outputs and to parameters."""
    with torch.no_grad():
        columns = [torch.cat(column) for column in zip(*[leaves(output) for output, _, _ in passed], strict=True)]
    for column, leaf in zip(columns, leaves(passed[0][0]), strict=True):
        column.requires_grad_(leaf.requires_grad)
    batch = tuple(torch.cat(column) for column in zip(*[batch for _, batch, _ in passed], strict=True))
    output = passed[0][0]
    output = dict(zip(output, columns, strict=True)) if isinstance(output, dict) else (
        tuple(columns) if isinstance(output, tuple) else columns[0]
    )  # fmt: skip
    with recipe.plan.seeder(loss_key(recipe.seed, step)), autocast(recipe):
        if recipe.loss_takes == "model":
            value = recipe.loss_fn(model, output, batch)
        else:
            value = recipe.loss_fn(output, batch[1])
    loss = value["loss"] if isinstance(value, dict) else value
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, [c for c in columns if c.requires_grad] + parameters, allow_unused=True)
    found = iter(found)
    seeds = [next(found) if column.requires_grad else torch.zeros_like(column) for column in columns]
    own = [next(found) if parameter.requires_grad else None for parameter in model.parameters()]
    return loss.item(), seeds, own


def autocast(recipe):
    return torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "bfloat16")


def leaves(output):
    return list(output.values()) if isinstance(output, dict) else [*output] if isinstance(output, tuple) else [output]


def first(batch):
    return next(iter(leaves(batch)))


def trained(recipe, **options):
    """Digest, losses and named losses of a run."""
    result = recipe.train(progress=False, **(options or {"engine": "inline"}))
    return result.digest, result.loss_history
