"""One process beside a member, and what a member proposes: cases that many simulated members meet only now and then."""

import contextlib
import pathlib
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from phalanx.engines.hosts import beacon, messages, world
from phalanx.engines.hosts.members import Members
from phalanx.engines.hosts.messages import Door, key_of
from phalanx.errors import PeersLostError
from phalanx.plan.membership import HUBS

KEY = key_of(b"", "hubs")
EVERYBODY = list(range(8))


@pytest.fixture
def beside():
    """Makes a beacon in this process, of a member of eight; by rank."""
    with contextlib.ExitStack() as undo:

        def make(me):
            pipe, parent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            air = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            for each in (pipe, parent, air):
                undo.enter_context(each)
            facts = {"me": me, "id": 100 + me, "key": KEY.hex(), "size": 8, "port": 9, "seconds": 20.0, "hubs": HUBS}
            made = beacon.Beacon(pipe, air, facts)
            peers = {str(rank): ["127.0.0.1", 9] for rank in EVERYBODY}
            run = {"run": 1, "number": 1, "members": EVERYBODY}
            made.configure({"peers": peers, "members": EVERYBODY, "run": run, "wide": False})
            return made

        yield make


def beat(sender, count, hears):
    """A beat of a member."""
    said = {"run": 1, "number": 1, "members": EVERYBODY, "hears": hears, "places": None, "asks": True}
    return {"from": sender, "id": 50 + sender, "port": 9, "count": count, "run": 1, "beat": said}


@pytest.mark.parametrize(("me", "admits"), [(7, False), (0, True)])
def test_who_is_no_hub_admits_nobody(beside, me, admits):
    """It does not know whether the member lives whose rank a newcomer has; a hub that has not heard that one does."""
    one, began = beside(me), time.monotonic()
    for count in range(1, 40):
        for hub in {0, 1, 2} - {me}:
            one.receive(beat(hub, count, EVERYBODY), ("127.0.0.1", 9), began + count / 2)
    now, place = began + 19.0, ["127.0.0.1", 4444]
    proof = one.door.mac(f"{one.salt} {place} 999".encode()).hex()
    join = {"kind": "join", "facts": "", "host": "h", "sees": False, "proof": proof}
    one.receive({"from": 5, "id": 999, "port": 4444, "count": 5, "run": 1, "say": join}, place, now)
    assert one.ended(5) == admits


def test_who_is_done_last_says_so():
    """Among many each speaks in its turn. The last one leaves at once, and says before that it is done."""
    one, said = object.__new__(Members), []
    others = [rank for rank in range(200) if rank != 1]
    vars(one).update(me=1, ranks=range(200), alive=others, left={}, done=set(others), _next_done=0.0)
    one.say = lambda to, message: said.append((to, message["kind"], len(message["finished"])))
    assert one.finish()
    assert said == [(others, "done", 200)]


def test_what_was_said_does_not_count_again():
    """Messages may overtake each other, and none of many that were recorded counts twice."""
    peer = beacon.Peer(("127.0.0.1", 9), 0.0)
    said = list(range(0, 100, 5))
    for one, other in zip(said[1::2], said[::2], strict=True):  # each pair in the other order
        for count in (one, other):
            assert not peer.repeats(count) or count == 0  # the first one that comes is the oldest that counts
            peer.note(count)
    assert all(peer.repeats(count) for count in said * 10)


ALONE = """
import os, signal, time
from phalanx.engines.hosts.members import Members
from phalanx.engines.hosts.messages import Door
one = Members(0, "127.0.0.1", 0, Door(b"key"), 5.0)
one.begin(1, 0, {0: one.place})
end = time.monotonic() + 2
while time.monotonic() < end:  # until it has begun
    one.news()
    time.sleep(0.05)
os.kill(one._process.pid, signal.SIGSTOP)
print(one._process.pid, flush=True)
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_stopped_helper_ends_with_its_member():
    """A job that is stopped as a whole and then killed leaves no process."""
    done = subprocess.run([sys.executable, "-c", ALONE], stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    pid, end = int(done.stdout), time.monotonic() + 20
    while pathlib.Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()[:3]
        time.sleep(0.05)


@pytest.mark.parametrize("text", ["a" * 5000, "\u0448" * 600, "\u00e9" * 160, '"\\' * 300, "\n\x1b" * 400, ""])
def test_a_farewell_fits_into_a_packet(text):
    """Whatever its letters, it is cut so that it comes; it was never sent where it had 224 Cyrillic letters."""
    about = {"run": (1 << 62) - 1, "from": 2047, "id": 1 << 60, "port": 65535, "count": 1 << 50}
    data = Door(KEY).seal(about | {"bye": {"way": "failed", "why": messages.cut(text)}})
    assert len(data) <= messages.MOST_BYTES
    assert Door(KEY).open(data) is not None
    assert messages.cut(text)[:100] == text[:100]


@pytest.fixture
def stores(monkeypatch):
    """The stores of members, by their place; ``World`` reaches these."""
    kept = {}

    def store(address, port, **_):
        values = kept.setdefault((address, port), {})
        return SimpleNamespace(set=values.__setitem__, get=values.get, check=lambda keys: set(keys) <= values.keys())

    monkeypatch.setattr(world, "TCP", store)
    return kept


@pytest.fixture
def process():
    """Makes a World that decides about incarnations, of a run of four; by rank."""
    with contextlib.ExitStack() as undo:

        def make(rank):
            made = object.__new__(world.World)
            made._door = Door(KEY, 8)
            made.members = Members(rank, "127.0.0.1", 0, made._door, 2.0)
            undo.callback(made.members.close)
            made.seconds, made.keeper, made.run_dir, made._names = 60.0, 0, None, {}
            made._hosts = {other: f"host{other}" for other in range(4)}
            return made

        yield make


def proposed(leader, ranks):
    """What the leader proposes if it hears these."""
    how = {"step": 7, "open": True, "each": 1, "wide": False}
    return leader._proposed(1, {rank: how | {"hears": [*set(ranks) - {rank}]} for rank in ranks})


def test_who_joins_knows_the_members_of_the_choice(process, stores):
    """Not those of a later ballot, whose leader heard fewer. Else the newcomer would count other quorums."""
    leader, newcomer = process(0), process(5)
    leader.members.begin(1, 0, {rank: ["127.0.0.1", 1000 + rank] for rank in range(4)})
    leader.members.joining = {5: {"place": ["127.0.0.1", 1005], "host": "host5", "sees": False}}
    leader._own = world.TCP("127.0.0.1", 777)
    leader._own.port = 777
    first, second = proposed(leader, range(4)), proposed(leader, range(3))
    assert (first["lost"], second["lost"]) == ([], [3])
    assert sorted(newcomer._roster(first)) == [0, 1, 2, 3]
    assert sorted(newcomer._roster(second)) == [0, 1, 2]


def test_who_cannot_reach_the_store_asks_anew(process, stores, monkeypatch):
    """It does not take a choice again that it was told before: the run may be in another incarnation by then."""
    newcomer = process(5)
    one, told = newcomer.members, []
    one.under_way = {"number": 0, "run": 1, "members": [0], "places": {}, "from": 0, "place": ["127.0.0.1", 1]}
    joined = {"5": ["127.0.0.1", 1005, "host5"]}
    value = {"run": 1, "number": 1, "store": ["127.0.0.1", 777], "lost": [], "joined": joined}

    def hear(_):
        told.append(len(one._waiting))
        one._waiting.append((0, {"kind": "chosen", "number": 1, "value": value}))

    monkeypatch.setattr(one, "_hear", hear)
    with pytest.raises(PeersLostError, match="store cannot be reached"):
        newcomer.join()
    assert told == [0] * world.TRIES


def test_nobody_joins_what_cannot_go_on(process, stores):
    """A choice that ends the run names no newcomers: with its reason it would not fit into a datagram."""
    leader = process(0)
    leader.members.begin(1, 0, {rank: ["127.0.0.1", 1000 + rank] for rank in range(4)})
    leader.members.joining = {5: {"place": ["127.0.0.1", 1005], "host": "host5", "sees": False}}
    leader._own = SimpleNamespace(port=777)
    how = {"step": 7, "open": True, "each": 1, "wide": False}
    choice = leader._proposed(8, {rank: how | {"hears": [0, 1, 2, 3]} for rank in range(4)})
    assert choice["wrong"].startswith("min_hosts is 8")
    assert choice["joined"] == {}
