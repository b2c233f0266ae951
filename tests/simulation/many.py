"""Simulated members of a run over many hosts: a thousand of them hear each other, agree and let others in.

Real are ``Members``, ``Beacon``, ``Agreement``, and what ``World`` proposes. What a member does between two
incarnations is left out. Time passes from one event to the next, so that a thousand processes cost little.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import math
import random
from types import SimpleNamespace

from greenlet import getcurrent

from phalanx.engines.hosts import beacon, members, world
from phalanx.engines.hosts.messages import MOST_BYTES, Door, key_of
from phalanx.errors import PhalanxError
from tests.simulation import net
from tests.simulation.net import Net, Process, address_of
from tests.simulation.replacing import replaced
from tests.simulation.schedule import Ended, Schedule

PORT, RUN = 29500, 4711
LOST_AFTER, BEATS = 2.0, 5
CALM, LATER = 0.5, 0.3  # seconds before anything falls; until a member looks whether it has to stop, at most
LONGEST = 60.0
ROOM = 160  # datagrams at a socket: what 212,992 bytes hold, as Linux counts
COST = 40e-6  # seconds that a process beside a member takes for a datagram


class Events(Schedule):
    """A schedule that looks only at actors for which something has happened."""

    def __init__(self, seed):
        super().__init__({}, bool, most=math.inf)
        self.random, self.queue, self.numbers = random.Random(seed), [], itertools.count()
        self.moments, self.parts = collections.deque(maxlen=0), collections.defaultdict(list)

    def start(self, process, name, body):
        actor = super().start(process, name, body)
        self.parts[process].append(actor)
        self.push(self.now, actor)
        return actor

    def push(self, moment, actor):
        """Look at an actor then."""
        heapq.heappush(self.queue, (moment, next(self.numbers), actor))

    def poke(self, process, moment=0.0):
        """Something happens to a process."""
        for actor in self.parts[process]:
            self.push(max(moment, self.now), actor)

    def run(self):
        try:
            while self.queue and self.now < LONGEST:
                moment, _, actor = heapq.heappop(self.queue)
                self.now = max(self.now, moment)
                if actor.dead or not self._may(actor):
                    continue
                with contextlib.suppress(Ended):
                    actor.switch()
                if actor.dead and actor in self._actors:
                    self._end(actor)
        finally:
            for actor in list(self._actors):
                self.kill(actor.process)

    def act(self):
        self.check()
        self.actions += 1
        return False

    def kill(self, process):
        super().kill(process)
        for part in list(self.parts):
            if part.rank == process.rank:
                self.poke(part)

    def _let_others_act(self, ready, until):
        if until < math.inf:
            self.push(until, getcurrent())
        if ready is not None and ready():
            self.push(self.now, getcurrent())
        super()._let_others_act(ready, until)


class Pipe(net.Pipe):
    """Its other end is looked at when something comes."""

    def send(self, data, flags=0):
        super().send(data, flags)
        self.net.schedule.poke(self.other.owner)


class Datagrams(net.Datagrams):
    """Counts what is sent."""

    def send(self, data):
        assert len(data) <= MOST_BYTES, f"a datagram of {len(data)} bytes"
        self.net.sent[self.owner.rank] += 1
        self.net.bytes[self.owner.rank] += len(data)
        super().send(data)

    def fly(self, moment, data, sender):
        super().fly(moment, data, sender)
        self.net.schedule.poke(self.holders[-1], moment)

    def recvfrom(self, _):
        got = super().recvfrom(_)
        self.net.schedule.wait(seconds=COST)
        return got


class ManyNet(Net):
    """A net that counts, with links of unlike length."""

    def __init__(self, schedule):
        super().__init__(schedule)
        self.sent, self.bytes = collections.Counter(), collections.Counter()
        self.silent = set()  # hosts without power

    def passes(self, sender, to):
        return super().passes(sender, to) and not self.silent & {sender, to}

    def arrival(self, sender, to):
        return super().arrival(sender, to) + (0 if sender == to else self.schedule.random.uniform(0, net.LATENCY))

    def pair(self, *_):
        one, other = Pipe(self), Pipe(self)
        one.other, other.other = other, one
        return one, other

    def names(self):
        few = {name: super(ManyNet, self).names()[name] for name in ("time", "secrets", "select", "subprocess")}
        return few | {"socket": net.altered(net.socket, socket=lambda *_: Datagrams(self), socketpair=self.pair)}


class Many:
    """So many members, some of which fall, or are cut from others, and may come back.

    Parameters
    ----------
    size, seed : int
    fallen : collection of int
        The hosts that lose their power at once.
    cut : collection of (int, int)
        Links that are cut in that direction.
    back : collection of int
        The fallen that start again, once the others have agreed.
    longest : float
        Seconds to wait for that.
    times : int
        How often they have to agree before.
    looks : (float, float)
        Seconds between two looks of a member at what has come: the least, and the most.
    hung : collection of int
        Members that do nothing once something falls, while the processes beside them go on.
    patience : float
        Seconds after which members go on without those.

    Attributes
    ----------
    agreed : dict of int to list
        What each member has agreed on, and when: (moment, incarnation).
    calm : float
        Seconds at the end in which nothing happens; ``settled`` is what each had sent until then.
    said : dict of int to (int, int)
        Datagrams and bytes that each member sent from the fall until all had agreed.
    """

    def __init__(
        self,
        size,
        seed,
        fallen=(),
        cut=(),
        back=(),
        longest=LONGEST,
        times=1,
        looks=(0.02, 0.1),
        hung=(),
        patience=LONGEST,
    ):
        self.size, self.fallen, self.links, self.back = size, set(fallen), set(cut), list(back)
        self.schedule = Events(seed)
        self.net = ManyNet(self.schedule)
        self.agreed = collections.defaultdict(list)
        self.worlds, self.ends, self.places, self.rosters, self.stopped = {}, {}, {}, {}, {}
        self.said, self.looks, self.hung, self.patience = {}, looks, set(hung), patience
        self.calm, self.settled = 0.0, {}
        self.struck_at, self.longest, self.times = math.inf, longest, times

    def run(self):
        """Run until all that go on have agreed, and those that come back are members."""
        names = {
            **self.net.names(),
            "presence": SimpleNamespace(own=bool),
            "BEATS": BEATS,
            "in_thread": self.asked,
            "host_name": lambda: "back",
        }
        names |= {
            "os": SimpleNamespace(getpid=lambda: 1, getppid=lambda: 1),
            "state": lambda _: b"S",
            "TCP": self.store,
        }
        with replaced((beacon, members, world), names), replaced((net,), {"ROOM": ROOM}):
            door = Door(key_of(b"", "many"), self.size)
            for rank in range(self.size):
                self.schedule.start(Process(rank, 0), "main", lambda rank=rank: self.live(rank, door))
            self.schedule.start(Process(-1, 0), "fate", self.strike)
            self.schedule.run()
        return self

    def asked(self, ask, _):
        return ask()

    def store(self, address, port, **_):
        """The store of a member, as ``World`` uses it."""
        values = self.rosters.setdefault((address, port), {})
        return SimpleNamespace(set=values.__setitem__, get=values.get, check=lambda keys: set(keys) <= values.keys())

    def world_of(self, rank, door):
        """What of ``World`` decides about incarnations."""
        made = object.__new__(world.World)
        made.members = members.Members(rank, address_of(rank), PORT + rank, door, LOST_AFTER)
        made._door, made.seconds, made.keeper, made.run_dir = door, self.patience, 0, None
        made._own = self.store(address_of(rank), PORT)
        made._own.port = PORT
        made._hosts, made._names = {other: f"host{other}" for other in range(self.size)}, {}
        self.worlds[rank] = made
        return made

    def live(self, rank, door):
        """What a member does."""
        one = self.world_of(rank, door)
        self.places[rank] = one.members.place
        self.schedule.wait(seconds=0.05)
        one.members.begin(RUN, 0, dict(self.places))
        self.go_on(rank, one)

    def return_(self, rank, door):
        """What a process does that comes back."""
        one = self.world_of(rank, door)
        one.members.facts, one.joins = "", True
        one.members.look_for({other: self.places[other] for other in range(self.size) if other not in self.fallen})
        while one.members.under_way is None:
            one.members.news()
            self.schedule.wait(seconds=0.1)
        self.begin(one, rank, one.join())
        self.go_on(rank, one)

    def begin(self, one, rank, chosen):
        self.agreed[rank].append((self.schedule.now, chosen))
        places = {other: each[:2] for other, each in chosen["roster"].items()}
        one.members.begin(chosen["run"], chosen["number"], places, wide=chosen["wide"])
        one._hosts, one.keeper = {other: each[2] for other, each in chosen["roster"].items()}, chosen["keeper"]

    def go_on(self, rank, one):
        try:
            while True:
                one.members.open = True
                while not one.members.news():
                    self.schedule.wait(seconds=self.schedule.random.uniform(*self.looks))
                while rank in self.hung:
                    one.members.news()
                    self.schedule.wait(seconds=0.1)
                one.members.open = False
                self.stopped[rank] = self.schedule.now
                how = {"step": 7, "open": True, "each": 1, "wide": bool(self.links)}
                self.begin(one, rank, one.agree_anew(how, 1))
        except PhalanxError as error:
            self.ends[rank] = error

    def strike(self):
        """What befalls the hosts."""
        self.schedule.wait(seconds=CALM)
        self.struck_at = self.schedule.now
        self.net.cut |= self.links
        for process in [each for each in self.schedule.living if each.rank in self.fallen]:
            self.schedule.kill(process)
            self.net.silent.add(process.rank)
        before = self.net.sent.copy(), self.net.bytes.copy()
        self.until(lambda: self.all_have(self.times))
        self.said = {
            rank: (self.net.sent[rank] - before[0][rank], self.net.bytes[rank] - before[1][rank])
            for rank in range(self.size)
            if rank not in self.fallen
        }
        door = Door(key_of(b"", "many"), self.size)
        for rank in self.back:
            self.net.silent.discard(rank)
            self.schedule.start(Process(rank, 1), "main", lambda rank=rank: self.return_(rank, door))
        if self.back:
            self.until(lambda: all(rank in self.newest for rank in self.back))
        self.schedule.wait(seconds=LATER)
        self.settled = self.net.sent.copy()
        self.schedule.wait(seconds=self.calm)
        for process in self.schedule.living - {Process(-1, 0)}:
            self.schedule.kill(process)

    def until(self, ready):
        while not ready() and self.schedule.now < self.longest:
            self.schedule.wait(seconds=0.05)

    def all_have(self, count):
        return all(
            len(self.agreed[rank]) >= count or rank in self.ends
            for rank in range(self.size)
            if rank not in self.fallen | self.hung
        )

    @property
    def newest(self):
        """The members of the newest incarnation."""
        return max((each[-1][1] for each in self.agreed.values() if each), key=lambda each: each["number"])["roster"]

    @property
    def pause(self):
        """Seconds from the first who knew of a fall, or from the silence, to the last who has agreed."""
        return max(each[0][0] for each in self.agreed.values() if each) - self.struck_at
