"""Every shared word has one writer: with the check on, whole runs keep to that, and who does not is caught."""

import functools
import os

import pytest

from phalanx.plan.lifecycle import Phase
from phalanx.shared.counters import PARENT, TASK, Counters, float_count, word_count
from tests.engines.deaths import Trapped, sprung
from tests.families import ADAMW, FAMILIES, conv_norm

WORKERS = 2


@pytest.fixture
def checked(monkeypatch):
    """The check is on in this process; what ``Checking`` makes turns it on in workers."""
    monkeypatch.setattr(Counters, "checked", True)


def counters():
    """Counters in memory of this process."""
    words = memoryview(bytearray(8 * word_count(WORKERS))).cast("q")
    floats = memoryview(bytearray(8 * float_count(WORKERS, WORKERS))).cast("d")
    return Counters(words, floats, WORKERS, WORKERS)


class Checking:
    """Makes the model; in workers it turns the check on, and plants a fault in worker 1 if there is one."""

    def __init__(self, make_model, fault=None):
        self.make_model, self.fault, self.parent = make_model, fault, os.getpid()

    def __call__(self):
        if os.getpid() != self.parent:
            Counters.checked = True
            if self.fault is not None:
                self.fault()
        return self.make_model()


def write_what_is_the_parents():
    """A fault: a worker that has computed its replicas says that the run pauses."""
    from phalanx.shared.counters import Barrier

    at = Barrier.at

    def writing(barrier, phase):
        at(barrier, phase)
        if phase == Phase.COMPUTED and barrier.worker == 1:
            barrier.counters.pause = 0

    Barrier.at = writing


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def test_a_run_keeps_to_one_writer(tmp_path, checked):
    """Steps, deaths at two places, an evaluation, a snapshot, a pause: nobody writes a word of another's."""
    traps = tmp_path / "traps"
    traps.mkdir()
    make_model = Trapped(conv_norm, traps, 1, 3, "COMPUTING")
    make_model = Trapped(make_model, traps, 0, 5, "half updated")
    give = functools.partial(FAMILIES["conv_norm"].recipe, 4, steps=8, optimizer=ADAMW)
    with give(make_model=Checking(make_model)).start(workers=WORKERS, engine="processes") as run:
        for report in run:
            if report.step in (1, 6):
                run.evaluate(accuracy, FAMILIES["conv_norm"].data, batch_size=4)
                run.save(tmp_path / f"saved {report.step}")
        result = run.result()
    assert sprung(traps) == 2
    assert result.digest == give(make_model=conv_norm).train(engine="inline").digest


def test_a_wrong_writer_ends_a_checked_run(checked):
    """The test above can fail: a worker that writes a word of the parent's is named."""
    recipe = FAMILIES["mlp"].recipe(4, steps=2)
    faulty = FAMILIES["mlp"].recipe(4, steps=2, make_model=Checking(recipe.make_model, write_what_is_the_parents))
    with pytest.raises(AssertionError, match="worker 1 wrote 0 to word 3, which is not its to write"):
        faulty.train(workers=WORKERS, engine="processes")


def test_every_role_can_write_its_own_and_nothing_else(checked):
    """For each word: who may write it, by the roles of the parent and of two workers."""
    shared = counters()
    roles = {role: shared.written_by(role) for role in (PARENT, 0, 1)}
    writers = {
        "grant": {PARENT},
        "pause": {PARENT},
        "awaited": {PARENT},
        "confirmed": {PARENT},
        "agreed": {0, PARENT},  # all are idle here
        "reported": {0, PARENT},
        "snapshot_step": {0, PARENT},
        "trouble": {0, 1, PARENT},
    }
    assert {name: _who_may(roles, lambda seen, name=name: setattr(seen, name, 1)) for name in writers} == writers
    for number in range(WORKERS):
        assert _who_may(roles, lambda seen, number=number: seen.workers[number].reach(1, Phase.SAVING)) == {number}
    assert shared.progress() == [(1, Phase.SAVING)] * WORKERS  # all see the same words


def test_the_parent_leaves_alone_what_the_first_worker_writes(checked):
    """While workers are at work, the parent cannot write what the first one decides; only the parent ends trouble."""
    shared = counters()
    parent, worker = shared.written_by(PARENT), shared.written_by(1)
    parent.kind, parent.grant = TASK, 1
    with pytest.raises(AssertionError, match="the parent wrote"):
        parent.snapshot_due = 3
    with pytest.raises(AssertionError, match="worker 1 wrote 0"):
        worker.trouble = 0
    parent.trouble = 0


def test_unchecked_counters_are_plain():
    """Without the check, which is off where nobody asked for it, a process has the counters themselves."""
    shared = counters()
    assert not Counters.checked
    assert shared.written_by(1) is shared


def _who_may(roles, write):
    """The roles in which writing does not fail."""
    allowed = set()
    for role, seen in roles.items():
        try:
            write(seen)
            allowed.add(role)
        except AssertionError:
            pass
        roles[PARENT].grant = 0  # all are idle again
    return allowed
