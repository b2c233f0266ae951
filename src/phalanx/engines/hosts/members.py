"""The members of a run over several hosts, as one of them sees them: who lives, who wants what, and what all agree on.

``plan.membership`` decides; the process beside this one (``beacon``) hears and says. Here is what is between: messages,
time, and news that end an incarnation. What a member gets by that process was read at the door (``messages``).

A member does not fall with its helper: one that is dead, or does not answer, is killed and started again, on the same
socket for datagrams, which this process keeps. Nothing waits for it.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from phalanx.checkpoint.directory import MARK, first, is_marked
from phalanx.engines.hosts import beacon, messages
from phalanx.errors import LeftError, PeersLostError, safe_str
from phalanx.plan.membership import HUBS, Addressed, Agreement, Message, quorum, turns
from phalanx.surroundings import interrupts, presence

TICK_SECONDS = 0.05
NAMED = 5  # lost members in a message
PINGS = 8  # within lost_after: looks whether the process beside this one answers
MOST_STARTS = 10  # of that process, without an answer
FAILED, CLOSED, DONE, STOPPED, LEAVES = "failed", "closed", "done", "stopped", "leaves"  # ways to leave
Place = list[Any]  # address and port of a process beside a member


class Farewell(NamedTuple):
    """How a member left, and why: FAILED and CLOSED end the run everywhere, else the others go on.

    STOPPED: it was stopped, as by early stopping. Others come to that by themselves, maybe after a longer evaluation;
    if one asks for another step all the same, the run has ended.
    """

    way: str
    why: str

    @classmethod
    def after(cls, error: BaseException | None) -> Farewell:
        """Of a process that this error ends: after Ctrl-C the run is closed, and one that was lost leaves alone.

        A process that was told of a close passes that on. After any other error the run has failed.
        """
        ways = {PeersLostError: LEAVES, LeftError: CLOSED, KeyboardInterrupt: CLOSED}
        way = next((way for kind, way in ways.items() if isinstance(error, kind)), FAILED)
        return cls(way, f"{type(error).__name__}: {safe_str(error)}".removesuffix(": "))


class Members:
    """Who takes part in a run. Implements ``presence.Owned``.

    Parameters
    ----------
    me : int
        The rank that this process was started with. It stays the same, whoever else falls.
    address : str
        Of this host, towards the others.
    port : int
        Where to listen, if it is free: a process that starts again finds the run by it.
    door : Door
        With the key of the job, and the size of its world. Counts what was dropped here and by the process beside.
    lost_after : float
        Seconds after which a silent member is lost.

    Attributes
    ----------
    number : int
        Of the incarnation, from 0.
    ranks : list of int
        Its members.
    place : Place
    places : dict of int to Place
        Of all processes of the run that are known.
    alive : list of int
        The other members that live.
    left : dict of int to Farewell
        Members that said why they leave.
    joining : dict of int to dict
        Processes that want to join, and what they told.
    under_way : dict or None
        For a process that has just started: the run that it may join, as its members say.
    facts : str
        A hash of what must be the same in all processes.
    open : bool
        Whether a process that wants to join is news.
    refused : bool
        Whether the members of the run that is under way do another one.
    folder : path or None
        Of the run, where all members see it: of two halves, the first that claims to go on there does.
    """

    def __init__(self, me: int, address: str, port: int, door: messages.Door, lost_after: float) -> None:
        self.me, self.seconds, self.run, self.number, self.door = me, lost_after, 0, 0, door
        self.ranks: list[int] = []
        self.places: dict[int, Place] = {}
        self.alive: list[int] = []
        self.left: dict[int, Farewell] = {}
        self._left_run: dict[int, int | None] = {}  # of which run each was a member
        self.done: set[int] = set()
        self.joining: dict[int, dict[str, Any]] = {}
        self.under_way: dict[str, Any] | None = None
        self.facts, self.refused, self.open = "", False, False
        self.folder: pathlib.Path | None = None
        self._half: str | None = None  # the half that may go on, as the folder says
        self._lost: dict[int, str] = {}
        self._ended: set[int] = set()  # those of them that will not come back
        self._waiting: list[tuple[int, Message]] = []
        self._past: dict[int, Any] = {}
        self._expelled, self._next_done = False, 0.0
        self._proofs: dict[int, str] = {}  # what each member wants to hear of one that joins
        self._air, self._parted = _listening(address, port), False
        self.place: Place = [address, self._air.getsockname()[1]]
        self._about = {
            "me": me, "id": secrets.randbits(60), "key": door.key.hex(), "size": door.size, "port": self.place[1],
            "seconds": lost_after, "hubs": HUBS,
        }  # fmt: skip
        self._order: dict[str, Any] | None = None  # the last one that says who takes part
        self._starts, self._asked, self._pinged = 0, False, time.monotonic()
        self._start()
        presence.own(self)

    def _start(self) -> None:
        """Start the process beside this one, and tell it what the one before knew."""
        self._pipe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # which keeps messages apart
        fds = theirs.fileno(), self._air.fileno()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", beacon.__file__, *map(str, fds)], pass_fds=fds, stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the caller, which then says why it leaves
            )  # fmt: skip
        with contextlib.suppress(OSError):  # then it has ended again, which the next look sees
            for order in filter(None, (self._about, self._order)):
                self._pipe.send(json.dumps(order).encode(), socket.MSG_DONTWAIT)

    def _start_again(self, why: object) -> None:
        """Replace a process beside this one that is dead, stopped or deaf."""
        self._starts += 1
        if self._starts > MOST_STARTS:
            raise PeersLostError(f"the process that speaks for this one to the others ends again and again: {why}")
        self._end_process()
        self._asked, self._pinged = False, time.monotonic()
        self._start()

    def begin(self, run: int, number: int, places: dict[int, Place], *, wide: bool = False) -> None:
        """An incarnation begins. Processes that were members before are told of it now and then: they may come back.

        ``wide``: all members have to hear all others, not only the hubs.
        """
        self.run, self.number, self.ranks = run, number, sorted(places)
        self.places |= places
        # Before a run is known, the last words of the one before may still come.
        self.left = {at: each for at, each in self.left.items() if at in places and self._left_run[at] in (None, run)}
        self.alive = [rank for rank in self.ranks if rank != self.me]
        self.done = self.done if number else set()
        self.joining, self._lost, self._ended, self._waiting, self._half = {}, {}, set(), [], None
        facts = {"run": run, "number": number, "members": self.ranks}
        self._tell_members({"peers": self.places, "members": self.ranks, "run": facts, "wide": wide})

    def look_for(self, places: dict[int, Place]) -> None:
        """Before a run: know where members of one that is under way may be."""
        self._tell_members({"peers": places, "members": [], "run": {}, "wide": False})

    def say(self, to: Sequence[int], message: Message) -> None:
        """Send a message to the processes beside others; it may be lost."""
        self._tell({"to": list(to), "say": message})

    def news(self) -> str:
        """Why this incarnation has to end; "" if it has not.

        Raises
        ------
        PeersLostError
            The others went on without this member.
        """
        self._hear(0)
        if self._expelled:
            raise PeersLostError(
                f"the other members did not hear process {self.me} for {self.seconds:g} s and went on without it"
            )
        away = [rank for rank in self.left if rank in self.ranks and self.left[rank].way not in (DONE, STOPPED)]
        if away or self._lost:
            return self.spelled(min(away or self._lost))
        if self._waiting:
            return f"process {self._waiting[0][0]} has stopped"
        wanted = self.joining if self.open and self.me == min(self.ranks) else ()
        return f"process {min(wanted)} wants to join" if wanted else ""

    def spelled(self, rank: int) -> str:
        """What became of a member."""
        if rank in self.left:
            return f"process {rank} {'has left' if self.left[rank].way == LEAVES else 'is lost'}: {self.left[rank].why}"
        return f"process {rank} is lost: {self._lost.get(rank, 'it lives, but does nothing')}"

    @property
    def final(self) -> tuple[int, Farewell] | None:
        """The first member that left in a way that ends the run everywhere, and how."""
        ends = [(rank, each) for rank, each in sorted(self.left.items()) if each.way in (FAILED, CLOSED, STOPPED)]
        return next((end for end in ends if end[0] in self.ranks), None)

    def able(self, some: Collection[int], *, claim: bool = False) -> bool:
        """Whether some members may go on without the others. ``claim``: say so in the folder, if they are a half."""
        here = sorted(set(some) & set(self.ranks))
        if self.folder is None or 2 * len(here) != len(self.ranks):
            return quorum(self.ranks, here)
        half = " ".join(map(str, here))
        # Paxos needs only that any two quorums have a member in common. Two halves have none, so both need one link,
        # and only one of them can make it. A link is made at once or not at all, over NFS, too, with its word in it.
        # Only a leader that is about to propose claims. A later leader of the same half reads the same word and goes
        # on. Where the folder cannot be read the word is "". That is no half, so this one may not go on. `begin`
        # forgets the claim, and the link's name has the number of the incarnation. Without a folder that all see, the
        # half with the lowest member goes on. The link lies in the mark. So a host cannot make it that has lost the
        # folder meanwhile, and sees an empty one at the same path, as where nothing is mounted any more. Not covered: a
        # half that claims and then dies. The other one ends with a PeersLostError all the same.
        if claim and self._half is None:
            self._half = first(self.folder / f"{MARK}{self.run}" / str(self.number), half)
        return self._half == half

    def _hopeful(self, some: Collection[int]) -> bool:
        """Whether some members may go on, or a half that nobody has claimed yet."""
        unclaimed = self.folder is not None and self._half is None
        return self.able(some) or (unclaimed and 2 * len(set(some) & set(self.ranks)) == len(self.ranks))

    def agree(self, how_stopped: Message, propose: Callable[[dict[int, Message]], Any], patience: float) -> Any:
        """Agree on the next incarnation.

        Parameters
        ----------
        how_stopped : dict
            How this member has stopped.
        propose : callable
            As of ``Agreement``.
        patience : float
            Seconds that a member may live without stopping.

        Raises
        ------
        PeersLostError
            So many members are lost that those who are left may not go on.
        """
        agreement = Agreement(self.me, self.ranks, propose, self.able)
        began = since = due = time.monotonic()
        while agreement.chosen is None:
            interrupts.check()
            self.news()
            if self.final is not None:
                break
            now = time.monotonic()
            # Four facts say how long to wait. `_ended` are members that are known to be gone: if the others cannot be
            # a quorum, nobody is waited for. `since` is when a quorum was last heard. A silent one may be heard
            # again, so this gives up only after `lost_after` seconds without one. `patience` is for a member that
            # lives and hangs in user code: the beat beside it goes on. After that time it does not count as alive any
            # more, and the others agree without it. The last bound is for members that hear each other and still come
            # to no value. Not covered: anything faster for a hang. A member that hangs between steps costs the others
            # `deadline_seconds`.
            late = self._late(now - began - patience, agreement.stopped)
            since = now if self._hopeful([self.me, *late]) else since
            over = now - since > self.seconds or now - began > 2 * patience + self.seconds
            if over or not self._hopeful(set(self.ranks) - self._ended):
                told = self.ranks if self.me in self.hubs else self.hubs  # who would have told this one
                silent = [f"process {rank} does not answer" for rank in told if rank not in agreement.stopped]
                lost = "; ".join(([*map(self.spelled, self._lost)] or silent)[:NAMED])
                half = "with the lowest" if self.folder is None else f"that is first in {str(self.folder)!r}"
                raise PeersLostError(
                    f"{lost}. Of {len(self.ranks)} members only a majority goes on, or the half {half}"
                )
            if now >= due:  # not with every message, as each would bring others
                due = now + TICK_SECONDS
                self._send(agreement.tick(late, {**how_stopped, "hears": self.alive}))
            self._hear(max(0.0, due - now))
            while self._waiting:
                sender, message = self._waiting.pop(0)
                known = sender in agreement.stopped
                self._send(agreement.hear(sender, message))
                due = due if known or not agreement.stopped.keys() >= {*self.alive} else now  # all have stopped
        self._past[self.number + 1] = agreement.chosen
        return agreement.chosen

    def _late(self, over: float, stopped: Collection[int]) -> list[int]:
        """The others that count as alive in an agreement; ``over``: seconds since all had to have stopped.

        Hubs know who has. Others know whether hubs have, and let the next ones lead if those hang. Whoever leads then
        is told a moment later.
        """
        if over < 0:
            return self.alive
        hubs = self.hubs
        late = [rank for rank in self.alive if rank in stopped or (self.me not in hubs and rank not in hubs)]
        leads = over >= self.seconds and self.me in sorted([self.me, *late])[:HUBS]
        return [rank for rank in late if rank in stopped] if leads else late

    def part(self, farewell: Farewell) -> None:
        """Say how this member leaves, and end the process beside it; once, whoever says so first."""
        if self._parted:
            return
        self._parted = True
        with contextlib.suppress(PeersLostError, subprocess.TimeoutExpired):
            for _ in range(2):  # it may have been killed before it read that
                self._tell({"bye": farewell._asdict()})
                if not self._process.wait(beacon.FAREWELLS * beacon.FAREWELL_SECONDS + self.seconds):
                    break
        self.close()

    def finish(self) -> bool:
        """Tell the others that this member has done all steps; returns whether all that live have. Hubs tell all."""
        now, every = time.monotonic(), turns(self.ranks)
        if self.me not in self.done:
            self._next_done = now + TICK_SECONDS * (self.ranks.index(self.me) % every)
            self.done.add(self.me)
        ended = self.done.issuperset(set(self.alive) - self.left.keys())
        if ended or now >= self._next_done:
            self._next_done = now + TICK_SECONDS * every
            to = self.alive if self.me in self.hubs else self.hubs
            self.say(to, {"kind": "done", "finished": sorted(self.done)})
        return ended

    @property
    def hubs(self) -> list[int]:
        """The members that hear all others, and lead: the lowest that live."""
        return sorted([self.me, *self.alive])[:HUBS]

    def close(self) -> None:
        """End the process beside this one."""
        self._end_process()
        self._air.close()

    def _end_process(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()

    def join(self, host: str) -> Any:
        """Ask the members of the run that is under way to let this process in; returns the incarnation that has it.

        None if the run has ended meanwhile. ``host`` is what the host is called.
        """
        assert self.under_way is not None, "who asks has looked"
        beat, end, self._waiting = self.under_way, time.monotonic() + self.seconds, []
        self.places = {**{int(rank): place for rank, place in beat["places"].items()}, beat["from"]: beat["place"]}
        self.run, self.number, self.ranks = beat["run"], beat["number"], beat["members"]
        self.look_for(self.places)
        while time.monotonic() < end and not self.refused:
            interrupts.check()
            sees = self.folder is not None and is_marked(self.folder, self.run)
            for rank in self.places:
                proof = self._proofs.get(rank, "")
                self.say([rank], {"kind": "join", "facts": self.facts, "host": host, "sees": sees, "proof": proof})
            self._hear(beacon.JOIN_SECONDS)
            if self.under_way["number"] != beat["number"] or self.under_way["from"] not in self.ranks:
                return self.join(host)
            for _, message in self._waiting:
                if message["kind"] == "chosen" and str(self.me) in message["value"]["joined"]:
                    return message["value"]
            if self.under_way is not beat:
                end, beat = time.monotonic() + self.seconds, self.under_way
        return None

    def leave(self) -> None:  # in a forked child
        self._pipe.close()
        self._air.close()
        self._process.returncode = 0  # not a child of this process, so nobody may wait for it

    def _tell_members(self, order: dict[str, Any]) -> None:
        """Tell the process beside this one who takes part; one that replaces it has to know that, too."""
        self._order = order
        self._tell(order)

    def _tell(self, order: dict[str, Any]) -> None:
        """Tell the process beside this one something, without waiting for it."""
        for _ in range(2):
            try:
                self._pipe.send(json.dumps(order).encode(), socket.MSG_DONTWAIT)
                return
            except BlockingIOError as error:
                if "say" in order or "ping" in order:  # datagrams may be lost, and who is deaf does not answer
                    return
                why = error
            except OSError as error:
                why = error
            self._start_again(why)

    def _tend(self) -> None:
        """Ask the process beside this one now and then whether it is there; replace it if it does not answer."""
        since = time.monotonic() - self._pinged
        if self._asked and since > self.seconds / 2:
            self._start_again("it does not answer")
        elif not self._asked and since > self.seconds / PINGS:
            self._asked, self._pinged = True, time.monotonic()
            self._tell({"ping": True})

    def _send(self, said: Sequence[Addressed]) -> None:
        # One order for all who get the same: as many as there are members would not fit into the pipe.
        for message in {id(message): message for _, message in said}.values():
            self.say([to for to, each in said if each is message], {**message, "number": self.number + 1})

    def _hear(self, seconds: float) -> None:
        """Take what the process beside this one has heard."""
        poller = select.poll()
        poller.register(self._pipe, select.POLLIN)
        while poller.poll(1000 * seconds):
            data = b""
            with contextlib.suppress(ConnectionError):
                data = self._pipe.recv(beacon.BUFFER)
            if not data:
                self._start_again("it has ended")
                break
            self._take(json.loads(data))
            seconds = 0
        self._tend()

    def _take(self, thing: dict[str, Any]) -> None:
        sender = thing.get("from", -1)
        if "alive" in thing:
            if thing["number"] != self.number:  # of before this incarnation
                return
            self.alive, lost = thing["alive"], {int(rank): why for rank, why in thing["lost"].items()}
            self._ended = set(thing["ended"])
            self._lost = {rank: why for rank, why in lost.items() if rank not in self.done | self.left.keys()}
        elif "ping" in thing:
            self._asked, self._starts = False, 0
        elif "dropped" in thing:
            self.door.dropped.update(thing["dropped"])
        elif "expelled" in thing:
            self._expelled = thing["expelled"] > self.number + 1 or self._past.get(thing["expelled"]) is None
        elif "under way" in thing:
            if thing["under way"]["places"] is not None:  # else this process is a member already, and will hear of that
                self.under_way = {**thing["under way"], "from": sender, "place": thing["place"]}
        elif "bye" in thing:
            self.left[sender], self._left_run[sender] = Farewell(**thing["bye"]), thing["run"]
        elif thing["say"]["kind"] == "join" or thing["run"] == self.run:  # else of an earlier run of this job
            self._take_said(sender, thing["say"], thing["place"])

    def _take_said(self, sender: int, message: Message, place: Place) -> None:
        kind, number = message["kind"], message.get("number", 0)
        if kind == "join":
            self._answer(sender, message, place)
        elif kind == "prove":
            self._proofs[sender] = message["proof"]
        elif kind in ("done", "refused"):
            self.done |= set(message.get("finished", ()))
            self.refused = self.refused or kind == "refused"
        elif not self._possible(message):
            self.door.dropped[messages.MALFORMED] += 1
        elif number == self.number + 1 and sender in self.ranks:
            self._waiting.append((sender, message))
        elif number in self._past and kind != "chosen":
            self.say([sender], {"kind": "chosen", "value": self._past[number], "number": number})

    def _possible(self, message: Message) -> bool:
        """Whether what others want to be the next incarnation can follow this one."""
        value = message.get("value") or message.get("accepted", [0, None])[1]
        if value is None or message["number"] != self.number + 1:
            return True
        named = {value["keeper"], *value["lost"], *([] if value["wrong"] else [value["source"]])}
        return (value["run"], value["number"]) == (self.run, self.number + 1) and named <= set(self.ranks)

    def _answer(self, sender: int, message: Message, place: Place) -> None:
        """Note that a process wants to join, refuse it, or tell it which incarnation has it."""
        chosen = self._past.get(self.number)
        if message["facts"] != self.facts:
            self.say([sender], {"kind": "refused"})
        elif chosen is not None and chosen["joined"].get(str(sender), [])[:2] == place:
            self.say([sender], {"kind": "chosen", "value": chosen, "number": self.number})
        else:
            self.left.pop(sender, None)
            self.joining[sender] = {"place": place, "host": message["host"], "sees": message["sees"]}


def _listening(address: str, port: int) -> socket.socket:
    """A socket for datagrams at this port, or at any if that is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    air = socket.socket(family, socket.SOCK_DGRAM)
    air.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, beacon.BUFFER)  # for many who speak at once; as far as allowed
    try:
        air.bind((address, port))
    except OSError:
        air.bind((address, 0))
    return air
