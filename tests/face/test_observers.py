"""Who looks on at a run: told in one order, waited for no longer than each says, and ended whatever another raises."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

import phalanx
from phalanx.run.loop import Loop
from phalanx.run.observers import watching
from phalanx.seams import Observer
from phalanx.seams.records import Progress, RunOptions, Seen
from phalanx.surroundings.turns import Turns

STEPS, PER_EPOCH = 10, 4
QUIET = SimpleNamespace(progress=False, on_snapshot_error="continue")


class Engine:
    """Does nothing but count steps; notes how far it may run ahead, and fails where it is told to."""

    def __init__(self):
        self.options, self.progress = RunOptions(), Progress()
        self.seen = Seen(self.progress)
        self.horizons, self.closed = [], False
        self.error = None

    def advance(self, batch, horizon):
        self.horizons.append(horizon)
        step = len(self.progress.loss_history)
        self.progress.add(0.5, 1)
        return phalanx.StepReport(step, None if batch else step // PER_EPOCH, 0.5, 1.0, 0.1, 1, 0.01)

    def evaluate(self, metrics, data, batch_size, weights=None):
        if self.error is not None:
            raise self.error
        return [[(0.75, 1.0)]]

    def eval_point(self):
        """No optimizer has two modes."""

    def close(self):
        self.closed = True


class Witness(Observer):
    """Notes in a list shared with others whatever it is told."""

    def __init__(self, name, seen, ahead=None, error=None):
        self.name, self.seen, self.ahead, self.error = name, seen, ahead, error

    def horizon(self, steps):
        return super().horizon(steps) if self.ahead is None else steps + self.ahead

    def happened(self, incident):
        self.seen.append((self.name, incident.kind))

    def step(self, report):
        self.seen.append((self.name, report.step, report.metric))

    def end(self):
        self.seen.append((self.name, "end"))
        if self.error is not None:
            raise self.error


def loop_of(*observers, evaluation=None):
    """A loop over an engine that only counts, and that engine."""
    engine, data = Engine(), (np.zeros(8), np.zeros(8))
    definition = phalanx.Recipe(lambda: None, data, sum, batch_size=2, replicas=1, steps=STEPS)
    due = (phalanx.Evaluation(max, data),) if evaluation else ()
    return Loop(definition, engine, due, observers), engine


def test_without_observers_an_engine_may_run_to_the_end():
    """Nobody looks on, so nothing stops the engine before the last step; a caller who looks stops it at each."""
    loop, engine = loop_of()
    loop.advance(None, watched=False)
    loop.advance(None, watched=True)
    loop.advance((1, 2), watched=False)
    assert engine.horizons == [STEPS, 2, 3]
    assert watching(QUIET, (), STEPS, Turns()) == []


def test_the_nearest_horizon_counts():
    """An engine runs no further ahead than any observer, or a due evaluation, allows."""
    seen = []
    loop, engine = loop_of(Witness("far", seen), Witness("near", seen, 3), Witness("further", seen, 5))
    loop.advance(None, watched=False)
    evaluated, other = loop_of(Witness("far", seen), evaluation=True)
    evaluated.advance(None, watched=False)
    called, third = loop_of(*watching(QUIET, [print], STEPS, Turns()), evaluation=True)
    assert engine.horizons == [3]
    assert other.horizons == [PER_EPOCH]
    assert (loop.runs_user_code, called.runs_user_code) == (False, True)
    assert third.horizons == []


def test_all_are_told_of_everything_in_one_order():
    """Incidents come before the step during which they happened, each once; ends come from the last to the first."""
    seen = []
    loop, engine = loop_of(Witness("a", seen), Witness("b", seen))
    loop.advance(None, watched=True)
    engine.progress.incidents.append(phalanx.Incident(1.0, "death", 0, 1))
    loop.advance(None, watched=True)
    loop.advance(None, watched=True)
    loop.end()
    told = [("a", 0, None), ("b", 0, None), ("a", "death"), ("b", "death"), ("a", 1, None), ("b", 1, None)]
    assert seen == [*told, ("a", 2, None), ("b", 2, None), ("b", "end"), ("a", "end")]
    assert engine.closed


def test_a_step_is_seen_when_its_evaluation_has_succeeded():
    """An evaluation that raised is made again by whatever is asked next; until then nobody sees the step."""
    seen = []
    loop, engine = loop_of(Witness("shows", seen), evaluation=True)
    advance = functools.partial(loop.advance, None, watched=True)
    for _ in range(PER_EPOCH):
        advance()
    assert seen[-1] == ("shows", 3, 0.75)
    assert [(kept.steps, kept.value, kept.name) for kept in engine.seen.evaluated] == [(4, 0.75, "max")]
    engine.error = phalanx.WorkerError("metric")
    for _ in range(PER_EPOCH - 1):
        advance()
    for ask in (advance, loop.complete, advance):
        with pytest.raises(phalanx.WorkerError, match="metric"):
            ask()
        assert (seen[-1], engine.seen.complete) == (("shows", 6, None), False)
    engine.error = None
    advance()
    assert seen[-2:] == [("shows", 7, 0.75), ("shows", 8, None)]
    assert [kept.steps for kept in engine.seen.evaluated] == [4, 8]


@pytest.mark.parametrize("asked", ["advance", "complete", "end"])
def test_an_observer_that_raised_had_its_call(asked):
    """The others are called first by whatever is asked next, also by the end; nobody is called twice."""

    class Raising(Witness):
        def step(self, report):
            super().step(report)
            if report.step == 1:
                raise OSError("no server")

    seen = []
    loop, engine = loop_of(Witness("a", seen), Raising("b", seen), Witness("c", seen))
    ask = {"advance": functools.partial(loop.advance, None, watched=True), "complete": loop.complete, "end": loop.end}
    ask["advance"]()
    with pytest.raises(OSError, match="no server"):
        ask["advance"]()
    assert seen[-2:] == [("a", 1, None), ("b", 1, None)]
    assert not engine.seen.complete
    del seen[:]
    ask[asked]()
    assert seen[0] == ("c", 1, None)
    assert [step for step in seen if step[1] == 1] == [("c", 1, None)]
    assert engine.seen.complete


def test_a_step_in_the_middle_of_a_step_is_refused():
    """An observer that asks for a step while others have not heard of the last one gets an error that says when."""
    seen = []

    class Asking(Witness):
        def step(self, report):
            loop.advance(None, watched=True)

    loop, _ = loop_of(Asking("asks", seen), Witness("hears", seen))
    with pytest.raises(phalanx.UsageError, match="not in a callback"):
        loop.advance(None, watched=True)
    loop.complete()
    assert seen == [("hears", 0, None)]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_end_that_fails_keeps_no_other_from_ending(failing):
    """Whichever observer cannot end, the others and the engine do, and its error reaches the caller."""
    seen = []
    errors = [phalanx.SnapshotError("full") if number == failing else None for number in range(3)]
    loop, engine = loop_of(*[Witness(number, seen, error=error) for number, error in enumerate(errors)])
    with pytest.raises(phalanx.SnapshotError, match="full"):
        loop.end()
    assert seen == [(2, "end"), (1, "end"), (0, "end")]
    assert engine.closed
