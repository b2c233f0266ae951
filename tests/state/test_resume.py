"""A run that was interrupted goes on to the same bits: killed anywhere, with other workers, or as a longer run."""

import collections
import contextlib
import functools
import itertools
import json
import random
import signal
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.checkpoint import snapshot
from phalanx.frameworks.torch import adapter
from phalanx.frameworks.torch.optimizer import Update
from tests.engines.deaths import hunted
from tests.families import (
    ADAMW,
    DATA,
    FAMILIES,
    FEATURES,
    IMAGES,
    OPTIMIZERS,
    SCHEDULERS,
    Elsewhere,
    conv_norm,
    mlp,
    muon_and_adamw,
)
from tests.sampling import sample
from tests.state.runs import (
    accuracy,
    assert_same,
    contents,
    drivers,
    engine_of,
    folder_of,
    norm_recipe,
    steps_in,
)

STEPS = 30
PAIRS = list(itertools.product([1, 2, 3], repeat=2))  # workers before and after
SPREAD = random.Random(2).sample(PAIRS * 2 + PAIRS[:3] * 4, STEPS)  # a driver that starts workers takes its time


@pytest.fixture(scope="module")
def wanted():
    """What the run would have been."""
    return norm_recipe(STEPS).train(engine="inline")


@pytest.fixture(scope="module")
def drive():
    """See ``drivers``."""
    with drivers() as function:
        yield function


@pytest.mark.long
@pytest.mark.parametrize("step", [*sample("killed drivers", range(STEPS - 1), 3), STEPS - 1])
def test_the_driver_is_killed_after_every_step(tmp_path, wanted, drive, step):
    """SIGKILL after step k, in the midst of saving or just after it; the run ends as if nothing had been."""
    settled = bool(step % 2)
    before, after = SPREAD[step]
    assert drive(step, before, tmp_path, settled=settled) == -signal.SIGKILL
    found = phalanx.load(tmp_path).step
    assert found in ([step + 1] if settled else [max(0, step - 1), step])
    seen = []
    result = norm_recipe(STEPS).train(
        run_dir=tmp_path, callbacks=[lambda report: seen.append(report.step)], **engine_of(after)
    )
    assert seen == list(range(found, STEPS))
    assert_same(result, wanted)


def undone(undo):
    """A fault: what an adopted state has written is undone by ``undo(model, updates, before)``."""

    def plant(monkeypatch):
        original = adapter.adopt

        def adopt(model, updates, state):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            original(model, updates, state)
            undo(model, updates, before)

        monkeypatch.setattr(adapter, "adopt", adopt)  # planted

    return plant


def forget_schedule(monkeypatch):
    monkeypatch.setattr(Update, "take_options", lambda update, options: None)  # planted


FORGOTTEN = {
    "buffers": undone(
        lambda model, updates, before: model.load_state_dict({**before, **dict(model.named_parameters())})
    ),
    "schedule": forget_schedule,
    "moments": undone(lambda model, updates, before: [optimizer.state.clear() for optimizer in updates.optimizers]),
    "weights": undone(lambda model, updates, before: model.load_state_dict(before)),
}


@pytest.mark.long
@pytest.mark.usefixtures("computed_once")
@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_is_not_put_back_shows_in_the_digest(tmp_path, monkeypatch, what):
    """The tests here can fail: without buffers, schedule, moments or weights, the digest differs."""
    norm_recipe(3).train(run_dir=tmp_path, engine="inline")
    (tmp_path / "next.json").unlink()  # which would show some of them before a step is done
    FORGOTTEN[what](monkeypatch)
    result = norm_recipe(6).train(run_dir=tmp_path, engine="inline")
    assert result.digest != norm_recipe(6).train(engine="inline").digest


def assert_snapshots_are_right(run_dir, steps):
    """Weights, buffers, losses and what optimizers keep are those of a run of so many steps."""
    with norm_recipe(steps).start(engine="inline") as run:
        for step in range(steps + 1):
            if step:
                next(run)
            if step not in steps_in(run_dir):
                continue
            run.save(run_dir / "alone" / str(step))
            found, alone = (
                contents(snapshot.read(place)) for place in (folder_of(run_dir, step), run_dir / "alone" / str(step))
            )
            assert found == alone, step


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_snapshot_is_the_state_of_its_step(tmp_path, workers):
    """While the run goes on, each snapshot is copied: it is that of a run of so many steps, bit for bit."""
    norm_recipe(12).train(run_dir=tmp_path, snapshot_every=1, keep_snapshots=99, **engine_of(workers))
    assert steps_in(tmp_path) == list(range(13))
    assert_snapshots_are_right(tmp_path, 12)


@pytest.mark.long
def test_snapshots_while_workers_die(tmp_path):
    """Workers are ended every few steps, and replaced, while snapshots are written: all of them are right."""
    rng = random.Random(1)
    options = {"run_dir": tmp_path, "snapshot_every": 3, "keep_snapshots": 99, "workers": 3, "engine": "processes"}
    with norm_recipe(90).start(**options) as run:
        next(run)
        with hunted(run, lambda: rng.uniform(0.2, 0.5)) as ended:
            run.finish()
        result = run.result()
    assert ended
    assert steps_in(tmp_path) == list(range(0, 91, 3))
    assert_same(result, norm_recipe(90).train(engine="inline"))
    assert_snapshots_are_right(tmp_path, 90)


def halved(tmp_path, give, first=3, steps=5):
    """Train for some steps, go on to the end, and compare with a run in one go."""
    give(steps=first).train(run_dir=tmp_path, engine="inline")
    assert phalanx.load(tmp_path).step == first
    result = give(steps=steps).train(run_dir=tmp_path, engine="inline")
    assert_same(result, give(steps=steps).train(engine="inline"))
    return result


@pytest.mark.long
@pytest.mark.parametrize("name", sample("resumed families", FAMILIES, 5))
def test_every_family(tmp_path, name):
    """Weights and buffers of every kind and dtype come back as they were."""
    family = FAMILIES[name]
    halved(tmp_path, functools.partial(family.recipe, family.replicas[0]), first=2, steps=4)


@pytest.mark.parametrize("name", sample("resumed optimizers", [*OPTIMIZERS, "muon_and_adamw"], 4))
def test_every_optimizer(tmp_path, name):
    """The state of torch's optimizers comes back as it was, and of several at once."""
    optimizer = OPTIMIZERS.get(name, muon_and_adamw)
    halved(tmp_path, functools.partial(FAMILIES["mlp"].recipe, 3, optimizer=optimizer))


@pytest.mark.parametrize("name", sample("resumed schedulers", SCHEDULERS, 4))
def test_every_scheduler(tmp_path, name):
    """Schedules go on where they were, ReduceLROnPlateau and nested ones too."""
    halved(tmp_path, functools.partial(FAMILIES["mlp"].recipe, 3, scheduler=SCHEDULERS[name]))


def test_a_schedule_of_a_rate_that_is_a_tensor(tmp_path):
    """Rates in tensors are scheduled on."""
    give = functools.partial(
        FAMILIES["mlp"].recipe, 3, optimizer=OPTIMIZERS["adam_tensor_lr"], scheduler=SCHEDULERS["exponential"]
    )
    halved(tmp_path, give)


@pytest.mark.long
@pytest.mark.parametrize("name", sample("resumed data", DATA, 4))
def test_every_kind_of_data(tmp_path, name):
    """Sample order and random draws depend on the step alone, so nothing of them has to be kept."""
    halved(tmp_path, lambda steps: FAMILIES["mlp"].recipe(3, steps=steps, **DATA[name]))


def test_milestones_stay_numbers(tmp_path):
    """MultiStepLR counts its milestones by integers, which JSON alone would turn into text."""
    give = functools.partial(FAMILIES["mlp"].recipe, 3, scheduler=SCHEDULERS["multi_step"])
    give(steps=2).train(run_dir=tmp_path, engine="inline")
    with give(steps=5).start(run_dir=tmp_path, engine="inline") as run:
        milestones = run._engine._framework._updates._schedules._schedulers[0].milestones
        assert milestones == collections.Counter([1, 3, 4])
        assert type(milestones) is collections.Counter
        assert all(type(key) is int for key in milestones)


def test_a_skipped_first_step(tmp_path):
    """A run whose first step was skipped goes on without torch's warning about the order of its calls."""
    x, y = FEATURES[0].clone(), FEATURES[1]
    x[0] = torch.nan
    data = {"data": (x, y), "shuffle": False, "on_nonfinite": "skip", "scheduler": SCHEDULERS["step"]}
    halved(tmp_path, lambda steps: FAMILIES["mlp"].recipe(3, steps=steps, **data), first=1)


def test_losses_that_are_not_finite(tmp_path):
    """NaN and infinite losses are kept as they were."""
    x, y = FEATURES[0].clone(), FEATURES[1]
    x[0] = torch.nan
    give = functools.partial(FAMILIES["mlp"].recipe, 3, data=(x, y), shuffle=False, on_nonfinite="ignore")
    give(steps=2).train(run_dir=tmp_path, engine="inline")
    result = give(steps=4).train(run_dir=tmp_path, engine="inline")
    alone = give(steps=4).train(engine="inline")
    assert (repr(result.loss_history), result.digest) == (repr(alone.loss_history), alone.digest)


@pytest.mark.long
def test_from_engine_to_engine(tmp_path, wanted):
    """One directory, each part of the run in another engine."""
    parts = [{"engine": "inline"}, {"engine": "processes", "workers": 2}, {}, {"engine": "processes", "workers": 3}]
    for number, options in enumerate([*parts, {"engine": "inline"}]):
        result = norm_recipe(6 * (number + 1)).train(run_dir=tmp_path, **options)
    assert_same(result, wanted)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), sample("resumed batches", [(1, 2), (2, 1), (3, 2)], 1))
def test_batches_that_the_caller_brings(tmp_path, before, after):
    """Without data, the caller goes on with the batch of ``run.steps``."""
    recipe = phalanx.Recipe(mlp, None, F.cross_entropy, replicas=3, optimizer=ADAMW)
    generator = torch.Generator().manual_seed(5)
    batches = [(torch.randn(9, 5, generator=generator), FEATURES[1][:9]) for _ in range(8)]

    def train(most, **options):
        with recipe.start(**options) as run:
            while run.steps < most:
                run.step(batches[run.steps])
            return run.result()

    train(3, run_dir=tmp_path, **engine_of(before))
    assert_same(train(8, run_dir=tmp_path, snapshot_every=2, **engine_of(after)), train(8, engine="inline"))


EVALUATION = phalanx.Evaluation(accuracy, IMAGES)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_evaluations_are_kept(tmp_path, workers):
    """What was measured before the interruption is in metric_history, once, as in a run in one go."""
    alone = norm_recipe(9).train(engine="inline", evaluation=EVALUATION)
    with norm_recipe(9).start(run_dir=tmp_path, evaluation=EVALUATION, **engine_of(workers)) as run:
        for _ in range(5):
            next(run)
    result = norm_recipe(9).train(run_dir=tmp_path, evaluation=EVALUATION, **engine_of(workers))
    assert result.metric_history == alone.metric_history
    assert_same(result, alone)


def odd_metric(output, target):
    return {2: torch.tensor(torch.nan), 4: torch.tensor(torch.inf)}.get(len(target), torch.tensor(0.1))


def test_odd_metrics_are_kept(tmp_path):
    """NaN, infinity and 0.1 come back to the bit."""
    with norm_recipe(1).start(run_dir=tmp_path, engine="inline") as run:
        for count in (2, 4, 3):
            run.evaluate(odd_metric, (IMAGES[0][:count], IMAGES[1][:count]))
        next(run)
        alone = run.result()
    result = norm_recipe(1).train(run_dir=tmp_path, engine="inline")
    assert repr(result.metric_history) == repr(alone.metric_history)
    assert len(alone.metric_history) == 3


@pytest.mark.campaign
@pytest.mark.parametrize("workers", [1, 2])
def test_no_evaluation_is_lost_to_a_snapshot(tmp_path, monkeypatch, workers):
    """Workers may run ahead to the end of an epoch while a snapshot is taken: it is evaluated all the same."""
    monkeypatch.setattr("phalanx.checkpoint.saver.SECONDS", 0.01)
    monkeypatch.setattr("phalanx.checkpoint.saver.SHARE", 1e9)
    give = functools.partial(FAMILIES["mlp"].recipe, 2, batch_size=2, epochs=60)  # epochs of ten steps
    evaluation = phalanx.Evaluation(accuracy, FEATURES)
    result = give().train(run_dir=tmp_path, evaluation=evaluation, **engine_of(workers))
    assert [kept.steps for kept in result.metric_history] == list(range(10, 601, 10))
    assert_same(result, give().train(engine="inline"))


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_no_step_is_missing_in_the_log(tmp_path, monkeypatch, workers):
    """Whenever snapshots are taken, the log has every step once, in order."""
    monkeypatch.setattr("phalanx.checkpoint.saver.SECONDS", 0.01)
    monkeypatch.setattr("phalanx.checkpoint.saver.SHARE", 1e9)
    FAMILIES["mlp"].recipe(2, steps=600).train(run_dir=tmp_path, **engine_of(workers))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(600))
    assert sum(event["event"] == "snapshot" for event in events) > 3


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_finished_run_again(tmp_path, workers):
    """It returns the same, and computes nothing; with fewer steps it has another answer, and is refused."""
    seen = []
    first = norm_recipe(4).train(run_dir=tmp_path, engine="inline")
    options = {"run_dir": tmp_path, "callbacks": [seen.append], **engine_of(workers)}
    assert_same(norm_recipe(4).train(**options), first)
    with pytest.raises(phalanx.UsageError, match="run of 4 steps, and the recipe has 3; raise steps"):
        norm_recipe(3).train(**options)
    assert seen == []


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_batches_beyond_the_plan(tmp_path, workers):
    """A run that had gone beyond its planned steps on brought batches goes on; planned steps beyond it are refused."""
    images, labels = IMAGES

    def bring(run_dir, *numbers, steps=3):
        with norm_recipe(steps).start(run_dir=run_dir, **engine_of(workers)) as run:
            run.finish()
            for number in numbers:
                run.step((images[:8] + number, labels[:8]))
        return run.result()

    whole = bring(tmp_path / "whole", 0, 1, 2)
    bring(tmp_path / "parts", 0)
    bring(tmp_path / "parts", 1)
    again = bring(tmp_path / "parts", 2)
    assert_same(again, whole)
    assert (again.steps, again.resumed_from, again.chain) == (6, 5, whole.chain)
    assert bring(tmp_path / "other", 0, 2, 1).digest != whole.digest
    with pytest.raises(phalanx.UsageError, match="run of 6 steps, and the recipe has 2; raise steps"):
        bring(tmp_path / "parts", steps=2)
    assert norm_recipe(3).train(run_dir=tmp_path / "parts", **engine_of(workers)).digest == whole.digest


def test_resume_false(tmp_path):
    """A directory that was used is refused; one that was not is fine."""
    norm_recipe(2).train(run_dir=tmp_path, engine="inline", resume=False)
    with pytest.raises(phalanx.UsageError, match=r"run of 2 steps.*resume is False"):
        norm_recipe(2).train(run_dir=tmp_path, engine="inline", resume=False)
    norm_recipe(3).train(run_dir=tmp_path, engine="inline")


def test_a_refused_start_leaves_the_directory_free(tmp_path):
    """A run that could not begin holds no lock."""

    def no_model():
        raise ValueError("no")

    with pytest.raises(phalanx.UsageError, match="make_model raised"):
        norm_recipe(4, make_model=no_model).train(run_dir=tmp_path, engine="inline")
    norm_recipe(4).train(run_dir=tmp_path, engine="inline")


def test_an_optimizer_with_hidden_state(tmp_path):
    """An optimizer that keeps state where no snapshot looks is refused, or told of, but never silently wrong."""
    give = functools.partial(FAMILIES["mlp"].recipe, 3, optimizer=Elsewhere)
    try:
        give(steps=3).train(run_dir=tmp_path, engine="inline")
        result = give(steps=6).train(run_dir=tmp_path, engine="inline")
    except (phalanx.PhalanxError, UserWarning):
        return
    assert_same(result, give(steps=6).train(engine="inline"))


class Expanded(nn.Module):
    """A constant buffer in memory that cannot be written element by element."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor([2.0]).expand(3))

    def forward(self, x):
        return self.body(x) * self.scale


def test_a_buffer_that_cannot_be_written(tmp_path):
    """A constant that was expanded is left alone, as it is equal."""
    halved(tmp_path, functools.partial(FAMILIES["mlp"].recipe, 3, make_model=Expanded))


class Wide(nn.Module):
    """A complex parameter of double precision."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.weight).abs()


def test_a_dtype_that_snapshots_have_not(tmp_path):
    """It is refused, or it works; but no run goes on without the snapshots that were asked for."""
    give = functools.partial(FAMILIES["mlp"].recipe, 3, make_model=Wide)
    with contextlib.suppress(phalanx.UsageError):
        halved(tmp_path, give)


@pytest.mark.parametrize("data", ["requires_grad", "conjugated"])
def test_columns_that_numpy_cannot_read(tmp_path, data):
    """Columns with a gradient, or conjugated lazily, are fine with run_dir if they are without."""
    x, y = FEATURES[0].clone(), FEATURES[1]
    forward_fn = None
    if data == "requires_grad":
        x.requires_grad_()
    else:
        x = torch.complex(x, x).conj()
        forward_fn = real_part
    give = functools.partial(FAMILIES["mlp"].recipe, 3, data=(x, y), forward_fn=forward_fn)
    try:
        give(steps=2).train(engine="inline")
    except phalanx.PhalanxError:
        pytest.skip("not accepted without run_dir either")
    halved(tmp_path, give)


def real_part(model, batch):
    return model(batch[0].real)


@pytest.mark.long
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_the_callers_modes_do_not_matter(tmp_path, mode):
    """A run goes on within the caller's inference mode, or with another default device, as it does without."""
    norm_recipe(3).train(run_dir=tmp_path, engine="inline")
    alone = norm_recipe(6).train(engine="inline")
    with mode():
        recipe = norm_recipe(6, make_model=on_cpu)
        try:
            recipe.train(engine="inline")
        except phalanx.PhalanxError:
            pytest.skip("not accepted without run_dir either")
    norm_recipe(3, make_model=on_cpu).train(run_dir=tmp_path / "other", engine="inline")
    with mode():
        assert_same(recipe.train(run_dir=tmp_path / "other", engine="inline"), alone)


def on_cpu():
    with torch.device("cpu"):
        return conv_norm()


def test_the_log_tells_what_happened(tmp_path):
    """Every line of the log is JSON, with a step each time, and says what began, went on and ended."""
    norm_recipe(2).train(run_dir=tmp_path, engine="inline")
    norm_recipe(4).train(run_dir=tmp_path, engine="inline")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    kinds = [(event["event"], event["step"]) for event in events if event["event"] in ("start", "resume", "end")]
    assert kinds == [("start", 0), ("end", 2), ("resume", 2), ("end", 4)]
    assert [event["step"] for event in events if event["event"] == "step"] == [0, 1, 2, 3]
    assert all(event["time"] <= time.time() for event in events)
