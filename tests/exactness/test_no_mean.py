"""Losses that are no means over samples: each is asked in the first step, warned of once, and nothing else moves."""

import functools
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx import manual
from phalanx.frameworks.torch.replica import forward

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(64, 6, generator=RANDOM)
CLASSES = torch.randint(3, (64,), generator=RANDOM)
REAL = torch.randn(64, 3, generator=RANDOM)
YES = torch.randint(2, (64, 3), generator=RANDOM).float()
GAPS = torch.where(torch.rand(64, generator=RANDOM) < 0.3, -100, CLASSES)
IDS = torch.randint(5, 30, (64, 9), generator=RANDOM)
PADDED = torch.where(torch.arange(9) < torch.randint(2, 10, (64, 1), generator=RANDOM), IDS, -100)
CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 5.0])
NO_MEAN = "is no mean over samples, and it returns no weight"


def linear():
    return nn.Linear(6, 3)


def unsteady():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))


def normed(output):
    return F.normalize(output, dim=1)


def dice(output, target):
    shown = output.sigmoid()
    return 1 - (2 * (shown * target).sum() + 1) / (shown.sum() + target.sum() + 1)


def dice_per_sample(output, target):
    shown = output.sigmoid()
    return (1 - (2 * (shown * target).sum(1) + 1) / (shown.sum(1) + target.sum(1) + 1)).mean()


def contrastive(output, target):
    scores = normed(output) @ normed(target).T / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores)))


def contrastive_of_eight(output, target):
    return F.cross_entropy(normed(output) @ normed(target).T / 0.1, torch.arange(8))


def triplets(output, target):
    distances = torch.cdist(output, output)
    alike = target[:, None] == target
    far = torch.where(alike, distances, 0.0).amax(1)
    near = torch.where(alike, torch.inf, distances).amin(1)
    return F.relu(far - near + 1).mean()


def focal(output, target):
    entropy = F.cross_entropy(output, target, reduction="none")
    return (1 - (-entropy).exp()).square() * entropy


def positives(output, target):
    return F.binary_cross_entropy_with_logits(output, target, reduction="sum") / target.sum()


def vicreg(output, target):
    return F.mse_loss(output, target) + F.relu(1 - output.std(0)).mean()


def correlation(output, target):
    return 1 - torch.corrcoef(torch.stack([output.flatten(), target.flatten()]))[0, 1]


def drawn_noise(output, target):
    return F.mse_loss(output + torch.randn_like(output), target)


def mixed(model, batch):
    x, y = batch
    order, share = torch.randperm(len(x)), float(torch.rand(()))
    output = model(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(output, y) + (1 - share) * F.cross_entropy(output, y[order])


def penalised(model, batch):
    decay = sum(parameter.square().sum() for parameter in model.parameters())
    return F.cross_entropy(model(batch[0]), batch[1]) + 0.1 * decay


def gradient_penalty(model, batch):
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return F.cross_entropy(model(x), batch[1]) + slope.square().sum(1).mean()


def of_two(model, batch):
    return contrastive(model(batch[0]), model(batch[0] + 0.1))


def writing(output, target):
    return output.sub_(target).square().mean()


def named(output, target):
    return {"loss": F.mse_loss(output, target), "error": (output - target).abs().mean()}


def squeezed(output, target):
    return F.binary_cross_entropy_with_logits(output[:, :1].squeeze(), target[:, 0])


def with_deviation(output, target):
    if len(output) < 2:
        raise ValueError("a deviation needs two samples")
    return F.mse_loss(output, target)


class Language(nn.Module):
    """Returns its own loss; ``labels`` with -100 are left out, as models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.drop = nn.Embedding(32, 8), nn.Linear(8, 32), nn.Dropout(0.1)

    def forward(self, ids, labels):
        logits = self.head(self.drop(self.embed(ids)))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


class Variational(nn.Module):
    """Draws random numbers in evaluations, too, and returns its own loss."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * spread.exp()
        return F.mse_loss(self.decoder(code), x) + (mean.square() + spread.exp() - spread).mean()


def own_loss(model, batch):
    return model(**batch).loss


def time_first(model, batch):
    return model(batch[0]).T


MODEL = {"loss_takes": "model"}
# A loss, the target, whether it warns, and what else the recipe has.
CASES = {
    # means over samples
    "cross entropy": (F.cross_entropy, CLASSES, False, {}),
    "cross entropy, a module": (nn.CrossEntropyLoss(), CLASSES, False, {}),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES, False, {}),
    "probabilities as targets": (lambda o, t: F.cross_entropy(o, t.softmax(1)), REAL, False, {}),
    "squared error": (F.mse_loss, REAL, False, {}),
    "absolute error": (F.l1_loss, REAL, False, {}),
    "huber": (F.huber_loss, REAL, False, {}),
    "squared error over ten": (lambda o, t: F.mse_loss(o, t) / 10, REAL, False, {}),
    "binary": (F.binary_cross_entropy_with_logits, YES, False, {}),
    "weights of positives": (nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHTS), YES, False, {}),
    "weights of columns": (nn.BCEWithLogitsLoss(weight=CLASS_WEIGHTS), YES, False, {}),
    "poisson": (F.poisson_nll_loss, YES, False, {}),
    "gaussian": (lambda o, t: F.gaussian_nll_loss(o, t, torch.ones_like(o)), REAL, False, {}),
    "divergence, batchmean": (
        lambda o, t: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"), REAL, False, {},
    ),
    "hinge": (F.multi_margin_loss, CLASSES, False, {}),
    "cosine": (lambda o, t: 1 - F.cosine_similarity(o, t).mean(), REAL, False, {}),
    "focal": (lambda o, t: focal(o, t).mean(), CLASSES, False, {}),
    "dice of each sample": (dice_per_sample, YES, False, {}),
    "signed": (lambda o, t: (o * t).mean(), REAL, False, {}),
    "tiny": (lambda o, t: 1e-20 * F.mse_loss(o, t), REAL, False, {}),
    "zero": (lambda o, t: 0 * F.mse_loss(o, t), REAL, False, {}),
    "weight penalty": (penalised, CLASSES, False, MODEL),
    "named losses": (named, REAL, False, {}),
    "written in place": (writing, REAL, False, {}),
    "batch norm and dropout": (F.cross_entropy, CLASSES, False, {"make_model": unsteady}),
    "outputs with samples last": (lambda o, t: F.mse_loss(o.T, t), REAL, False, {"forward_fn": time_first}),
    "float64": (F.mse_loss, REAL.double(), False, {"make_model": lambda: linear().double(), "data": X.double()}),
    "bfloat16": (F.mse_loss, REAL.bfloat16(), False, {"make_model": lambda: linear().bfloat16(), "data": X.bfloat16()}),
    "autocast": (F.cross_entropy, CLASSES, False, {"precision": "bfloat16"}),
    "micro-batches": (F.cross_entropy, CLASSES, False, {"micro_batches": 2}),
    "ignored targets, but none is there": (F.cross_entropy, CLASSES, False, {}),
    "a feature of -100": (lambda o, t: F.mse_loss(o, t.float()), torch.full((64, 3), -100), False, {}),
    # what cannot be told
    "random": (drawn_noise, REAL, False, {}),
    "mixup": (mixed, CLASSES, False, MODEL),
    "gradient penalty": (gradient_penalty, CLASSES, False, MODEL),
    "two samples at least": (with_deviation, REAL, False, {"batch_size": 16}),
    "squeezed": (squeezed, YES, False, {"batch_size": 16}),
    "one sample": (contrastive, REAL, False, {"batch_size": 4}),
    # with a weight, or over the batch
    "a weight": (phalanx.weighted(F.mse_loss, lambda o, t: len(t)), REAL, False, {}),
    "class weights with their sum": (
        lambda o, t: (F.cross_entropy(o, t, weight=CLASS_WEIGHTS), CLASS_WEIGHTS[t].sum()), CLASSES, False, {},
    ),
    "over the batch": (contrastive, REAL, False, {"loss_over": "batch"}),
    "one replica": (contrastive, REAL, False, {"replicas": 1}),
    # no means
    "class weights": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), CLASSES, True, {}),
    "class weights in a lambda": (lambda o, t: F.cross_entropy(o, t, weight=CLASS_WEIGHTS), CLASSES, True, {}),
    "class weights, six samples": (
        lambda o, t: F.cross_entropy(o, t, CLASS_WEIGHTS), CLASSES, True, {"batch_size": 24},
    ),
    "class weights, micro-batches": (
        lambda o, t: F.cross_entropy(o, t, CLASS_WEIGHTS), CLASSES, True, {"micro_batches": 2},
    ),
    "ignored targets": (F.cross_entropy, GAPS, True, {}),
    "ignored targets in a lambda": (lambda o, t: F.cross_entropy(o, t, ignore_index=1), CLASSES, True, {}),
    "a mask": (lambda o, t: (o.square() * t).sum() / t.sum(), YES, True, {}),
    "a sum": (lambda o, t: F.mse_loss(o, t, reduction="sum"), REAL, True, {}),
    "a sum over a constant": (lambda o, t: F.mse_loss(o, t, reduction="sum") / 100, REAL, True, {}),
    "a sum over positives": (positives, YES, True, {}),
    "dice": (dice, YES, True, {}),
    "contrastive": (contrastive, REAL, True, {}),
    "contrastive, of a fixed size": (contrastive_of_eight, REAL, True, {}),
    "contrastive, of the model": (of_two, CLASSES, True, MODEL),
    "contrastive, with batch norm": (of_two, CLASSES, True, {**MODEL, "make_model": unsteady}),
    "triplets": (triplets, CLASSES, True, {}),
    "vicreg": (vicreg, REAL, True, {}),
    "correlation": (correlation, REAL, True, {}),
    "root of squares": (lambda o, t: F.mse_loss(o, t).sqrt(), REAL, True, {}),
    "the worst": (lambda o, t: (o - t).square().amax(), REAL, True, {}),
    "a median": (lambda o, t: (o - t).abs().median(), REAL, True, {}),
    "centred": (lambda o, t: (o * (t - t.mean()) / t.std()).square().mean(), REAL, True, {}),
    "class weights, autocast": (
        lambda o, t: F.cross_entropy(o, t, weight=CLASS_WEIGHTS), CLASSES, True, {"precision": "bfloat16"},
    ),
    "a sum, bfloat16": (
        lambda o, t: F.mse_loss(o, t, reduction="sum"), REAL.bfloat16(), True,
        {"make_model": lambda: linear().bfloat16(), "data": X.bfloat16()},
    ),
}  # fmt: skip


def recipe(loss_fn, target, **more):
    x = more.pop("data", X)
    given = {
        "make_model": linear,
        "batch_size": 32,
        "steps": 3,
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
    }
    return phalanx.Recipe(data=(x, target), loss_fn=loss_fn, **(given | more))


def told(made, **options):
    """The warnings of a run about its loss, and its digest."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        digest = made.train(**({"engine": "inline"} | options)).digest
    assert all("mean" in str(each.message) or "Using a target" in str(each.message) for each in caught), caught
    return [str(each.message) for each in caught if NO_MEAN in str(each.message)], digest


@pytest.mark.parametrize("name", CASES)
def test_a_loss_warns_where_it_is_no_mean(name, monkeypatch):
    """Each loss warns once, or not at all, and the run has the bits of one in which nobody asks."""
    loss_fn, target, warns, more = CASES[name]
    made = recipe(loss_fn, target, **more)
    messages, digest = told(made)
    assert len(messages) == warns
    monkeypatch.setattr(forward, "LOOKS", 0)  # planted
    assert told(made) == ([], digest)


OWN = {
    "full rows": (Language, {"ids": IDS, "labels": IDS}, {}, False),
    "padded rows, recognised": (Language, {"ids": IDS, "labels": PADDED}, {}, False),
    "full rows, by forward_fn": (Language, {"ids": IDS, "labels": IDS}, {"forward_fn": own_loss}, False),
    "padded rows, by forward_fn": (Language, {"ids": IDS, "labels": PADDED}, {"forward_fn": own_loss}, True),
    "a code that is drawn": (Variational, X, {}, False),
}


@pytest.mark.parametrize("name", OWN)
def test_the_own_loss_of_a_model(name, monkeypatch):
    """Token means over full rows are means over samples; those over padded rows are weighted, or warned of."""
    model, data, more, warns = OWN[name]
    made = phalanx.Recipe(model, data, None, batch_size=32, steps=2, **more)
    messages, digest = told(made)
    assert len(messages) == warns
    monkeypatch.setattr(forward, "LOOKS", 0)  # planted
    assert told(made) == ([], digest)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"workers": 2}, {"devices": ["cpu"] * 2}])
def test_one_worker_warns(options):
    """With several workers there is one warning, and the bits are those of one process."""
    made = recipe(contrastive, REAL)
    messages, digest = told(made, engine="processes", **options)
    assert len(messages) == 1
    assert digest == told(made)[1]


@pytest.mark.parametrize("share", [1, 8])
def test_targets_that_are_ignored_later(share):
    """Targets of -100 in later shares are warned of, also in shares of one sample; negative twin: where all count."""

    def messages(labels):
        data = {"ids": IDS, "labels": labels}
        given = {"shuffle": False, "batch_size": 4 * share, "steps": 64 // (4 * share)}
        return told(phalanx.Recipe(Language, data, None, own_loss, **given))[0]

    (message,) = messages(torch.where(torch.arange(64)[:, None] < 32, IDS, PADDED))
    assert "the loss of forward_fn seems to ignore targets of -100" in message
    assert messages(IDS) == []


def test_each_phase_is_asked():
    """The phase whose loss is no mean is warned of; negative twin: two phases of means."""
    mean, other = phalanx.Phase(F.mse_loss, "0", name="mean"), phalanx.Phase(contrastive, "2", every=2)

    def messages(*phases):
        made = recipe(None, REAL, make_model=lambda: nn.Sequential(linear(), nn.Tanh(), nn.Linear(3, 3)),
                      phases=list(phases), optimizer=None)  # fmt: skip
        return told(made)[0]

    assert len(messages(mean, other)) == 1
    assert messages(mean, phalanx.Phase(F.l1_loss, "2")) == []


def test_the_ways_out():
    """The warning names what helps, and each of it ends the warning."""
    (message,), _ = told(recipe(lambda o, t: F.cross_entropy(o, t, weight=CLASS_WEIGHTS), CLASSES))
    for way in ("phalanx.weighted", "loss_over='batch'", "replicas=1"):
        assert way in message


def calls(made):
    """How often the loss was called in each step."""
    counts, loss_fn = [0] * made.steps, made.loss_fn

    def counting(output, target):
        counts[phalanx.current_step()] += 1
        return loss_fn(output, target)

    warnings.simplefilter("ignore")
    made.replace(loss_fn=counting).train(engine="inline")
    return counts


@pytest.mark.parametrize(("loss_fn", "more"), [(F.mse_loss, 3), (contrastive, 4)])
def test_what_it_costs(loss_fn, more, monkeypatch):
    """A mean is called three times more, in the first step alone; four times before a warning."""
    with warnings.catch_warnings():
        asked = calls(recipe(loss_fn, REAL))
        monkeypatch.setattr(forward, "LOOKS", 0)  # planted
        plain = calls(recipe(loss_fn, REAL))
    assert [one - other for one, other in zip(asked, plain, strict=True)] == [more, 0, 0]


class Restless(nn.Module):
    """Draws in training, and counts its calls in a buffer that it computes with."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = linear(), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(self.drop(x)) + self.calls


def by_hand(loss_fn, steps=3):
    """The weights and buffers after some steps by hand, and the warnings."""
    torch.manual_seed(0)
    replicas = manual.replicate(Restless(), ["cpu"] * 4)
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.1) for replica in replicas]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            rows = slice(16 * step, 16 * step + 16)
            manual.data_parallel_step(replicas, optimizers, (X[rows], REAL[rows]), loss_fn)
    return phalanx.digest(replicas[0]), [str(each.message) for each in caught]


def drawing(output, target):
    return F.mse_loss(output, target) + 0 * torch.rand(())


def test_loops_by_hand(monkeypatch):
    """A loop by hand is warned once, and draws what it would; negative twin: generators that are not put back."""
    asked, messages = by_hand(contrastive)
    assert len(messages) == 1
    assert re.search(NO_MEAN, messages[0])
    drew = by_hand(drawing)[0]
    monkeypatch.setattr(forward.generators, "kept", lambda *_: warnings.catch_warnings())  # planted
    assert by_hand(drawing)[0] != drew
    monkeypatch.setattr(forward, "LOOKS", 0)  # planted
    assert by_hand(contrastive) == (asked, [])
    assert by_hand(drawing)[0] == drew


def partly_compiled():
    return nn.Sequential(torch.compile(linear(), backend="aot_eager"), nn.Linear(3, 3))


@pytest.mark.long
def test_a_compiled_model_is_not_compiled_for_parts(monkeypatch):
    """Asking compiles nothing, and the bits are the same; negative twin: where it is asked as everywhere else."""
    frames = pytest.importorskip("torch._dynamo.utils")

    def compiled():
        torch._dynamo.reset()
        frames.counters.clear()
        digest = told(recipe(penalised, CLASSES, make_model=partly_compiled, **MODEL))[1]
        return frames.counters["stats"]["unique_graphs"], digest

    asked = compiled()
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "set_stance", lambda _: warnings.catch_warnings())  # planted
        assert compiled()[0] > asked[0]
    monkeypatch.setattr(forward, "LOOKS", 0)  # planted
    assert compiled() == asked
