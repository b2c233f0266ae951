"""What must hold after a simulated run over several hosts, whatever befell it."""

from __future__ import annotations

import dataclasses
import itertools

from phalanx.errors import LeftError, PeersLostError
from phalanx.plan.membership import quorum
from tests.simulation.hosts import LONGEST, WATCHED


def check(simulation):
    """Raise an AssertionError if something does not hold."""
    for process, run in simulation.runs.items():
        check_told(simulation, process, run)
        check_end(simulation, process, run)
    for one, other in itertools.product(simulation.runs.values(), repeat=2):
        check_one_side(simulation, one.world, other.world)
    assert simulation.schedule.now < LONGEST, f"it took {simulation.schedule.now:.0f} s"
    if not simulation.schedule.struck:
        ends = [run.end for run in simulation.runs.values()]
        assert set(ends) == {"done"}, ends


def check_told(simulation, process, run):
    """Each step is told once, in order; what is told is what an undisturbed run has."""
    states, steps, losses = simulation.states, [each[0] for each in run.told], [each[1] for each in run.told]
    first = steps[0] if steps else 0
    assert steps == list(range(first, first + len(steps))), f"{process} was told of steps {steps}"
    assert losses == [states[step + 1] for step in steps], f"{process} was told of other losses: {losses}"
    assert first == 0 or run.world.joins, f"{process} was told of steps {steps}"
    if run.engine is None:
        return
    check_evaluated(simulation, run, process)
    history = run.engine.progress.loss_history
    assert history == states[1 : len(history) + 1], f"{process} has other losses: {history}"
    if run.end is not None and not run.engine.engine.lost:
        assert run.framework.state == states[len(history)], f"{process} has another state after {len(history)} steps"


def check_evaluated(simulation, run, process):
    """Each evaluation that is due is told once, in order, and is of the state that it is said to be of."""
    due = [step for step in range(1, simulation.steps + 1) if step % WATCHED == 0 or step == simulation.steps]
    expected = [(step, simulation.states[step], "state") for step in due]
    found = [dataclasses.astuple(each) for each in run.engine.seen.evaluated]
    assert found == expected[: len(found)], f"{process} evaluated {found}"
    first = len(found) - len(run.evaluated) if run.world.joins else 0
    assert run.evaluated == [value for _, value, _ in found[first:]], f"{process} was told of {run.evaluated}"
    if run.end == "done":
        assert found == expected, f"{process} evaluated {found} only"


def check_end(simulation, process, run):
    """A process does all steps, or says why not; nobody is lost who was among so many that could have gone on."""
    end, told = run.end, run.told
    if end is None:
        assert process in simulation.victims, f"{process} ended without a word"
    elif end == "done":
        assert (told and told[-1][0] == simulation.steps - 1) or run.world.joins, f"{process} was told of steps {told}"
    elif end == "interrupted":
        assert process in simulation.interrupted, f"{process} was interrupted by nobody"
    elif isinstance(end, LeftError):
        assert simulation.interrupted, f"nobody has closed the run, but {process} says {end}"
    elif end != "left":  # which only who was told to leave says
        unready = [each for each, other in simulation.runs.items() if not other.computes]
        told_so = any(f"process {each.rank}" in str(end) and "left the run" in str(end) for each in unready)
        early = process in unready or told_so
        assert isinstance(end, PeersLostError), f"{process} ended by {end!r}"
        assert early or not run.well, f"{process} ended by {end!r}, although {run.well} were well"


def check_one_side(simulation, one, other):
    """All members of an incarnation take the same for the next one; only a majority goes on, or one half of them.

    That is the half that has claimed in the folder, or else the one with the lowest member.
    """
    if one is None or other is None or one.members.run != other.members.run:
        return
    pasts = [{number: chosen for number, chosen in each.members._past.items() if chosen} for each in (one, other)]
    for number, chosen in pasts[0].items():
        same = pasts[1].get(number, chosen)
        assert same == chosen, f"two sides go on: {chosen} and {same}"
    everybody = set(range(simulation.size))
    for number, chosen in sorted((pasts[1] | pasts[0]).items()):
        stay = everybody - set(chosen["lost"])
        claim = simulation.disk.claim(one.members.run, number - 1)
        claimed = claim is not None and 2 * len(stay) == len(everybody)
        fair = claim == spelled_half(stay) if claimed else quorum(everybody, stay)
        assert fair, f"{stay} of {everybody} went on in incarnation {number}, and {claim} has claimed that"
        everybody = stay | set(map(int, chosen["joined"]))


def spelled_half(half):
    """A half as the folder has it."""
    return " ".join(map(str, sorted(half)))
