"""Every shared word has one writer: for all others it is read-only memory, so who writes it is caught."""

import pytest

from phalanx.plan.lifecycle import Stage
from phalanx.shared.counters import PARENT, Counters, float_count, word_count
from tests.engines.faulty import Planted
from tests.families import FAMILIES

WORKERS = 2


def counters(roles):
    """Counters in memory of this process, as each of these roles may use them."""
    words = memoryview(bytearray(8 * word_count(WORKERS))).cast("q")
    floats = memoryview(bytearray(8 * float_count(WORKERS, WORKERS))).cast("d")
    return {role: Counters(words, floats, WORKERS, WORKERS, role) for role in roles}


def write_what_is_the_parents():
    """A fault: a worker that has computed its replicas says that the run pauses."""
    from phalanx.shared.counters import Barrier

    at = Barrier.at

    def writing(barrier, stage):
        at(barrier, stage)
        if stage == Stage.COMPUTED and barrier.worker == 1:
            barrier.counters.pause = 0

    Barrier.at = writing


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def test_a_wrong_writer_ends_a_run():
    """A worker that writes a word of the parent's ends the run: such memory is read-only."""
    recipe = FAMILIES["mlp"].recipe(4, steps=2)
    faulty = FAMILIES["mlp"].recipe(4, steps=2, make_model=Planted(recipe.make_model, write_what_is_the_parents))
    with pytest.raises(TypeError, match="read-only memory"):
        faulty.train(workers=WORKERS, engine="processes")


def test_every_role_can_write_its_own_and_nothing_else():
    """For each word: who may write it, by the roles of the parent and of two workers."""
    roles = counters((PARENT, 0, 1))
    writers = {
        "grant": {PARENT},
        "pause": {PARENT},
        "awaited": {PARENT},
        "confirmed": {PARENT},
        "agreed": {0, PARENT},  # the parent while all are idle
        "reported": {0, PARENT},
        "snapshot_step": {0, PARENT},
        "trouble": {0, 1, PARENT},
    }
    assert {name: _who_may(roles, lambda seen, name=name: setattr(seen, name, 1)) for name in writers} == writers
    for number in range(WORKERS):
        assert _who_may(roles, lambda seen, number=number: seen.workers[number].reach(1, Stage.SAVING)) == {number}
    assert roles[PARENT].progress() == [(1, Stage.SAVING)] * WORKERS  # all see the same words


def _who_may(roles, write):
    """The roles in which writing does not fail."""
    allowed = set()
    for role, seen in roles.items():
        try:
            write(seen)
            allowed.add(role)
        except TypeError:
            pass
    return allowed
