"""A process that neither reports nor saves does both once the one that did is lost, even at the end of a run.

Its world is played: a process is told that another one saves, and later that it leads.
"""

import contextlib
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest

from phalanx.checkpoint.directory import RunDirectory, newest_step
from phalanx.errors import PeersLostError
from phalanx.run import opening
from tests.families import FAMILIES

STEPS = 3


class Noted:
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def begin(self, run):
        self.told.append(("begin", run.steps))

    def step(self, report):
        self.told.append(("step", report.step))

    def end(self, result):
        self.told.append(("end",))


@pytest.fixture
def beside(tmp_path):
    """Begins a run in a process beside the one that saves; ``at_the_end`` is called when its engine has closed."""
    alone = opening._of_this_process

    def one_of_several(settled, _):
        return alone(settled, SimpleNamespace(elect=lambda run_dir: False))

    @contextlib.contextmanager
    def begun(at_the_end=lambda state: None, **options):
        with mock.patch.object(opening, "_of_this_process", one_of_several):
            run = FAMILIES["mlp"].recipe(2, steps=STEPS).start(engine="inline", run_dir=tmp_path / "run", **options)
        state, close = run._engine.progress, run._engine.close

        def closed():
            close()
            at_the_end(state)

        state.leads, run._engine.close = False, closed
        with run:
            yield run

    return begun


def leads(state):
    """The process that saved is lost."""
    state.leads = True


def test_the_end_is_saved_by_who_is_left(beside, tmp_path):
    """Who saved was lost after its last step. The end is saved, and callbacks that would look on do not begin."""
    with FAMILIES["mlp"].recipe(2, steps=STEPS).start(engine="inline", run_dir=tmp_path / "run") as saving:
        next(saving)
    noted = Noted()
    with beside(at_the_end=leads, callbacks=[noted]) as run:
        run.finish()
    assert noted.told == []
    alone = FAMILIES["mlp"].recipe(2, steps=STEPS).train(engine="inline", run_dir=tmp_path / "alone")
    assert (run.result().digest, run.result().chain) == (alone.digest, alone.chain)
    again = FAMILIES["mlp"].recipe(2, steps=STEPS).train(engine="inline", run_dir=tmp_path / "run")
    assert (again.resumed_from, again.digest, again.chain) == (STEPS, alone.digest, alone.chain)


def test_in_the_middle_callbacks_begin_too(beside, tmp_path):
    """Twin: who leads from the second step on has callbacks called from there, and saves."""
    noted = Noted()
    with beside(callbacks=[noted]) as run:
        next(run)
        run._engine.progress.leads = True
        run.finish()
    assert newest_step(tmp_path / "run") == STEPS
    assert noted.told == [("begin", 1), ("step", 1), ("step", 2), ("end",)]


def test_who_does_not_lead_saves_nothing(beside, tmp_path):
    """Twin: while another process saves, this one makes no directory."""
    with beside() as run:
        run.finish()
    assert not (tmp_path / "run").exists()


def test_the_end_of_a_run_that_was_stopped(beside, tmp_path):
    """EarlyStopping and ``run.stop`` end a run, too, so its end is saved; a with block that is left early does not."""
    with beside(at_the_end=leads) as run:
        next(run)
    assert not (tmp_path / "run").exists()
    with beside(at_the_end=leads) as run:
        next(run)
        run.stop()
    assert newest_step(tmp_path / "run") == 1


@pytest.mark.long
def test_a_directory_that_is_still_held(beside, tmp_path):
    """Who saved is frozen and holds the directory: nothing is saved, and a warning says so."""
    held = RunDirectory(tmp_path / "run", None)
    try:
        said = pytest.warns(UserWarning, match=f"nobody has saved step {STEPS}, the last one")
        with said, beside(at_the_end=leads) as run:
            run.finish()
    finally:
        held.close()
    assert newest_step(tmp_path / "run") == -1


def test_a_state_that_is_lost_is_not_saved(beside, tmp_path):
    """If the engine cannot end the run, its error comes, and nothing is saved in place of another."""

    def lost(state):
        state.leads = True
        raise PeersLostError("the state is lost")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PeersLostError, match="the state is lost"), beside(at_the_end=lost) as run:
            run.finish()
    assert not (tmp_path / "run").exists()
