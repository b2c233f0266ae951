"""Reports about numbers of workers, means and gradients."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.callbacks import Thaw
from tests.orders import triples
from tests.reports.hand import (
    MOMENTUM,
    SGD,
    TARGET,
    X,
    Y,
    batches,
    by_shares,
    entropy,
    fixed,
    line,
    made,
    net,
    plain,
    recipe,
    told,
)
from tests.reports.report import ROUNDING, Case, here, noting, outcome, report, wrong

LABELS = torch.where(made(24, 5, seed=3) > 0.3, made(24, 5, seed=4).abs().long() % 3, -100)  # many are not counted
LABELS[2:4] = -100  # nothing counts in the second share
TOKENS = made(24, 5, 4, seed=5)


@report("Workers", ROUNDING, "Lightning-AI/pytorch-lightning#6789 huggingface/transformers#10385")
@wrong("Two devices with half the batch each came to worse results than one with the whole batch.")
@here("The whole batch is cut into shares. Losses and weights are those of one device.")
def same_batch_on_more_devices():
    return Case(recipe(optimizer=MOMENTUM), told(plain(net(), entropy, batches(X, Y), MOMENTUM)))


@report("Workers", 0.0, "pytorch/pytorch#30509 NVIDIA/nccl#446 pytorch/pytorch#187276")
@wrong("The bits of gradients changed with the size of buckets, or with the library that adds.")
@here("Gradients are added in an order that R alone decides.")
def order_of_additions():
    rows = torch.tensor(triples(4))
    weights = torch.zeros(rows.shape[1])
    for _ in range(6):
        weights = weights - ((rows[0] + rows[1]) + (rows[2] + rows[3])) / 4
    return Case(
        recipe(
            lambda: nn.ParameterList([torch.zeros(rows.shape[1])]),
            (rows,),
            lambda output, target: (output * target).sum(1).mean(),
            forward_fn=lambda model, batch: model[0].expand(len(batch[0]), -1),
            target_fn=lambda batch: batch[0],
            batch_size=4,
            optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        ),
        weights,
        lambda result, options: result.model[0].detach(),
    )


@report("Workers", ROUNDING, "meta-pytorch/torchrec#747")
@wrong("Ranks had to have batches of one size, or the mean was of something else.")
@here("Shares may differ by a sample. They are weighted by their sizes.")
def shares_of_unlike_sizes():
    return Case(recipe(batch_size=7), told(plain(net(), entropy, batches(X, Y, size=7))))


@report("Workers", ROUNDING, "ultralytics/ultralytics#18616 neuralmagic/sparseml#135 NVIDIA/apex#696")
@wrong("Losses or rates were multiplied by the number of processes, to make good a mean that was right before.")
@here("Loss, gradient and rate are those of the whole batch. Neither R nor workers scale them.")
def scales_by_numbers_of_processes():
    weight, bias, losses = torch.linspace(-0.5, 0.75, 4).double(), torch.full((1,), -0.5).double(), []
    for x, y in batches(X, TARGET):
        error = x @ weight + bias - y[:, 0]
        losses.append(float((error * error).sum() / 8))
        weight, bias = weight - 0.125 * 2 / 8 * (x.T @ error), bias - 0.125 * 2 / 8 * error.sum()
    right = {"losses": losses, "weights": {"weight": weight[None], "bias": bias}}
    return Case(recipe(line, (X, TARGET), F.mse_loss, replicas=3), right)


@report("Gradients", ROUNDING, "pytorch/pytorch#33148 microsoft/PyMarlin#80 Lightning-AI/pytorch-lightning#20404")
@wrong("Ranks with a batch more than others waited for ever.")
@here("The last batch may have fewer samples than there are replicas. The others sit that step out.")
def last_batch_of_one_sample():
    data = X[:9], Y[:9]
    return Case(recipe(data=data, batch_size=4), told(plain(net(), entropy, batches(*data, size=4))))


def over_tokens(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def tokens_case(**changes):
    weighted = phalanx.weighted(over_tokens, lambda output, target: (target != -100).sum())
    right = plain(net(), lambda model, x, y: over_tokens(model(x), y), batches(TOKENS, LABELS))
    return Case(recipe(net, (TOKENS, LABELS), weighted, **changes), told(right))


@report("Gradients", ROUNDING, "huggingface/transformers#34242 huggingface/transformers#40799")
@wrong("The mean over tokens was taken on each device, and the mean of these means was trained on.")
@here("With `phalanx.weighted` it is the mean over all tokens of the batch.")
def mean_over_tokens():
    return tokens_case(replicas=3)


@report("Gradients", ROUNDING, "ml-explore/mlx-lm#1413 allenai/open-instruct#1736 verl-project/verl#5625")
@wrong("Gradient accumulation averaged the means of micro-batches, so short samples weighed too much.")
@here("Parts of a share are weighted by their tokens, too.")
def micro_batches_of_unlike_length():
    return tokens_case(micro_batches=2)


@report("Gradients", ROUNDING, "NVIDIA-NeMo/Automodel#2468")
@wrong("A rank whose samples had nothing to train on skipped its backward pass, and the others hung.")
@here("A share of weight 0 is left out of the mean.")
def share_in_which_nothing_counts():
    return tokens_case()


@report("Gradients", ROUNDING, "huggingface/transformers#1563 huggingface/diffusers#721")
@wrong("Gradients were clipped after each part, and not once before the update.")
@here("`max_norm` clips the mean gradient of the batch, once.")
def clipping_each_part():
    right = plain(net(), entropy, batches(X, Y), max_norm=0.1)
    return Case(recipe(max_norm=0.1, micro_batches=2), told(right))


@report("Gradients", ROUNDING, "modelscope/twinkle#290 PaddlePaddle/Paddle#35893")
@wrong("The norm was added up over ranks that all had it, or was that of one rank's part.")
@here("The norm is that of the whole mean gradient, wherever its parts lie.")
def norm_of_the_whole():
    right = plain(net(), entropy, batches(X, Y), max_norm=0.1)["norms"]
    return Case(recipe(max_norm=0.1), right, **noting(lambda told: told.grad_norm))


@report("Gradients", ROUNDING, "modelscope/FunASR#3472 karpathy/build-nanogpt#30")
@wrong("`no_sync` was around the wrong passes, so that only some micro-batches counted.")
@here("Accumulation is the same sum as that over replicas. There is nothing to switch.")
def accumulation_of_all_parts():
    return Case(recipe(replicas=3, micro_batches=2), told(plain(net(), entropy, batches(X, Y))))


class Spare(nn.Module):
    """A layer that is never used, and two that are used for some samples only."""

    def __init__(self):
        super().__init__()
        self.spare, self.low, self.high = (nn.Linear(4, 3) for _ in range(3))

    def forward(self, x):
        low = x[:, 0] < 0.5
        out = torch.zeros(len(x), 3, dtype=x.dtype)
        for layer, chosen in ((self.low, low), (self.high, ~low)):
            if chosen.any():
                out = out.index_put((chosen.nonzero()[:, 0],), layer(x[chosen]))
        return out


@report("Gradients", 0.0, "pytorch/pytorch#43259 Megvii-BaseDetection/YOLOX#885")
@wrong("A parameter that no sample used ended the run with an error.")
@here("Its gradient is None, as on one device. Weight decay does not touch it, and it keeps its bits.")
def parameter_that_is_never_used():
    right = {name: each.detach() for name, each in fixed(Spare()).spare.named_parameters()}
    return Case(
        recipe(lambda: fixed(Spare()), optimizer=MOMENTUM),
        right,
        lambda result, options: {name: each.detach() for name, each in result.model.spare.named_parameters()},
    )


@report("Gradients", ROUNDING, "open-mmlab/mmdetection#4742 open-mmlab/mmdetection3d#488")
@wrong("Ranks took other branches, and used other parameters.")
@here("A replica that did not use a parameter adds nothing. No flag is needed.")
def branches_by_sample():
    data = batches(X, Y)
    return Case(
        recipe(lambda: fixed(Spare()), optimizer=MOMENTUM), told(plain(fixed(Spare()), entropy, data, MOMENTUM))
    )


class Tied(nn.Module):
    """The embedding is the output layer, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 4), nn.Linear(4, 3)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x).tanh())


@report("Gradients", ROUNDING, "Lightning-AI/pytorch-lightning#9525 huggingface/accelerate#1000")
@wrong("Tied weights came apart when the model was moved or dealt out.")
@here("Tied weights stay one tensor, with one gradient and one update.")
def tied_weights():
    right = told(plain(fixed(Tied()), entropy, batches(Y, Y.roll(1))))
    return Case(
        recipe(lambda: fixed(Tied()), (Y, Y.roll(1))),
        {**right, "tied": True},
        lambda result, options: {
            **outcome(result.model, result.loss_history),
            "tied": result.model.head.weight is result.model.embedding.weight,
        },
    )


@report("Gradients", ROUNDING, "NVIDIA/apex#46 facebookresearch/fairscale#614")
@wrong("Layers could not be frozen or thawed once the model was wrapped.")
@here("`run.freeze`, `run.thaw` and `Thaw` act at a step boundary, in every process.")
def layers_that_thaw():
    model = net()

    def before(step):
        model[0].requires_grad_(step >= 3)

    right = told(plain(model, entropy, batches(X, Y), MOMENTUM, before=before))
    return Case(recipe(optimizer=MOMENTUM), right, options=lambda: {"callbacks": [Thaw("0.*", epoch=1)]})


@report("Gradients", ROUNDING, "facebookresearch/vissl#474 huggingface/transformers#22252")
@wrong("A contrastive loss compared the samples of one device only.")
@here('With `loss_over="batch"` the loss sees the outputs of the whole batch.')
def contrastive_loss():
    def pairs(output, target):
        return F.cross_entropy(output @ output.roll(1, 0).T, torch.arange(len(output)))

    right = plain(net(), lambda model, x, y: pairs(model(x), y), batches(X, Y))
    return Case(recipe(loss_fn=pairs, loss_over="batch"), told(right))


@report("Gradients", ROUNDING, "ecmwf/WeatherGenerator#2718")
@wrong("A loss that was NaN on another rank than the first was not skipped.")
@here('With `on_nonfinite="skip"` a loss that is not finite on any replica leaves the weights as they were.')
def not_a_number_on_one_rank():
    x = X.clone()
    x[14] = torch.inf
    right = plain(net(), entropy, batches(x, Y), MOMENTUM, skip=True)
    return Case(
        recipe(data=(x, Y), optimizer=MOMENTUM, on_nonfinite="skip"),
        right["weights"],
        lambda result, options: outcome(result.model, [])["weights"],
    )


class Two(nn.Module):
    """Two parts, each with an optimizer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)


@report("Gradients", ROUNDING, "Lightning-AI/pytorch-lightning#7233 open-mmlab/mmgeneration#286")
@wrong("Models with two optimizers, as GANs, trained worse on two devices, or failed.")
@here("Each phase is a gradient of the whole batch and an update, in order.")
def two_optimizers():
    def small(model, batch):
        return model.first(batch[0]).square().mean()

    def both(model, batch):
        return F.cross_entropy(model.second(model.first(batch[0])), batch[1])

    model, losses = fixed(Two()), []
    rules = [SGD(model.first.parameters()), MOMENTUM(model.second.parameters())]
    for batch in batches(X, Y):
        for loss, rule in zip((small, both), rules, strict=True):
            model.zero_grad()
            value = loss(model, batch)
            value.backward()
            rule.step()
            losses += [float(value.detach())] if loss is small else []
    phases = [
        phalanx.Phase(small, parameters="first", optimizer=SGD, loss_takes="model"),
        phalanx.Phase(both, parameters="second", optimizer=MOMENTUM, loss_takes="model"),
    ]
    made_anew = phalanx.Recipe(lambda: fixed(Two()), (X, Y), batch_size=8, steps=6, shuffle=False, phases=phases)
    return Case(made_anew, outcome(model, losses))


@report("Gradients", ROUNDING, "pytorch/pytorch#175024 pytorch/pytorch#22095")
@wrong("Two forward passes before one backward pass failed, as buffers were written in between.")
@here("Buffers are settled after the step. A forward pass may be called as often as one likes.")
def two_forward_passes():
    def twice(model, x, y):
        return F.cross_entropy(model(x), y) + model(x * 2).square().mean()

    def make():
        return fixed(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))

    model = make()
    losses = by_shares(model, twice, batches(X, Y))
    return Case(
        recipe(make, loss_fn=lambda model, batch: twice(model, *batch), loss_takes="model"), outcome(model, losses)
    )
