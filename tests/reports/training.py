"""Reports about schedules, optimizers, buffers, evaluations, resuming, and code that travels."""

import functools
import math
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import phalanx
from phalanx.callbacks import EMA, EarlyStopping
from tests.reports.hand import (
    ADAMW,
    MOMENTUM,
    SGD,
    X,
    Y,
    batches,
    by_shares,
    entropy,
    evaluating,
    fixed,
    line,
    made,
    net,
    normed,
    plain,
    recipe,
    told,
)
from tests.reports.report import ROUNDING, Case, here, noting, outcome, report, wrong

HALVED = functools.partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)
HELD = made(13, 4, seed=7), made(13, 4, seed=8).argmax(1) % 3  # no number of workers divides 13
RATES = noting(lambda told: told.lr)


@report("Schedules", 0.0, "huggingface/accelerate#2926 ContextualAI/HALOs#33 jzhang38/EasyContext#21")
@wrong("The schedule took a step for each process, so the rate fell too fast.")
@here("The schedule takes one step for each step of the optimizer.")
def schedule_steps_once():
    return Case(recipe(scheduler=HALVED), [0.125, 0.125, 0.0625, 0.0625, 0.03125, 0.03125], **RATES)


@report("Schedules", 0.0, "huggingface/transformers#24088 huggingface/accelerate#843")
@wrong("A schedule of a known length was over before the training was, or went beyond its end.")
@here("A schedule over all steps is at its end in the last one.")
def schedule_of_a_known_length():
    one_cycle = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=6)
    right = plain(net(), entropy, batches(X, Y), scheduler=one_cycle)["rates"]
    return Case(recipe(scheduler=one_cycle), right, **RATES)


@report("Schedules", 0.0, "huggingface/accelerate#3797")
@wrong("ReduceLROnPlateau counted each evaluation once for each process.")
@here("It is told one loss a step, and its patience counts steps.")
def plateau_counts_once():
    plateau = functools.partial(lr_scheduler.ReduceLROnPlateau, patience=1, factor=0.5)
    made_anew = recipe(loss_fn=lambda output, target: output.mean() * 0 + 1, scheduler=plateau)
    return Case(made_anew, [0.125, 0.125, 0.125, 0.0625, 0.0625, 0.03125], **RATES)


@report("Schedules", 0.0, "rmchurch/disruptcnn#3")
@wrong("ReduceLROnPlateau saw the loss of one rank, and did not lower the rate.")
@here("It sees the loss of the whole batch.")
def plateau_of_the_whole_batch():
    plateau = functools.partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5)
    x = X * torch.tensor([1.0, 1, 1, 1, 1, 1, 5, 9]).double().repeat(3)[:, None]  # one share is unlike the others
    facts = plain(net(), entropy, batches(x, Y), scheduler=plateau)
    assert facts["rates"][-1] < 0.125
    return Case(recipe(data=(x, Y), scheduler=plateau), facts["rates"], **RATES)


@report("Schedules", 0.0, "huggingface/accelerate#999")
@wrong("With accumulation the schedule took a step for each part.")
@here("Parts of a step do not count as steps.")
def schedule_and_accumulation():
    right = [0.125, 0.125, 0.0625, 0.0625, 0.03125, 0.03125]
    return Case(recipe(scheduler=HALVED, micro_batches=2), right, **RATES)


@report("Resuming", ROUNDING, "ultralytics/yolov5#292 XPixelGroup/BasicSR#327 IntelLabs/distiller#145")
@wrong("After a resume the learning rate began anew.")
@here("The schedule goes on where it was.")
def schedule_after_a_resume():
    def shape(step):
        return (1 + math.cos(math.pi * step / 6)) / 2

    made_anew = recipe(scheduler=functools.partial(lr_scheduler.LambdaLR, lr_lambda=shape))
    return Case(made_anew, [0.125 * shape(step) for step in range(6)], **RATES)


@report("Resuming", ROUNDING, "LibreYOLO/libreyolo#277 qfgaohao/pytorch-ssd#163")
@wrong("After a resume the optimizer had forgotten its momentum.")
@here("The optimizer's state is in every snapshot.")
def momentum_after_a_resume():
    return Case(recipe(optimizer=MOMENTUM), told(plain(net(), entropy, batches(X, Y), MOMENTUM)), stops=(2, 4))


@report("Resuming", ROUNDING, "deepspeedai/DeepSpeed#2898 deepspeedai/Megatron-DeepSpeed#439")
@wrong("A checkpoint could be loaded by as many processes as had written it, and by no others.")
@here("A snapshot knows no workers. Any number of them goes on with it.")
def other_number_of_workers():
    return Case(recipe(optimizer=ADAMW), told(plain(net(), entropy, batches(X, Y), ADAMW)))


@report("Resuming", 0.0, "horovod/horovod#3264 pytorch/elastic#97")
@wrong("When a worker failed or came, all failed, or went back to the last checkpoint.")
@here("Another worker takes its place within the step. Each step is seen once.")
def steps_after_a_death():
    return Case(recipe(), [0, 1, 2, 3, 4, 5], **noting(lambda told: told.step))


def averaging(decay=0.5):
    """A callback of ``plain`` that averages weights after each step, and the averages."""
    model, average = net(), {}

    def note():
        for name, each in model.named_parameters():
            value = each.detach()
            average[name] = average[name] + (1 - decay) * (value - average[name]) if name in average else value.clone()

    def before(step):
        if step:
            note()

    facts = plain(model, entropy, batches(X, Y), before=before)
    note()
    return facts, average


@report("Resuming", ROUNDING, "m2lines/Samudra#282 m2lines/Samudra#313")
@wrong("The average of the weights began anew after a resume.")
@here("The average is in every snapshot, beside the weights.")
def average_after_a_resume():
    return Case(
        recipe(),
        averaging()[1],
        lambda result, options: dict(result.averaged),
        options=lambda: {"callbacks": [EMA(0.5)]},
    )


def accuracy(output, target):
    return (output.argmax(-1) == target).double().mean()


@report("Schedules", ROUNDING, "harubaru/waifu-diffusion#31 PKU-YuanGroup/Open-Sora-Plan#186")
@wrong("Training went on with the averaged weights once they had been saved or evaluated.")
@here("Evaluations use the average, and training the weights. Neither sees the other's.")
def average_and_training():
    facts, average = averaging()
    model = net()
    model.load_state_dict(average)
    with evaluating(model):
        metric = float(F.cross_entropy(model(HELD[0]), HELD[1]))
    return Case(
        recipe(),
        {**told(facts), "metric": metric},
        lambda result, options: {
            **outcome(result.model, result.loss_history),
            "metric": result.metric_history[-1].value,
        },
        lambda: {"callbacks": [EMA(0.5)], "evaluation": phalanx.Evaluation("loss", HELD, every_steps=1)},
    )


def buffers(result, options):
    return {name: each.detach() for name, each in result.model.named_buffers()}


@report("Buffers", ROUNDING, "pytorch/pytorch#13711 pytorch/pytorch#1051 huggingface/pytorch-image-models#110")
@wrong("Each device had running statistics of its own, and only those of the first were kept.")
@here("Running statistics are averaged over replicas after each step. Counts are counted once.")
def running_statistics():
    model = normed()
    by_shares(model, entropy, batches(X, Y))
    return Case(recipe(normed), dict(model.named_buffers()), buffers)


@report("Buffers", ROUNDING, "facebookresearch/fvcore#152 facebookresearch/detectron2#5409")
@wrong("Ranks with unlike batches came to other statistics.")
@here("Statistics of shares are weighted by their samples.")
def statistics_of_unlike_shares():
    model = normed()
    by_shares(model, entropy, batches(X, Y, size=6))
    return Case(recipe(normed, batch_size=6), dict(model.named_buffers()), buffers)


@report("Buffers", ROUNDING, "open-mmlab/mmdetection#4582 open-mmlab/mmaction2#675")
@wrong("What an evaluation showed was not what the saved model came to.")
@here("An evaluation is of the very weights and buffers that are kept.")
def evaluation_and_saved_model():
    model = normed()
    by_shares(model, entropy, batches(X, Y))
    with evaluating(model):
        right = float(F.cross_entropy(model(HELD[0]), HELD[1]))

    def both(result, options):
        with evaluating(result.model):
            again = float(F.cross_entropy(result.model(HELD[0]), HELD[1]))
        return [result.metric_history[-1].value, again]

    return Case(recipe(normed), [right, right], both, lambda: {"evaluation": phalanx.Evaluation("loss", HELD)})


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.layer(x) / self.calls


@report("Buffers", 0.0, "pytorch/pytorch#2864")
@wrong("A counter in the model was counted up in copies, and lost with them.")
@here("A buffer that all replicas count up counts steps. A plain attribute is refused.")
def counter_in_a_model():
    return Case(recipe(lambda: fixed(Counting())), 6, lambda result, options: int(result.model.calls))


def evaluated(metric, data, **changes):
    """Options with an evaluation at the end of each epoch, and the last value as the value."""
    return {
        "options": lambda: {"evaluation": phalanx.Evaluation(metric, data, **changes)},
        "seen": lambda result, options: result.metric_history[-1].value,
    }


def trained(data=HELD):
    """Output and target of the plain loop's model."""
    model = net()
    plain(model, entropy, batches(X, Y))
    with evaluating(model):
        return model(data[0]), data[1]


@report("Evaluations", ROUNDING, "pytorch/pytorch#25162 mosaicml/composer#2218")
@wrong("Accuracy counted samples that were repeated to fill up batches.")
@here("Each held-out sample counts once.")
def accuracy_of_odd_data():
    output, target = trained()
    right = sum(int(row.argmax()) == int(label) for row, label in zip(output, target, strict=True)) / 13
    return Case(recipe(), right, **evaluated(accuracy, HELD, batch_size=2))


@report("Evaluations", 0.0, "roboflow/rf-detr#1507")
@wrong("A metric over the whole set was given some images twice.")
@here("`phalanx.whole` gets all outputs, in order, one for each sample.")
def number_of_evaluated_samples():
    data = made(21, 4), torch.arange(21)

    def whole(output, target):
        return float(len(output)) if target.tolist() == list(range(21)) else -1.0

    return Case(recipe(), 21.0, **evaluated(phalanx.whole(whole), data, batch_size=4))


@report("Evaluations", ROUNDING, "RUCAIBox/RecBole#1872")
@wrong("Means of parts were weighted by wrong numbers of samples.")
@here("Parts of an evaluation are weighted by their samples.")
def mean_of_unlike_parts():
    def confidence(output, target):
        return output.softmax(-1).amax(-1).mean()

    right = float(trained()[0].softmax(-1).amax(-1).sum()) / 13
    return Case(recipe(), right, **evaluated(confidence, HELD, batch_size=5))


@report("Evaluations", ROUNDING, "Lightning-AI/pytorch-lightning#4783 facebookresearch/dlrm#324")
@wrong("An area under the curve was the sum, or the mean, of those of the ranks.")
@here("A metric that is no mean over samples is computed once, from all outputs.")
def area_under_the_curve():
    def area(output, target):
        high, low = output[target == 1, 1], output[target != 1, 1]
        return float((high[:, None] > low).double().mean())

    output, target = trained()
    pairs = [(float(a[1]), float(b[1])) for a, one in zip(output, target, strict=True) if one == 1
             for b, other in zip(output, target, strict=True) if other != 1]  # fmt: skip
    right = sum(one > other for one, other in pairs) / len(pairs)
    return Case(recipe(), right, **evaluated(phalanx.whole(area), HELD, batch_size=4))


@report("Evaluations", 0.0, "Lightning-AI/pytorch-lightning#379 ultralytics/yolov5#8345 webdataset/webdataset#446")
@wrong("One process stopped early, and the others waited for it.")
@here("`EarlyStopping` decides once. All workers end after the same step.")
def early_stop():
    def flat(output, target):
        return 0.5

    def options():
        evaluation = phalanx.Evaluation(flat, HELD)
        return {"evaluation": evaluation, "callbacks": [EarlyStopping("flat", patience=2, mode="max")]}

    return Case(recipe(steps=30), 9, lambda result, options: result.steps, options, stops=(4,))


@report("Code", ROUNDING, "KevinMusgrave/pytorch-metric-learning#5 zjunlp/Relphormer#9 k2-fsa/icefall#284")
@wrong("Lambdas and functions within functions could not be sent to processes.")
@here("They travel by value: model, loss, optimizer and schedule may be lambdas and local classes.")
def lambdas():
    class Local(nn.Linear):
        def forward(self, x):
            return super().forward(x) * half(2.0)

    half = lambda value: value / 2  # noqa: E731
    schedule = lambda rule: lr_scheduler.LambdaLR(rule, lambda step: 1 / (1 + step))  # noqa: E731
    made_anew = recipe(
        lambda: fixed(Local(4, 3)),
        loss_fn=lambda output, target: F.cross_entropy(output, target),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.125),
        scheduler=schedule,
    )
    return Case(made_anew, told(plain(fixed(nn.Linear(4, 3)), entropy, batches(X, Y), SGD, scheduler=schedule)))


CELL = """
import torch
def scale():
    return 0.5
def cell_loss(output, target):
    return (output - target).square().mean() * scale()
"""


@report("Code", ROUNDING, "Lightning-AI/pytorch-lightning#16136 huggingface/accelerate#940")
@wrong("In notebooks workers could not find functions of cells, or were forks of a process that used the GPU.")
@here("Functions of `__main__` travel by value. Workers are never forks of your process.")
def functions_of_a_notebook():
    main = sys.modules["__main__"].__dict__
    exec(CELL, main)
    right = plain(line(), lambda model, x, y: (model(x) - y).square().mean() / 2, batches(X, X[:, :1]))
    return Case(recipe(line, (X, X[:, :1]), main["cell_loss"]), told(right))
