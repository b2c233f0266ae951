"""R = 1 has the bits of a plain loop of tinygrad's, R = k those of k shares folded; and what must not be so."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from tinygrad import Context, GlobalCounters, Tensor, helpers, nn

import phalanx
from tests.sampling import sample
from tests.tinygrad.by_hand import answer
from tests.tinygrad.families import FAMILIES, OPTIMIZERS, Mlp, terms

TWO = ["CPU", "CPU:1"]
ONE_BY_ONE = ("dropout", "norm", "tied", "whole_loss")


@pytest.mark.long
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_one_replica(name):
    """One replica ends in the bits of a loop by hand: dropout, BatchNorm, a weight used twice, a loss in forward."""
    recipe = FAMILIES[name].recipe(1)
    result = recipe.train()
    assert (result.digest, result.loss_history) == answer(recipe)


@pytest.mark.long
@pytest.mark.parametrize("name", sample("tinygrad, R = 3", ("dropout", "masked"), 1))
def test_three_replicas(name):
    """Three uneven shares, and weights that the loss tells, some 0, are folded as by hand."""
    recipe = FAMILIES[name].recipe(3, optimizer=OPTIMIZERS["adam"], steps=3)
    result = recipe.train(devices=TWO)
    assert (result.digest, result.loss_history) == answer(recipe)


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "fault"), [(1, "unkeyed"), (4, "one_key"), (4, "left_to_right")])
def test_a_fault_is_noticed(replicas, fault):
    """Negative twin: one stream for all steps or replicas, or another order of additions, is another digest."""
    noisy = FAMILIES["dropout"].recipe(replicas, steps=2, batch_size=2 * replicas)
    recipe = terms(replicas) if fault == "left_to_right" else noisy
    assert recipe.train().digest == answer(recipe)[0] != answer(recipe, fault)[0]


@pytest.mark.long
def test_what_is_realized_apart_is_another_program():
    """Negative twin: gradients that are realized with the update take other kernels, whose bits may be others."""
    recipe = FAMILIES["norm"].recipe(1, steps=2)

    def kernels(fault):
        GlobalCounters.reset()
        digest = answer(recipe, fault)[0]
        return GlobalCounters.kernel_count, digest

    together, apart = kernels(None), kernels("realized apart")
    assert together[1] == recipe.train().digest
    assert together[0] != apart[0]


@pytest.mark.long
def test_a_stale_device_is_noticed(monkeypatch):
    """Negative twin: if the second device kept its first weights, two devices would end in another digest."""
    from phalanx.frameworks.tinygrad.adapter import Tinygrad

    recipe = FAMILIES["mlp"].recipe(2)
    wanted = recipe.train(devices=TWO).digest
    assert wanted == recipe.train().digest
    monkeypatch.setattr(Tinygrad, "_spread", lambda self: None)  # planted
    assert recipe.train(devices=TWO).digest != wanted


@pytest.mark.long
def test_buffers_are_settled():
    """After a step a floating buffer is the mean of what replicas left, a count the first's, a constant as it was."""
    recipe = FAMILIES["norm"].recipe(2, steps=1, batch_size=8)
    model = recipe.train().model
    means = []
    with Context(TRAINING=1):
        for replica, indices in enumerate(recipe.plan.shares(0)):
            Tensor.manual_seed(recipe.seed)
            own = recipe.make_model()
            Tensor.realize(*nn.state.get_parameters(own))
            Tensor.manual_seed(recipe.plan.key(0, replica))
            own(Tensor(recipe.data[0][indices])).realize(own.norm.running_mean)
            means.append(own.norm.running_mean.numpy())
    assert np.array_equal(model.norm.running_mean.numpy(), (means[0] + means[1]) / np.float32(2))
    assert not np.array_equal(means[0], means[1])
    assert (model.norm.num_batches_tracked.item(), model.scale.numpy()) == (1, np.float32(0.7))


def test_dtypes_stay():
    """A model of 64 bits is trained in 64 bits: what float32 cannot hold is there at the end."""

    class Double:
        def __init__(self):
            self.weight = Tensor(np.array([1 + 1e-12, 2.0]))

    recipe = phalanx.Recipe(
        Double, np.eye(2), None, lambda model, x: (x * model.weight).sum() * 0.0,
        replicas=2, batch_size=2, steps=2, optimizer=functools.partial(nn.optim.SGD, lr=0.1),
    )  # fmt: skip
    weight = recipe.train(devices=TWO).params["weight"]
    assert weight.numpy().dtype == np.float64
    assert weight.numpy()[0] == 1 + 1e-12 != float(np.float32(1 + 1e-12))


def test_uneven_shares_are_not_biased():
    """Three samples over two replicas have the mean of three: 6 to the last bit, not 6.75, the mean of two means."""

    class Line:
        def __init__(self):
            self.weight = Tensor([0.0])

    def trained(replicas):
        data = np.array([[3.0], [6.0], [9.0]], np.float32)
        optimizer = functools.partial(nn.optim.SGD, lr=1.0)
        forward = lambda model, x: (x * model.weight).mean()  # noqa: E731
        recipe = phalanx.Recipe(
            Line, data, None, forward, replicas=replicas, batch_size=3, steps=1, shuffle=False, optimizer=optimizer
        )
        return float(recipe.train().params["weight"].item())

    assert [trained(replicas) for replicas in (1, 2, 3)] == [-6.0] * 3


@pytest.mark.long
def test_nothing_is_shared_with_the_caller():
    """A model that is passed in stays as it is, and neither devices nor results have memory in common with it."""
    model = Mlp()
    Tensor.realize(*nn.state.get_parameters(model))
    before = model.first.weight.numpy().copy()
    recipe = FAMILIES["mlp"].recipe(2, make_model=model)
    with recipe.start(devices=TWO) as run:
        first = next(iter(run)) and run.result().params["first.weight"]
        held = first.numpy()
        run.finish()
        last = run.result().params["first.weight"].numpy()
    assert np.array_equal(model.first.weight.numpy(), before)
    assert np.array_equal(first.numpy(), held)
    assert len({array.tobytes() for array in (before, held, last)}) == 3
    homes = itertools.combinations([model.first.weight, first, run.result().model.first.weight], 2)
    assert all(one.uop.base.buffer is not other.uop.base.buffer for one, other in homes)
    assert recipe.train().digest == run.result().digest


@pytest.mark.long
def test_the_callers_settings_stay():
    """Streams and settings of the caller are as before a run, which does not look at them."""
    recipe = FAMILIES["dropout"].recipe(1, steps=1)
    Tensor.manual_seed(5)
    wanted = Tensor.rand(3).numpy()
    Tensor.manual_seed(5)
    with Context(BEAM=0, TRAINING=0):
        result = recipe.train()
        assert helpers.TRAINING.value == 0
    assert np.array_equal(Tensor.rand(3).numpy(), wanted)
    assert result.digest == recipe.train().digest


@pytest.mark.longest
def test_flowers_one_by_one():
    """One sample per replica without an axis of its own: the same digest on one device and on three."""

    def loss_fn(output, target):
        return output.reshape(1, -1).sparse_categorical_crossentropy(target.reshape(1))

    samples = list(zip(*FAMILIES["mlp"].data, strict=True))
    recipe = FAMILIES["mlp"].recipe(4, data=samples, batch_size=None, steps=3, loss_fn=loss_fn)
    one, three = (recipe.train(devices=["CPU", "CPU:1", "CPU:2"][:count]).digest for count in (1, 3))
    assert one == three != dataclasses.replace(recipe, seed=1).train().digest


def noisy(samples):
    x, y = (np.stack(column) for column in zip(*samples, strict=True))
    return (Tensor(x) + 0.1 * Tensor.randn(*x.shape)).numpy(), y


@pytest.mark.longest
def test_what_collating_draws_is_keyed():
    """User code on the host may draw from tinygrad: its numbers follow from the replica's key, on any devices."""
    x, y = FAMILIES["mlp"].data
    recipe = FAMILIES["mlp"].recipe(2, data=list(zip(x, y, strict=True)), collate_fn=noisy)
    Tensor.manual_seed(5)
    digests = {recipe.train(devices=devices).digest for devices in (["CPU"], TWO)}
    with recipe.start() as run:
        for _ in run:
            Tensor.randn(3)  # moves the stream
        assert digests == {run.result().digest}
    assert digests != {FAMILIES["mlp"].recipe(2).train().digest}


@pytest.mark.long
def test_functions_of_an_evaluation():
    """Targets and batches are those of the evaluation's own functions; a forward_fn of its own is refused."""
    (x, y), seen = FAMILIES["mlp"].data, []

    def metric_fn(output, target):
        seen.append(target.numpy().tolist())
        return 0.0

    own = {
        "target_fn": lambda batch: batch[1] + 1,
        "collate_fn": lambda samples: tuple(np.stack([row[n] for row in samples]) for n in (0, 1)),
    }
    with FAMILIES["mlp"].recipe(2).start() as run:
        run.evaluate(metric_fn, (x[:8], y[:8]), **own)
        assert seen[0] == (y[:8] + 1).tolist()  # it is measured again, as evaluations are watched
        with pytest.raises(phalanx.UsageError, match="forward_fn in predict"):
            run.evaluate(metric_fn, (x[:8], y[:8]), forward_fn=lambda model, x: model(x))
    refused = FAMILIES["mlp"].recipe(2, loss_takes="model", loss_fn=lambda net, batch: 0)
    with pytest.raises(phalanx.UsageError, match="loss_takes is 'model', which is for torch"):
        refused.start()
    with pytest.raises(phalanx.UsageError, match="buffers is given, which is for torch"):
        FAMILIES["mlp"].recipe(2, buffers={"queue": "first"}).start()


@pytest.mark.long
def test_what_a_metric_sees():
    """Outputs and targets stay when the next chunk is computed; random numbers are the chunk's; TRAINING is off."""
    (x, y), seen = FAMILIES["mlp"].data, []

    def metric_fn(output, target):
        seen.append((output, target, helpers.TRAINING.value))
        return float(np.random.rand())

    with FAMILIES["mlp"].recipe(2).start() as run, Context(TRAINING=1):
        values = [run.evaluate(metric_fn, (x[:16], y[:16]), batch_size=4) for _ in range(3)]
    assert len(set(values)) == 1
    assert len({str(output.numpy().tolist()) for output, _, _ in seen[:4]}) == 4
    assert [target.numpy().tolist() for _, target, _ in seen[:4]] == y[:16].reshape(4, 4).tolist()
    assert {training for _, _, training in seen} == {0}
