"""Replicas define the answer, workers define only the speed: the same tests for every framework."""

import dataclasses
import itertools
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

import phalanx
from tests.engines.deaths import PLACES, Trapped, sprung
from tests.engines.moving import hurry, moves, turn_back
from tests.sampling import cover, sample
from tests.state.runs import ROOT

PROCESSES = ("torch", "jax")  # those that compute in worker processes, too
KITS = (*PROCESSES, "tinygrad")
EVERY = (1, 2, 3, 5, 8)
STEPS = 6
ABSENT_CLASS = 2
FAMILIES = {
    "torch": ["lenet", "transformer", "conv_norm", "masked_tokens"],
    "jax": ["masked_tokens", "dropout", "bfloat16", "whole_loss"],
    "tinygrad": ["dropout", "norm", "tied", "masked", "whole_loss"],
}
OPTIMIZERS = {
    "torch": ["sgd_nesterov", "adamw", "adafactor"],
    "jax": ["noise", "adam_schedule", "rates", "unless_nan"],
    "tinygrad": ["sgd", "adam", "lamb", "two"],
}


MORE = [pytest.param(kit, name, marks=pytest.mark.campaign) for kit, name in (("jax", "lenet"), ("tinygrad", "conv"))]


def with_kits(names, pairs):
    """Cases that each name the kit that they are tried with, before other values."""
    return pytest.mark.parametrize(("kit", *names), pairs, indirect=["kit"])


def of_each(name, choices, count=1):
    """Pairs of a kit and one of its choices; so many of each kit's are drawn."""
    pairs = {kit: [(kit, choice) for choice in choices[kit]] for kit in choices}
    return [case for kit in choices for case in sample(f"{name} of {kit}", pairs[kit], count)]


def in_processes(function):
    """For frameworks that have worker processes."""
    return pytest.mark.parametrize("kit", PROCESSES, indirect=True)(function)


def course(recipe, metric=None, **options):
    """What must not change: digest, losses, and what an evaluation of thirteen samples gave, each to the last bit."""
    with recipe.start(**options) as run:
        run.finish()
        held_out = tuple(column[:13] for column in recipe.data)
        value = None if metric is None else run.evaluate(metric, held_out, batch_size=3).hex()
        result = run.result()
    return result.digest, [loss.hex() for loss in result.loss_history], value


def same(kit, recipe, workers, metric=None):
    """Compare workers, or devices, with one of them in one process; returns what both answered."""
    wanted = course(recipe, metric, engine="inline")
    assert course(recipe, metric, **kit.spread(workers)) == wanted, f"{workers} workers"
    return wanted


@pytest.mark.long
@pytest.mark.cases(1)
@with_kits(["workers"], of_each("any number of workers", dict.fromkeys(KITS, EVERY)))
def test_any_number_of_workers(kit, workers):
    """Eight replicas of uneven shares, and a last batch with empty ones: the same on 1 to 8 workers."""
    recipe = kit.recipe(8, batch_size=13, steps=5, drop_last=False, optimizer=kit.adaptive)
    assert {len(share) for step in range(2) for share in recipe.plan.shares(step)} == {0, 1, 2}
    same(kit, recipe, workers, kit.metric)


@pytest.mark.long
@with_kits(["name"], [*of_each("families", FAMILIES), *MORE])
def test_families(kit, name):
    """Every model, with five replicas, ends in the same state, losses and evaluation on three workers."""
    same(kit, kit.recipe(5, name), 3, None if name == "whole_loss" else kit.metric)


@pytest.mark.long
@with_kits(["name"], of_each("optimizers", OPTIMIZERS))
def test_optimizers(kit, name):
    """An optimizer over what a worker owns has the bits of one over everything."""
    same(kit, kit.recipe(3, steps=4, optimizer=kit.optimizers[name]), 2)


@pytest.mark.long
@with_kits(["replicas"], cover("loop by hand", KITS, [1, 4]))
def test_the_loop_by_hand(kit, replicas):
    """Two workers, or the only one, end in the bits of a loop that anyone could write."""
    recipe = kit.recipe(replicas, optimizer=kit.adaptive)
    digest, losses = kit.answer(recipe)[:2]
    result = recipe.train(**kit.spread(min(replicas, 2)))
    assert (result.digest, result.loss_history) == (digest, losses)


@pytest.mark.long
def test_another_answer(kit):
    """Other replicas, another seed, or one step fewer is another digest: equal ones mean something."""
    recipes = [kit.recipe(2, "dropout"), kit.recipe(3, "dropout"), kit.recipe(2, "dropout", seed=1)]
    recipes.append(kit.recipe(2, "dropout", steps=recipes[0].plan.steps - 1))
    assert len({course(recipe, engine="inline")[0] for recipe in recipes}) == 4


@pytest.mark.long
@pytest.mark.parametrize("workers", sample("clipping of kits", [2, 3], 1))
def test_clipping(kit, workers):
    """The norm is that of all gradients, wherever they are owned."""
    assert same(kit, kit.recipe(5, max_norm=0.05), workers)[0] != course(kit.recipe(5), engine="inline")[0]


@pytest.mark.long
@with_kits(["on_nonfinite"], cover("not finite, any kit", KITS, ["skip", "ignore"]))
def test_steps_that_are_not_finite(kit, on_nonfinite):
    """A step with NaN in one share is skipped by all workers, or taken by all of them."""
    x, y = (np.asarray(column).copy() for column in kit.recipe(1).data)
    x[11, 0] = np.nan
    recipe = kit.recipe(5, data=(x, y), on_nonfinite=on_nonfinite)
    assert "nan" in same(kit, recipe, 2)[1]


@pytest.mark.long
def test_steps_in_which_nothing_counts(kit):
    """Where every replica has weight 0 the step is skipped by all workers; a run that may not skip says how."""
    x, y = (np.asarray(column).copy() for column in kit.recipe(1).data)
    y[:8] = ABSENT_CLASS  # the first batch, and no more of the later ones than some
    mean = kit.families["mlp"].loss_fn
    loss = lambda output, target: (mean(output, target), (target != ABSENT_CLASS).sum())  # noqa: E731
    recipe = kit.recipe(3, data=(x, y), loss_fn=loss, shuffle=False, on_nonfinite="skip", steps=2)
    losses = same(kit, recipe, 2)[1]
    assert ["nan" in each for each in losses] == [True, False]
    untrained, skipped, trained = (weights(dataclasses.replace(recipe, steps=steps)) for steps in (0, 1, 2))
    assert untrained == skipped != trained
    with pytest.raises(phalanx.RunError, match=r"every replica of step 0 has weight 0.*on_nonfinite='skip' goes on"):
        dataclasses.replace(recipe, on_nonfinite="stop").train(engine="inline")


def weights(recipe):
    """The bytes of all parameters after a run."""
    with recipe.start(engine="inline") as run:
        run.finish()
        values = [value.numpy() if hasattr(value, "numpy") else value for value in run.params.values()]
    return [np.asarray(value).tobytes() for value in values]


def halves(epoch, generator):
    """All batches of an epoch, as a sampler of the user's returns them."""
    order = generator.permutation(13)
    return [order[: 4 + epoch], order[4 + epoch :]]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["weights", "batch_sampler"])
def test_samples_that_are_drawn(kit, kind):
    """Weights and a batch_sampler decide the samples in every framework: as by hand, and on any number of workers."""
    even = kit.recipe(3, steps=4)
    weights = {"weights": range(even.plan.samples)}
    changes = weights if kind == "weights" else {"batch_size": 32, "drop_last": False, "batch_sampler": halves}
    recipe = kit.recipe(3, steps=4, **changes)
    answer = kit.answer(recipe)
    assert same(kit, recipe, 2)[:2] == (answer[0], [loss.hex() for loss in answer[1]])
    assert answer[0] != kit.answer(even)[0]


@pytest.mark.long
@pytest.mark.parametrize("kit", ["jax", "tinygrad"], indirect=True)
def test_what_only_models_of_torch_have(kit):
    """Parameters cannot be frozen in mid-run elsewhere; that is refused by name, and the run goes on."""
    recipe = kit.recipe(2, steps=2)
    with recipe.start(engine="inline") as run:
        with pytest.raises(phalanx.UsageError, match="freeze and thaw are for models of torch"):
            run.freeze(next(iter(run.params)))
        run.finish()
        assert run.result().digest == kit.answer(recipe)[0]


@pytest.mark.long
def test_batches_that_the_caller_brings(kit):
    """Batches brought by hand to three workers end in the planned run's bits."""
    recipe = kit.recipe(5)
    with kit.recipe(5, data=None, steps=None).start(**kit.spread(3)) as run:
        for step in range(recipe.plan.steps):
            run.step(tuple(column[recipe.plan.indices(step)] for column in recipe.data))
        assert run.result().digest == recipe.train(engine="inline").digest


@pytest.mark.long
def test_the_state_at_every_report(kit):
    """While a report is held the state is exactly that after its step, and taking it changes nothing."""
    recipe = kit.recipe(4, optimizer=kit.adaptive)
    seen = []
    with recipe.start(**kit.spread(2)) as run:
        for report in run:
            seen.append(run.result().digest)
            assert report.step == len(seen) - 1
    wanted = [kit.recipe(4, steps=steps, optimizer=kit.adaptive).train(engine="inline").digest for steps in (1, 3)]
    assert [seen[0], seen[2]] == wanted


@pytest.mark.long
@in_processes
def test_moving_to_workers_and_back(kit, monkeypatch):
    """One process, then two workers, then one process again: the bits of one process."""
    recipe = kit.recipe(3, steps=20, optimizer=kit.adaptive)
    hurry(monkeypatch, recipe)
    turn_back(monkeypatch)
    counts, result = moves(recipe)
    assert [count for count, _ in itertools.groupby(counts)] == [1, 2, 1]
    wanted = recipe.train(engine="inline")
    assert (result.digest, result.loss_history) == (wanted.digest, wanted.loss_history)


@pytest.mark.long
def test_reports(kit):
    """Loss and norm of every step are the same for any number of workers."""

    def reports(**options):
        with kit.recipe(5).start(**options) as run:
            return [(report.loss.hex(), report.grad_norm.hex(), report.samples) for report in run]

    assert reports(engine="inline") == reports(**kit.spread(3))


@pytest.mark.long
def test_the_recipes_own_loss(kit):
    """Over the samples of a step it is what the next step has, by its weights; over others it is another."""
    recipe = kit.recipe(1, shuffle=False)
    with recipe.start() as run:
        samples = len(recipe.plan.indices(0))
        value = run.evaluate("loss", tuple(column[:samples] for column in recipe.data))
        other = run.evaluate("loss", tuple(column[1:samples] for column in recipe.data))
        assert value == pytest.approx(run.step(), rel=1e-5)
        assert other != pytest.approx(value, rel=1e-5)


@pytest.mark.long
def test_evaluation_after_each_epoch(kit):
    """Values in the middle of a run are the same, and taking them changes nothing that follows."""
    recipe = kit.recipe(5, steps=None, epochs=2)
    evaluation = phalanx.Evaluation(kit.metric, tuple(column[:13] for column in recipe.data), batch_size=3)
    one = recipe.train(engine="inline", evaluation=evaluation)
    other = recipe.train(**kit.spread(2), evaluation=evaluation)
    assert len(one.metric_history) == 2
    assert list(map(dataclasses.astuple, one.metric_history)) == list(map(dataclasses.astuple, other.metric_history))
    assert one.digest == other.digest == recipe.train(engine="inline").digest


@pytest.mark.long
@with_kits(["place"], of_each("deaths", dict.fromkeys(PROCESSES, PLACES), 2))
def test_a_death_at_every_named_point(kit, tmp_path, place):
    """SIGKILL of either worker at each point of the protocol: the digest is that of a quiet run."""
    plain = kit.families["plain"]
    step = 1 if place == "half saved" else 3  # the first snapshot is always due there
    wanted = plain.recipe(4, steps=STEPS, optimizer=kit.adaptive).train(engine="inline")
    trap = Trapped(plain.make_model, tmp_path, PLACES.index(place) % 2, step, place, framework=kit.name)
    result = plain.recipe(4, steps=STEPS, optimizer=kit.adaptive, make_model=trap).train(workers=2, engine="processes")
    assert (result.digest, result.loss_history) == (wanted.digest, wanted.loss_history)
    assert sprung(tmp_path) == 1


@pytest.mark.long
@with_kits(["before", "after"], cover("going on", KITS, [(1, 2), (2, 3), (3, 1)]))
def test_going_on_with_other_workers(kit, tmp_path, before, after):
    """A run goes on from its directory with other workers, to the bits of one that was never interrupted."""
    whole = kit.recipe(4, steps=STEPS, optimizer=kit.adaptive).train(engine="inline")
    kit.recipe(4, steps=2, optimizer=kit.adaptive).train(run_dir=tmp_path, **kit.engine_of(before))
    resumed = kit.recipe(4, steps=STEPS, optimizer=kit.adaptive).train(run_dir=tmp_path, **kit.engine_of(after))
    assert resumed.resumed_from == 2
    assert (resumed.digest, resumed.loss_history) == (whole.digest, whole.loss_history)


DRIVER = """
import os, signal, sys
from tests.contract.kits import kit_of
kit = kit_of({name!r})
with kit.recipe(4, steps=6, optimizer=kit.adaptive).start(
    **kit.spread(2), run_dir={run_dir!r}, snapshot_every=1
) as run:
    for report in run:
        if report.step == 3:
            run.result()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.campaign
def test_a_driver_that_is_killed(kit, tmp_path):
    """SIGKILL of the whole run in its fourth step: the same call again ends in the same bits."""
    code = DRIVER.format(name=kit.name, run_dir=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, timeout=500)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    resumed = kit.recipe(4, steps=STEPS, optimizer=kit.adaptive).train(engine="inline", run_dir=tmp_path)
    assert resumed.resumed_from >= 3
    assert resumed.digest == kit.recipe(4, steps=STEPS, optimizer=kit.adaptive).train(engine="inline").digest


@pytest.mark.long
@pytest.mark.cases(1)
def test_a_damaged_snapshot(kit, tmp_path):
    """One flipped bit in the newest snapshot: the run goes on from the one before, to the same bits, and says so."""
    whole = kit.recipe(4, steps=STEPS, optimizer=kit.adaptive).train(engine="inline")
    kit.recipe(4, steps=3, optimizer=kit.adaptive).train(engine="inline", run_dir=tmp_path, snapshot_every=1)
    newest = max(pathlib.Path(tmp_path).rglob("*.safetensors"), key=lambda path: str(path.parent))
    damaged = bytearray(newest.read_bytes())
    damaged[-3] ^= 1
    newest.write_bytes(damaged)
    with pytest.warns(UserWarning, match="step-"):
        resumed = kit.recipe(4, steps=STEPS, optimizer=kit.adaptive).train(engine="inline", run_dir=tmp_path)
    assert resumed.resumed_from == 2
    assert resumed.digest == whole.digest


@pytest.mark.long
@pytest.mark.cases(2)
def test_user_errors_have_an_address(kit):
    """What a loss raises in a worker names step, replica and samples, and carries the state."""

    def broken(output, target):
        raise KeyError("weights")

    with pytest.raises(phalanx.WorkerError, match="step 0, replica 0") as caught:
        kit.recipe(2, loss_fn=broken).train(**kit.spread(2))
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.result.steps == 0


BAD = {
    "replicas": ({"replicas": 0}, {}, "replicas is 0"),
    "batch": ({"batch_size": 0}, {}, "batch_size is 0"),
    "threads": ({"threads": 0}, {}, "threads is 0"),
    "workers": ({}, {"workers": 9}, "workers is 9"),
    "engine": ({}, {"engine": "magic"}, "engine is 'magic'"),
    "steps": ({"steps": -1}, {}, "steps is -1"),
    "model": ({"make_model": lambda: 3}, {}, "make_model returned"),
    "optimizer": ({"optimizer": lambda *named: 3}, {}, "optimizer returned"),
    "loss": ({"loss_fn": lambda output, target: "a"}, {}, "loss_fn returned"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(kit, name):
    """Wrong calls are refused with the argument's name and value, whatever the framework."""
    changes, options, message = BAD[name]
    with pytest.raises(phalanx.PhalanxError, match=message):
        kit.recipe(**{"replicas": 2, **changes}).train(**({"engine": "inline"} | options))
