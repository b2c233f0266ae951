"""A step by hand: the bits of a recipe, equal replicas, and nothing changed when it fails."""

import contextlib
import functools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx import manual
from phalanx.frameworks.torch.replica.gradient import drop
from phalanx.manual import step as stepping
from tests.by_hand import start, take
from tests.families import (
    DATA,
    FAMILIES,
    FEATURES,
    OPTIMIZERS,
    ConstantBuffers,
    Counting,
    TrappedNet,
    Unused,
    conv_norm,
    double,
    mlp,
    mlp_bfloat16,
    normal,
    terms,
    token_loss,
    whole,
)  # fmt: skip
from tests.sampling import cover

ALGORITHMS = ["ordered", "ring", "naive"]
MLP = FAMILIES["mlp"]
# Those that draw no random numbers, and leave forward, precision and batch to the defaults.
PLAIN = [
    name
    for name, family in FAMILIES.items()
    if name != "transformer" and family.forward_fn is None and family.precision is None and family.batch_size
]


def by_manual(recipe, spoil=lambda replicas: None, **options):
    """The recipe's steps by hand: the digest of every replica with its optimizer, and the losses."""
    model, _, _ = start(recipe)
    replicas = manual.replicate(model, ["cpu"] * recipe.replicas)
    optimizers = [recipe.optimizer(list(replica.named_parameters())) for replica in replicas]
    losses = []
    for number in range(recipe.plan.steps):
        spoil(replicas)
        batch = take(recipe.data, torch.from_numpy(recipe.plan.indices(number)))
        options = {"max_norm": recipe.max_norm, **options}
        losses.append(manual.data_parallel_step(replicas, optimizers, batch, recipe.loss_fn, **options))
    return digests(replicas, optimizers, recipe.plan.steps), losses


def digests(replicas, optimizers, steps):
    return [phalanx.digest(*pair, steps) for pair in zip(replicas, optimizers, strict=True)]


def trained(recipe):
    """The recipe's own digest, as often as it has replicas, and its losses."""
    result = recipe.train(engine="inline")
    return [result.digest] * recipe.replicas, result.loss_history


@pytest.mark.parametrize(("name", "replicas"), cover("manual steps", PLAIN, [1, 3, 4]))
def test_a_step_has_the_bits_of_a_recipe(name, replicas):
    """Weights, buffers, optimizer state and losses of every replica are those of the recipe with as many."""
    recipe = FAMILIES[name].recipe(replicas)
    assert by_manual(recipe) == trained(recipe)


@pytest.mark.parametrize(("replicas", "batch_size"), cover("manual shares", [2, 3, 6, 7], [1, 2, 5, 7, 10, 20]))
def test_uneven_and_small_batches(replicas, batch_size):
    """Uneven shares weigh as many samples as they hold, and empty ones nothing."""
    for family in (MLP, FAMILIES["constant_buffers"], FAMILIES["partly_unused"], FAMILIES["counting"]):
        recipe = family.recipe(replicas, batch_size=batch_size)
        assert by_manual(recipe) == trained(recipe)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adamw_fused", "adam_tensor_lr", "rprop", "adafactor"])
def test_optimizers(name):
    """Each replica's own optimizer ends in the recipe's state."""
    recipe = MLP.recipe(3, optimizer=OPTIMIZERS[name], batch_size=7, steps=6)
    assert by_manual(recipe) == trained(recipe)


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
@pytest.mark.parametrize("name", ["mlp", "tied", "partly_unused", "mixed_dtypes", "odd_tensors"])
def test_clipping(name, max_norm):
    """The averaged gradient is clipped, with the recipe's bits."""
    recipe = FAMILIES[name].recipe(3, max_norm=max_norm)
    assert by_manual(recipe) == trained(recipe)
    assert (by_manual(recipe) == by_manual(recipe, max_norm=math.inf)) == (max_norm == 1e6)


class Halved(nn.Module):
    """A bfloat16 model between float32 ends."""

    def __init__(self):
        super().__init__()
        self.body = mlp_bfloat16()

    def forward(self, x):
        return self.body(x.bfloat16()).float()


def test_bfloat16_models():
    """bfloat16 gradients are added as a recipe adds them."""
    recipe = MLP.recipe(4, make_model=Halved, batch_size=10)
    assert by_manual(recipe) == trained(recipe)


@pytest.mark.parametrize("algorithm", ["ring", "naive"])
def test_another_order_is_noticed(algorithm):
    """Negative twin: another order of additions ends in other bits, which all replicas have."""
    recipe = terms(7)
    found = by_manual(recipe, algorithm=algorithm)
    assert by_manual(recipe) == trained(recipe)
    assert found[0] != trained(recipe)[0]
    assert len(set(found[0])) == 1


def test_a_mean_of_means_is_noticed(monkeypatch):
    """Negative twin: uneven shares that all weigh the same end in other bits, which all replicas have."""
    recipe = FAMILIES["lenet"].recipe(7, batch_size=20)
    monkeypatch.setattr(stepping, "share_weights", lambda sizes: [float(size > 0) for size in sizes])
    found = by_manual(recipe)
    assert found[0] != trained(recipe)[0]
    assert len(set(found[0])) == 1


def test_the_parts_make_the_step():
    """Replicate, shard, sync with the shards' sizes and update, one by one: the same bits as the step."""
    x, y = normal(7, 5), whole(3, 7)
    replicas, others = (manual.replicate(MODEL, ["cpu"] * 3) for _ in range(2))
    optimizers, theirs = ([adamw(replica) for replica in group] for group in (replicas, others))
    for _ in range(5):
        manual.data_parallel_step(replicas, optimizers, (x, y), F.cross_entropy)
        shards = manual.shard_batch((x, y), 3)
        for replica, optimizer, (inputs, target) in zip(others, theirs, shards, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(replica(inputs), target).backward()
        manual.sync_gradients(others, [len(target) for _, target in shards])
        for optimizer in theirs:
            optimizer.step()
    assert digests(replicas, optimizers, 5) == digests(others, theirs, 5)


MODEL = mlp()


def adamw(replica):
    return torch.optim.AdamW(replica.parameters(), lr=0.01)


def ready(model=MODEL, count=3, make=adamw):
    """Replicas with their optimizers."""
    replicas = manual.replicate(model, ["cpu"] * count)
    return replicas, [make(replica) for replica in replicas]


def state(replicas, optimizers):
    """Everything that a step may change, as a digest per replica; and that there are no gradients."""
    assert all(parameter.grad is None for replica in replicas for parameter in replica.parameters())
    return digests(replicas, optimizers, 0)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("make_model", [mlp, conv_norm, double, Counting, Unused, ConstantBuffers])
def test_replicas_stay_equal(make_model, algorithm):
    """For 20 steps of even, uneven and tiny batches, every parameter and buffer is equal on all replicas."""
    replicas, optimizers = ready(make_model())
    shape = {conv_norm: (3, 6, 6), ConstantBuffers: (6, 4)}.get(make_model, (5,))
    dtype = torch.float64 if make_model is double else torch.float32
    for number in range(20):
        samples = 2 + number % 7
        batch = normal(samples, *shape, seed=number, dtype=dtype), whole(3, samples)
        manual.data_parallel_step(replicas, optimizers, batch, F.cross_entropy, algorithm=algorithm)
        first, *others = [[*replica.parameters(), *replica.buffers()] for replica in replicas]
        assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))
    assert digests(replicas, optimizers, 20)[1:] == digests(replicas, optimizers, 20)[:-1]


def test_a_big_batch_has_the_same_gradient():
    """With one sample more on some shards, a step of SGD moves float64 weights as one big batch does."""
    model, (x, y) = double(), (normal(7, 5, dtype=torch.float64), whole(3, 7))
    replicas, optimizers = ready(model, 4, lambda replica: torch.optim.SGD(replica.parameters(), lr=1.0))
    loss = manual.data_parallel_step(replicas, optimizers, (x, y), F.cross_entropy)
    expected = F.cross_entropy(model(x), y)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for before, after in zip(model.parameters(), replicas[0].parameters(), strict=True):
        assert torch.allclose(before - after, before.grad, rtol=0, atol=1e-14)
        assert not torch.allclose(before - after, 4 * before.grad, rtol=0, atol=1e-4)


def stale(replicas):
    for replica in replicas:
        for parameter in replica.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)


@pytest.mark.parametrize("batch_size", [2, 8])
@pytest.mark.parametrize("name", ["mlp", "partly_unused", "unused", "frozen"])
def test_stale_gradients_are_never_added(name, batch_size):
    """Gradients left in replicas, in those without a share or in frozen parameters too, change nothing."""
    recipe = FAMILIES[name].recipe(4, batch_size=batch_size)
    if name == "frozen":
        recipe = FAMILIES[name].recipe(2, batch_size=8)
    assert by_manual(recipe, stale) == trained(recipe)


def test_every_form_of_batch():
    """Pairs, lists as loaders yield them, numpy, dicts and lists of samples are called as a recipe calls them."""
    x, y = FEATURES[0][:7], FEATURES[1][:7]
    forms = {
        "pair": (x, y),
        "list": [x, y],
        "numpy": (x.numpy(), y.numpy()),
        "samples": list(zip(x, y, strict=True)),
    }
    ends = set()
    for batch in forms.values():
        replicas, optimizers = ready()
        loss = manual.data_parallel_step(replicas, optimizers, batch, F.cross_entropy)
        ends.add((loss, *digests(replicas, optimizers, 1)))
    replicas, optimizers = ready(Owning())
    loss = manual.data_parallel_step(replicas, optimizers, {"x": x, "y": y.numpy()}, None)
    assert {end[0] for end in ends} == {loss}
    assert len(ends) == 1
    replicas, optimizers = ready(nn.Linear(5, 5))
    manual.data_parallel_step(replicas, optimizers, x, F.mse_loss)


class Owning(nn.Module):
    """Takes a dict's columns by name and returns its loss."""

    def __init__(self):
        super().__init__()
        self.body = MODEL

    def forward(self, x, y):
        return F.cross_entropy(self.body(x), y)


def test_dicts_have_the_recipe_s_bits():
    """A dict batch with a model that returns its loss, as in a recipe."""
    recipe = MLP.recipe(3, **DATA["dict"])
    assert by_manual(recipe) == trained(recipe)


def test_hooks():
    """They see the batch, the averaged gradients before clipping, and the updated replicas, once a step each."""
    replicas, optimizers = ready(make=lambda replica: torch.optim.SGD(replica.parameters(), lr=1.0))
    x, y = normal(6, 5), whole(3, 6)
    seen = []

    def before_shard(batch):
        seen.append("before_shard")
        assert batch[0] is x
        return batch[0][:4], batch[1][:4]

    def after_sync(given):
        assert given is replicas
        seen.append([[parameter.grad.clone() for parameter in replica.parameters()] for replica in given])

    def after_step(given):
        seen.append([parameter.detach().clone() for parameter in given[0].parameters()])

    hooks = {"before_shard": before_shard, "after_sync": after_sync, "after_step": after_step}
    loss = manual.data_parallel_step(replicas, optimizers, (x, y), F.cross_entropy, max_norm=1e-3, **hooks)
    assert loss == pytest.approx(F.cross_entropy(MODEL(x[:4]), y[:4]).item())
    name, averaged, updated = seen
    assert name == "before_shard"
    assert all(torch.equal(*pair) for other in averaged[1:] for pair in zip(averaged[0], other, strict=True))
    norm = torch.nn.utils.get_total_norm(averaged[0])
    assert norm > 1e-2
    moved = [before.detach() - after for before, after in zip(MODEL.parameters(), updated, strict=True)]
    assert torch.nn.utils.get_total_norm(moved).item() == pytest.approx(1e-3, rel=1e-2)


def test_a_hook_may_keep_the_batch():
    """What returns None changes nothing; a hook may change the averaged gradients in place."""
    ends = []
    for hook in ({}, {"before_shard": lambda batch: None}, {"after_sync": halve}):
        replicas, optimizers = ready(make=lambda replica: torch.optim.SGD(replica.parameters(), lr=0.1))
        manual.data_parallel_step(replicas, optimizers, FEATURES, F.cross_entropy, **hook)
        ends.append(digests(replicas, optimizers, 1))
    assert ends[0] == ends[1] != ends[2]


def halve(replicas):
    for replica in replicas:
        for parameter in replica.parameters():
            parameter.grad.mul_(0.5)


BAD = 5  # the sample at which something goes wrong; the second of three shares of nine


def raising(x, hidden):
    if (x == 99).any():
        raise KeyError("sample 99")
    return hidden


def not_a_number(x, hidden):
    return hidden / (x != 99).all()


def steep(x, hidden):
    """Finite, but the root's gradient at 0 is not."""
    return hidden + (x[:, :1] - 99).abs().mul(hidden.sum() * 0).sqrt() if (x == 99).any() else hidden


def trapped_batch():
    x = normal(9, 3)
    x[BAD] = 99
    return x, normal(9, 1, seed=1)


@pytest.mark.parametrize(
    ("trap", "kind", "says"),
    [
        (raising, phalanx.WorkerError, "KeyError in user code at replica 1 on cpu, samples .3, 4, 5. of the batch"),
        (not_a_number, phalanx.NonFiniteError, "the loss is (nan|inf) at replica 1 on cpu"),
        (steep, phalanx.NonFiniteError, "the gradient has values that are not finite at replica 1"),
    ],
)
def test_a_failing_replica_changes_nothing(trap, kind, says):
    """The replica and its samples are named; weights, buffers and optimizers are as before, gradients gone."""
    torch.manual_seed(0)
    replicas, optimizers = ready(TrappedNet(trap))
    good = normal(9, 3), normal(9, 1)
    manual.data_parallel_step(replicas, optimizers, good, F.mse_loss)
    drop([parameter for replica in replicas for parameter in replica.parameters()])
    before = state(replicas, optimizers)
    with pytest.raises(kind, match=says) as caught:
        manual.data_parallel_step(replicas, optimizers, trapped_batch(), F.mse_loss)
    assert caught.value.replica == 1
    assert caught.value.samples == (3, 4, 5)
    assert isinstance(caught.value.__cause__, KeyError) == (trap is raising)
    assert state(replicas, optimizers) == before
    manual.data_parallel_step(replicas, optimizers, good, F.mse_loss)
    assert digests(replicas, optimizers, 0) != before


def test_a_failing_hook_changes_nothing():
    """An error in a hook before the update leaves all as it was."""
    replicas, optimizers = ready(conv_norm())
    before = state(replicas, optimizers)
    batch = normal(6, 3, 6, 6), whole(3, 6)
    for hook in ("before_shard", "after_sync"):
        with pytest.raises(ZeroDivisionError):
            manual.data_parallel_step(replicas, optimizers, batch, F.cross_entropy, **{hook: lambda _: 1 / 0})
        assert state(replicas, optimizers) == before


def weighing(*weights):
    """A loss that returns these weights in turn; None: the bare loss."""
    turn = iter(weights)

    def loss_fn(output, target):
        loss, weight = F.cross_entropy(output, target), next(turn)
        return loss if weight is None else (loss, weight)

    return loss_fn


@pytest.mark.parametrize(
    ("weights", "kind", "says"),
    [
        ([0, 0, 0], phalanx.RunError, "weight 0 for every share"),
        ([1, None, 1], phalanx.UsageError, "a weight for some replicas and none for others"),
        ([1, -1, 1], phalanx.UsageError, "loss_fn returned the weight -1"),
    ],
)
def test_weights_that_make_no_mean(weights, kind, says):
    """All weights 0, weights of some only and negative ones are refused, and nothing is changed."""
    replicas, optimizers = ready()
    before = state(replicas, optimizers)
    with pytest.raises(kind, match=says):
        manual.data_parallel_step(replicas, optimizers, FEATURES, weighing(*weights))
    assert state(replicas, optimizers) == before


def test_a_hidden_weight_is_warned_of():
    """A class-weighted mean that does not tell its weight is biased over shares, and says so."""
    replicas, optimizers = ready()
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    with pytest.warns(UserWarning, match="weighted"):
        manual.data_parallel_step(replicas, optimizers, FEATURES, loss_fn)


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, **{"lr": 0.1, **options})


REPLICAS = manual.replicate(MODEL, ["cpu"] * 2)
BOTH = [sgd(replica.parameters()) for replica in REPLICAS]


class Parametric(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.cross_entropy(output, target) * self.scale


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"replicas": []}, r"replicas is \[\]"),
        ({"replicas": [REPLICAS[0], REPLICAS[0]]}, "share the memory"),
        ({"replicas": [REPLICAS[0], double()]}, r"replicas\[1\] is unlike"),
        (
            {"replicas": [list(replica.parameters()) for replica in REPLICAS]},
            r"replicas\[0\] is \[.*it must be a torch.nn.Module",
        ),
        ({"replicas": [nn.ReLU(), nn.ReLU()]}, "without trainable parameters"),
        ({"optimizers": BOTH[:1]}, "optimizers has 1 for 2 replicas"),
        ({"optimizers": [*BOTH, BOTH[0]]}, "optimizers has 3 for 2 replicas"),
        ({"optimizers": BOTH[0]}, "optimizers is SGD"),
        (
            {"optimizers": BOTH[::-1]},
            r"optimizers\[0\] has 4 parameters in group 0 that are not those of replicas\[0\]",
        ),
        ({"optimizers": [BOTH[0], sgd(MODEL.parameters())]}, r"optimizers\[1\] has 4 parameters"),
        ({"optimizers": [BOTH[0], None]}, r"optimizers\[1\] is a NoneType"),
        ({"optimizers": [torch.optim.LBFGS(r.parameters()) for r in REPLICAS]}, r"optimizers\[0\] is a LBFGS"),
        ({"optimizers": [BOTH[0], sgd(REPLICAS[1].parameters(), lr=0.2)]}, r"optimizers\[1\].*'lr' of group 0"),
        ({"optimizers": [BOTH[0], sgd(REPLICAS[1][0].parameters())]}, "'params' of group 0"),
        ({"optimizers": [BOTH[0], adamw(REPLICAS[1])]}, "unlike.*its type"),
        ({"batch": (normal(5, 5), whole(3, 4))}, r"batch\[0\] has 5, batch\[1\] has 4"),
        ({"batch": (normal(4, 5), whole(3, 2))}, r"batch\[0\] has 4, batch\[1\] has 2"),
        ({"batch": (normal(0, 5), whole(3, 0))}, "batch is empty"),
        ({"batch": []}, "batch is empty"),
        ({"batch": (np.array(["a", "b"]), whole(3, 2))}, "which no tensor can hold"),
        ({"batch": (normal(4, 5, dtype=torch.float64), whole(3, 4))}, "float64"),
        ({"loss_fn": nn.CrossEntropyLoss}, "loss_fn is the class CrossEntropyLoss"),
        ({"loss_fn": nn.CrossEntropyLoss(reduction="sum")}, "loss_fn sums over the share"),
        ({"loss_fn": Parametric()}, "loss_fn is a Parametric with parameters"),
        ({"loss_fn": lambda output, target: 1.0}, "loss_fn returned a float"),
        ({"loss_fn": lambda output, target: output}, "loss_fn returned a tensor of shape"),
        ({"algorithm": "star"}, "algorithm is 'star'"),
        ({"max_norm": 0}, "max_norm is 0"),
        ({"max_norm": math.nan}, "max_norm is nan"),
        ({"after_step": 3}, "after_step is 3"),
    ],
)
def test_wrong_calls_are_refused(changes, says):
    """What is wrong is named, and nothing was changed: no weight, no buffer, no optimizer, no gradient left."""
    call = {"replicas": REPLICAS, "optimizers": BOTH, "batch": FEATURES, "loss_fn": F.cross_entropy, **changes}
    before = state(REPLICAS, BOTH)
    with pytest.raises(phalanx.UsageError, match=says):
        manual.data_parallel_step(**call)
    assert state(REPLICAS, BOTH) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizers": BOTH[:1]},
        {"batch": (normal(5, 5), whole(3, 4))},
        {"batch": (normal(0, 5), whole(3, 0))},
        {"loss_fn": Parametric()},
        {"algorithm": "star"},
        {"max_norm": -1},
        {"after_sync": 3},
    ],
)
def test_a_refused_call_leaves_gradients_alone(changes):
    """Gradients are dropped when a step begins, not when a call is refused."""
    replicas, optimizers = ready(count=2)
    stale(replicas)
    call = {"optimizers": optimizers, "batch": FEATURES, "loss_fn": F.cross_entropy, **changes}
    with pytest.raises(phalanx.UsageError):
        manual.data_parallel_step(replicas, **call)
    assert all(bool((each.grad == 7).all()) for replica in replicas for each in replica.parameters())


def test_sparse_gradients_are_refused():
    """A sparse gradient is named after the backward pass, and nothing was updated."""
    replicas, optimizers = ready(nn.Sequential(nn.Embedding(4, 3, sparse=True)), make=lambda r: sgd(r.parameters()))
    before = state(replicas, optimizers)
    with pytest.raises(phalanx.UsageError, match=r"'0.weight' has a sparse gradient"):
        manual.data_parallel_step(replicas, optimizers, (whole(4, 6), whole(3, 6)), F.cross_entropy)
    assert state(replicas, optimizers) == before


def test_autocast_around_a_whole_loop():
    """Weights are cast anew each step, also if one autocast is around all of them; without it, bits differ."""
    cast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    ends = []
    for loop, step in ((cast, contextlib.nullcontext), (contextlib.nullcontext, cast), (contextlib.nullcontext,) * 2):
        replicas, optimizers = ready(make=lambda replica: sgd(replica.parameters(), lr=1.0))
        with loop():
            for _ in range(3):
                with step():
                    manual.data_parallel_step(replicas, optimizers, FEATURES, F.cross_entropy)
        ends.append(digests(replicas, optimizers, 3))
    assert ends[0] == ends[1] != ends[2]


def test_a_step_under_no_grad():
    """The caller's no_grad does not reach in, as in a recipe."""
    ends = []
    for enabled in (True, False):
        replicas, optimizers = ready()
        with torch.set_grad_enabled(enabled):
            manual.data_parallel_step(replicas, optimizers, FEATURES, F.cross_entropy)
        ends.append(digests(replicas, optimizers, 1))
    assert ends[0] == ends[1]


def test_masked_shares_weigh_nothing():
    """A share without a token is not looked at, though its loss is NaN: its replica is updated like the others."""
    family = FAMILIES["masked_tokens"]
    x, y = (column.clone() for column in family.data)
    y[:7] = -100
    assert token_loss(torch.zeros(42, 11), y[:7]).isnan()
    model = family.make_model()
    replicas, optimizers = ready(model)
    loss = manual.data_parallel_step(replicas, optimizers, (x, y), family.loss_fn)
    assert loss == pytest.approx(token_loss(model(x), y).item(), rel=1e-6)
    assert len(set(digests(replicas, optimizers, 1))) == 1


class Writing(nn.Module):
    """Doubles something of its own in forward: a parameter, or a buffer."""

    def __init__(self, what):
        super().__init__()
        self.body, self.what = mlp(), what
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            getattr(self, self.what).mul_(2)
        return self.body(x) * self.scale


def test_a_parameter_that_forward_writes_is_refused():
    """As in a recipe: what follows would start from other weights. The weights that were written stay so."""
    replicas, optimizers = ready(Writing("scale"), 2)
    with pytest.raises(phalanx.UsageError, match="parameter 'scale' was written in place in forward") as caught:
        manual.data_parallel_step(replicas, optimizers, FEATURES, F.cross_entropy)
    assert "at replica 0 on cpu" in caught.value.__notes__[0]
    assert all(parameter.grad is None for replica in replicas for parameter in replica.parameters())


def test_a_buffer_that_forward_writes_is_settled():
    """Negative twin: the same model may write its buffer."""
    replicas, optimizers = ready(Writing("count"), 2)
    manual.data_parallel_step(replicas, optimizers, FEATURES, F.cross_entropy)
    assert [replica.count.item() for replica in replicas] == [2, 2]


def test_modes_are_the_caller_s():
    """Replicas in eval mode are trained as they are: BatchNorm's statistics stay, which they do not in train mode."""
    batch, ends = (normal(6, 3, 6, 6), whole(3, 6)), []
    for training in (False, True):
        replicas, optimizers = ready(conv_norm().train(training))
        before = [replica[1].running_mean.clone() for replica in replicas]
        manual.data_parallel_step(replicas, optimizers, batch, F.cross_entropy)
        ends.append(all(map(torch.equal, before, [replica[1].running_mean for replica in replicas])))
    assert ends == [True, False]


def test_a_share_that_is_too_small_is_explained():
    """BatchNorm's own words come with a way out, and with the replica."""
    replicas, optimizers = ready(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    with pytest.raises(phalanx.UsageError, match="BatchNorm cannot normalise a share of 1 sample"):
        manual.data_parallel_step(replicas, optimizers, (normal(5, 5), whole(3, 5)), F.cross_entropy)
