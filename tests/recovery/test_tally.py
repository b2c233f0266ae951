"""Which deaths of workers end a run: those in a row at one place."""

import random

import pytest

from phalanx.plan.lifecycle import MOST, OWN, Cause, Place, Tally

X, LATER = Place(3, "compute", 1), Place(3, "compute", 2)
KILL, EXIT = Cause.ANYBODY, Cause.ITSELF


def ended(tally, deaths, worker=0):
    """After how many of these deaths the run ends; None: it goes on."""
    for number, (place, cause) in enumerate(deaths, 1):
        if tally.count(worker, place, cause, f"{cause.name} {number}") is not None:
            return number
    return None


@pytest.mark.parametrize("place", [X, Place(3, "update"), Place(-1, "start"), Place(3, "task", 2)])
@pytest.mark.parametrize(("cause", "most"), [(EXIT, OWN), (KILL, MOST)])
def test_deaths_in_a_row_at_one_place_end_the_run(place, cause, most):
    """Three that a worker made itself, ten by a signal of anybody's, wherever that is; one less does not."""
    assert ended(Tally(), [(place, cause)] * 100) == most
    assert ended(Tally(), [(place, cause)] * (most - 1)) is None


@pytest.mark.parametrize("most", [1, 3, 50])
def test_the_caller_says_how_many_kills_are_too_many(most):
    """Of exits three stay too many."""
    assert ended(Tally(most), [(X, KILL)] * 100) == most
    assert ended(Tally(most), [(X, EXIT)] * 100) == OWN


def test_progress_between_deaths_starts_the_count_anew():
    """A worker that came further, or was ended elsewhere, does not die in a row; the same deaths without that do."""
    assert ended(Tally(), [(X, EXIT), (X, EXIT), (LATER, EXIT)] * 50) is None
    assert ended(Tally(), [*[(X, KILL)] * 9, (Place(4, "compute"), KILL)] * 50) is None
    assert ended(Tally(), [(X, EXIT), (X, EXIT), (X, EXIT)] * 50) == OWN


def test_exits_and_kills_are_counted_apart():
    """Two exits and nine kills at one place, in any order, go on; either one more ends the run."""
    for seed in range(20):
        deaths = [(X, EXIT)] * 2 + [(X, KILL)] * 9
        random.Random(seed).shuffle(deaths)
        for last in (EXIT, KILL):
            assert ended(Tally(), [*deaths, (X, last)]) == 12


def test_each_worker_has_a_row_of_its_own():
    """Deaths of others neither add to a worker's nor interrupt them."""
    tally = Tally()
    for _ in range(OWN - 1):
        for worker in range(4):
            assert tally.count(worker, X, EXIT, "exited") is None
    streak = tally.count(2, X, EXIT, "exited")
    assert (streak.place, streak.own, streak.causes) == (X, OWN, ["exited"] * OWN)


@pytest.mark.parametrize("chance", [0.1, 0.3])
def test_kills_at_random_do_not_end_a_run_that_gets_on(chance):
    """A worker is killed in one or three of ten replicas that it computes: a thousand are done all the same."""
    for seed in range(20):
        rng, tally, step = random.Random(seed), Tally(), 0
        while step < 1000:
            if rng.random() < chance:
                assert tally.count(0, Place(step, "compute"), KILL, "killed") is None
            else:
                step += 1
