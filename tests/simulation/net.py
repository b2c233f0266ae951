"""What a simulated process asks its system for: time, processes, threads, pipes, datagrams, a store, Gloo.

Each thing here takes the place of one that the code under test imports. Nothing decides anything about a run. Hosts
are numbered, and each member of a run is on one of its own. What one sends to another comes when the link lets it.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import itertools
import json
import socket
import subprocess
from types import SimpleNamespace
from typing import NamedTuple

import torch

from phalanx.engines.hosts.beacon import Beacon
from phalanx.engines.hosts.messages import MAC_BYTES, VERSION, Door
from tests.simulation.replacing import Poller, altered

LATENCY, SLOW, LATER, LATE = 0.01, 0.4, 0.7, 1.5  # seconds; the last: longer than a host may be silent
ROOM = 40  # messages in a pipe, or datagrams at a socket


class Process(NamedTuple):
    """A simulated process: its host, how often that was started before, and what it is."""

    rank: int
    life: int
    part: str = "caller"  # or "beacon", "worker"


class Net:
    """The links between hosts, and what listens where."""

    def __init__(self, schedule):
        self.schedule, self.cut, self.slow = schedule, set(), set()
        # How many datagrams of a link are to be lost, come malformed with a right MAC, come again, later, come late,
        # and come in another version with a right MAC.
        self.losing, self.garbling, self.repeating, self.delaying, self.outdating = self.strikes = [
            collections.Counter() for _ in range(5)
        ]
        self.door = None  # with the key of the job
        self.bound, self.stores, self.groups = {}, {}, {}
        self.count = itertools.count(1)  # of whatever needs a name: no number comes twice

    def names(self):
        """What stands for what modules import, by name."""
        return {
            "net": self, "GROUP": Group, "TCP": Store, "c10d": SimpleNamespace(PrefixStore=PrefixStore),
            "time": SimpleNamespace(
                monotonic=self.now, perf_counter=self.now, sleep=lambda seconds: self.schedule.wait(seconds=seconds)
            ),
            "secrets": SimpleNamespace(randbits=lambda _: next(self.count), token_hex=lambda _: f"{next(self.count)}"),
            "select": SimpleNamespace(poll=lambda: Poller(self.schedule), POLLIN=1),
            "socket": altered(socket, socket=lambda *_: Datagrams(self), socketpair=self.pair),
            "subprocess": altered(subprocess, Popen=lambda *_, pass_fds, **__: Beside(self, *pass_fds)),
            "threading": SimpleNamespace(Thread=functools.partial(Thread, self.schedule)),
        }  # fmt: skip

    def now(self):
        self.schedule.check()
        return self.schedule.now

    def gone(self, process):
        return not self.schedule.lives(process)

    def passes(self, sender, to):
        """Whether what one host sends reaches another."""
        return (sender, to) not in self.cut

    def arrival(self, sender, to):
        """When something that is sent now comes."""
        moment = self.schedule.now + (SLOW if (sender, to) in self.slow else 0 if sender == to else LATENCY)
        self.schedule.moments.append(moment)
        return moment

    def pair(self, *_):
        one, other = Pipe(self), Pipe(self)
        one.other, other.other = other, one
        return one, other


class File(contextlib.AbstractContextManager):
    """Something that a process may close or give to a child. It is its own descriptor."""

    def __init__(self, net):
        self.net, self.owner, self.closed = net, net.schedule.process, False

    def fileno(self):
        return self

    def close(self):
        self.net.schedule.check()
        self.closed |= self.owner == self.net.schedule.process  # a copy that a child has stays open

    def gone(self):
        return self.closed or self.net.gone(self.owner)

    def __exit__(self, *_):
        self.close()


class Pipe(File):
    """One end of a pair of sockets between two processes of a host."""

    def __init__(self, net):
        super().__init__(net)
        self.came = collections.deque()

    def readable(self):
        return bool(self.came) or self.other.gone()

    def recv(self, _):
        if not self.readable():
            self.net.schedule.wait(self.readable)
        return self.came.popleft() if self.came else b""

    def send(self, data, flags=0):
        self.net.schedule.act()
        if len(self.other.came) >= ROOM and not self.other.gone():
            if flags:
                raise BlockingIOError
            self.net.schedule.wait(lambda: len(self.other.came) < ROOM or self.other.gone())
        if self.other.gone() or self.closed:
            raise BrokenPipeError
        self.other.came.append(data)


class Datagrams(File):
    """A socket for datagrams. They may be lost, and overtake each other. A process and its child may both have it."""

    def __init__(self, net):
        super().__init__(net)
        self.flying, self.came = [], collections.deque()  # on the way, by when they come; and those that have come
        self.refused, self.holders = None, [self.owner]

    def gone(self):
        return self.closed or all(map(self.net.gone, self.holders))

    def setblocking(self, _):
        """Only sockets that do not wait are simulated."""

    def setsockopt(self, *_):
        """How much they take is ``ROOM``."""

    def bind(self, place):
        address, port = place[0], place[1] or 50_000 + next(self.net.count)
        if (address, port) in self.net.bound and not self.net.bound[address, port].gone():
            raise OSError("address already in use")
        self.place = address, port
        self.net.bound[self.place] = self

    def getsockname(self):
        return self.place

    def connect(self, place):
        self.to = tuple(place)

    def fly(self, moment, data, sender):
        """Something is on the way, and comes then."""
        bisect.insort(self.flying, (moment, next(self.net.count), data, sender))

    def readable(self):
        """Whether something has come. What came before this look found the room that was left, or is lost."""
        while self.flying and self.flying[0][0] <= self.net.schedule.now:
            _, _, *arrived = self.flying.pop(0)
            if len(self.came) < ROOM:
                self.came.append(arrived)
        return bool(self.came)

    def send(self, data):
        net, here, there = self.net, self.owner.rank, host_of(self.to[0])
        net.schedule.act()
        if self.refused is not None and self.refused <= net.schedule.now:
            self.refused = None
            raise ConnectionRefusedError
        lost, garbled, repeated, late, outdated = struck = [count[here, there] > 0 for count in net.strikes]
        for count, once in zip(net.strikes, struck, strict=True):
            count[here, there] -= once
        if garbled:
            data = malformed(data, net.door, next(net.count))
        if outdated:
            body = b"0" + data[MAC_BYTES:].removeprefix(VERSION)
            data = net.door.mac(body) + body
        if lost or not net.passes(here, there):
            return
        listener, moment = net.bound.get(self.to), net.arrival(here, there)
        if late:
            moment += LATE
            net.schedule.moments.append(moment)
        if listener is None or listener.gone():
            self.refused = moment if net.passes(there, here) else None
        else:
            listener.fly(moment, data, here)
            if repeated:
                listener.fly(moment + LATER, data, here)
                net.schedule.moments.append(moment + LATER)

    def sendto(self, data, place):
        self.to = place
        self.send(data)

    def recvfrom(self, _):
        if not self.readable():
            raise BlockingIOError
        data, sender = self.came.popleft()
        return data, (address_of(sender), 0)


class Beside:
    """The process beside a member: it runs the real ``Beacon``."""

    def __init__(self, net, pipe, air):
        self.net, self.process = net, net.schedule.process._replace(part=f"beacon {next(net.count)}")
        pipe.owner = self.process
        air.holders.append(self.process)
        net.schedule.start(self.process, "main", lambda: self.serve(pipe, air))

    def serve(self, pipe, air):
        with contextlib.suppress(ConnectionError, ValueError):  # its parent may end first
            facts = json.loads(pipe.recv(1 << 16))
            self.net.door = Door(bytes.fromhex(facts["key"]))
            Beacon(pipe, air, facts).serve()

    def wait(self, seconds=None):
        """As ``Popen.wait``."""
        if not self.net.schedule.wait(lambda: self.net.gone(self.process), seconds):
            raise subprocess.TimeoutExpired("beacon", seconds)

    def kill(self):
        self.net.schedule.act()
        self.net.schedule.kill(self.process)


class Thread:
    """A thread of the process that starts it."""

    def __init__(self, schedule, target, args, daemon):
        self.schedule, self.body = schedule, functools.partial(target, *args)

    def start(self):
        body, self.body = self.body, None  # what it holds ends with it
        self.actor = self.schedule.start(self.schedule.process, "thread", body)

    def is_alive(self):
        self.schedule.check()
        return not self.actor.dead

    def join(self, seconds):
        self.schedule.wait(lambda: self.actor.dead, seconds)


class Store:
    """``torch.distributed.TCPStore``: that of a process, or a connection to it."""

    net, prefix, server = None, "", None

    def __init__(self, host, port, is_master=False, timeout=None, **_):
        net = self.net
        self.host, self.port, self.seconds = host, port or 50_000 + next(net.count), timeout.total_seconds()
        self.owner, place = net.schedule.process, (host, self.port)

        def served():
            return place in net.stores and not net.gone(net.stores[place].owner)

        if not is_master:
            self._wait(served)
        elif served():
            raise RuntimeError("address already in use")
        else:
            net.stores[place], self.values = self, {}
        self.server = net.stores[place]

    def _wait(self, ready=lambda: True):
        """Wait until the host of the store answers."""
        net, here, there = self.net, self.owner.rank, host_of(self.host)

        def broken():
            return self.server is not None and net.gone(self.server.owner)

        def over():
            stopped = self.server is not None and self.server.owner in net.schedule.frozen
            return net.passes(here, there) and net.passes(there, here) and (broken() or (ready() and not stopped))

        if not net.schedule.wait(over, self.seconds):
            raise RuntimeError("the store does not answer")
        if broken():
            raise RuntimeError("the store has ended")

    def set(self, key, value):
        self._wait()
        self.server.values[self.prefix + key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key):
        self._wait(lambda: self.prefix + key in self.server.values)
        return self.server.values[self.prefix + key]

    def check(self, keys):
        self._wait()
        return all(self.prefix + key in self.server.values for key in keys)


class PrefixStore(Store):
    """``torch.distributed.PrefixStore``: another store, in which all keys have a prefix."""

    def __init__(self, prefix, store):
        vars(self).update(vars(store), underlying_store=store, prefix=f"{store.prefix}{prefix}/")


class Wire(File):
    """What a group has of one of its processes; it outlives the group, as the others may look at it."""

    def __init__(self, net):
        super().__init__(net)
        self.came = collections.defaultdict(collections.deque)

    def hears(self, other):
        return self.net.passes(other.owner.rank, self.owner.rank)


class Group:
    """``torch.distributed.ProcessGroupGloo``: connections between the processes that come with the same store."""

    net = None
    _Options = SimpleNamespace
    create_device = create_default_device = staticmethod(lambda **_: None)

    def __init__(self, store, rank, size, options):
        self.rank, self.seconds, self.mine = rank, options._timeout.total_seconds(), Wire(self.net)
        name = next(self.net.count)
        self.net.groups[name] = self.mine
        try:
            store.set(str(rank), str(name))
            others = [other for other in range(size) if other != rank]
            self.others = {other: self.net.groups[int(store.get(str(other)))] for other in others}
            for other in self.others.values():
                self.wait(lambda other=other: self.mine.hears(other) and other.hears(self.mine), other)
        except BaseException:
            self.mine.closed = True
            raise

    def __del__(self):
        self.mine.closed = True

    def wait(self, ready, other):
        """Wait for another process, which may end."""
        done = self.net.schedule.wait(lambda: ready() or self.ended(other), self.seconds)
        if not ready():
            raise RuntimeError("Connection closed by peer" if done else "Timed out waiting")

    def ended(self, other):
        """Whether this process knows that another one has closed the connection."""
        return other.gone() and self.mine.hears(other)

    def send(self, tensors, number, _):
        self.net.schedule.act()
        other = self.others[number]
        if self.ended(other):
            raise RuntimeError("Connection closed by peer")
        moment = self.net.arrival(self.mine.owner.rank, other.owner.rank)
        other.came[self.rank].append((moment, tensors[0].numpy().tobytes()))
        return SimpleNamespace(wait=self.net.schedule.check)

    def _allgather_base(self, gathered, mine):
        rows = gathered.view(len(self.others) + 1, -1)
        rows[self.rank].copy_(mine)
        for other in self.others:
            self.send([mine], other, 0)
        for other in self.others:
            self.recv([rows[other]], other, 0).wait()
        return SimpleNamespace(is_completed=lambda: True, wait=self.net.schedule.check)

    def recv(self, tensors, number, _):
        came, other = self.mine.came[number], self.others[number]

        def wait():
            self.wait(lambda: came and came[0][0] <= self.net.schedule.now and self.mine.hears(other), other)
            tensors[0].copy_(torch.frombuffer(bytearray(came.popleft()[1]), dtype=torch.uint8))

        return SimpleNamespace(wait=wait)


def malformed(data, door, number):
    """A datagram in which something does not fit, or all of it, with the MAC of who has the key."""
    message = json.loads(data[MAC_BYTES:].removeprefix(VERSION))
    junk = [None, -1, "x", [], {}, 1 << 80, [[]] * 9, True][number % 8]
    holder = next((message[kind] for kind in ("say", "beat", "bye") if number % 3 and kind in message), message)
    name = sorted(holder)[number % len(holder)]
    if number % 5:
        del holder[name]
    holder[name if number % 5 > 1 else "more"] = junk
    return door.seal(message)


def address_of(rank):
    """The address of a host."""
    return f"10.0.0.{rank}"


def host_of(address):
    """The host with this address."""
    return int(address.rpartition(".")[2])
