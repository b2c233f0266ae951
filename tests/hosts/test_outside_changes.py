"""What a callback changes outside the model is refused over hosts, too; what follows from the step is the same."""

import pytest

import phalanx
from phalanx.definition.steady import Steady
from tests.face.test_outside_changes import Annealed, Rows, recipe
from tests.hosts.worlds import world

CODE = """
from tests.hosts.test_outside_changes import of_dataset, of_loss, annealed, unwatched
def run(make):
    job, change = make()
    sets = type("Sets", (), {{"everywhere": {everywhere}, "step": lambda _, told: change(told)}})()
    options = dict(workers=4, progress=False, lost_after=2.0, deadline_seconds=30.0)
    return job.train(callbacks=[sets], **options).digest
{before}
for make in {makers}:
    tried(lambda: run(make))
told += [[made and made.steps, made and made.digest] for made in results]
"""


def setting(owner, name):
    """A callback that sets an attribute after the fifth step."""
    return lambda told: setattr(owner, name, 1) if told.step == 4 else None


def of_loss():
    loss = Annealed()
    return recipe(loss, replicas=4), setting(loss, "beta")


def of_dataset():
    data = Rows()
    return recipe(data=data, replicas=4), setting(data, "epoch")


def annealing(output, target):
    """A loss whose second term grows with the steps, as the refusal advises."""
    weight = phalanx.current_step() / 10 + phalanx.current_epoch()
    return Annealed()(output, target) + weight * output.square().mean()


def annealed():
    return recipe(annealing, replicas=4), lambda told: None


def unwatched():
    """Nobody looks: planted."""
    Steady.check = lambda self, steps: None


def told_by(pair, *makers, everywhere=True, before=""):
    """What each of two processes told of these runs, and the state that each error had."""
    return pair(CODE.format(makers=f"[{', '.join(makers)}]", everywhere=everywhere, before=before))


@pytest.mark.long
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_change_ends_the_run_in_every_process(pair, everywhere):
    """It is named before the next step with the state of that step; so it is if the first process alone calls back."""
    states = [
        recipe(data=data, replicas=4, epochs=None, steps=5).train(engine="inline").digest for data in (None, Rows())
    ]
    for rank, told in enumerate(told_by(pair, "of_loss", "of_dataset", everywhere=everywhere)):
        kind = "UsageError" if everywhere or rank == 0 else "LeftError"
        assert [text.partition(":")[0] for text in told[:2]] == [kind] * 2
        assert "loss_fn.beta was 0.0 and is 1" in told[0]
        assert "data.epoch was 0 and is 1" in told[1]
        assert all("before step 5" in text for text in told[:2])
        assert told[2:] == [[5, state] for state in states]


@pytest.mark.long
def test_what_follows_from_the_step_is_the_same_over_hosts(pair):
    """The way out that the refusal names has the digest of one process."""
    wanted = annealed()[0].train(engine="inline", progress=False).digest
    assert told_by(pair, "annealed") == [[wanted]] * 2


@pytest.mark.long
def test_without_the_refusal_there_would_be_another_digest(monkeypatch):
    """The negative twin: unwatched, a change counts in one process and not over hosts."""
    found = world(CODE.format(makers="[of_loss]", everywhere=True, before="unwatched()"))
    monkeypatch.setattr(Steady, "check", lambda self, steps: None)  # planted
    job, change = of_loss()
    changed = job.train(engine="inline", callbacks=[change], progress=False).digest
    assert found[0] == found[1] != [changed]
