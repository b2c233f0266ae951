"""Losses over the whole batch: the big batch's numbers for any R, and equal bits wherever replicas are computed."""

import functools
import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.callbacks import EMA
from phalanx.engines.processes.board import Shared
from phalanx.frameworks.torch.replica.buffers import Buffers
from phalanx.frameworks.torch.replica.over_batch import OverBatch
from tests import by_hand
from tests.engines.deaths import once
from tests.over_batch import KINDS, NORMED, PLAIN, Clip, X, answer, clip_loss, moco_loss, plain, recipe, trained
from tests.sampling import cover, sample
from tests.seen import Seen, compare

STEP = functools.partial(torch.optim.SGD, lr=1.0)  # one step moves the weights by exactly the gradient
TOLERANCE = 1e-12


def wide(kind, replicas, **changes):
    """One step over 21 samples in float64."""
    make, data = KINDS[kind]["make_model"], KINDS[kind]["data"]
    data = tuple(column[:21].double() if column.is_floating_point() else column[:21] for column in data)
    given = {"make_model": lambda: make().double(), "data": data, "batch_size": 21, "steps": 1, "optimizer": STEP}
    return recipe(kind, replicas, **given | changes)


def moved(recipe):
    """The loss, and by how much one step moved each weight."""
    result = recipe.train(engine="inline", progress=False)
    torch.manual_seed(recipe.seed)
    begun = dict(recipe.make_model().named_parameters())
    return result.loss, {name: begun[name].detach() - value.detach() for name, value in result.model.named_parameters()}


def distances(one, other):
    """How far two such answers are apart, by name, relative to the whole gradient."""
    size = torch.cat([value.reshape(-1) for value in other[1].values()]).norm()
    apart = {name: float((one[1][name] - value).norm() / size) for name, value in other[1].items()}
    return {"loss": abs(one[0] / other[0] - 1), **apart}


@pytest.mark.filterwarnings("ignore:the loss of forward_fn comes to something else")
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
def test_the_big_batch(kind, replicas):
    """Loss and gradients, the temperature's too, are the big batch's up to rounding; a share's loss has others."""
    wanted = moved(plain(wide(kind, 1)))
    assert max(distances(moved(wide(kind, replicas)), wanted).values()) < TOLERANCE
    assert max(distances(moved(wide(kind, replicas, micro_batches=2)), wanted).values()) < TOLERANCE
    assert max(distances(moved(plain(wide(kind, replicas))), wanted).values()) > 1e-3
    if kind == "clip":
        assert wanted[1]["logit_scale"].abs() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_one_replica_is_the_plain_loop(kind):
    """R = 1 has the bits of a loop that knows nothing of this; so it needs no gradient in parts."""
    assert trained(recipe(kind, 1)) == by_hand.answer(plain(recipe(kind, 1)))


CASES = {
    "two": (2, {}),
    "uneven": (4, {}),
    "parts": (3, {"micro_batches": 2}),
    "one in parts": (1, {"micro_batches": 3}),
    "clipped": (3, {"max_norm": 0.1}),
    "half": (2, {"precision": "bfloat16"}),
    "empty": (8, {"batch_size": 6, "steps": 3}),
}
BY_HAND = [(kind, case) for kind in KINDS for case in CASES if case != "empty" or kind not in NORMED]


@pytest.mark.filterwarnings("ignore:batch_size is")
@pytest.mark.parametrize(("kind", "case"), sample("over the batch by hand", BY_HAND, 20))
def test_by_hand(kind, case):
    """The loop by hand: outputs, one loss, and each share once more, back from its rows."""
    replicas, changes = CASES[case]
    assert trained(recipe(kind, replicas, **changes)) == answer(recipe(kind, replicas, **changes))


@pytest.mark.parametrize("fault", ["wrong slice", "own per replica"])
def test_faults_in_the_loop(fault):
    """Negative twins: gradients of another replica's rows, and the loss's own gradient from each replica."""
    even = recipe("clip", batch_size=12, drop_last=True)
    assert trained(even)[0] == answer(even)[0] != answer(even, fault)[0]


# Engines.

HOW = {
    "two": {"workers": 2},
    "three": {"workers": 3},
    "one worker": {"workers": 1, "engine": "processes"},
    "devices": {"devices": ["cpu", "cpu"]},
    "three devices": {"devices": ["cpu"] * 3},
}
HALVED = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
RECIPES = {
    **{kind: (kind, 4, {}) for kind in KINDS},
    "parts": ("noisy", 3, {"micro_batches": 2}),
    "empty": ("clip", 8, {"batch_size": 6, "steps": 3}),
    "clipped": ("clip", 5, {"max_norm": 0.1, "scheduler": HALVED}),
    "half": ("simclr", 3, {"precision": "bfloat16"}),
    "frozen": ("clip", 3, {"make_model": lambda: frozen()}),
}


def frozen():
    model = Clip()
    model.image.requires_grad_(False)
    return model


def seen_of(recipe, happens=None, **options):
    """All that can be seen of a run."""
    average = EMA(0.5)
    seen = Seen(average, predict=tuple(column[:3] for column in recipe.data))
    callbacks = [average, seen, *([happens] if happens else [])]
    recipe.train(callbacks=callbacks, progress=False, **options)
    return seen


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:batch_size is")
@pytest.mark.parametrize(("name", "how"), cover("over the batch anywhere", RECIPES, HOW))
def test_any_engine(name, how):
    """Digests, losses, named losses, averages, outputs and the model's tensors are those of one process."""
    kind, replicas, changes = RECIPES[name]
    inline = seen_of(recipe(kind, replicas, **changes), engine="inline")
    assert compare(seen_of(recipe(kind, replicas, **changes), **HOW[how]), inline) == []


def in_order_of_arrival(board, said):
    """``Shared.share`` that takes workers as they happen to come: here, the last one first."""
    texts = share(board, said)
    return [text for block in reversed(board._station.placement.blocks) for text in texts[block.start : block.stop]]


def of_the_next(over, one, watch):
    """``OverBatch.backward`` from the rows of another replica."""
    seeds = over.outcome.seeds
    over.outcome.seeds = {**seeds, one.replica: seeds[(one.replica + 1) % len(seeds)]}
    yield from backward(over, one, watch)


def each_its_own(over, said, key, phase, chosen):
    """``OverBatch.compute`` after which every worker counts the loss's own gradient."""
    told = compute(over, said, key, phase, chosen)
    over.outcome.last = over.counting
    return told


def first_of_worker(over, one, keep):
    over.counting = one.replica
    return said_of(over, one, keep=keep)


share, backward, compute, said_of = Shared.share, OverBatch.backward, OverBatch.compute, OverBatch.said
after_loss = Buffers._after_loss
PLANTS = {
    "order of arrival": [(Shared, "share", in_order_of_arrival)],
    "another's rows": [(OverBatch, "backward", of_the_next)],
    "own gradient of each worker": [(OverBatch, "compute", each_its_own), (OverBatch, "said", first_of_worker)],
}


class Planting:
    """Makes a model, after planting a fault into the process where it is made."""

    def __init__(self, make_model, plants):
        self.make_model, self.plants, self.parent = make_model, plants, os.getpid()

    def __call__(self):
        if os.getpid() != self.parent:
            for owner, name, function in self.plants:
                setattr(owner, name, function)  # planted
        return self.make_model()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*came to something else")
@pytest.mark.parametrize("name", [None, *PLANTS])
def test_faults_in_workers(name):
    """Negative twins: each makes another answer; without them it is that of one process."""
    make = Planting(Clip, PLANTS[name] if name else [])
    found = trained(recipe("clip", 2, make_model=make), workers=2, nondeterministic="allow")
    assert (found == trained(recipe("clip", 2))) is (name is None)


class OneAlone(Planting):
    """Only the process that is the first to ask writes what the loss wrote."""

    def __call__(self):
        if os.getpid() != self.parent:
            number = 0 if once(self.plants, "first") else 1
            Buffers._after_loss = lambda own, settled: settled if number else after_loss(own, settled)  # planted
        return self.make_model()


@pytest.mark.long
def test_a_queue_that_one_worker_writes(tmp_path):
    """Negative twin: the queue is another one in the other worker, and the next loss shows it."""
    make = OneAlone(KINDS["moco"]["make_model"], tmp_path)
    with pytest.raises(phalanx.UsageError, match="workers came to different losses of one batch"):
        trained(recipe("moco", 2, make_model=make), devices=["cpu", "cpu"])


class Struck:
    """``function``, at whose call, or in whose backward pass, the first worker that comes to step 2 is killed."""

    loss_done = -1

    def __init__(self, function, folder, place):
        self.function, self.folder, self.place, self.parent = function, str(folder), place, os.getpid()

    def strike(self, place):
        if (
            self.place == place
            and os.getpid() != self.parent
            and phalanx.current_step() == 2
            and once(self.folder, place)
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, *given):
        if self.function is moco_loss:
            self.strike("loss")
            Struck.loss_done = phalanx.current_step()
        elif given[0].training:
            self.strike("again" if Struck.loss_done == phalanx.current_step() else "forward")
        output = self.function(*given)
        if isinstance(output, tuple) and output[0].requires_grad:
            output[0].register_hook(lambda _: self.strike("backward"))
        return output


@pytest.mark.long
@pytest.mark.parametrize("place", ["forward", "loss", "again", "backward"])
@pytest.mark.parametrize("how", ["two", "three", "devices"])
def test_deaths(tmp_path, place, how):
    """A worker that is killed in forward, in the loss, in the second forward pass or in backward leaves no trace."""
    struck = {name: Struck(KINDS["moco"][name], tmp_path, place) for name in ("forward_fn", "loss_fn")}
    found = seen_of(recipe("moco", 5, batch_size=16, **struck), **HOW[how])
    assert compare(found, seen_of(recipe("moco", 5, batch_size=16), engine="inline")) == []
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["moco", "clip"])
def test_resumes(tmp_path, kind):
    """A run that stops and goes on elsewhere is the run that did not."""
    ways = [{"workers": 2}, {"devices": ["cpu", "cpu"]}, {"engine": "inline"}]
    for steps, how in zip((2, 4, 5), ways, strict=True):
        found = trained(recipe(kind, 4, steps=steps), run_dir=tmp_path, **how)
    assert found == trained(recipe(kind, 4))


def text_loss(model, batch):
    return F.mse_loss(model.text(batch[1]).sum(1), batch[0].sum(1))


def in_phases(replicas, **changes):
    """The images' tower over the batch, then the texts' over the share."""
    phases = [
        phalanx.Phase(
            clip_loss, parameters=["image", "logit_scale"], loss_takes="model", loss_over="batch", optimizer=STEP
        ),
        phalanx.Phase(text_loss, parameters="text", loss_takes="model", optimizer=STEP),
    ]
    given = {"loss_fn": None, "loss_takes": "output", "loss_over": "share", "phases": phases, "batch_size": 16}
    return recipe("clip", replicas, **given | changes)


@pytest.mark.long
@pytest.mark.parametrize("how", ["two", "devices"])
def test_phases(how):
    """One phase over the batch and one over the share: the big batch's weights, and the bits of one process."""

    def double():
        return Clip().double()

    columns = tuple(column.double() for column in KINDS["clip"]["data"])
    models = [
        in_phases(replicas, make_model=double, data=columns, steps=2).train(engine="inline", progress=False).model
        for replicas in (1, 4)
    ]
    one, four = (nn.utils.parameters_to_vector(model.parameters()).detach() for model in models)
    assert float((one - four).norm() / one.norm()) < TOLERANCE
    found, wanted = (in_phases(3).train(progress=False, **way) for way in (HOW[how], {"engine": "inline"}))
    assert (found.digest, found.phase_history) == (wanted.digest, wanted.phase_history)


BATCHES = [tuple(column[at : at + 8] for column in KINDS["moco"]["data"]) for at in (0, 8, 16)]


@pytest.mark.parametrize("options", [{"engine": "inline"}, pytest.param({"workers": 2}, marks=pytest.mark.long)])
def test_brought_batches_and_streams(options):
    """Batches that the caller brings, a dataset that is read by sample, and a stream have the planned run's bits."""
    planned = recipe("moco", 3, batch_size=8, steps=3, shuffle=False)
    wanted = trained(planned)
    samples = list(zip(*KINDS["moco"]["data"], strict=True))
    assert trained(planned.replace(data=samples), **options) == wanted
    stream = planned.replace(data=phalanx.Stream(functools.partial(iter, samples)), shuffle=True)
    assert trained(stream, **options) == wanted
    with planned.replace(data=None, steps=None).start(progress=False, **options) as run:
        assert [run.step(batch) for batch in BATCHES] == wanted[1]
        assert run.result().digest == wanted[0]


# Buffers that the loss writes.


@pytest.mark.parametrize("options", [{"engine": "inline"}, pytest.param({"workers": 2}, marks=pytest.mark.long)])
@pytest.mark.parametrize("replicas", [2, 4])
def test_queue_and_centre(replicas, options):
    """The queue gets the keys of the whole batch, in its order, and the centre moves by their mean."""
    moco = recipe("moco", replicas, steps=3)
    model = moco.train(progress=False, **options).model
    torch.manual_seed(moco.seed)
    begun = KINDS["moco"]["make_model"]()
    queue, centre, at = begun.queue.clone(), torch.zeros(8), 0
    for step in range(3):
        shares = [torch.from_numpy(share) for share in moco.plan.shares(step)]
        keys = torch.cat([F.normalize(begun.key(X[share])) for share in shares]).detach()
        queue[:, at : at + len(keys)], at = keys.T, at + len(keys)
        centre.lerp_(keys.mean(0), 0.1)
    assert at == int(model.at) == 3 * 14
    assert torch.equal(model.queue, queue)
    assert torch.equal(model.centre, centre)
    assert model.queue.norm(dim=0).sub(1).abs().max() < 1e-5


def nothing(parameter):
    """A hook that takes the gradient away."""
    parameter.grad.zero_()


class Odd(nn.Module):
    """A model whose backward pass draws random numbers, or writes buffers, as ``kind`` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm, self.scale = nn.BatchNorm1d(4), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("size", torch.zeros(()))
        if kind == "accumulated":
            self.scale.register_post_accumulate_grad_hook(nothing)

    def forward(self, x):
        if self.kind == "checkpointed":
            return self.last(checkpoint(lambda x: self.norm(self.first(x)), x, use_reentrant=False))
        hidden = self.first(x)
        if self.kind == "noisy":
            hidden.register_hook(lambda gradient: gradient + 0.1 * torch.randn_like(gradient))
        if self.kind == "writing":
            hidden.register_hook(lambda gradient: gradient + 0 * self.size.copy_(gradient.norm()))
        return self.last(hidden)


def scaled(model, output, target):
    return (model.scale * output @ output.T).logsumexp(1).mean()


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["checkpointed", "noisy", "writing", "accumulated"])
def test_what_happens_in_a_backward_pass(kind):
    """A kept graph goes back as one that is computed again: with its generators, and what hooks write is kept."""
    recipe = phalanx.Recipe(
        functools.partial(Odd, kind), (torch.linspace(-1, 1, 256).reshape(64, 4).sin(),), scaled, loss_takes="model",
        forward_fn=lambda model, batch: model(batch[0]), target_fn=lambda batch: torch.zeros(len(batch[0])),
        loss_over="batch", replicas=2, batch_size=8, steps=4,
    )  # fmt: skip
    kept, again = recipe.train(workers=2), recipe.train(engine="inline")
    assert (kept.digest, kept.loss_history) == (again.digest, again.loss_history)
    assert (kept.model.scale.item() == 2.0) == (kind == "accumulated")


class Rooted(nn.Module):
    """A model with a parameter for the loss, whose square root has no gradient at 0."""

    def __init__(self):
        super().__init__()
        self.layer, self.zero = nn.Linear(4, 3), nn.Parameter(torch.zeros(()))


def test_a_gradient_of_the_loss_alone_that_is_not_finite():
    """It is no replica's: the error names the batch, though one replica takes it up."""
    recipe = phalanx.Recipe(
        Rooted, (torch.ones(16, 4),), lambda model, output, target: output.mean() + model.zero.sqrt(), replicas=4,
        forward_fn=lambda model, batch: model.layer(batch[0]), target_fn=lambda batch: batch[0], batch_size=8, steps=1,
        loss_takes="model", loss_over="batch",
    )  # fmt: skip
    with pytest.raises(phalanx.NonFiniteError, match="the gradient has values that are not finite") as caught:
        recipe.train(engine="inline")
    assert caught.value.replica is None
    assert len(caught.value.samples) == 8


def test_a_list_that_may_be_read_in_two_ways():
    """A list of items that could be one of columns is refused: what it is would depend on sizes."""
    recipe = phalanx.Recipe(
        lambda: nn.Linear(4, 3), (torch.ones(16, 4),), lambda output, target: output.mean(),
        target_fn=lambda batch: [torch.ones(len(batch[0]), 4) for _ in batch[0]], loss_over="batch", replicas=2,
        batch_size=4, steps=1, forward_fn=lambda model, batch: model(batch[0]),
    )  # fmt: skip
    with pytest.raises(phalanx.UsageError, match="may be an entry for each sample, or for each column"):
        recipe.train(engine="inline")
