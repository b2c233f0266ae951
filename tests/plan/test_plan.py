"""The plan: a pure function of the recipe and the step. Nothing is carried, so one may start anywhere."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.keys import evaluation_key, evaluation_sample_key, replica_key
from phalanx.plan.orders import Plan, steps_per_epoch

LOW = 2**32 - 1


def no_seeding(key):
    return contextlib.nullcontext()


def make(seeder=no_seeding, **changes):
    """A plan of 10 samples in batches of 4 for 3 replicas, or with ``changes``."""
    recipe = {"samples": 10, "replicas": 3, "batch_size": 4, "steps": 9, "seed": 0, "shuffle": True, "drop_last": False}
    return Plan(**(recipe | changes), seeder=seeder)


class WithReplacement:
    """A wrong plan: each step draws its samples without looking at the other steps."""

    steps_per_epoch = 3

    def indices(self, step):
        return np.random.default_rng(step).integers(0, 10, 4 if step % 3 < 2 else 2)


@st.composite
def recipes(draw):
    """Arguments of a plan that has at least one step an epoch."""
    samples, drop_last = draw(st.integers(1, 60)), draw(st.booleans())
    return {
        "samples": samples,
        "replicas": draw(st.integers(1, 9)),
        "batch_size": draw(st.integers(1, samples if drop_last else samples + 5)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "shuffle": draw(st.booleans()),
        "drop_last": drop_last,
    }


def epoch_of(plan, epoch):
    """The batches of one epoch."""
    first = epoch * plan.steps_per_epoch
    return [plan.indices(step) for step in range(first, first + plan.steps_per_epoch)]


def same(one, other):
    """Equal bits, shape and dtype of two arrays of indices."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


# An epoch


@settings(deadline=None, max_examples=150, derandomize=True)
@given(recipe=recipes(), epoch=st.integers(0, 2**30))
def test_an_epoch_covers_every_sample_once(recipe, epoch):
    """Every index comes exactly once; with ``drop_last`` what is left out is less than a batch, and none repeats."""
    plan = make(**recipe)
    batches = epoch_of(plan, epoch)
    seen = np.concatenate(batches)
    assert seen.dtype == np.int64
    assert len(set(seen.tolist())) == len(seen)
    assert set(seen.tolist()) <= set(range(plan.samples))
    assert {len(batch) for batch in batches[:-1]} <= {plan.batch_size}
    if plan.drop_last:
        assert len(batches[-1]) == plan.batch_size
        assert plan.samples - len(seen) < plan.batch_size
    else:
        assert len(seen) == plan.samples
    if not plan.shuffle:
        assert seen.tolist() == list(range(len(seen)))


def test_an_epoch_that_repeats_samples_is_noticed():
    """Negative twin: a plan that draws with replacement has repeats."""
    seen = np.concatenate(epoch_of(WithReplacement(), 0))
    assert len(seen) == 10
    assert len(set(seen.tolist())) < 10


def test_dropped_samples_are_not_always_the_same():
    """With ``drop_last`` every sample comes in some epoch."""
    plan = make(drop_last=True)
    assert {index for epoch in range(50) for batch in epoch_of(plan, epoch) for index in batch.tolist()} == {*range(10)}


# Starting anywhere


@settings(deadline=None, max_examples=50, derandomize=True)
@given(recipe=recipes(), step=st.integers(0, 200), steps=st.integers(0, 10))
def test_the_length_of_the_run_does_not_matter(recipe, step, steps):
    """A run can be extended: the plan of a longer one begins with the shorter one, and goes on past its end."""
    assert same(make(**recipe, steps=steps).indices(step), make(**recipe, steps=1000).indices(step))


# What the order depends on


def orders(plan, epochs=20):
    """How many of the first epochs differ from each other."""
    return len({np.concatenate(epoch_of(plan, epoch)).tobytes() for epoch in range(epochs)})


def test_epochs_differ_when_shuffled():
    """Twenty epochs of 30 samples have twenty orders; the negative twin, unshuffled, has one."""
    assert orders(make(samples=30)) == 20
    assert orders(make(samples=30, shuffle=False)) == 1


def test_seeds_differ():
    """Fifty seeds, large ones too, have fifty orders; the negative twin, unshuffled, one."""
    many = [*range(47), 2**32, 2**63, 2**64 - 1]
    shuffled = {make(samples=30, batch_size=30, seed=seed).indices(0).tobytes() for seed in many}
    plain = {make(samples=30, batch_size=30, seed=seed, shuffle=False).indices(0).tobytes() for seed in many}
    assert len(shuffled) == 50
    assert len(plain) == 1


@settings(deadline=None, max_examples=60, derandomize=True)
@given(recipe=recipes(), epoch=st.integers(0, 50), replicas=st.integers(1, 20))
def test_the_order_does_not_depend_on_replicas_or_batches(recipe, epoch, replicas):
    """The same samples come in the same order for any R; batches only cut that order."""
    plan = make(**recipe)
    step = epoch * plan.steps_per_epoch
    whole = make(**recipe | {"batch_size": plan.samples, "drop_last": False}).indices(epoch)
    cut = np.concatenate(epoch_of(plan, epoch))
    assert same(make(**recipe | {"replicas": replicas}).indices(step), plan.indices(step))
    assert same(cut, whole[: len(cut)])


# Shares


@settings(deadline=None, max_examples=150, derandomize=True)
@given(recipe=recipes(), step=st.integers(0, 200))
def test_shares_are_the_step_cut_by_array_split(recipe, step):
    """R shares, end to end the indices of the step, cut where numpy cuts; some may be empty."""
    plan = make(**recipe)
    indices, shares = plan.indices(step), plan.shares(step)
    assert len(shares) == plan.replicas
    assert same(np.concatenate(shares), indices)
    assert all(same(a, b) for a, b in zip(shares, np.array_split(indices, plan.replicas), strict=True))


def test_dealing_in_turn_is_noticed():
    """Negative twin: giving every third sample to a replica makes other shares."""
    plan = make()
    indices, shares = plan.indices(0), plan.shares(0)
    assert [len(share) for share in shares] == [2, 1, 1]
    assert not same(indices[0::3], shares[0])


# What the caller does with an answer


def survives_mutation(plan, steps=9):
    """Whether overwriting every answer leaves later answers alone."""
    before = [plan.indices(step).tobytes() for step in range(steps)]
    for step in range(steps):
        plan.indices(step)[:] = -1
    return before == [plan.indices(step).tobytes() for step in range(steps)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_overwriting_an_answer_changes_no_later_one(shuffle):
    """Returned arrays belong to the caller, within one cached epoch and across epochs."""
    plan = make(shuffle=shuffle)
    assert survives_mutation(plan, 3)
    assert survives_mutation(plan)


@pytest.mark.parametrize("shuffle", [True, False])
def test_overwriting_shares_changes_no_later_ones(shuffle):
    """Shares belong to the caller as well."""
    plan = make(shuffle=shuffle)
    before = plan.indices(0).tobytes()
    for share in plan.shares(0):
        share[:] = -1
    assert plan.indices(0).tobytes() == before
    assert np.concatenate(plan.shares(0)).tobytes() == before


def test_views_of_a_kept_order_are_noticed():
    """Negative twin: a plan that hands out its own memory is changed by the caller."""

    class Leaky:
        kept = np.arange(36)

        def indices(self, step):
            return self.kept[4 * step : 4 * step + 4]

    assert not survives_mutation(Leaky())


@pytest.mark.parametrize("step", [-1, -3, -(10**9)])
def test_negative_steps_are_refused(step):
    """Steps count from 0; Python's counting from the end is not meant."""
    with pytest.raises(IndexError, match=str(step)):
        make().indices(step)
    with pytest.raises(IndexError, match=str(step)):
        make().shares(step)


# Arithmetic


@pytest.mark.long
def test_steps_per_epoch_counts_batches():
    """As many steps as slices of the data; with ``drop_last`` as many as full ones."""
    for samples, batch_size in itertools.product(range(1, 41), range(1, 46)):
        lengths = [len(range(samples)[start : start + batch_size]) for start in range(0, samples, batch_size)]
        assert steps_per_epoch(samples, batch_size, drop_last=False) == len(lengths)
        assert steps_per_epoch(samples, batch_size, drop_last=True) == lengths.count(batch_size)
        plan = make(samples=samples, batch_size=batch_size)
        assert plan.steps_per_epoch == len(lengths)
        assert [len(plan.indices(step)) for step in range(len(lengths))] == lengths


@settings(deadline=None, max_examples=100, derandomize=True)
@given(recipe=recipes(), step=st.integers(0, 10**6))
def test_epochs_are_counted_from_zero(recipe, step):
    """A step belongs to the epoch whose steps it lies among."""
    plan = make(**recipe)
    first = plan.epoch(step) * plan.steps_per_epoch
    assert first <= step < first + plan.steps_per_epoch


@pytest.mark.long
def test_a_plan_is_compared_by_its_recipe():
    """Equal recipes have equal plans, whatever was asked of them; another seed makes another plan."""
    asked = make()
    asked.indices(7)
    assert asked == make(seeder=contextlib.nullcontext)
    assert asked != make(seed=1)


# Keys


def low_halves(function, replicas, steps=400):
    """How many different low halves the keys of all replica-steps have."""
    return len({function(step, replica) & LOW for step in range(steps) for replica in range(replicas)})


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2, 3, 8, 17])
def test_each_replica_step_has_a_key_of_its_own(replicas):
    """No two replica-steps of a run share the low half of their keys."""
    assert low_halves(lambda step, replica: replica_key(7, step, replica, replicas), replicas) == 400 * replicas


def test_a_key_shared_by_replica_steps_is_noticed():
    """Negative twin: step + replica gives replica 1 of a step the key of replica 0 of the next."""
    assert low_halves(lambda step, replica: replica_key(7, step + replica, 0, 3), 3) < 1200


def test_seeding_gets_the_key_of_the_replica_step():
    """``seeded`` hands the replica's key to the seeder and enters nothing by itself."""
    asked = []

    def note(key):
        asked.append(key)
        return contextlib.nullcontext("inside")

    plan = make(note, seed=5)
    with plan.seeded(4, 2) as inside:
        assert inside == "inside"
    with plan.seeded_sample(4, 9):
        pass
    assert asked == [replica_key(5, 4, 2, 3), plan.sample_key(4, 9)]


def test_a_sample_has_one_key_an_epoch():
    """Whoever reads a sample, at whichever step of the epoch, for any R: one key; another one in each epoch."""
    keyed = {
        (epoch, index): {
            make(replicas=replicas).sample_key(3 * epoch + position, index)
            for replicas, position in itertools.product([1, 3, 8], range(3))
        }
        for epoch, index in itertools.product(range(20), range(10))
    }
    assert {len(found) for found in keyed.values()} == {1}
    assert len(set.union(*keyed.values())) == 200
    assert len({key & LOW for found in keyed.values() for key in found}) == 200


def test_a_key_by_step_would_be_noticed():
    """Negative twin: a sample's key that came from the step would change within the epoch."""
    plan = make()
    assert len({replica_key(0, step, 9, plan.samples) for step in range(plan.steps_per_epoch)}) == 3


def test_training_and_evaluation_share_no_key():
    """Replica-steps, samples, evaluation chunks and evaluation samples draw from streams of their own."""
    plan = make(batch_size=10)
    families = [
        {replica_key(0, step, 0, 1) for step in range(1000)},
        {plan.sample_key(epoch, index) for epoch in range(100) for index in range(10)},
        {evaluation_key(0, chunk) for chunk in range(1000)},
        {evaluation_sample_key(0, index) for index in range(1000)},
    ]
    assert len(set.union(*families)) == 4000
