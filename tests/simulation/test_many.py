"""Many simulated members: whoever falls, those that are left agree soon, and what each says does not grow with them."""

import collections
import itertools
import random
import socket

import pytest

from phalanx.engines.hosts import beacon, messages
from phalanx.engines.hosts.messages import Door
from phalanx.engines.hosts.world import World
from phalanx.errors import PeersLostError
from phalanx.plan.membership import HUBS, Agreement, turns
from tests.sampling import SEED
from tests.simulation.many import BEATS, LOST_AFTER, ROOM, Many

SOON = 2.0  # seconds after the silence until all have agreed
SHARES = {"one": lambda size: 1, "a tenth": lambda size: size // 10, "a third": lambda size: size // 3}


def fallen_of(size, count, seed):
    """So many hosts, drawn; for every third seed the lowest ones, which hear all others."""
    return list(range(count)) if seed % 3 == 0 else random.Random(seed).sample(range(size), count)


def problem(many):
    """What does not hold after a run; "" if all does."""
    stay = [rank for rank in range(many.size) if rank not in many.fallen]
    if many.ends:
        return f"ended: {next(iter(many.ends.items()))}"
    if not all(many.agreed[rank] for rank in stay):
        return "not all have agreed"
    if len({repr(sorted(many.agreed[rank][0][1].items())) for rank in stay}) > 1:
        return "they have agreed on different things"
    if set(many.agreed[stay[0]][0][1]["lost"]) != many.fallen:
        return f"lost: {many.agreed[stay[0]][0][1]['lost']}, fallen: {sorted(many.fallen)}"
    return "" if many.pause < LOST_AFTER + SOON else f"it took {many.pause - LOST_AFTER:.2f} s after the silence"


def fallen(size, share, seeds):
    """Have some fall, for each seed; returns what does not hold first."""
    for seed in seeds:
        if why := problem(Many(size, seed, fallen_of(size, SHARES[share](size), seed)).run()):
            return f"seed {seed}: {why}"
    return ""


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("share", SHARES)
def test_members_agree_soon(share):
    """30 members lose one, a tenth or a third at once: all others agree that it is those, within two seconds."""
    assert fallen(30, share, range(2 * SEED, 2 * SEED + 3)) == ""


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("share", SHARES)
def test_members_agree_soon_for_many_seeds(share, part):
    """The same for many seeds."""
    assert fallen(30, share, range(1000 * SEED + part, 1000 * SEED + 1000, 15)) == ""


@pytest.mark.campaign
@pytest.mark.parametrize("share", SHARES)
def test_more_members_agree_soon(share):
    """The same for two hundred members."""
    assert fallen(200, share, [3 * SEED, 3 * SEED + 1]) == ""


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("share", SHARES)
def test_a_thousand_members_agree_soon(share, number):
    """The same for a thousand. A hub stays: without one all ask all, and the simulator needs an hour for that."""
    seeds = (seed for seed in itertools.count(21 * SEED + 3 * number + 1) if seed % 3)
    count = SHARES[share](1000)
    assert fallen(1000, share, [next(seed for seed in seeds if not {0, 1, 2} <= {*fallen_of(1000, count, seed)})]) == ""


def returned(seed, looks):
    """Have some come back; returns whom members have lost since, and the newest incarnation, if all have the same."""
    many = Many(12, seed, {0, 4, 5, 9, 11}, back=[0, 4, 9, 11], looks=looks).run()
    newest = [each[-1][1] for each in many.agreed.values() if each]
    assert not many.ends
    assert all(each["roster"] == many.newest for each in newest)
    after = [chosen for each in many.agreed.values() for _, chosen in each if chosen["number"] > 1]
    return {rank for chosen in after for rank in chosen["lost"]}, newest[0]


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("looks", [(0.002, 0.01), (0.02, 0.1)], ids=["at once", "later"])
def test_those_that_fell_come_back(looks):
    """Each asks the hubs, is let in, and is told by the one who did that who the others are; three at a time.

    Nobody is lost because a hub did not know them before. That once was, where members looked at once.
    """
    for seed in range(SEED, SEED + 4):
        lost, newest = returned(seed, looks)
        assert not lost
        assert set(newest["roster"]) == set(range(12)) - {5}
        assert newest["number"] >= 3  # one without them, and at most three join at once


@pytest.mark.long
@pytest.mark.parametrize("hung", [(0,), (0, 1), (0, 1, 2), (3, 4, 5)])
def test_members_that_hang(hung):
    """The others go on without them after some time, also where those are the ones that lead."""
    many = Many(9, SEED, [8], hung=hung, patience=3.0, longest=30.0).run()
    stay = set(range(8)) - set(hung)
    assert not set(many.ends) & stay
    assert {tuple(many.agreed[rank][0][1]["lost"]) for rank in stay} == {(*hung, 8)}


@pytest.mark.long
def test_beats_after_the_lowest_fell():
    """Those that asked all others then do not go on with that: two of them once answered each other for ever."""
    many = Many(24, SEED, [0, 1, 2], longest=20.0, times=1)
    many.calm = 4 * LOST_AFTER
    many.run()
    beats = [many.net.sent[rank] - many.settled[rank] for rank in range(6, 24)]
    assert max(beats) <= 3 * (4 * BEATS + 2)


def test_a_cut_that_no_hub_sees():
    """Two that cannot reach each other part once all hear all; before, the hubs' word is believed."""
    many = Many(8, SEED, cut={(5, 7)}, longest=8.0).run()
    assert not many.net.passes(5, 7)
    assert not any(many.agreed.values()), "hubs hear both"
    wide = Many(8, SEED, {6}, cut={(5, 7)}, times=2).run()  # what falls ends the incarnation; the next one is wide
    number, lost = max((each["number"], tuple(each["lost"])) for of in wide.agreed.values() for _, each in of)
    assert (number, lost) == (2, (7,))
    assert isinstance(wide.ends[7], PeersLostError)


def beats(size, seconds=6.0):
    """How many datagrams each member has sent, where nothing falls."""
    many = Many(size, SEED, longest=seconds).run()
    return [many.net.sent[rank] / many.schedule.now * LOST_AFTER / BEATS for rank in range(size)]


@pytest.mark.long
def test_beats_do_not_grow_with_members():
    """A member that is no hub says as much among 40 as among 10; hubs say one beat to each."""
    few, more = beats(10), beats(40)
    assert max(more[3:]) <= max(few[3:]) * 1.1 < 3.3
    assert max(more[:3]) < 39 * 1.1
    assert sum(more) < 6 * 40 * 1.1


class Fixed(beacon.Beacon):
    """Planted: the hubs stay the three lowest, whoever falls."""

    def choose_hubs(self, now):
        self.hubs = sorted([*self.members, self.me])[:3]
        self.count_on(self.members if self.me in self.hubs else [rank for rank in self.hubs if rank != self.me], now)


@pytest.mark.long
def test_a_standby_that_does_not_take_over_is_found(monkeypatch):
    """Where the lowest members fall, the others do not agree then."""
    assert problem(Many(30, 0, range(10), longest=10.0).run()) == ""
    monkeypatch.setattr("tests.simulation.net.Beacon", Fixed)
    assert problem(Many(30, 0, range(10), longest=10.0).run()) != ""


@pytest.mark.parametrize(("number", "lives"), [(1, True), (2, False)])
def test_a_set_of_members_of_before(number, lives):
    """A hub that is still in the incarnation before does not know who has joined; one in this incarnation does."""
    with socket.socket() as pipe, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as air:
        facts = {"me": 5, "id": 5, "key": b"key".hex(), "size": 8, "port": 9, "seconds": 20.0, "hubs": HUBS}
        one = beacon.Beacon(pipe, air, facts)
        everybody = [0, 1, 2, 5, 6]
        run = {"run": 1, "number": 2, "members": everybody}
        peers = {str(rank): ["127.0.0.1", 9] for rank in everybody}
        one.configure({"peers": peers, "members": everybody, "run": run, "wide": False})
        beat = {"run": 1, "number": number, "members": [0, 1, 2, 5], "hears": [1, 2, 5], "places": None, "asks": True}
        one.receive({"from": 0, "id": 7, "port": 9, "count": 1, "run": 1, "beat": beat}, ("127.0.0.1", 9), one.seen)
        assert (6 in one.alive(one.seen)) == lives


def test_a_leader_that_does_not_count_is_found(monkeypatch):
    """Planted: who is lost is told wrongly by the leader, and members that are told so go on without each other."""
    proposed = World._proposed

    def wrong(self, least, stopped):
        made = proposed(self, least, stopped)
        return made and made | {"lost": made["lost"][1:]}

    monkeypatch.setattr(World, "_proposed", wrong)
    assert "lost: " in problem(Many(30, 1, [7, 8, 9]).run())


LONGEST_HOST, LONGEST_PLACE = "h" * messages.HOST, ["ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255", 65535]


def longest():
    """The longest datagrams of each kind that a run of the most members may have."""
    everybody = list(range(messages.MOST_MEMBERS))
    big, last = (1 << 62) - 1, everybody[-1]
    value = {
        "run": big, "number": 10**6, "wrong": "", "step": 10**12, "lost": everybody[:-1],
        "source": last, "keeper": last,
        "joined": {str(last - each): [*LONGEST_PLACE, LONGEST_HOST] for each in range(messages.NEWCOMERS)},
        "each": 1 << 20, "shared": False, "wide": False, "store": LONGEST_PLACE,
    }  # fmt: skip
    ballot, number = [10**6, last], 10**6
    said = [
        {"kind": "join", "facts": "f" * 64, "host": LONGEST_HOST, "sees": False, "proof": "f" * 64},
        {"kind": "done", "finished": everybody},
        {"kind": "stopped", "number": number, "step": 10**12, "open": False, "each": 8, "wide": False}
        | {"hears": everybody},
        {"kind": "promise", "number": number, "ballot": ballot, "accepted": [ballot, value]},
        {"kind": "accept", "number": number, "ballot": ballot, "value": value},
        {"kind": "chosen", "number": number, "value": value},
    ]  # fmt: skip
    beat = {"run": big, "number": number, "members": everybody, "hears": everybody, "asks": False}
    places = {str(last - each): LONGEST_PLACE for each in range(HUBS)}
    return [{"beat": beat | {"places": None}}, {"beat": beat | {"places": places}}, *({"say": each} for each in said)]


@pytest.mark.parametrize("message", longest(), ids=lambda one: one.get("say", {"kind": "beat"})["kind"])
def test_every_datagram_fits_into_a_packet(message):
    """Whatever 2,048 members with the longest names and addresses say is at most 1,200 bytes."""
    about = {"run": (1 << 62) - 1, "from": messages.MOST_MEMBERS - 1, "id": 1 << 60, "port": 65535, "count": 1 << 50}
    door = Door(b"key")
    data = door.seal(about | message)
    assert door.open(data) == about | message
    assert len(data) <= messages.MOST_BYTES


def test_many_agreements_ask_few():
    """A member says how it has stopped to three others, when it is its turn."""
    one, turn, every = Agreement(500, range(1000), lambda stopped: None), 500 % turns(range(1000)), turns(range(1000))
    said = [one.tick(range(1000), {"step": 1}) for _ in range(2 * every)]
    assert [at for at, each in enumerate(said) if each] == [turn, turn + every]
    assert [each.to for each in said[turn]] == [0, 1, 2]


class Crowded(Agreement):
    """Planted: a leader asks all members at once, as it did before."""

    def _ask(self, question=None):
        return [said for member in self._members if question for said in self._say(member, question)]


def ticks_until_agreed(kind, size, most):
    """How many ticks so many members need, each of which hears 160 messages of the last tick, and no others."""
    members = [kind(me, range(size), lambda stopped: {"members": sorted(stopped)}) for me in range(size)]
    draw, inboxes = random.Random(SEED), collections.defaultdict(list)
    for tick in range(most):
        heard, inboxes = inboxes, collections.defaultdict(list)
        for me, one in enumerate(members):
            came = draw.sample(heard[me], min(ROOM, len(heard[me])))
            for to, message in [
                *one.tick(range(size), {"step": 1}),
                *(said for each in came for said in one.hear(*each)),
            ]:
                inboxes[to].append((me, message))
        if all(one.chosen is not None for one in members):
            return tick
    return most


def test_many_agree_where_few_answers_find_room():
    """Of 500 answers at once a socket would hold 160, and no ballot would ever have a majority."""
    assert max(ticks_until_agreed(Agreement, size, 40) for size in (3, 127, 128, 240, 500)) < 25
    assert ticks_until_agreed(Crowded, 500, 40) == 40
