"""The engine of a run changes at step boundaries: here before every step, as somebody prescribes."""

import pytest

from phalanx.engines.changing import Changing
from phalanx.engines.inline import Inline
from phalanx.engines.processes.driver import Processes
from phalanx.engines.recovery.failures import Deadline
from phalanx.errors import RunError
from phalanx.frameworks.registry import open_framework
from phalanx.plan.fold import place
from phalanx.seams.records import Progress, Records, RunOptions, Seen
from tests.families import ADAMW, FAMILIES

STEPS = 9


def opener(recipe, framework, state, workers):
    """Opens the engine with so many workers; 1 is this process."""
    if workers == 1:
        return lambda: Inline(recipe, framework, state)
    return lambda: Processes(recipe, framework, place(recipe.replicas, workers), state, Deadline())


def digest(recipe, turns, between=lambda framework: None):
    """The digest after a step with each of ``turns`` many workers; ``between`` may do something to the state."""
    state = Records(RunOptions(), progress := Progress(), Seen(progress))
    framework = open_framework(recipe)
    changing = Changing(state, opener(recipe, framework, state, turns[0]))
    try:
        changing.advance(None, 1)
        for step, workers in enumerate(turns[1:], start=1):
            changing.change(opener(recipe, framework, state, workers))
            between(framework)
            assert changing.workers == workers
            changing.advance(None, step + 1)
        return changing.export(copy=False).digest
    finally:
        changing.close()


@pytest.mark.long
@pytest.mark.parametrize("family", ["mlp", "conv_norm", "counting"])
def test_an_engine_for_each_step(family):
    """One process, two workers, three, and back again: one digest, whoever did which step."""
    recipe = FAMILIES[family].recipe(3, steps=STEPS, optimizer=ADAMW)
    assert digest(recipe, [1, 2, 3, 2, 1, 1, 3, 3, 1]) == recipe.train(engine="inline").digest


@pytest.mark.long
def test_a_state_that_changes_on_the_way_is_seen():
    """One weight that is doubled between two engines ends in another digest."""

    def plant(framework):
        first = next(iter(framework.export(1, copy=False, digest=False).params.values()))
        first.data.mul_(2)  # planted

    recipe = FAMILIES["mlp"].recipe(3, steps=3, optimizer=ADAMW)
    assert digest(recipe, [1, 1, 1], plant) != digest(recipe, [1, 1, 1])


def test_an_engine_that_cannot_be_opened_leaves_the_one_before():
    """The error is raised, and the run goes on where it was."""
    recipe = FAMILIES["mlp"].recipe(3, steps=3)
    state = Records(RunOptions(), progress := Progress(), Seen(progress))
    framework = open_framework(recipe)
    changing = Changing(state, opener(recipe, framework, state, 1))

    def impossible():
        raise OSError("no room")

    changing.advance(None, 1)
    with pytest.raises(OSError, match="no room"):
        changing.change(impossible)
    changing.advance(None, 2)
    changing.change(opener(recipe, framework, state, 1))
    changing.advance(None, 3)
    assert changing.export(copy=False).digest == recipe.train(engine="inline").digest


def test_a_state_that_did_not_come_home_ends_the_run():
    """No other engine begins with an older state."""
    recipe = FAMILIES["mlp"].recipe(3, steps=3)
    state = Records(RunOptions(), progress := Progress(), Seen(progress))
    framework = open_framework(recipe)
    engine = Inline(recipe, framework, state)
    changing = Changing(state, lambda: engine)
    changing.advance(None, 1)
    engine.ended = "its state could not be taken home"
    opened = []
    with pytest.raises(RunError, match="could not be taken home"):
        changing.change(lambda: opened.append(1))
    assert not opened
