"""The door of a run's network: what does not fit is dropped and counted, whoever sends it, and ends nothing."""

import contextlib
import copy
import json
import os
import random
import resource
import socket
import time

import pytest

from phalanx.engines.hosts import beacon
from phalanx.engines.hosts.members import Farewell, Members
from phalanx.engines.hosts.messages import FOREIGN, MALFORMED, OTHER_VERSION, Door, key_of
from phalanx.plan.membership import HUBS
from tests.sampling import SEED

SIZE, RUN = 3, 4711
KEY = key_of(b"", "test")
PLACES = {"0": ["127.0.0.1", 29500], "2": ["10.0.0.2", 29502]}
INCARNATION = {
    "run": RUN, "number": 1, "wrong": "", "step": 7, "lost": [1], "joined": {"2": ["10.0.0.2", 29502, "b"]},
    "source": 0, "keeper": 0, "each": 2, "shared": False, "wide": False, "store": ["127.0.0.1", 4000],
}  # fmt: skip
CROWD = {str(rank): ["10.0.0.2", 29502, "b"] for rank in range(4)}
BEAT = {"run": RUN, "number": 0, "members": [0, 1], "hears": [0], "places": None, "asks": True}
SAID = [
    {"kind": "join", "facts": "ab" * 32, "host": "b", "sees": False, "proof": ""},
    {"kind": "prove", "proof": "ab"},
    {"kind": "done", "finished": [1, 2]},
    {"kind": "refused"},
    {"kind": "stopped", "number": 1, "step": 7, "open": True, "each": 2, "wide": False, "hears": [0]},
    {"kind": "prepare", "number": 1, "ballot": [1, 1]},
    {"kind": "promise", "number": 1, "ballot": [1, 1], "accepted": [[0, -1], None]},
    {"kind": "promise", "number": 1, "ballot": [2, 1], "accepted": [[1, 1], INCARNATION]},
    {"kind": "accept", "number": 1, "ballot": [1, 1], "value": INCARNATION},
    {"kind": "accepted_by", "number": 1, "ballot": [1, 1]},
    {"kind": "chosen", "number": 1, "value": INCARNATION},
]
ABOUT = {"run": RUN, "from": 1, "id": 12, "port": 9, "count": 3}
# One of each kind, as it travels.
TRAFFIC = [
    ABOUT | {"look": True, "run": None},
    ABOUT | {"beat": BEAT},
    ABOUT | {"beat": BEAT | {"places": PLACES}},
    ABOUT | {"bye": {"way": "failed", "why": "its disk is full"}},
    *[ABOUT | {"say": said} for said in SAID],
]
# What each once did: it ended the process beside a member, or came out of train() as a raw error.
MALFORMED_ONES = {
    "a port of 70000": TRAFFIC[0] | {"port": 70000},
    "a port that is a text": TRAFFIC[0] | {"port": "x"},
    "nested lists": b"[" * 50_000,
    "whom a member hears is a number": ABOUT | {"beat": BEAT | {"hears": 5}},
    "no number": b'{"look": true, "run": null, "from": NaN, "id": 1, "port": 9, "count": 3}',
    "a number of 5,000 digits": b'{"look": true, "from": ' + b"1" * 5000 + b"}",
    "no UTF-8": b"\xff\xfe" * 100,
    "a rank from WORLD_SIZE on": ABOUT | {"say": SAID[0], "from": SIZE},
    "a negative rank": TRAFFIC[0] | {"from": -1},
    "True for a rank": TRAFFIC[0] | {"from": True},
    "a bye without fields": ABOUT | {"bye": {}},
    "a bye of no known way": ABOUT | {"bye": {"way": "x", "why": ""}},
    "stopped without facts": ABOUT | {"say": {"kind": "stopped", "number": 1}},
    "prepare without a ballot": ABOUT | {"say": {"kind": "prepare", "number": 1}},
    "nothing was chosen": ABOUT | {"say": {"kind": "chosen", "value": None, "number": 1}},
    "an empty choice": ABOUT | {"say": {"kind": "chosen", "value": {}, "number": 1}},
    "a choice of too many": ABOUT | {"say": SAID[-1] | {"value": INCARNATION | {"joined": CROWD}}},
    "a keeper that is no member": ABOUT | {"say": SAID[-1] | {"value": INCARNATION | {"keeper": 1}}},
    "nothing accepted in a ballot": ABOUT | {"say": SAID[6] | {"accepted": [[5, 1], None]}},
    "say without a kind": ABOUT | {"say": {}},
    "an unknown kind": ABOUT | {"say": {"kind": "sing"}},
    "join without facts": ABOUT | {"say": {"kind": "join"}},
    "a field too many": ABOUT | {"look": True, "more": 1},
    "two kinds": ABOUT | {"look": True, "beat": BEAT},
    "a list": [],
    "null": None,
    "a text that is too long": ABOUT | {"bye": {"way": "failed", "why": "x" * 5000}},
}


def sealed(door, content):
    """A datagram with this content: a message, or bytes as they are."""
    if not isinstance(content, bytes):
        return door.seal(content)
    return door.mac(b"1" + content) + b"1" + content


@pytest.mark.parametrize("message", TRAFFIC)
def test_every_kind_comes_through(message):
    """What members say to each other is read as it was said, and counted as nothing."""
    door = Door(KEY, SIZE)
    assert door.open(door.seal(message)) == message
    assert not door.dropped


@pytest.mark.parametrize("what", MALFORMED_ONES)
def test_what_does_not_fit_is_dropped(what):
    """It is counted, and nothing is raised."""
    door = Door(KEY, SIZE)
    assert door.open(sealed(door, MALFORMED_ONES[what])) is None
    assert door.dropped == {MALFORMED: 1}


def test_a_message_of_another_version_says_so():
    """It is neither taken for one of this version, nor for one of another job."""
    door = Door(KEY, SIZE)
    body = b"2" + json.dumps(TRAFFIC[0]).encode()
    assert door.open(door.mac(body) + body) is None
    assert door.dropped == {OTHER_VERSION: 1}


@pytest.mark.parametrize("other", [key_of(b"", "another"), key_of(b"a secret of 16 b", "test"), b"", KEY[:31]])
def test_without_the_key_nothing_is_read(other):
    """Another job, another secret, none: whatever it says is dropped."""
    door = Door(KEY, SIZE)
    assert [door.open(Door(other, SIZE).seal(message)) for message in TRAFFIC] == [None] * len(TRAFFIC)
    assert door.dropped == {FOREIGN: len(TRAFFIC)}
    assert door.open(b"") is None
    assert door.open(b"x" * 100) is None


def test_texts_from_outside_obey_nothing():
    """Escape sequences and changes of direction come out as ``repr`` shows them; lines may end."""
    door = Door(KEY, SIZE)
    said = door.open(door.seal(ABOUT | {"bye": {"way": "failed", "why": "\x1b[31mred\r\u202e\nnext"}}))
    assert said["bye"]["why"] == "\\x1b[31mred\\r\\u202e\nnext"


def test_what_a_store_has():
    """A value is read where it was put, by who has the key; anything else is as if it were not there."""
    door = Door(KEY, SIZE)
    about = {
        "doubts": {"x" * 900: "1" * 3000},
        "host": "a",
        "cores": [0],
        "place": ["127.0.0.1", 9],
        "recipe": {"lr": 0.1},
    }
    values = {"run": RUN, "hello": "ab", "welcome": "cd", "newest": -1, "left": ["failed", "why"], "about": about}
    for name, value in values.items():
        data = door.seal(value, f"1/{name}")
        assert door.open_value(name, f"1/{name}", data) == value
        assert door.open_value(name, f"2/{name}", data) is None
        assert Door(b"other", SIZE).open_value(name, f"1/{name}", data) is None
        assert door.open_value(name, f"1/{name}", b"7") is None
        assert door.open_value(name, f"1/{name}", door.seal({"x": 1}, f"1/{name}")) is None


OPEN = []


def datagram_socket():
    """A socket that is closed after the test."""
    OPEN.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    return OPEN[-1]


@pytest.fixture(autouse=True)
def closed():
    """Close the sockets of a test."""
    yield
    while OPEN:
        OPEN.pop().close()


class Outside:
    """A socket of somebody who is no member."""

    def __init__(self, door, rank=1, address="127.0.0.1"):
        self.door, self.rank, self.count, self.id = door, rank, 0, 99
        self.air = datagram_socket()
        self.air.bind((address, 0))
        self.air.setblocking(False)
        self.place = list(self.air.getsockname())

    def say(self, to, run=RUN, **what):
        """Send a message of a kind, in the form that messages have."""
        self.count += 1
        about = {"run": run, "from": self.rank, "id": self.id, "port": self.place[1], "count": self.count}
        self.air.sendto(self.door.seal(about | what), tuple(to.place))

    def heard(self):
        """All that has come."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.door.open(self.air.recv(1 << 16)))
        return found


@pytest.fixture
def member():
    """Makes a member of a run with the real process beside it; by rank."""
    with contextlib.ExitStack() as undo:

        def make(rank, size=SIZE, seconds=2.0, key=KEY):
            made = Members(rank, "127.0.0.1", 0, Door(key, size), seconds)
            undo.callback(made.close)
            return made

        yield make


def pair_of(member, **options):
    """Two members of a run that hear each other."""
    both = [member(0, **options), member(1, **options)]
    for each in both:
        each.begin(RUN, 0, {0: both[0].place, 1: both[1].place})
    hear(both, 0.5)  # so that each has heard who the other is
    return both


def wait(members, done, seconds=30.0):
    """Have members hear until something holds. What ends an incarnation fails."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not happen in time"
        assert [each.news() for each in members] == [""] * len(members)
        time.sleep(0.02)


def hear(members, seconds):
    """Have members hear for a while."""
    end = time.monotonic() + seconds
    wait(members, lambda: time.monotonic() > end)


def pid_of(member):
    """The process beside a member."""
    return member._process.pid  # planted


def used(pid):
    """(descriptors, resident KB) of a process."""
    with open(f"/proc/{pid}/status") as file:
        resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    return len(os.listdir(f"/proc/{pid}/fd")), resident


def mutated(value, draw):
    """A message in which something is another type, range, length or name."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        at, path = value, []
        while isinstance(at, (dict, list)) and at and (not path or draw.random() < 0.7):
            key = draw.choice([*at]) if isinstance(at, dict) else draw.randrange(len(at))
            path.append((at, key))
            at = at[key]
        holder, key = path[-1]
        junk = [None, True, -1, 1 << 70, 70000, 0.5, float("nan"), "", "\x1b[J", "x" * 9000, [], {}, [[]] * 9, SIZE, 1]
        if isinstance(holder, dict) and draw.random() < 0.3:
            holder[draw.choice(["kind", "x", "from", "say", "0"])] = holder.pop(key)
        else:
            holder[key] = draw.choice(junk)
    return value


def datagrams(count, seed):
    """Mutations of what members say, with the key and without; those that would fit are of another run."""
    draw, door = random.Random(seed), Door(KEY, SIZE)
    for _ in range(count):
        message = draw.choice(TRAFFIC)
        if draw.random() < 0.3:  # whatever it is, without the key
            yield Door(b"other", SIZE).seal(message) if draw.random() < 0.5 else draw.randbytes(draw.randrange(200))
            continue
        if draw.random() < 0.3:
            body = bytearray(json.dumps(message).encode())
            for _ in range(draw.randint(1, 4)):
                body[draw.randrange(len(body))] = draw.randrange(256)
            data = sealed(door, bytes(body))
        else:
            data = door.seal(mutated(message, draw))
        if (read := door.open(data)) is not None:
            read |= {"run": RUN + 1}
            if "beat" in read:
                read["beat"]["run"] = RUN + 1
            data = door.seal(read)
        yield data


@pytest.mark.long
@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.campaign)])
def test_whatever_comes_nobody_ends(member, count):
    """Two members get mutations of all kinds of messages, and go on hearing each other with flat memory."""
    both = pair_of(member)
    out = datagram_socket()
    pids, before = [pid_of(each) for each in both], None
    for number, data in enumerate(datagrams(count, SEED)):
        with contextlib.suppress(OSError):  # longer than a datagram may be
            out.sendto(data, tuple(both[number % 2].place))
        if number % 50 == 0:
            hear(both, 0.01)
            before = [used(pid) for pid in pids] if number == count // 50 // 3 * 50 else before
    hear(both, 1.0)
    assert [each.news() for each in both] == ["", ""]
    assert [each.alive for each in both] == [[1], [0]]
    assert [pid_of(each) for each in both] == pids, "a process beside a member has ended"
    after = [used(pid) for pid in pids]
    assert [each[0] for each in after] == [each[0] for each in before]
    assert all(now[1] < then[1] + 3000 for now, then in zip(after, before, strict=True)), (before, after)
    assert sum(each.door.dropped.total() for each in both) > count / 3
    assert all(not each.joining and not each.left for each in both)


@pytest.mark.long
def test_one_datagram_ends_nothing(member):
    """Each malformed message that once ended a run, sent by somebody who can make the key."""
    one = member(0, seconds=30.0)
    one.begin(RUN, 0, {0: one.place, 1: ["127.0.0.1", 9]})
    pid = pid_of(one)
    out = datagram_socket()
    for content in MALFORMED_ONES.values():
        out.sendto(sealed(one.door, content)[:65000], tuple(one.place))
        hear([one], 0.02)
    wait([one], lambda: one.door.dropped.total() == len(MALFORMED_ONES))
    assert pid_of(one) == pid


@pytest.mark.long
def test_a_stranger_is_answered_once_for_each_look(member):
    """300 looks get at most 300 answers, and nothing comes to anybody who has not asked."""
    both = pair_of(member, seconds=4.0)
    stranger = Outside(Door(KEY, SIZE), rank=2)
    for _ in range(300):
        stranger.say(both[0], run=None, look=True)
    hear(both, 1.0)
    answers = stranger.heard()
    assert 0 < len(answers) <= 300
    hear(both, 1.0)
    assert stranger.heard() == []
    descriptors = used(pid_of(both[0]))[0]
    stranger.say(both[0], run=None, look=True)
    hear(both, 0.5)
    assert used(pid_of(both[0]))[0] == descriptors


JOIN = SAID[0]


def challenged(stranger, members, to):
    """The proof that a member wants to hear of a newcomer."""
    stranger.say(to, say=JOIN)
    found = []
    wait(members, lambda: found.extend(stranger.heard()) or found)
    return found[0]["say"]["proof"]


@pytest.mark.long
def test_who_wants_to_join_has_to_be_where_it_says(member):
    """A join without what was sent to its place is no news, and is answered with one datagram; with it, it is."""
    both = pair_of(member)
    both[0].open, both[0].facts = True, JOIN["facts"]
    stranger = Outside(Door(KEY, SIZE), rank=2)
    proof = challenged(stranger, both, both[0])
    other = Outside(Door(KEY, SIZE), rank=2)
    other.say(both[0], say=JOIN | {"proof": proof})  # what somebody else was sent
    hear(both, 0.5)
    assert both[0].joining == {}
    stranger.say(both[0], say=JOIN | {"proof": proof})
    end = time.monotonic() + 20
    while not both[0].news() and time.monotonic() < end:
        time.sleep(0.02)
    assert both[0].news() == "process 2 wants to join"
    assert both[0].joining[2]["place"] == stranger.place


@pytest.mark.long
def test_who_lives_is_not_replaced(member):
    """A join for the rank of a member that is heard is no news, with all that a newcomer can show."""
    both = pair_of(member)
    both[0].open, both[0].facts = True, JOIN["facts"]
    stranger = Outside(Door(KEY, SIZE), rank=1)
    proof = challenged(stranger, both, both[0])
    for _ in range(5):
        stranger.say(both[0], say=JOIN | {"proof": proof})
    hear(both, 1.0)
    assert both[0].joining == {}
    assert both[0].alive == [1]


@pytest.mark.long
def test_what_was_said_before_does_not_count(member):
    """A recorded beat of a member that has fallen does not keep it alive."""
    both = pair_of(member, seconds=1.0)
    fake = Outside(Door(KEY, SIZE), rank=1)
    fake.id, fake.count = both[1]._about["id"], 0  # planted: what a beat of it says
    os.kill(pid_of(both[1]), 19)  # planted: stopped
    end = time.monotonic() + 20
    while both[0].news() == "":
        fake.say(both[0], beat=BEAT | {"hears": [0, 1]})
        assert time.monotonic() < end, "recorded beats kept it alive"
        time.sleep(0.05)
    assert "process 1 is lost" in both[0].news()


@pytest.mark.parametrize("run", [None, RUN - 1])
def test_words_of_another_run_do_not_count(member, run):
    """Recorded, they come before a run is known here, and in it: nobody is done by them, or refused."""
    one, fake = member(0), Outside(Door(KEY, SIZE), rank=1)

    def say(**others):
        for said in ({"kind": "done", "finished": [1, 2]}, {"kind": "refused"}):
            fake.say(one, run=run, say=said)
        fake.say(one, **others)  # they came before this

    say(beat=BEAT | {"places": PLACES})
    wait([one], lambda: one.under_way)
    assert (one.done, one.refused) == (set(), False)
    one.begin(RUN, 0, {0: one.place, 1: fake.place})
    say(say={"kind": "done", "finished": [1]})
    wait([one], lambda: one.done)
    assert (one.done, one.refused) == ({1}, False)


def test_descriptors_beyond_those_of_select(member):
    """Whoever has many files open gives high numbers to the processes beside it, which go on all the same."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        both = pair_of(member)
        wait(both, lambda: [each.finish() for each in both] == [True, True])
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def beside(there, *members):
    """What runs beside member 0, in this process, where another one is ``there``; and the caller's end of its pipe."""
    pipe, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    OPEN.extend([pipe, other])
    facts = {"me": 0, "id": 5, "key": KEY.hex(), "size": SIZE, "port": 9, "seconds": 2.0, "hubs": HUBS}
    made = beacon.Beacon(pipe, datagram_socket(), facts)
    run = {"run": RUN, "number": 1, "members": list(members)}
    made.configure({"peers": {"2": there.place}, "members": list(members), "run": run, "wide": False})
    return made, other


def test_a_caller_that_is_killed_before_it_reads():
    """What was said to it is no reason to end without the last words for the others."""
    there = Outside(Door(KEY, SIZE), rank=2)
    made, caller = beside(there, 0, 2)
    assert made.notify_parent({"ping": True})
    caller.close()
    made.serve()
    assert not made.notify_parent({"ping": True})
    words = [each["bye"]["way"] for each in there.heard() if "bye" in each]
    assert words == ["ended"] * beacon.FAREWELLS
    made.peers[2].socket.close()


def test_a_lost_member_is_told_of_the_run_for_a_bounded_time():
    """Its last address may have another owner by then."""
    there = Outside(Door(KEY, SIZE), rank=2)
    made, _ = beside(there, 0)
    made.beat()
    time.sleep(0.05)
    assert [each["beat"]["run"] for each in there.heard()] == [RUN]
    made.peers[2].last -= beacon.TOLD_SECONDS  # planted: it fell long ago
    made.configure({"peers": {"2": there.place}, "members": [0], "run": made.run | {"number": 2}, "wide": False})
    made.beat()
    time.sleep(0.05)
    assert there.heard() == []
    made.peers[2].socket.close()


@pytest.mark.long
@pytest.mark.parametrize("number", [9, 19], ids=["killed", "stopped"])
def test_a_member_goes_on_without_its_helper(member, number):
    """Another one is started on the same socket, and nobody counts the member as lost."""
    both = pair_of(member, seconds=4.0)
    pid = pid_of(both[0])
    os.kill(pid, number)
    for _ in range(2000):  # more than a pipe holds; nothing waits
        both[0].say([1], {"kind": "prove", "proof": ""})
    wait(both, lambda: pid_of(both[0]) != pid)
    hear(both, 5.0)
    assert [each.alive for each in both] == [[1], [0]]


def test_a_helper_that_ends_again_and_again_is_an_error(member, monkeypatch):
    """It is started some times only, and then the member says so."""
    from phalanx.engines.hosts import members
    from phalanx.errors import PeersLostError

    one = member(0)
    one.begin(RUN, 0, {0: one.place})
    monkeypatch.setattr(members.sys, "executable", "/bin/false")
    os.kill(pid_of(one), 9)
    with pytest.raises(PeersLostError, match="ends again and again"):
        hear([one], 30)


def test_a_member_says_why_it_leaves_also_by_a_new_helper(member):
    """Its last words come, though the process beside it was killed just before."""
    both = pair_of(member)
    os.kill(pid_of(both[0]), 9)
    both[0].part(Farewell("closed", "enough"))
    end = time.monotonic() + 20
    while 0 not in both[1].left:
        both[1].news()
        assert time.monotonic() < end
        time.sleep(0.02)
    assert both[1].left[0] == Farewell("closed", "enough")
