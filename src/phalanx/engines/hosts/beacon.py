"""A small process beside each member of a run over several hosts: it says that the member lives, and hears others.

It is a process of its own, since user code may keep the interpreter's lock for as long as it likes. It looks whether
its parent is stopped or gone: a stopped parent is silent, too. It uses the standard library alone, so that it starts in
some milliseconds. ``messages`` says what a datagram may be; what is lost is said again with the next beat.

Two members are connected while each hears the other. So a link that is cut in one direction is cut.

Beats grow as the members, not as their square: everybody beats to the three lowest members that it hears, the hubs.
These beat to all, and say whom they hear. So who is a hub knows by itself who lives, and others have its word. Whoever
gets a beat from one that it does not count on answers it, as the two do not see the same hubs. Not covered: a link
between two others that is cut while both reach the hubs. Their exchange ends then, and ends again when they begin anew;
in the incarnation after that all beat to all (``wide``). They do so, too, once the three lowest are silent.

Whoever is no member is answered once for each message, and in all at most as often in a beat as the world has
processes. A newcomer counts once it has shown that it is where it says: it has to repeat what was sent there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

if __package__:
    from phalanx.engines.hosts import messages
else:  # the package's own __init__ would import torch
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import messages  # pyright: ignore[reportMissingImports]

BUFFER = 1 << 20
PR_SET_PDEATHSIG = 1
BEATS = 20  # within the time after which a silent member counts as lost
FAREWELLS, FAREWELL_SECONDS = 4, 0.03  # how often the last word is said, and the time between
JOIN_SECONDS = 0.2  # between two tries to join
TOLD_SECONDS = 3600.0  # for which a lost member's last address is told of the run
KNOWN = 16  # numbers of messages; so many may overtake another one
AT_ONCE = 100  # datagrams that are read before anything else is done
LOOKS = 20  # within a beat, at who lives
REFUSED = 2  # datagrams in a row that a host refuses: nobody listens there any more


class Peer:
    """Another process: where it is, and what was heard of it."""

    __slots__ = "address", "gone", "hears", "hears_me", "id", "last", "proved", "recent", "refused", "socket"

    def __init__(self, address: Sequence[Any], now: float) -> None:
        self.address, self.last, self.refused, self.gone = tuple(address), now, 0, False
        self.hears_me = True  # as far as it has said
        self.hears: list[int] | None = None  # whom it hears, of a hub
        self.id: int | None = None
        self.proved = False  # whether it asked to join
        self.recent: tuple[int, ...] = ()  # the highest numbers of its messages
        self.socket: socket.socket | None = None

    def repeats(self, count: int) -> bool:
        """Whether a message with this number came before, or may have come: it is older than all that are known."""
        return count in self.recent or count < min(self.recent, default=0)

    def note(self, count: int) -> None:
        """A message has come; others may overtake it."""
        self.recent = tuple(sorted((*self.recent, count))[-KNOWN:])

    def send(self, data: bytes) -> None:
        """Send a datagram; a host that has no such port any more says so with the next one."""
        try:
            if self.socket is None:
                kind = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
                self.socket = socket.socket(kind, socket.SOCK_DGRAM)
                self.socket.setblocking(False)
                self.socket.connect(self.address)
            self.socket.send(data)
        except ConnectionRefusedError:
            self.refused += 1
        except OSError:  # no route, or no name; it is silent then, and the next datagram looks again
            self.socket = None


class Beacon:
    """Hears and says; the parent is at the other end of ``pipe``.

    Parameters
    ----------
    pipe, air : socket
    facts : dict
        me, id, key, size (of the world), port (where others reach ``air``), seconds (after which a silent member is
        lost), hubs (how many there are).
    """

    def __init__(self, pipe: socket.socket, air: socket.socket, facts: dict[str, Any]) -> None:
        self.pipe, self.air, self.me, self.seconds = pipe, air, facts["me"], facts["seconds"]
        self.port, self.id, self.size, self.most_hubs = facts["port"], facts["id"], facts["size"], facts["hubs"]
        self.door = messages.Door(bytes.fromhex(facts["key"]), self.size)
        self.every, self.parent = self.seconds / BEATS, os.getppid()
        self.count = self.answers = 0  # the last message's number; those to strangers since a beat
        self.salt = ""  # of what newcomers have to repeat in this incarnation
        self.peers: dict[int, Peer] = {}
        self.members: list[int] = []
        self.hubs: list[int] = []
        self.near: set[int] = set()  # members that this one beats to, and has to hear; they only get more
        self.believed: set[int] = set()  # those of the others that live, as hubs say
        self.run: dict[str, Any] = {}  # what beats say of it: its number, that of the incarnation, and its members
        self.last_word = {"why": "its process ended", "way": "ended"}
        self.reported: list[int] | None = None
        self.reply: tuple[float, dict[str, Any]] = -1.0, {}  # when others asked last, and the answer
        self.replaced: set[int] = set()  # members whose rank has a new process, which wants to join
        self.next = self.seen = self.looked = self.look_at = time.monotonic()

    def serve(self) -> None:
        """Go on until the parent ends, or wants that."""
        poller = select.poll()  # select refuses descriptors from 1024 on, and the parent's numbers are kept
        for each in (self.pipe, self.air):
            poller.register(each, select.POLLIN)
        while os.getppid() == self.parent:
            wait = max(0.0, min(self.next, self.look_at) - time.monotonic())
            readable = {descriptor for descriptor, _ in poller.poll(1000 * wait)}
            now = time.monotonic()
            if now - self.seen > self.seconds / 2:  # this process was stopped, and could hear nobody
                for peer in self.peers.values():
                    peer.last += now - self.seen
            self.seen = now
            if self.pipe.fileno() in readable and not self.handle_order():
                break
            if readable:  # for all that comes at once, one look is enough
                self.look_at = min(self.look_at, self.looked + self.every / LOOKS)
            if self.air.fileno() in readable:
                self.listen(now)
            if now >= self.next:
                self.next = now + self.every
                if state(self.parent) not in (b"T", b"t"):
                    self.beat()
                self.answers, self.look_at = 0, now
                if self.door.dropped and self.notify_parent({"dropped": self.door.dropped}):
                    self.door.dropped.clear()
            if now >= self.look_at:
                self.looked, self.look_at = now, math.inf
                self.notify_who_lives(now)
        for _ in range(FAREWELLS):
            self.send(self.members, {"bye": self.last_word})
            time.sleep(FAREWELL_SECONDS)

    def handle_order(self) -> bool:
        """Do what the parent wants; returns whether it is still there."""
        data = b""
        with contextlib.suppress(ConnectionError):  # it was killed before it had read what was sent
            data = self.pipe.recv(BUFFER)
        order: dict[str, Any] = json.loads(data) if data else {"bye": self.last_word}
        if "say" in order:
            self.send(order["to"], {"say": order["say"]})
        elif "bye" in order:
            self.last_word = order["bye"]
        elif "ping" in order:
            self.notify_parent(order)
        else:
            self.configure(order)
        return "bye" not in order

    def configure(self, order: dict[str, Any]) -> None:
        """Take part in an incarnation, or know where processes are."""
        now = time.monotonic()
        for peer in self.peers.values():  # the words of the incarnation before do not count in this one
            peer.hears, peer.hears_me = None, True
        for rank, address in order["peers"].items():
            known, back = self.peers.get(int(rank)), int(rank) in order["members"] and int(rank) not in self.members
            if known is None or known.address != tuple(address) or back:
                self.peers[int(rank)] = new = Peer(address, now)
                new.id = known.id if known and known.proved else None  # else its first beat says that
        self.members = [rank for rank in order["members"] if rank != self.me]
        self.run, self.reported, self.replaced, self.reply = order["run"], None, set(), (-1.0, {})
        # Beats come one after another, as many at once would not all find room at a hub.
        turn = sum(rank < self.me for rank in self.members) / (1 + len(self.members))
        self.next = now + self.every * turn
        self.near, self.believed, self.wide = set(), set(self.members), order["wide"]
        self.choose_hubs(now)
        self.salt = secrets.token_hex(16)

    def beat(self) -> None:
        """Say that this member lives, and whom it hears; tell others that a run is under way, and where.

        Before a run, ask whether one is under way.
        """
        now = time.monotonic()
        self.choose_hubs(now)
        if self.run:
            self.send(self.near, self.own_beat(now, asks=True))
        if self.run and self.me not in self.hubs:
            return
        others = [rank for rank in self.peers if rank not in self.members and rank != self.me]
        recent = [rank for rank in others if now - self.peers[rank].last < TOLD_SECONDS]
        self.send(recent, self.under_way(now) if self.run else {"look": True})

    def choose_hubs(self, now: float) -> None:
        """Find the hubs. Who is counted on from now on has half of the time to be heard."""
        self.hubs, everybody = [], sorted([*self.members, self.me])
        for rank in everybody:
            if rank != self.me:
                self.count_on([rank], now)
                if not self.hears(rank, now):
                    continue
            self.hubs.append(rank)
            if len(self.hubs) == self.most_hubs:
                break
        # Others may have fallen with the lowest ones. To ask one after another would cost half of the time each.
        alone = not set(everybody[: self.most_hubs]) & set(self.hubs)
        if self.me in self.hubs or self.wide or alone:
            self.count_on(self.members, now)

    def count_on(self, ranks: Sequence[int], now: float) -> None:
        """Beat to members from now on, and expect to hear them."""
        for rank in set(ranks) - self.near:
            self.peers[rank].last = max(self.peers[rank].last, now - self.seconds / 2)
            self.near.add(rank)

    def own_beat(self, now: float, places: dict[int, Any] | None = None, *, asks: bool = False) -> dict[str, Any]:
        """What members say to each other while all is well. ``asks``: for an answer, which asks for none."""
        return {"beat": {**self.run, "hears": self.alive(now, heard=True), "places": places, "asks": asks}}

    def under_way(self, now: float) -> dict[str, Any]:
        """What a process that is no member gets to know of the run: where it may ask."""
        return self.own_beat(now, {rank: self.peers[rank].address for rank in self.hubs if rank != self.me})

    def send(self, ranks: Iterable[int], message: dict[str, Any]) -> None:
        """Send something to some processes."""
        data = self.sealed(message)
        if len(data) > messages.MOST_BYTES:  # nobody would read it; tests write the longest of each kind
            self.door.dropped["too long to send"] += 1
            return
        for rank in ranks:
            if rank in self.peers:
                self.peers[rank].send(data)

    def sealed(self, message: dict[str, Any]) -> bytes:
        """A message of this process. Its number is higher than those before, also those of a beacon before this one."""
        self.count = max(self.count + 1, int(time.monotonic() * 1e6))
        about = {"run": self.run.get("run"), "from": self.me, "id": self.id, "port": self.port, "count": self.count}
        return self.door.seal(about | message)

    def answer(self, place: Sequence[Any], message: dict[str, Any]) -> None:
        """Send one datagram to a process that is no member."""
        if self.answers < self.size:
            self.answers += 1
            with contextlib.suppress(OSError):  # no way to there
                self.air.sendto(self.sealed(message), (place[0], place[1]))

    def listen(self, now: float) -> None:
        """Read what has come."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                data, address = self.air.recvfrom(BUFFER)
                if message := self.door.open(data):
                    self.receive(message, address, now)

    def receive(self, message: dict[str, Any], address: Sequence[Any], now: float) -> None:
        """Note who lives, and pass on what the parent has to know."""
        sender, place, beat = message["from"], [address[0], message["port"]], message.get("beat")
        peer = self.peers.get(sender)
        same = peer if peer is not None and peer.id in (None, message["id"]) else None  # else another process was there
        if sender == self.me or (same and same.id is not None and same.repeats(message["count"])):
            return  # somebody says again what was said
        if same and same.id is not None:
            same.note(message["count"])
        if "look" in message:
            if self.run and sender not in self.members:
                self.answer(place, self.under_way(now))
        elif "say" in message and message["say"]["kind"] == "join":
            if self.me in self.hubs and self.admits(message, place, now):  # who is no hub does not know who is heard
                self.notify_parent({**message, "place": place})
        elif beat is None:
            if (self.run and message["run"] != self.run["run"]) or ("bye" in message and peer and not same):
                return  # of a run before, or of a process that has been replaced
            if "bye" in message and peer is not None:
                peer.gone = peer.gone or message["run"] == self.run.get("run")  # else maybe of the run before this one
            self.notify_parent({**message, "place": place})
        elif not self.run:
            self.notify_parent({"under way": beat, "from": sender, "place": place})
        elif beat["run"] == self.run["run"]:
            if beat["number"] > self.run["number"] and self.me not in beat["members"]:
                self.notify_parent({"expelled": beat["number"]})
            if same and sender in self.members:
                same.last, same.refused = now, 0
                if same.id is None:
                    same.id, same.recent = message["id"], (message["count"],)
                if beat["number"] == self.run["number"]:  # else it does not know all members
                    same.hears_me = self.me in beat["hears"]
                    same.hears = beat["hears"] if sender in self.hubs else None
                if beat["asks"] and sender not in self.near:
                    if self.reply[0] != now:  # once for all that came at once: to look at all members takes long
                        self.reply = now, self.own_beat(now)
                    same.send(self.sealed(self.reply[1]))

    def admits(self, message: dict[str, Any], place: Sequence[Any], now: float) -> bool:
        """Whether a process that wants to join is where it says, and nobody is heard whose rank it has."""
        proof = self.door.mac(f"{self.salt} {place} {message['id']}".encode()).hex()
        if not self.run or message["say"]["proof"] != proof:
            if self.run:
                self.answer(place, {"say": {"kind": "prove", "proof": proof}})
            return False
        sender, peer = message["from"], self.peers.get(message["from"])
        if peer is None or peer.id not in (None, message["id"]) or peer.address != tuple(place):
            # A process that was killed with its beacon is silent, or its port refuses. One that is heard was not
            # replaced, whoever says so.
            if peer and sender in self.members and not self.ended(sender) and now - peer.last < self.seconds / 2:
                return False
            self.replaced |= {sender} & set(self.members)
            self.peers[sender] = peer = Peer(place, now)
        peer.id, peer.recent, peer.proved = message["id"], (message["count"],), True
        return True

    def alive(self, now: float, *, heard: bool = False) -> list[int]:
        """The members that live: each is heard, and hears this one. ``heard``: those that are heard.

        Of those that are not near: the ones that hubs hear.
        """
        hubs = [self.peers[rank] for rank in self.hubs if rank != self.me and self.hears(rank, now)]
        if words := [peer.hears for peer in hubs if peer.hears is not None]:
            self.believed = set().union(*words)
        return [
            rank
            for rank in self.members
            if (
                self.hears(rank, now) and (heard or self.peers[rank].hears_me)
                if rank in self.near
                else rank in self.believed and not self.ended(rank)
            )
        ]

    def hears(self, rank: int, now: float) -> bool:
        """Whether a member was heard lately."""
        return not self.ended(rank) and now - self.peers[rank].last < self.seconds

    def ended(self, rank: int) -> bool:
        """Whether the process that was this member is known to be gone."""
        return rank in self.replaced or self.peers[rank].gone or self.peers[rank].refused >= REFUSED

    def notify_who_lives(self, now: float) -> None:
        """Tell the parent who lives, if that has changed."""
        alive = self.alive(now)
        if self.run and alive != self.reported:
            lost = {
                rank: "its process ended" if self.ended(rank) else f"silent for {self.seconds:g} s"
                for rank in sorted(set(self.members) - set(alive))
            }
            ended = [rank for rank in lost if self.ended(rank)]
            if self.notify_parent({"number": self.run["number"], "alive": alive, "lost": lost, "ended": ended}):
                self.reported = alive

    def notify_parent(self, message: dict[str, Any]) -> bool:
        """Tell the parent something; returns whether that went. While it does not read, what is too much is dropped."""
        try:
            self.pipe.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):  # that the parent is gone shows when it is heard next
            return False
        return True


def state(pid: int) -> bytes:
    """What the kernel says of a process: T if it is stopped, as by SIGSTOP, t if a debugger stopped it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0]
    return b""


if __name__ == "__main__":
    PIPE, AIR = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    AIR.setblocking(False)
    with contextlib.suppress(OSError, AttributeError):  # not on this system
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT))  # so that it ends also if it was stopped
    with contextlib.suppress(ValueError, OSError):  # a hub has a socket for each member
        MOST = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST, MOST))
    with contextlib.suppress(KeyboardInterrupt, ConnectionError):
        Beacon(PIPE, AIR, json.loads(PIPE.recv(BUFFER))).serve()
