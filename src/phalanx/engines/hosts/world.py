"""The processes of a run over several hosts: who they are, whether all do the same run, and how they are connected.

At the start they find each other in the store of their torch.distributed world. Later ones find the run by the beats of
its members, and each incarnation has a store of its own, so nothing depends on one host. Nothing is unpickled:
processes exchange JSON, and bytes of known layout.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import pathlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch.distributed import distributed_c10d as c10d

from phalanx.checkpoint.directory import is_marked, mark, newest_step
from phalanx.definition.checks import warn
from phalanx.definition.plain import hashed
from phalanx.engines.hosts.addresses import ends, host_name, look_at_address, towards, until_known
from phalanx.engines.hosts.gloo import INTERFACE, LOOPBACK, TCP, Gloo, Rendezvous, answer, in_thread
from phalanx.engines.hosts.members import CLOSED, FAILED, LEAVES, STOPPED, Farewell, Members
from phalanx.engines.hosts.messages import MOST_MEMBERS, NEWCOMERS, Door, cut, key_of
from phalanx.engines.hosts.stores import (
    POLL_SECONDS,
    Values,
    Waiting,
    address_of,
    hint,
    job_of,
    opened,
    reached,
    run_of,
    secret_of,
    served,
    surroundings,
    unfound,
)  # fmt: skip
from phalanx.errors import LeftError, PeersLostError, PhalanxError, RunError, SeveredError, UsageError
from phalanx.plan.membership import mutual
from phalanx.surroundings import interrupts
from phalanx.surroundings.presence import printable, say

SECONDS = 120.0  # to wait for another host; a first step may be compiled meanwhile
STORE_SECONDS = 5.0  # for the store's answer once something is wrong
CONNECTED = datetime.timedelta(seconds=20)  # until members that have agreed reach their store
PIECE = 64 << 20  # bytes of a state that travel at once
TRIES = 3  # to get who is a member
MOST_NAME = 1000  # characters of what differs, which may have a key of a dict in it
# What the others of a run get, by how a process leaves it.
ERRORS = {LEAVES: PeersLostError, CLOSED: LeftError, STOPPED: LeftError}
ENDED = ". So it has ended here, too"
RUNS = [0]  # begun in this process; the same number in all processes


class UnderWayError(PhalanxError):
    """A run is under way that this process can join; never leaves this module."""


class World:
    """All processes of a run: who they are, before its first step and whenever that changes.

    Parameters
    ----------
    seconds : float or None
        How long to wait for others.
    lost_after : float
        Seconds after which a silent process is lost.
    secret_file : path or None
        Has the secret of the job, in place of the environment.
    tells : bool
        Whether a process that does not report says once that it takes part.

    Attributes
    ----------
    rank, size : int
        Among the members of the present incarnation.
    members : Members
    joins : bool
        Whether this process joins a run that is under way.
    keeper : int
        The member that reports and saves.
    """

    def __init__(
        self, seconds: float | None, lost_after: float, secret_file: pathlib.Path | None = None, *, tells: bool = False
    ) -> None:
        self.seconds, self._tells = SECONDS if seconds is None else seconds, tells
        RUNS[0] += 1
        self.rank, self.size, address, port = surroundings()
        if self.size > MOST_MEMBERS:
            raise UsageError(
                f"WORLD_SIZE is {self.size}, and a run over hosts has at most {MOST_MEMBERS} processes; start one "
                "process on each host, which has workers for all its processors, or one for each device"
            )
        self._waiting = Waiting(f"process {self.rank} waits for {{}} (of {self.size}) at {address}:{port}")
        until_known(address, port, self.seconds, self._waiting)
        own, there = ends(address)
        secret, lonely = secret_of(secret_file), ""
        if self.rank == 0 and RUNS[0] == 1:
            lonely = look_at_address(address, there, self.size, open_=not secret)
        self._door = Door(key_of(secret, job_of(self.size, address, port)), self.size)
        self.members = Members(self.rank, own, port + self.rank, self._door, lost_after)
        self.members.look_for({rank: [there, port + rank] for rank in range(1 if self.rank else self.size)})
        self.joins, self.keeper = False, 0
        self._gloo: Gloo | None = None
        self.run_dir: pathlib.Path | None = None
        self._own: Any = None  # one store for all incarnations that this process proposes
        self._names = dict[int, str]()
        try:
            base = self._opened(address, port)
            self._tcp = address_of(base)
            store = c10d.PrefixStore(f"phalanx/{RUNS[0]}", base)
            values = Values(store, self._door, lambda do: in_thread(do, self._look), f"{RUNS[0]}/", self._waiting)
            with reached(self._tcp[0]):
                self.run = run_of(values, self.rank, self.size, self.seconds, self._look, lonely)
            self._store, self._values = c10d.PrefixStore(str(self.run), store), values.within(str(self.run))
            self._values.ask = lambda do: in_thread(do, self.check)
        except UnderWayError:
            self.joins = True
        except BaseException:
            self.members.close()
            raise

    def agree(self, facts: Mapping[str, Any], doubts: Mapping[str, str], cores: Sequence[int]) -> int:
        """Check that all have the same recipe in the same environment; returns how many workers each has room for.

        ``facts`` must be equal. Where ``doubts`` are not, a warning says so.

        Raises
        ------
        UsageError
            A process differs; names it and the field.
        PeersLostError, RunError
            A process did not come, or has left again; a RunError if it has failed.
        """
        doubts = {_shortened(name): value for name, value in doubts.items()}
        given = {**facts, "doubts": doubts, "host": host_name(), "cores": list(cores), "place": self.members.place}
        mine = json.loads(json.dumps(given, default=repr))
        self.members.facts = hashed(json.dumps([mine[name] for name in facts])).hex()
        if self.joins:
            return max(1, len(cores))
        with reached(self._tcp[0]):
            self._values.put(f"about/{self.rank}", mine)
        everybody = [self._get(f"about/{rank}", rank) for rank in range(self.size)]
        self._hosts = {rank: item["host"] for rank, item in enumerate(everybody)}
        for rank, theirs in enumerate(everybody):
            for name in facts:
                if theirs.get(name) != mine[name]:
                    raise UsageError(_differing(rank, self.rank, name, theirs.get(name), mine[name]))
            for name, value in mine["doubts"].items():
                if theirs["doubts"].get(name, value) != value:
                    warn(
                        f"{name} is {value} in process {self.rank}, and {theirs['doubts'][name]} in process {rank}; "
                        "if it decides the answer, that depends on who computes what"
                    )
        try:
            self._connect(self.seconds)
        except SeveredError as error:
            raise PeersLostError(
                f"{error}; let all hosts reach each other at all TCP ports, by the interface that leads to MASTER_ADDR "
                f"({INTERFACE} names another)"
            ) from None
        self.members.begin(self.run, 0, {rank: item["place"] for rank, item in enumerate(everybody)})
        return min(_room(item, everybody) for item in everybody)

    def elect(self, run_dir: pathlib.Path | None) -> bool:
        """Agree on the keeper, the first process whose directory has the newest snapshot; returns whether it is me."""
        self.run_dir = run_dir
        if self.joins:
            self.members.folder = run_dir
            return False
        with reached(self._tcp[0]):
            self._values.put(f"newest/{self.rank}", -1 if run_dir is None else newest_step(run_dir))
        steps = [self._get(f"newest/{rank}", rank) for rank in range(self.size)]
        self.keeper = steps.index(max(steps))
        return self.rank == self.keeper

    def share(self) -> None:
        """See whether all members see the keeper's directory."""
        if self.rank == self.keeper and self.run_dir is not None:
            mark(self.run_dir, self.members.run)
        self.odd_one(b"marked")
        sees = self.run_dir is not None and is_marked(self.run_dir, self.members.run)
        if self.odd_one(bytes([sees])) is None and sees:
            self.members.folder = self.run_dir

    def agree_anew(self, how_stopped: dict[str, Any], least: int) -> dict[str, Any]:
        """Agree with the members that are left on the next incarnation.

        Parameters
        ----------
        how_stopped : dict
            step: how many updates the state here has, None if it is lost; open: whether others may join now; each: how
            many workers a host has; wide: whether all have to hear all others next.
        least : int
            With how many members it is worth while.

        Raises
        ------
        PeersLostError
            This member may not go on.
        RunError, LeftError
            A member left in a way that ends the run.
        """
        chosen = self.members.agree(how_stopped, functools.partial(self._proposed, least), self.seconds)
        self.check_final()
        if self.members.me in chosen["lost"]:
            raise PeersLostError(f"the other members go on without {self.named(self.members.me)}: they did not hear it")
        if chosen["wrong"]:
            raise PeersLostError(chosen["wrong"])
        stay = {rank for rank in self.members.ranks if rank not in chosen["lost"]}
        return _whole(chosen, {rank: [*self.members.places[rank], self._hosts[rank]] for rank in stay})

    def check_final(self, seconds: float = 0.0) -> None:
        """Raise if a member left in a way that ends the run; it may be heard within some ``seconds``."""
        end = time.monotonic() + seconds
        while self.members.final is None and time.monotonic() < end:
            self.members.news()
            time.sleep(POLL_SECONDS)
        if (final := self.members.final) is not None:
            rank, (way, why) = final
            raise ERRORS.get(way, RunError)(f"{self.named(rank)} left the run: {why}{ENDED * (ENDED not in why)}")

    def next(self, chosen: Mapping[str, Any]) -> None:
        """Begin the incarnation that was agreed on. Raises a SeveredError if a member has fallen meanwhile."""
        places = {rank: each[:2] for rank, each in chosen["roster"].items()}
        # What a process said before its rank was started again does not count any more.
        self.members.left = {rank: each for rank, each in self.members.left.items() if rank not in chosen["joined"]}
        self.members.begin(chosen["run"], chosen["number"], places, wide=chosen["wide"])
        self._hosts = {rank: host for rank, (_, _, host) in chosen["roster"].items()}
        self.keeper = chosen["keeper"]
        self.members.folder = self.run_dir if chosen["shared"] else None
        self.run, self._tcp = chosen["run"] + chosen["number"], tuple(chosen["store"])
        self.rank, self.size = self.members.ranks.index(self.members.me), len(places)
        try:
            # In a thread, as a stopped host never answers; a client of its own also for whoever has the store.
            store = in_thread(functools.partial(TCP, *self._tcp, timeout=CONNECTED), self.check)
        except SeveredError:
            raise
        except Exception as error:
            raise SeveredError(f"the members' store at {self._tcp[0]} cannot be reached: {error}") from error
        self._store = c10d.PrefixStore(str(chosen["number"]), store)
        self._connect(self.seconds)

    def join(self) -> dict[str, Any] | None:
        """Ask to join the run that is under way; returns the incarnation that has this process, None if it has ended.

        Raises
        ------
        UsageError
            The others train another recipe, or in another environment.
        """
        why: Exception | None = None
        for _ in range(TRIES):
            chosen = self.members.join(host_name())
            if self.members.refused:
                raise UsageError(
                    "a run is under way on these hosts, and its recipe, options, library versions or numeric "
                    "environment are others than those of this process; start it with the same, or end that run first"
                )
            if chosen is None:
                return None
            try:
                return _whole(chosen, in_thread(functools.partial(self._roster, chosen), interrupts.check))
            except Exception as error:  # whatever torch has
                why = error
        raise PeersLostError(f"this process was let in {TRIES} times, but the members' store cannot be reached: {why}")

    def _roster(self, chosen: Mapping[str, Any]) -> dict[int, list[Any]]:
        """Who stays, as the one who let this process in has told: others knew that."""
        store = TCP(*chosen["store"], timeout=CONNECTED)
        known = Values(store, self._door, lambda do: do(), f"{chosen['run']}/").take(f"roster/{chosen['number']}")
        return {int(rank): each for rank, each in known.items() if int(rank) not in chosen["lost"]}

    def _opened(self, address: str, port: int) -> Any:
        """The store."""
        # Torch waits for ever where something accepts a connection and does not answer. Else it says what is wrong,
        # and soon enough: a thread of it that ends while this process ends would abort it.
        end = time.monotonic() + 1.5 * self.seconds + STORE_SECONDS

        def look() -> None:
            self._look()
            if time.monotonic() > end:
                raise unfound(address, port, "what listens there does not answer as a store does")

        with self._waiting.on("the store of process 0"):
            return in_thread(functools.partial(opened, self.rank, self.size, address, port, self.seconds), look)

    def _look(self) -> None:
        interrupts.check()
        self._waiting.tick()
        self.members.news()
        if self.members.under_way is not None:
            raise UnderWayError

    def _connect(self, seconds: float) -> None:
        """Connect the callers' processes of all members."""
        self._names = {rank: host.split()[0] for rank, host in self._hosts.items()}
        together = len(set(self._hosts.values())) == 1
        self._interface = LOOPBACK if together else towards(self._tcp[0])
        if self._gloo is not None:
            self._gloo.close()
        facts = c10d.PrefixStore("callers", self._store), self.rank, self.size, seconds, self._interface, self.check
        others = ", ".join(f"process {rank}" for rank in self._hosts if rank != self.members.me)
        with self._waiting.on(f"a connection to {others}"):
            self._gloo = in_thread(functools.partial(Gloo, *facts, key=self._door.key), self.check)

    def check(self) -> None:
        """Raise a SeveredError if this incarnation has to end."""
        interrupts.check()
        self._waiting.tick()
        if why := self.members.news():
            raise SeveredError(why)

    def waiting_for(self, whom: str) -> contextlib.AbstractContextManager[None]:
        """Inside, ``check`` says now and then that this process waits."""
        return self._waiting.on(whom)

    def _proposed(self, least: int, stopped: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
        """The next incarnation, as this member would have it, from what those tell that have stopped."""
        members = self.members
        hears = {rank: set(facts["hears"]) & stopped.keys() for rank, facts in stopped.items()}
        group = mutual(hears, members.me)
        if not members.able(group, claim=True):
            return None
        steps = {rank: stopped[rank]["step"] for rank in group if stopped[rank]["step"] is not None}
        source = min(steps, key=lambda rank: (-steps[rank], rank), default=-1)
        able = bool(steps) and stopped[source]["open"]
        joining = {rank: facts for rank, facts in sorted(members.joining.items()) if able and rank not in group}
        wrong = "" if steps else "no member has the state of a whole step any more; start again"
        if len(group) + len(joining) < least:
            wrong = f"min_hosts is {least}, and {len(group)} members are left; start again when there are more"
        joining = {} if wrong else dict(list(joining.items())[:NEWCOMERS])
        self._own = self._own or served(members.place[0], 0, CONNECTED)
        if joining:  # they know nobody yet
            # All, so that it is the same for each ballot; whose value is chosen is not known yet.
            roster = {str(rank): [*members.places[rank], self._hosts[rank]] for rank in members.ranks}
            Values(self._own, self._door, lambda do: do(), f"{members.run}/").put(
                f"roster/{members.number + 1}", roster
            )
        proposed = {
            "run": members.run, "number": members.number + 1, "wrong": wrong, "step": steps.get(source),
            "lost": sorted(set(members.ranks) - set(group)), "source": source,
            "joined": {rank: [*facts["place"], facts["host"]] for rank, facts in joining.items()},
            "keeper": self.keeper if self.keeper in group else min(group), "each": stopped[members.me]["each"],
            "shared": members.folder is not None and all(facts["sees"] for facts in joining.values()),
            "wide": any(facts["wide"] for facts in stopped.values()), "store": [members.place[0], self._own.port],
        }  # fmt: skip
        return json.loads(json.dumps(proposed))  # as others get it

    def behind(self, step: int, agreed: int) -> list[int]:
        """The members that have not the state of a step; ``step``: of the state here, -1 if it is lost."""
        gathered = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self._met.gather(gathered.view(torch.uint8), torch.tensor([step], device="cpu").view(torch.uint8))
        return [rank for rank, theirs in zip(self.members.ranks, gathered.tolist(), strict=True) if theirs != agreed]

    def tell(self, workers: int) -> None:
        """Say that this process takes part, where another one reports."""
        me = self.members.me
        if self._tells and me != self.keeper:
            way = "has joined" if self.joins else "is in"
            by = f"the run that {self.named(self.keeper)} reports"
            say(f"{self.named(me)} {way} {by}: {workers} of its {workers * self.size} workers are here")

    def rendezvous(self, blocks: Sequence[range]) -> Rendezvous:
        """Where this process's workers find those of others."""
        hosts = in_rows([self._hosts[rank] for rank in self.members.ranks])
        facts = self._tcp, self.run, self.rank, tuple(blocks), self.seconds, self._interface, hosts
        return Rendezvous(*facts, key=self._door.key)

    def send(self, content: bytes, ranks: Iterable[int]) -> None:
        """Send bytes to members."""
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        positions = [self.members.ranks.index(rank) for rank in ranks]
        for piece in (torch.tensor([len(content)], device="cpu"), *data.split(PIECE)):
            self._wait([self._met.begin_send(piece, position) for position in positions])

    def receive(self, rank: int) -> bytes:
        """Bytes that a member sends."""
        position, size = self.members.ranks.index(rank), torch.empty(1, dtype=torch.int64, device="cpu")
        with self._waiting.on(f"the state from process {rank}"):
            self._wait([self._met.begin_receive(size, position)])
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        for piece in data.split(PIECE):
            self._wait([self._met.begin_receive(piece, position)])
        return data.numpy().tobytes()

    def _wait(self, works: Sequence[Any]) -> None:
        """Wait in a thread of its own, as whoever is stopped never answers; Ctrl-C and news end that."""
        in_thread(functools.partial(self._met.wait, works), self.check)

    def odd_one(self, content: bytes) -> int | None:
        """The first process whose bytes differ from rank 0's, at equal length; None if all have the same."""
        gathered = torch.empty(self.size * len(content), dtype=torch.uint8, device="cpu")
        self._met.gather(gathered, torch.frombuffer(bytearray(content), dtype=torch.uint8))
        rows = gathered.numpy().reshape(self.size, -1)
        differing = np.flatnonzero((rows != rows[0]).any(1))
        return int(differing[0]) if len(differing) else None

    def told(self, content: bytes) -> list[bytes]:
        """What all members say, in the order of their ranks; each may say as much as it likes."""
        sizes = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self._met.gather(sizes.view(torch.uint8), torch.tensor([len(content)], device="cpu").view(torch.uint8))
        room = int(sizes.max())
        gathered = torch.empty(self.size * room, dtype=torch.uint8, device="cpu")
        self._met.gather(gathered, torch.frombuffer(bytearray(content.ljust(room)), dtype=torch.uint8))
        rows = gathered.numpy().reshape(self.size, room)
        return [row[:size].tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]

    def failed(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Before the first step: let others know why this process leaves, before they miss it."""
        way, why = Farewell.after(error)
        if not self.joins:
            self._values.ask = lambda do: do()
            ask = functools.partial(self._values.put, f"left/{self.rank}", [way, cut(why)])
            thread = threading.Thread(target=answer, args=(Future(), ask), daemon=True)  # it may never answer
            thread.start()
            thread.join(STORE_SECONDS)
        self.part(LEAVES if self.joins else way, why)  # members go on without who has not joined yet

    def part(self, way: str, why: str) -> None:
        """Leave the run: say why, and close what was opened for it; the store stays."""
        # First, as whoever hears the reason may end, and a thread of its that still waits in Gloo would abort it then.
        if self._gloo is not None:
            self._gloo.close()
        self.members.part(Farewell(way, cut(why)))

    @property
    def _met(self) -> Gloo:
        assert self._gloo is not None  # agree() comes first
        return self._gloo

    def _get(self, key: str, rank: int) -> Any:
        """What a process says at the start of a run; raises if it has said that it leaves."""
        end = time.monotonic() + self.seconds
        with reached(self._tcp[0]), self._waiting.on(f"process {rank}"):
            while time.monotonic() < end:
                if (value := self._values.take(key)) is not None:
                    return value
                if (left := self._values.take(f"left/{rank}")) is not None:
                    way, why = left
                    # What failed there would fail again. All else, as Ctrl-C there, is a start that somebody missed.
                    kind = RunError if way == FAILED else PeersLostError
                    raise kind(f"{self.named(rank)} left before this run began: {why}")
                time.sleep(POLL_SECONDS)
        raise PeersLostError(
            f"{self.named(rank)} did not come to this run within {self.seconds:.0f} s; all processes of the "
            f"world must train the same recipe{hint(self._door)}"
        )

    def named(self, rank: int) -> str:
        """How messages call a member."""
        return f"process {rank} on {self._names[rank]}" if rank in self._names else f"process {rank}"


def _whole(chosen: Mapping[str, Any], stay: Mapping[int, list[Any]]) -> dict[str, Any]:
    """An incarnation with all that its members know of it, as what travels has only what is new."""
    joined = {int(rank): each for rank, each in chosen["joined"].items()}
    return {**chosen, "joined": sorted(joined), "roster": {**stay, **joined}}


def in_rows(hosts: Sequence[str]) -> int:
    """How many hosts there are, if each has equally many processes, at least two, one after another; else 1."""
    count = len(set(hosts))
    rows = [hosts[first : first + len(hosts) // count] for first in range(0, len(hosts), len(hosts) // count)]
    regular = len(rows) == count and all(len(set(row)) == 1 for row in rows)
    return count if regular and len(hosts) > count else 1


def _shortened(name: str) -> str:
    return name if len(name) < MOST_NAME else f"{name[:MOST_NAME]} {hashed(name).hex()[:16]}"


def _room(item: Mapping[str, Any], everybody: Sequence[Mapping[str, Any]]) -> int:
    """How many processors a process has for itself, where others of the same host may run on them too."""
    mine = set(item["cores"])
    sharing = sum(other["host"] == item["host"] and bool(mine & set(other["cores"])) for other in everybody)
    return len(mine) // sharing


def _differing(rank: int, own: int, name: str, theirs: Any, value: Any) -> str:
    if isinstance(value, dict) and isinstance(theirs, dict):
        field = next(key for key in {**value, **theirs} if value.get(key) != theirs.get(key))
        name, value, theirs = printable(f"{name}.{field}"), value.get(field), theirs.get(field)
    return (
        f"{name} is {value!r} in process {own}, but {theirs!r} in process {rank}; all processes must have the same "
        "recipe, options, library versions and numeric environment"
    )
