"""Reports about samples, their order, random numbers, and streams."""

import functools

import numpy as np
import torch
from torch import nn

import phalanx
from tests.reports.hand import X, Y, batches, entropy, epochs, net, plain, recipe, sightings, times
from tests.reports.report import ROUNDING, Case, here, report, wrong

ONCE = [1] * 24


def counted(sizes, per_epoch):
    """A value: how often each sample was seen in each epoch."""
    return lambda result, options: epochs(times(result.model, sizes), per_epoch)


@report("Samples", 0.0, "pytorch/pytorch#31771 lucidrains/DALLE-pytorch#230 kan-bayashi/ParallelWaveGAN#177")
@wrong("Without a call of `set_epoch` every epoch had the same order.")
@here("Each epoch has an order of its own, which follows from (seed, epoch).")
def same_order_every_epoch():
    def orders(result, options):
        seen = times(result.model, [8] * 9)
        parts = [seen[start : start + 3] for start in (0, 3, 6)]
        return [all(one != other for one, other in ((parts[0], parts[1]), (parts[1], parts[2]))), epochs(seen, 3)]

    return Case(sightings(24, 9, shuffle=True), [True, [ONCE] * 3], orders)


@report("Samples", 0.0, "pytorch/pytorch#22584")
@wrong("Samples were repeated, so that each rank had equally many.")
@here("Each sample comes once in an epoch. Nothing wraps, nothing is padded.")
def no_sample_twice():
    return Case(sightings(10, 9, batch_size=4, shuffle=True), [[1] * 10] * 3, counted([4, 4, 2] * 3, 3))


@report("Samples", 0.0, "Lightning-AI/pytorch-lightning#3716")
@wrong("Each of four processes did all steps of an epoch.")
@here("An epoch has as many steps as it has batches, for any number of workers.")
def steps_of_an_epoch():
    return Case(
        recipe(data=(X[:22], Y[:22]), epochs=2), [6, 44], lambda result, options: [result.steps, result.samples]
    )


@report("Samples", 0.0, "allenai/rslearn#182 pytorch/ignite#1080")
@wrong("A sampler of one's own was replaced without a word.")
@here("`batch_sampler` says every batch of an epoch, and is followed.")
def sampler_of_ones_own():
    chosen = [[3, 1, 4, 1], [5, 9, 2, 6], [8]]
    right = [[batch.count(sample) for sample in range(10)] for batch in chosen * 2]
    made = sightings(10, 6, batch_sampler=lambda epoch, generator: chosen)
    return Case(made, right, lambda result, options: times(result.model, [4, 4, 1] * 2))


@report("Samples", 0.0, "pytorch/pytorch#77154 Lightning-AI/pytorch-lightning#12866 fastai/fastai#2637")
@wrong("Weighted sampling did not work over several processes, or was left out.")
@here("`weights=` draws as many samples as there are. One of weight 0 never comes.")
def weighted_samples():
    weights = [0.0] * 6 + [1.0] * 12 + [50.0] * 6

    def facts(result, options):
        counts = epochs(times(result.model, [8] * 6), 3)
        return [[sum(each), sum(each[:6]), sum(each[18:]) > sum(each[6:18])] for each in counts]

    return Case(sightings(24, 6, weights=weights, shuffle=True), [[24, 0, True]] * 2, facts)


def numbers():
    return ((torch.tensor(number),) for number in range(24))


IN_ORDER = [[int(number // 8 == step % 3) for number in range(24)] for step in range(6)]


def stream_case(**changes):
    return Case(
        sightings(24, 6, phalanx.Stream(numbers)), IN_ORDER, lambda result, options: times(result.model, [8] * 6),
        **changes,
    )  # fmt: skip


@report("Samples", 0.0, "huggingface/datasets#5360 Lightning-AI/pytorch-lightning#15734")
@wrong("Each rank read the whole stream, so every sample came once for each rank.")
@here("A stream is read once, whatever the number of workers.")
def stream_on_each_rank():
    return stream_case()


@report("Samples", 0.0, "huggingface/datasets#3423")
@wrong("Each reading process of a stream yielded the same samples.")
@here("With `shards=` each logical reader has its part, and each sample comes once.")
def stream_with_several_readers():
    def part(shard, shards):
        return ((torch.tensor(number),) for number in range(int(shard), 24, shards))

    return Case(sightings(24, 6, phalanx.Stream(part, shards=4)), [ONCE] * 2, counted([8] * 6, 3))


@report("Samples", ROUNDING, "huggingface/transformers#3944")
@wrong("With a part for each process, predictions would come in another order, and some of them twice.")
@here("Predictions are in the order of the inputs, one for each.")
def order_of_predictions():
    model = net()
    plain(model, entropy, batches(X, Y))
    with torch.no_grad():
        right = model(X[:13])
    return Case(recipe(), right, lambda result, options: result.predict(X[:13]))


class Jittered(torch.utils.data.Dataset):
    """Its samples come with a number that numpy draws."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor(index), torch.tensor(float(np.random.randint(1, 2**40)), dtype=torch.float64)


@report("Random numbers", 0.0, "xingyizhou/CenterNet#233 open-mmlab/OpenPCDet#886 wolny/pytorch-3dunet#32")
@wrong("Reading processes drew the same numbers from numpy, and again in every epoch.")
@here("All generators are seeded from (seed, epoch, sample) before a sample is read.")
def augmentation_by_numpy():
    def drawn(result, options):
        return len(set((result.model.seen.detach() * 8).round().flatten().tolist()) - {0.0})

    made = sightings(24, 6, Jittered()).replace(
        forward_fn=lambda model, batch: model.seen[batch[0], phalanx.current_step()] * batch[1]
    )
    return Case(made, 48, drawn)


class Masks(nn.Module):
    """A row of weights for each step and sample, which shows the mask that dropout drew there."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(6, 4, 64, dtype=torch.float64))

    def forward(self, index):
        return self.rows[phalanx.current_step(), index] * nn.functional.dropout(torch.ones(len(index), 64).double())


def masks_case(rows):
    """Of how many different masks, ``rows(weights)`` of all, the samples were trained with."""
    return Case(
        recipe(
            Masks,
            (torch.arange(4), torch.zeros(4)),
            lambda output, target: -output.sum(1).mean(),
            batch_size=4,
            optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        ),
        len(rows(torch.zeros(6, 4, 64))),
        lambda result, options: len({tuple(row) for row in (rows(result.model.rows.detach()) > 0).tolist()}),
    )


@report("Random numbers", 0.0, "huggingface/transformers#31412 facebookresearch/fastMRI#123")
@wrong("Every device had the same dropout mask.")
@here("Dropout is keyed by (seed, step, replica): replicas have masks of their own.")
def dropout_on_each_device():
    return masks_case(lambda rows: rows[0])


@report("Random numbers", 0.0, "SebChw/Actually-Robust-Training#137")
@wrong("After a checkpoint was loaded the generators stood elsewhere, and results differed.")
@here("Each step is seeded by its number, whether a run arrives there or begins there.")
def dropout_after_a_resume():
    return masks_case(lambda rows: rows.flatten(0, 1))


def noisy(output, target):
    """A metric that draws numbers, and leaves the generators elsewhere."""
    return float(torch.rand(3).sum() + np.random.rand())


@report("Random numbers", ROUNDING, "Lightning-AI/pytorch-lightning#6988")
@wrong("A validation before training changed the order of the samples that were trained on.")
@here("Evaluations change neither generators nor modes. Training is the same without them.")
def evaluation_that_draws_numbers():
    made = recipe(shuffle=True)
    data = [[column[made.plan.indices(step)] for column in (X, Y)] for step in range(6)]
    facts = plain(net(), entropy, data)
    return Case(
        made,
        {name: facts[name] for name in ("losses", "weights")},
        options=lambda: {"evaluation": phalanx.Evaluation(noisy, (X, Y), every_steps=1)},
    )


@report("Resuming", 0.0, "huggingface/accelerate#4233 huggingface/accelerate#2016 NVIDIA-NeMo/Speech#10797")
@wrong("A run that went on in the middle of an epoch had samples twice, or left some out.")
@here("It goes on with the next batch. Each sample comes once in an epoch.")
def resumed_in_mid_epoch():
    return Case(sightings(24, 9, shuffle=True), [ONCE] * 3, counted([8] * 9, 3), stops=(4,))


@report("Resuming", 0.0, "verl-project/verl#7401")
@wrong("A run that went on at the end of an epoch left out the next one.")
@here("It begins the next epoch, with that epoch's order.")
def resumed_between_epochs():
    return Case(sightings(24, 9, shuffle=True), [ONCE] * 3, counted([8] * 9, 3), stops=(3, 6))


@report("Resuming", 0.0, "huggingface/datasets#7538 alibaba/TorchEasyRec#544")
@wrong("A stream dropped samples, or began anew, when a run went on.")
@here("A stream goes on after the last sample that was trained on.")
def stream_that_goes_on():
    return stream_case(stops=(4,))


@report("Resuming", 0.0, "huggingface/datasets#8308")
@wrong("The second resume of a stream began from its first sample.")
@here("A run may go on as often as it likes.")
def stream_that_goes_on_twice():
    return stream_case(stops=(2, 4))
