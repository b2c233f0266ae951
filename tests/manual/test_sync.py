"""The averaged gradient: by the definition to the bit, for any weights, absent gradients and dtypes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import phalanx
from phalanx import manual
from tests.by_hand import fold, mean
from tests.families import SharedGrad, Tied, double, frozen, mlp, normal
from tests.orders import triples

ALGORITHMS = ["ordered", "ring", "naive"]


def parameter(gradient, dtype=torch.float32):
    """A parameter with this gradient, or none."""
    made = nn.Parameter(torch.zeros(7, dtype=dtype) if gradient is None else torch.zeros_like(gradient))
    made.grad = gradient
    return made


def gradients(count, seed=0, dtype=torch.float32, size=7):
    return [normal(size, seed=seed * 100 + number, dtype=torch.float64).to(dtype) for number in range(count)]


def relative(weights):
    return [weight / max(weights) for weight in weights]


def synced(given, weights=None, algorithm="ordered", dtype=torch.float32):
    """What each replica of one parameter has after a sync."""
    replicas = [nn.ParameterList([parameter(None if one is None else one.clone(), dtype)]) for one in given]
    manual.sync_gradients(replicas, weights, algorithm)
    return [replica[0].grad for replica in replicas]


def same(found, expected):
    if expected is None:
        return all(one is None for one in found)
    return all(one is not None and one.dtype == expected.dtype and torch.equal(one, expected) for one in found)


CASES = st.integers(1, 9).flatmap(
    lambda count: st.tuples(
        st.lists(st.booleans(), min_size=count, max_size=count),
        st.lists(st.sampled_from([0, 1, 2, 3, 5, 0.25]), min_size=count, max_size=count).filter(any),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]),
    )
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(case=CASES, seed=st.integers(0, 50))
def test_the_mean_is_the_fold(case, seed):
    """Any weights and any absent gradients: every replica has the specification's mean, bit for bit, in its dtype."""
    there, weights, dtype = case
    given = [one if here else None for one, here in zip(gradients(len(there), seed, dtype), there, strict=True)]
    assert same(synced(given, weights, dtype=dtype), mean(given, relative(weights)))


@pytest.mark.long
@settings(deadline=None, max_examples=60, derandomize=True)
@given(case=CASES, algorithm=st.sampled_from(["ring", "naive"]))
def test_other_algorithms_are_close(case, algorithm):
    """Ring and naive give all replicas the same bits, near the exact mean, where gradients are absent too."""
    there, weights, dtype = case
    given = [one if here else None for one, here in zip(gradients(len(there), 1, dtype), there, strict=True)]
    found = synced(given, weights, algorithm, dtype)
    expected = mean([None if one is None else one.to(torch.complex128) for one in given], relative(weights))
    assert same(found, found[0])
    assert (found[0] is None) == (expected is None)
    if expected is not None:
        assert torch.allclose(found[0].to(torch.complex128), expected, rtol=0, atol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("count", [3, 5, 8])
def test_another_order_is_noticed(count):
    """Negative twin: adding from left to right gives other bits, but for three."""
    given = list(torch.tensor(triples(count)))
    assert same(synced(given), fold(given) / count)
    assert same(synced(given), fold(given, "left_to_right") / count) == (count == 3)


def test_absent_is_not_zero():
    """The sign of -0 survives replicas without a gradient, which it would not if they added zeros."""
    minus = torch.full((7,), -0.0)
    assert all(torch.signbit(one).all() for one in synced([None, minus, None]))
    assert not torch.signbit(fold([None, minus, None], "absent_is_zero")).any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_uneven_weights_are_no_mean_of_means(algorithm):
    """Two shards of 3 and 1 samples: the mean over samples, which the plain mean of both is not."""
    given = [torch.full((7,), 1.0), torch.full((7,), 5.0)]
    assert same(synced(given, [3, 1], algorithm), torch.full((7,), 2.0))
    assert same(synced(given, None, algorithm), torch.full((7,), 3.0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_divisor_counts_replicas_without_a_gradient(algorithm):
    """A gradient that one replica of four has is divided by four, as if the loss did not depend on it elsewhere."""
    assert same(synced([None, torch.full((7,), 8.0), None, None], None, algorithm), torch.full((7,), 2.0))
    assert same(synced([None, None], None, algorithm), None)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weight_zero_is_not_looked_at(algorithm):
    """A replica of weight 0 may have NaN, adds nothing, and gets the mean; so does one alone with a gradient."""
    nan = torch.full((7,), torch.nan)
    assert same(synced([torch.full((7,), 4.0), nan], [1, 0], algorithm), torch.full((7,), 4.0))
    assert same(synced([None, nan], [1, 0], algorithm), None)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_float64_is_kept(algorithm):
    """1 + 1e-12 survives: nothing is cast to float32 on the way."""
    fine = torch.full((7,), 1 + 1e-12, dtype=torch.float64)
    assert same(synced([fine, fine], None, algorithm, torch.float64), fine)
    assert not torch.equal(fine.float().double(), fine)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_lone_replica_is_not_touched(algorithm):
    """One replica is multiplied and divided by nothing, whatever its weight."""
    [one] = gradients(1)
    assert same(synced([one], [3], algorithm), one)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tied_parameters_are_averaged_once(algorithm):
    """A parameter with two names, or listed twice, is averaged once, not again with the first result in it."""
    replicas = manual.replicate(Tied(), ["cpu"] * 2)
    given = gradients(2, size=88)
    for replica, gradient in zip(replicas, given, strict=True):
        replica.head.weight.grad = gradient.view(11, 8).clone()
    manual.sync_gradients(replicas, algorithm=algorithm)
    expected = ((given[0] + given[1]) / 2).view(11, 8)
    assert same([replica.embedding.weight.grad for replica in replicas], expected)
    many, weights = [1 / torch.arange(1.0, 1000.0)] * 3, [3, 5, 7]
    twice = [nn.ParameterList([made := parameter(gradient.clone()), made]) for gradient in many]
    manual.sync_gradients(twice, weights, algorithm)
    once = synced(many, weights, algorithm)
    assert same([one.grad for one, _ in twice], once[0])
    assert not same(synced(once, weights, algorithm), once[0])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_in_shared_memory_are_averaged_once(algorithm):
    """Autograd may give several parameters views of one gradient: each is averaged by itself."""
    replicas = manual.replicate(SharedGrad(), ["cpu"] * 2)
    for number, replica in enumerate(replicas):
        replica(normal(4, 5, seed=number)).square().sum().backward()
        assert replica.a.grad.untyped_storage().data_ptr() == replica.b.grad.untyped_storage().data_ptr()
    expected = [(one + other) / 2 for one, other in ([r.a.grad.clone() for r in replicas],) for _ in range(3)]
    manual.sync_gradients(replicas, algorithm=algorithm)
    for replica in replicas:
        found = [replica.a.grad, replica.b.grad, replica.c.grad]
        assert all(map(torch.equal, found, expected))
        assert len({gradient.untyped_storage().data_ptr() for gradient in found}) == 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_frozen_parameters_stay_without(algorithm):
    """Frozen parameters have no gradient before or after; the others have the mean, biases included."""
    replicas = manual.replicate(frozen(), ["cpu"] * 3)
    for number, replica in enumerate(replicas):
        replica(normal(4, 5, seed=number)).square().mean().backward()
    bias, weight = (mean([r[3].get_parameter(name).grad for r in replicas], [1.0] * 3) for name in ("bias", "weight"))
    manual.sync_gradients(replicas, algorithm=algorithm)
    for replica in replicas:
        assert all(each.grad is None for each in replica[:2].parameters())
    if algorithm == "ordered":
        assert same([replica[3].bias.grad for replica in replicas], bias)
        assert same([replica[3].weight.grad for replica in replicas], weight)


def test_what_is_frozen_is_left_alone():
    """A gradient that a parameter had before it was frozen is not handed to the others."""
    replicas = [
        nn.ParameterList([parameter(one), parameter(one.clone()).requires_grad_(False)]) for one in gradients(2)
    ]
    replicas[1][1].grad = None
    manual.sync_gradients(replicas)
    assert torch.equal(replicas[0][1].grad, gradients(2)[0])
    assert replicas[1][1].grad is None


def sparse():
    """Two embeddings with sparse gradients."""
    replicas = [nn.Embedding(4, 2, sparse=True) for _ in range(2)]
    for replica in replicas:
        replica(torch.tensor([1])).sum().backward()
    return replicas


def with_gradients(*models):
    """These models, each with a gradient in every parameter that is trained."""
    for number, model in enumerate(models):
        for each in model.parameters():
            each.grad = torch.full_like(each, float(number)) if each.requires_grad else None
    return list(models)


MODEL = mlp()


@pytest.mark.parametrize(
    ("replicas", "arguments", "says"),
    [
        ([], {}, r"replicas is \[\]"),
        (with_gradients(MODEL, MODEL), {}, "share the memory"),
        (with_gradients(mlp(), double()), {}, r"replicas\[1\] is unlike"),
        (with_gradients(mlp(), mlp().requires_grad_(False)), {}, "unlike.*fixed.*trained"),
        (with_gradients(mlp(), mlp(), mlp()[:1]), {}, r"replicas\[2\] is unlike"),
        ([list(mlp().parameters()), list(mlp().parameters())], {}, r"torch.nn.ParameterList\(parameters\)"),
        ([nn.ReLU(), nn.ReLU()], {}, "without trainable parameters"),
        (with_gradients(mlp(), mlp()), {"weights": [1]}, r"weights is \[1\].*2 finite numbers"),
        (with_gradients(mlp(), mlp()), {"weights": [0, 0]}, "not all 0"),
        (with_gradients(mlp(), mlp()), {"weights": [1, -1]}, "weights is"),
        (with_gradients(mlp(), mlp()), {"weights": [1, torch.nan]}, "weights is"),
        (with_gradients(mlp(), mlp()), {"weights": 3}, "weights is 3"),
        (with_gradients(mlp(), mlp()), {"algorithm": "star"}, "algorithm is 'star'.*'ordered', 'ring', 'naive'"),
        (sparse(), {}, "'weight' has a sparse gradient"),
    ],
)
def test_what_cannot_be_averaged_is_refused(replicas, arguments, says):
    """A wrong call is named, and no gradient was changed."""
    models = [replica for replica in replicas if isinstance(replica, nn.Module)]
    before = [each.grad if each.grad is None else each.grad.clone() for model in models for each in model.parameters()]
    with pytest.raises(phalanx.UsageError, match=says):
        manual.sync_gradients(replicas, **arguments)
    after = [each.grad for model in models for each in model.parameters()]
    for one, other in zip(before, after, strict=True):
        assert one is other or torch.equal(one.to_dense(), other.to_dense())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_that_are_turned_rows(algorithm):
    """A gradient with a dimension of one element and strides of its own is summed as its copy is."""
    rows = [torch.randn(1, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    replicas = [nn.ParameterList([torch.zeros(4, 1)]) for _ in rows]
    for (parameter,), row in zip(replicas, rows, strict=True):
        parameter.grad = row.t()
    plain = [nn.ParameterList([torch.zeros(4, 1)]) for _ in rows]
    for (parameter,), row in zip(plain, rows, strict=True):
        parameter.grad = row.t().clone(memory_format=torch.contiguous_format)
    for each in (replicas, plain):
        manual.sync_gradients(each, algorithm=algorithm)
    for (one,), (other,) in zip(replicas, plain, strict=True):
        assert torch.equal(one.grad, other.grad)
    assert not torch.equal(replicas[0][0].grad, rows[0].t())
