"""The agreement on who goes on: every order of messages, losses and deaths leads to one value, or to none."""

import json
import random

import pytest

from phalanx.checkpoint.directory import first, is_marked, mark
from phalanx.plan import membership
from phalanx.plan.membership import Agreement, mutual, quorum

SEEDS = 60


def proposer(me, count):
    """Proposes what only this member would, so that two chosen values show."""
    return lambda stopped: {"by": me, "at": next(count), "members": sorted(stopped)}


class Net:
    """Members that agree over a network that loses, repeats and delays messages; some die on the way."""

    def __init__(self, seed, size, kind=Agreement):
        self.random = random.Random(seed)
        self.size, self.flying, self.dead = size, [], set()
        count = iter(range(10**6))
        self.members = [kind(me, range(size), proposer(me, count)) for me in range(size)]
        self.chosen = []

    def send(self, sender, said):
        for to, message in said:
            if len(self.flying) > 40:  # what comes too fast is lost
                continue
            if self.random.random() > 0.2:
                self.flying.append((sender, to, json.dumps(message)))
            if self.random.random() < 0.1:
                self.flying.append((sender, to, json.dumps(message)))

    def note(self, me):
        value = self.members[me].chosen
        if value is not None:
            self.chosen.append(json.dumps(value, sort_keys=True))

    def step(self, *, deaths=True, suspects=True):
        """One event: a message arrives, time passes for somebody, or somebody dies."""
        kind = self.random.random()
        if kind < 0.75 and self.flying:
            sender, to, text = self.flying.pop(self.random.randrange(len(self.flying)))
            if to not in self.dead:
                self.send(to, self.members[to].hear(sender, json.loads(text)))
                self.note(to)
        elif kind < 0.99 or not deaths:
            me = self.random.randrange(self.size)
            if me not in self.dead:
                alive = [other for other in range(self.size) if other not in self.dead]
                if suspects:  # who is heard differs, and may be wrong
                    alive = [other for other in alive if other == me or self.random.random() < 0.8]
                self.send(me, self.members[me].tick(alive, {"step": 5}))
                self.note(me)
        elif len(self.dead) < self.size - 1:
            self.dead.add(self.random.randrange(self.size))


def differing(kind, sizes=(2, 3, 4, 5), seeds=SEEDS):
    """How many random runs chose two values."""
    wrong = 0
    for size in sizes:
        for seed in range(seeds):
            net = Net(seed, size, kind)
            for _ in range(400):
                net.step()
            wrong += len(set(net.chosen)) > 1
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_two_quorums_meet(size):
    """Any two sets of members that may go on have one in common, so never two sides go on."""
    every = [[member for member in range(size) if bits >> member & 1] for bits in range(1 << size)]
    able = [some for some in every if quorum(range(size), some)]
    assert all(set(one) & set(other) for one in able for other in able)
    assert quorum(range(size), range(size))
    assert not quorum(range(size), [])


def test_half_needs_the_lowest():
    """With exactly half, the half with the lowest member goes on."""
    assert quorum([1, 4], [1])
    assert not quorum([1, 4], [4])
    assert quorum([0, 1, 2, 3], [0, 3])
    assert not quorum([0, 1, 2, 3], [1, 2])


@pytest.fixture(params=[1, 2, membership.TOLD_IN_A_TICK])
def at_once(request, monkeypatch):
    """How many members are asked in a tick: all of these few, or a part, as of many."""
    monkeypatch.setattr(membership, "TOLD_IN_A_TICK", request.param)


@pytest.mark.usefixtures("at_once")
def test_never_two_values():
    """Whatever is lost, repeated, late or dead: no two members take different values."""
    assert differing(Agreement) == 0


class Forgets(Agreement):
    """Planted: a promise does not tell what was accepted before."""

    def _prepare(self, sender, message):
        self._accepted = (membership.NONE, None)
        return super()._prepare(sender, message)


class Obeys(Agreement):
    """Planted: accepts ballots below one that it promised."""

    def _accept(self, sender, message):
        self._promised = membership.NONE
        return super()._accept(sender, message)


class Insists(Agreement):
    """Planted: a leader keeps to its own proposal, whatever was accepted before."""

    def _promise(self, sender, message):
        return super()._promise(sender, {**message, "accepted": (membership.NONE, None)})


class Hasty(Agreement):
    """Planted: chosen as soon as one member has accepted."""

    def _accepted_by(self, sender, message):
        self._votes |= set(self._members)
        return super()._accepted_by(sender, message)


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", [Forgets, Obeys, Insists, Hasty])
def test_faults_are_found(kind):
    """Each rule is needed: without it, some of these runs choose two values."""
    assert differing(kind, sizes=(3, 4, 5), seeds=250) > 0


def chosen_apart():
    """What is chosen among four members, of which two and two hear each other, and no others."""
    count = iter(range(10**6))
    members = [Agreement(me, range(4), proposer(me, count)) for me in range(4)]
    for _ in range(2 * membership.PATIENCE):
        said = [(me, each) for me, one in enumerate(members) for each in one.tick([me, me ^ 1], {"step": 5})]
        while said:
            (sender, (to, message)), said = said[0], said[1:]
            if to == sender ^ 1:
                said += [(to, each) for each in members[to].hear(sender, message)]
    return {json.dumps(one.chosen) for one in members if one.chosen is not None}


def test_any_half_as_a_quorum_is_found(monkeypatch):
    """The half with the lowest member goes on alone. With any half as a quorum, two sides choose differently."""
    assert len(chosen_apart()) == 1
    monkeypatch.setattr(membership, "quorum", lambda members, some: 2 * len(set(members) & set(some)) >= len(members))
    assert len(chosen_apart()) == 2


def claiming(fair):
    """Makes members of which a half may go on once it has claimed that where all see it; or, unfairly, by itself."""
    claims = {}

    def make(me, members, propose):
        if me == 0:  # of a new net
            claims.clear()
        half = []

        def proposed(stopped):
            half[:] = claims.setdefault("first", sorted(stopped)) if fair else sorted(stopped)
            return propose(stopped)

        def able(some):
            return 2 * len(set(some)) > len(members) or sorted(set(some)) == half

        return Agreement(me, members, proposed, able)

    return make


@pytest.mark.long
def test_the_half_that_is_first():
    """Of two halves that see one directory only one goes on; without the directory both do, which is found."""
    assert differing(claiming(True), sizes=(2, 4)) == 0
    assert differing(claiming(False), sizes=(2, 4), seeds=250) > 0


def test_who_claims_first(tmp_path):
    """The second claim leaves the first; where nothing can be written nobody has claimed."""
    assert [first(tmp_path / "half", word) for word in ("0 1", "2 3", "0 1")] == ["0 1"] * 3
    assert first(tmp_path / "nowhere" / "half", "0 1") == ""


def test_a_claim_is_made_in_the_mark(tmp_path):
    """Where the mark is not, nobody claims; the mark of the next run takes claims and marks of runs before away."""
    (tmp_path / "world-6").symlink_to(".")
    mark(tmp_path, 7)
    assert [is_marked(tmp_path, run) for run in (6, 7)] == [False, True]
    assert first(tmp_path / "world-7" / "0", "0 1") == "0 1"
    mark(tmp_path, 8)
    assert [is_marked(tmp_path, run) for run in (7, 8)] == [False, True]
    assert first(tmp_path / "world-7" / "0", "2 3") == ""


@pytest.mark.long
@pytest.mark.cases(2)
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_who_live_agree_in_the_end(size):
    """Once nobody dies and who lives is known, all living members of a quorum come to know the value."""
    for seed in range(30):
        net = Net(seed, size)
        for _ in range(60):
            net.step()
        living = [member for member in range(size) if member not in net.dead]
        if not quorum(range(size), living):
            continue
        for _ in range(4000):
            net.step(deaths=False, suspects=False)
        assert all(net.members[member].chosen is not None for member in living), seed


def test_what_is_lost_is_asked_again():
    """A question or an answer that got lost costs no ballot: who has not answered is asked once more."""
    for lost in ("prepare", "promise", "accept", "accepted_by"):
        members, dropped, ballots = [Agreement(me, range(3), lambda _: "value") for me in range(3)], 0, set()
        for _ in range(membership.PATIENCE):
            said = [(me, each) for me, one in enumerate(members) for each in one.tick(range(3), {"step": 1})]
            while said:
                (sender, (to, message)), said = said[0], said[1:]
                ballots |= {message["ballot"] for _ in [0] if "ballot" in message}
                if message["kind"] == lost and dropped < 2:  # to or from both of the others
                    dropped += 1
                else:
                    said += [(to, each) for each in members[to].hear(sender, message)]
        assert (dropped, ballots) == (2, {(1, 0)}), lost
        assert [one.chosen for one in members] == ["value"] * 3, lost


def test_nothing_is_chosen_without_a_quorum():
    """Two of five that hear only each other never choose."""
    net = Net(1, 5)
    net.dead = {0, 1, 2}
    for _ in range(2000):
        net.step(deaths=False, suspects=False)
    assert net.chosen == []


def test_what_cannot_be_proposed_is_tried_again():
    """A leader whose proposal cannot be formed yet waits, and asks again."""
    answers = iter([None, None, {"members": [0]}])
    alone = Agreement(0, [0], lambda _: next(answers))
    for _ in range(3):
        assert alone.chosen is None
        alone.tick([], {"step": 1})
    assert alone.chosen == {"members": [0]}


def test_members_that_hear_each_other():
    """Who hears somebody but is not heard does not count; the lower ones are preferred."""
    assert mutual({0: [1, 2], 1: [0, 2], 2: [0, 1]}, 0) == [0, 1, 2]
    assert mutual({0: [1, 2], 1: [0, 2], 2: [1]}, 0) == [0, 1]
    assert mutual({0: [1, 2], 1: [0], 2: [0]}, 0) == [0, 1]
    assert mutual({0: [2], 2: [0], 3: []}, 2) == [0, 2]
