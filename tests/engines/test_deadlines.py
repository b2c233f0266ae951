"""How long a worker may be silent: long steps and evaluations are no hangs, and whoever ends a run says what to do."""

import time

import pytest
from torch.nn import functional as F

import phalanx
from phalanx.engines.recovery import failures
from tests.engines.moving import hurry
from tests.families import FAMILIES, Elsewhere

SHORT, LONG = 0.4, 1.3  # seconds that take the place of a minute, and what is longer
LATE = 3  # a step


@pytest.fixture
def impatient(monkeypatch):
    """Usual steps may take a part of a second in place of a minute; ten minutes stay ten minutes."""
    monkeypatch.setattr(failures, "PATIENCE", SHORT)
    monkeypatch.setattr(failures, "SLOWER", 1)


def long_step(output, target):
    """The loss, late in one step."""
    if phalanx.current_step() == LATE:
        time.sleep(LONG)
    return F.cross_entropy(output, target)


def accuracy(output, target):
    """A chunk takes long."""
    time.sleep(LONG)
    return (output.argmax(1) == target).float().mean()


def ended(recipe, **options):
    """The digest, and which incidents there were."""
    result = recipe.train(progress=False, **options)
    return result.digest, [incident.why for incident in result.incidents if incident.kind == "death"]


@pytest.mark.long
def test_a_step_that_takes_long_is_tried_with_more_time(impatient):
    """A worker that was killed for a long step has ten minutes when it tries again, so the run goes on."""
    recipe = FAMILIES["mlp"].recipe(2, loss_fn=long_step, steps=5)
    digest, whys = ended(recipe, workers=2, engine="processes")
    assert digest == recipe.train(engine="inline").digest
    assert whys
    assert all("deadline_seconds" in why for why in whys)


@pytest.mark.long
def test_a_long_evaluation_with_auto(impatient, monkeypatch):
    """The same where the run has moved from this process to workers."""
    recipe = FAMILIES["mlp"].recipe(2, steps=8)
    hurry(monkeypatch, recipe)
    evaluation = phalanx.Evaluation(accuracy, FAMILIES["mlp"].data, batch_size=64, every_steps=8)
    result = recipe.train(workers="auto", evaluation=evaluation, progress=False)
    assert (result.digest, result.incidents) == (recipe.train(engine="inline").digest, ())


@pytest.mark.long
def test_a_worker_that_cannot_be_replaced_has_more_time(impatient):
    """An optimizer from elsewhere keeps its state in one worker, whose death would end the run: it is not killed."""
    recipe = FAMILIES["mlp"].recipe(2, loss_fn=long_step, steps=5, optimizer=Elsewhere)
    assert ended(recipe, workers=2, engine="processes") == (recipe.train(engine="inline").digest, [])


@pytest.mark.long
def test_who_says_a_deadline_is_taken_at_the_word(tmp_path):
    """With deadline_seconds, three hangs at one place end the run; the error says to raise it, and that helps."""

    def slow(output, target):
        time.sleep(LONG * (phalanx.current_step() == LATE))
        return F.cross_entropy(output, target)

    recipe = FAMILIES["mlp"].recipe(2, loss_fn=slow, steps=5)
    with pytest.raises(
        phalanx.RunError, match=r"hung for 1 s, its deadline_seconds, .* raise deadline_seconds"
    ) as told:
        recipe.train(workers=2, engine="processes", deadline_seconds=1, progress=False)
    assert told.value.step == LATE
    recipe.train(workers=2, engine="processes", deadline_seconds=60, progress=False)


def test_how_long_a_worker_may_be_silent(monkeypatch):
    """Steps by steps, evaluations by evaluations; the first, and who tries again, ten minutes."""
    monkeypatch.setattr(failures.sys, "gettrace", lambda: None)
    deadline = failures.Deadline()
    assert (deadline.seconds(), deadline.seconds(task=True)) == (600, 600)
    deadline.note(0.01)
    assert (deadline.seconds(), deadline.seconds(once=True), deadline.seconds(task=True)) == (60, 600, 600)
    deadline.note(100.0, task=True)
    assert (deadline.seconds(), deadline.seconds(task=True)) == (60, 2000)
    deadline.doubted = True
    assert deadline.seconds() == 600
    deadline.note(0.01)
    assert deadline.seconds() == 60
    assert failures.Deadline(5.0).seconds(task=True) == 5
