"""R = k has the bits of a plain loop that computes k shares alone and adds them in the fixed order."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import phalanx
from phalanx.frameworks.torch.arithmetic import same_bytes
from tests.by_hand import answer, compute, evaluate, fold, folded, one, read, settle, start, update
from tests.families import (
    DATA,
    FAMILIES,
    FEATURES,
    OPTIMIZERS,
    SAMPLES,
    SCHEDULERS,
    Circumstances,
    PartlyUnused,
    muon_and_adamw,
    output_only,
    terms,
)  # fmt: skip
from tests.sampling import cover

MLP = FAMILIES["mlp"]
each_count = pytest.mark.parametrize("replicas", [1, 3])
CASES = [(name, replicas) for name, family in FAMILIES.items() for replicas in family.replicas]


def trained(recipe):
    """Digest and loss history of a run."""
    result = recipe.train(engine="inline")
    return result.digest, result.loss_history


@pytest.mark.long
@pytest.mark.parametrize(("name", "replicas"), CASES)
def test_families(name, replicas):
    """Every family ends in the bits and losses of the folded loop."""
    recipe = FAMILIES[name].recipe(replicas)
    assert trained(recipe) == answer(recipe)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "masked_tokens"])
def test_the_two_loops_agree(name):
    """One share, folded, is the plain loop: the two halves of the specification say the same."""
    recipe = FAMILIES[name].recipe(1)
    model, optimizers, losses = folded(recipe, recipe.plan.steps)
    assert (phalanx.digest(model, optimizers, recipe.plan.steps), losses) == answer(recipe)


def test_the_order_of_the_fold():
    """The specification's own fold, spelled out for every count up to eight."""
    spelled = {
        1: "0", 2: "(0+1)", 3: "((0+1)+2)", 4: "((0+1)+(2+3))", 5: "(((0+1)+(2+3))+4)", 6: "(((0+1)+(2+3))+(4+5))",
        7: "(((0+1)+(2+3))+((4+5)+6))", 8: "(((0+1)+(2+3))+((4+5)+(6+7)))",
    }  # fmt: skip

    class Term(str):
        def __add__(self, other):
            return Term(f"({self:s}+{other:s})")

    assert {count: fold([Term(i) for i in range(count)]) for count in spelled} == spelled
    assert fold([None, Term(1), None, Term(3)]) == "(1+3)"


UNEVEN = itertools.product(["mlp", "constant_buffers"], [2, 3, 6, 7, 8])
SMALLER = itertools.product([1, 2, 5], [7, 8, 13])


@pytest.mark.parametrize(("name", "replicas", "batch_size"), cover("uneven", UNEVEN, [7, 9, 10, 13, SAMPLES]))
def test_uneven_shares(name, replicas, batch_size):
    """Shares that differ by one sample weigh as many samples as they hold."""
    recipe = FAMILIES[name].recipe(replicas, batch_size=batch_size)
    assert trained(recipe) == answer(recipe)


@pytest.mark.parametrize(
    ("name", "batch_size", "replicas"),
    cover("smaller than R", ["mlp", "transformer", "counting", "partly_unused", "masked_tokens"], SMALLER),
)
def test_batches_smaller_than_r(name, batch_size, replicas):
    """Replicas without a sample are absent: not zeros, not in the mean, not in the buffers."""
    family, five = FAMILIES[name], [1, 2, 3, 5, 6]  # those that have tokens in masked_tokens
    recipe = family.recipe(replicas, data=tuple(column[five] for column in family.data), batch_size=batch_size)
    assert len(recipe.plan.indices(0)) < replicas
    assert trained(recipe) == answer(recipe)


@pytest.mark.parametrize(("name", "max_norm"), cover("clipping of families", FAMILIES, [0.05, 1e6]))
def test_clipping(name, max_norm):
    """The mean gradient is clipped, not the replicas', with the bits of ``clip_grad_norm_``."""
    recipe = FAMILIES[name].recipe(3, max_norm=max_norm)
    assert trained(recipe) == answer(recipe)


@each_count
@pytest.mark.parametrize(("name", "optimizer"), cover("schedulers by hand", SCHEDULERS, ["sgd_nesterov", "adamw"]))
def test_schedulers(name, optimizer, replicas):
    """Every scheduler is stepped as by hand, ReduceLROnPlateau with the mean loss; without it the end differs."""
    changes = {"steps": 6, "optimizer": OPTIMIZERS[optimizer]}
    recipe = MLP.recipe(replicas, scheduler=SCHEDULERS[name], **changes)
    assert trained(recipe) == answer(recipe)
    assert trained(recipe) != trained(MLP.recipe(replicas, **changes))


@each_count
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, replicas):
    """Every optimizer ends in the bits of the loop by hand, its state included."""
    recipe = MLP.recipe(replicas, steps=8, optimizer=OPTIMIZERS[name])
    assert trained(recipe) == answer(recipe)


@each_count
@pytest.mark.parametrize("scheduler", [None, functools.partial(lr_scheduler.StepLR, step_size=2)])
def test_a_list_of_optimizers(scheduler, replicas):
    """Muon for the matrices beside AdamW for the rest, each with a scheduler of its own, is stepped as by hand."""
    recipe = MLP.recipe(replicas, optimizer=muon_and_adamw, scheduler=scheduler)
    assert trained(recipe) == answer(recipe)


@pytest.mark.parametrize(("name", "replicas"), [*((name, 1) for name in DATA), *cover("data by hand", DATA, [2, 3])])
def test_data(name, replicas):
    """Every kind of data is read and collated share by share, with the random numbers of the loop by hand."""
    recipe = MLP.recipe(replicas, steps=6, **DATA[name])
    assert trained(recipe) == answer(recipe)


@each_count
@pytest.mark.parametrize("name", ["mlp", "conv_norm", "transformer"])
def test_epochs(name, replicas):
    """Two epochs are as many steps as two passes take, in bits too."""
    family = FAMILIES[name]
    recipe = family.recipe(replicas, epochs=2)
    assert recipe.plan.steps == 2 * -(-SAMPLES // family.batch_size)
    assert trained(recipe) == answer(recipe) == trained(family.recipe(replicas, steps=recipe.plan.steps))


@each_count
@pytest.mark.parametrize("seed", [1, 2**32 - 1, 2**40 + 7, 2**64 - 1])
def test_seeds(seed, replicas):
    """Any seed, in model, order and dropout, is as by hand."""
    recipe = FAMILIES["transformer"].recipe(replicas, seed=seed)
    assert trained(recipe) == answer(recipe) != trained(FAMILIES["transformer"].recipe(replicas))


@pytest.mark.long
@each_count
@pytest.mark.parametrize(
    "changes", [{}, {"make_model": lambda: Circumstances(5, 3), "data": FEATURES, "loss_fn": F.cross_entropy}]
)
def test_threads(changes, replicas):
    """Replicas compute with the recipe's threads, whatever the caller's are, and user code finds so many."""
    alone, both = (FAMILIES["wide_sum"].recipe(replicas, threads=threads, **changes) for threads in (1, 2))
    assert trained(alone) == answer(alone)
    torch.set_num_threads(2)
    assert trained(both) == answer(both)
    assert torch.get_num_threads() == 2
    assert not changes or trained(alone) != trained(both)


def tokens_in_shares(recipe, step):
    """How many targets that count each replica has."""
    return [int((recipe.data[1][torch.from_numpy(share)] != -100).sum()) for share in recipe.plan.shares(step)]


def test_fully_masked_shares():
    """A share without a single token has a mean of 0/0, which is not looked at."""
    recipe = FAMILIES["masked_tokens"].recipe(8)
    assert all(0 in tokens_in_shares(recipe, step) for step in range(2))
    share = recipe.plan.shares(0)[tokens_in_shares(recipe, 0).index(0)]
    loss, weight = evaluate(recipe, start(recipe)[0], read(recipe, 0, share))
    assert loss.isnan()
    assert weight == 0
    result = recipe.train(engine="inline")
    assert all(torch.isfinite(parameter).all() for parameter in result.params.values())
    assert (result.digest, result.loss_history) == answer(recipe)


class CountingTokens(nn.Module):
    """Counts its forward passes in buffers, a float that differs between shares and an integer."""

    def __init__(self):
        super().__init__()
        self.body = FAMILIES["tied"].make_model()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("average", torch.tensor(0.0))

    def forward(self, x):
        self.calls += 1
        self.average += 0.1 * (x.float().mean() - self.average)
        return self.body(x)


def test_a_masked_share_still_ran():
    """Weight 0 takes a share out of loss and gradient; its forward pass ran, so its buffers are in their mean."""
    recipe = FAMILIES["masked_tokens"].recipe(8, make_model=CountingTokens)
    assert trained(recipe) == answer(recipe)
    assert recipe.train(engine="inline").model.calls == recipe.plan.steps


@pytest.mark.parametrize("weight", [3, 2.5, True, torch.tensor(7), torch.tensor([4.0])])
@pytest.mark.parametrize("replicas", [1, 3])
def test_any_number_is_a_weight(weight, replicas):
    """Weights may be Python numbers or tensors; with one replica they change nothing."""
    recipe = MLP.recipe(replicas, loss_fn=phalanx.weighted(F.cross_entropy, lambda output, target: weight))
    assert trained(recipe) == answer(recipe)
    assert replicas > 1 or trained(recipe) == trained(MLP.recipe(1))


def test_constant_buffers_do_not_drift():
    """Tables and masks have the bytes they were made with, for every R."""
    family = FAMILIES["constant_buffers"]
    torch.manual_seed(0)
    begun = {name: buffer.clone() for name, buffer in family.make_model().named_buffers()}
    assert set(begun) == {"table", "mask"}
    for replicas in family.replicas:
        ended = dict(family.recipe(replicas).train(engine="inline").model.named_buffers())
        assert all(torch.equal(ended[name], begun[name]) for name in begun)


def test_some_shares_use_the_layer_and_some_do_not():
    """The family of partly used parameters has steps where all, some and none of the replicas use the layer."""
    recipe = FAMILIES["partly_unused"].recipe(3, steps=12)
    x, uses = recipe.data[0], PartlyUnused().uses_extra
    counts = {sum(uses(x[torch.from_numpy(share)]) for share in recipe.plan.shares(step)) for step in range(12)}
    assert counts >= {1, 2}
    single = FAMILIES["partly_unused"].recipe(3, steps=12, batch_size=2)
    used = [any(uses(x[torch.from_numpy(s)]) for s in single.plan.shares(t) if len(s)) for t in range(12)]
    assert set(used) == {True, False}
    assert trained(recipe) == answer(recipe)
    assert trained(single) == answer(single)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_unused_parameters_stay(replicas):
    """A gradient absent in all replicas stays absent: no decay, no momentum, no optimizer state."""
    family = FAMILIES["unused"]
    torch.manual_seed(0)
    begun, model = family.make_model(), family.recipe(replicas).train(engine="inline").model
    assert phalanx.digest(model.spare) == phalanx.digest(begun.spare)
    assert model.spare.weight.grad is None
    assert not torch.equal(model.body.weight, begun.body.weight)


def test_shared_gradients_are_views_of_one_storage():
    """Torch does give the three parameters views of one storage, which adding in place would count thrice."""
    recipe = FAMILIES["shared_grad"].recipe(3)
    model = start(recipe)[0]
    evaluate(recipe, model, read(recipe, 0, recipe.plan.indices(0)))[0].backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    assert torch.equal(grads[0], grads[2])


class Alias(torch.autograd.Function):
    """The gradient of ``(weight * x).sum()`` as a view of ``x`` itself, which autograd then keeps in ``.grad``."""

    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(x)
        return (weight * x).sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0].view(-1), None


class Aliasing(nn.Module):
    """Its gradient shares memory with its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return Alias.apply(self.weight, x)


def test_a_gradient_in_the_memory_of_the_data_is_not_written():
    """Folding writes into gradients, and one of them may be the user's own sample: that is left alone."""
    data = (FAMILIES["mlp"].data[0].clone(), torch.zeros(SAMPLES))
    before = data[0].clone()
    MLP.recipe(3, make_model=Aliasing, data=data, loss_fn=output_only, batch_size=None).train(engine="inline")
    assert torch.equal(data[0], before)


# What would go wrong is noticed: each mistake below ends in other bits, on any processor.

FAULTS = [
    ("buffers_not_restored", "conv_norm", 3),
    ("buffers_not_restored", "spectral", 3),
    ("buffers_of_the_first", "conv_norm", 3),
    ("equal_buffers_averaged", "constant_buffers", 3),
    ("equal_buffers_averaged", "constant_buffers", 6),
    ("equal_buffers_averaged", "constant_buffers", 7),
    ("unseeded", "transformer", 3),
    ("one_seed", "transformer", 3),
    ("zeros", "unused", 3),
    ("zeros", "negative_zero", 3),
    ("absent_is_zero", "negative_zero", 3),
    ("mean_of_means", "mlp", 3),
    ("mean_of_means", "masked_tokens", 4),
]


@pytest.mark.long
@pytest.mark.parametrize(("fault", "name", "replicas"), FAULTS)
def test_faults_in_the_loop(fault, name, replicas):
    """Each named mistake in the folded loop ends in another digest."""
    recipe = FAMILIES[name].recipe(replicas)
    assert answer(recipe, fault)[0] != trained(recipe)[0]


@pytest.mark.parametrize("replicas", range(4, 9))
def test_another_order_is_noticed(replicas):
    """Gradients that are added from left to right, or in the caller's ``.grad``, end in another digest."""
    recipe = terms(replicas)
    model, optimizers, _ = accumulated(recipe, recipe.plan.steps)
    expected = trained(recipe)[0]
    assert expected == answer(recipe)[0]
    assert expected != answer(recipe, "left_to_right")[0]
    assert expected != phalanx.digest(model, optimizers, recipe.plan.steps)


def test_dividing_first_is_noticed():
    """The mean of 5, 0 and 0 is 1.6666666, and 5 times the float nearest to a third is 1.6666667."""
    recipe = terms(3, data=(torch.tensor([[5.0] * 3, [0.0] * 3, [0.0] * 3]), torch.zeros(3)))
    assert answer(recipe)[0] == trained(recipe)[0] != answer(recipe, "divide_first")[0]


def accumulated(recipe, steps):
    """Gradient accumulation as it is usually written: all shares into one ``.grad``, the loss scaled before."""
    model, optimizers, schedulers = start(recipe)
    losses = []
    for step in range(steps):
        model.zero_grad()
        losses.append(0.0)
        for replica, indices in enumerate(recipe.plan.shares(step)):
            with recipe.plan.seeded(step, replica):
                loss, _ = evaluate(recipe, model, read(recipe, step, indices))
                loss = loss * (len(indices) / len(recipe.plan.indices(step)))
                loss.backward()
            losses[-1] += loss.item()
        update(recipe, model, optimizers, schedulers, losses[-1])
    return model, optimizers, losses


@pytest.mark.parametrize(("name", "replicas"), [("mlp", 3), ("lenet", 4), ("transformer", 4)])
def test_accumulating_is_nearly_the_same(name, replicas):
    """Gradients that meet in one ``.grad``, in hosting order, have nearly the same losses."""
    recipe = FAMILIES[name].recipe(replicas)
    assert accumulated(recipe, recipe.plan.steps)[2] == pytest.approx(trained(recipe)[1], rel=1e-4)


def test_adding_shared_gradients_in_place_counts_them_thrice():
    """What the family of shared gradients guards against does happen to whoever adds in place."""
    recipe = FAMILIES["shared_grad"].recipe(3)
    model, _, _ = start(recipe)
    first, second = (compute(recipe, model, [], 0, replica).gradient for replica in (0, 1))
    compute(recipe, model, [], 0, 0)  # leaves the gradients of replica 0 in .grad
    for parameter, other in zip(model.parameters(), second, strict=True):
        parameter.grad.add_(other)
    torch.testing.assert_close(model.a.grad, first[0] + 3 * second[0])


def test_averaging_equal_masks_gives_infinity():
    """The mean of equal masks of finfo.min is -inf, the mean of equal numbers may be another one: hence the rule."""
    _, mask = FAMILIES["constant_buffers"].make_model().buffers()
    table = 1 / torch.arange(1.0, 100.0)
    for count in (3, 6, 7):
        assert torch.equal(settle([table] * count, [1.0] * count), table)
        assert not torch.equal(settle([table] * count, [1.0] * count, "equal_buffers_averaged"), table)
        assert settle([mask] * count, [1.0] * count, "equal_buffers_averaged").isinf().any()


def test_the_replica_count_is_part_of_the_answer():
    """Other counts of replicas add in another order, and so have other bits, and nearly the same losses."""
    counts = (1, 2, 3, 6, 7, 8)
    assert len({trained(terms(replicas, 8))[0] for replicas in counts}) == len(counts)
    results = {replicas: trained(MLP.recipe(replicas)) for replicas in counts}
    for _, losses in results.values():
        assert losses == pytest.approx(results[1][1], rel=1e-5)


def test_two_replicas_are_not_one():
    """The plain loop and the folded loop of two end in different bits."""
    recipe = terms(2, 8)
    model, optimizers, _ = one(recipe, recipe.plan.steps)
    assert trained(recipe) == answer(recipe)
    assert phalanx.digest(model, optimizers, recipe.plan.steps) != trained(recipe)[0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_buffers_are_compared_by_their_bytes(dtype):
    """Equal bytes are the same, NaN too; other bytes are not, though zeros of two signs are equal numbers."""
    for shape in [(), (0,), (3,), (2, 3)]:
        some = torch.ones(shape, dtype=dtype)
        assert same_bytes(some, some.clone())
        assert some.numel() == 0 or not same_bytes(some, torch.zeros_like(some))
    if dtype.is_floating_point or dtype.is_complex:
        zero, nan = torch.zeros(3, dtype=dtype), torch.full((3,), float("nan"), dtype=dtype)
        assert not same_bytes(zero, -zero)
        assert same_bytes(nan, nan.clone())
    if dtype.is_complex:
        negative = torch.full((3,), 1 + 2j).conj().imag  # torch negates it when it is read
        assert same_bytes(negative, negative.clone())
        assert not same_bytes(negative, -negative)
