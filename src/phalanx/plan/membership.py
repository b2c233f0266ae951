"""Decides who goes on with a run over several hosts, and from which step. A pure machine: messages in, messages out.

A run over hosts is a sequence of incarnations. Within one, the members are fixed. When one falls, leaves or wants to
join, all members stop after a whole step, and agree on the next incarnation: its members, its step, and whose state it
begins with. They agree by Paxos for a single value (Lamport, "Paxos Made Simple", 2001): whoever leads, and however
often leaders fall, no two members ever take different values. Nothing here is written to disk: a process that starts
again is not a member any more, and has to join.

Only a quorum of the last members goes on, so a run never splits: a majority, or one half of them.
That is the one with the lowest member or, where all see one directory, the first one that makes a link there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]  # plain values only, so that it travels as JSON
HUBS = 3  # members that hear all others, and say it to all when they have stopped: the lowest that live
TOLD_IN_A_TICK = 128  # members that answer at once, or tell a hub of themselves: a socket holds some 160 datagrams
AGAIN = 4  # ticks after the last question, until a leader asks those again that have not answered
PATIENCE = 10  # ticks until a leader begins another ballot, beside those in which it asks
KINDS = "stopped", "prepare", "promise", "accept", "accepted_by", "chosen"
NONE: tuple[int, int] = (0, -1)  # before all ballots


class Addressed(NamedTuple):
    """A message and the member that is to get it."""

    to: int
    message: Message


def turns(members: Sequence[int]) -> int:
    """In how many ticks each member speaks once to those that hear all, which is one for a few members."""
    return 1 + len(members) // TOLD_IN_A_TICK


def quorum(members: Collection[int], some: Collection[int]) -> bool:
    """Whether ``some`` of the members may go on without the others. Any two quorums have a member in common."""
    here = set(members) & set(some)
    return 2 * len(here) + (min(members) in here) > len(members)


def mutual(hears: Mapping[int, Collection[int]], first: int) -> list[int]:
    """Members that all hear each other, ``first`` among them; in order, as far as each hears those before it."""
    chosen = [first]
    for member in sorted(set(hears) - {first}):
        if all(member in hears[other] and other in hears[member] for other in chosen):
            chosen.append(member)
    return sorted(chosen)


class Agreement:
    """What one member says and hears until all know the next incarnation.

    Parameters
    ----------
    me : int
    members : sequence of int
        Of the last incarnation.
    propose : callable
        ``propose(stopped)``: the next incarnation, as plain values, from how each member has stopped; None
        if it cannot be formed now. Asked where this member leads.
    able : callable
        ``able(some)``: whether some members are a quorum.

    Attributes
    ----------
    chosen : Any
        The next incarnation; None until it is known here.
    stopped : dict of int to dict
        How members have stopped, as each said.
    """

    def __init__(
        self, me: int, members: Sequence[int], propose: Callable[[dict[int, Message]], Any],
        able: Callable[[Collection[int]], bool] | None = None,
    ) -> None:  # fmt: skip
        self.chosen: Any = None
        self.stopped: dict[int, Message] = {}
        self._me, self._members, self._propose = me, tuple(members), propose
        self._able = able or functools.partial(quorum, members)
        self._promised, self._accepted = NONE, (NONE, None)
        self._ballot, self._proposal = NONE, None
        self._promises: dict[int, tuple[tuple[int, int], Any]] = {}
        self._votes: set[int] = set()
        self._wait = 0
        # Hubs hear all others. So among many only a part of them speaks in each tick: each says in its turn how it has
        # stopped, and a leader asks them one part after another until a quorum has answered. Tried before: all at once.
        # From 400 members on so many answers found no room that no ballot ever had a quorum.
        self._every = turns(members)
        self._turn, self._ticks = self._members.index(me) % self._every, 0
        self._question, self._unasked, self._order = Message(), list[int](), list[int]()
        self._room, self._again = 0, 0  # how many may be asked in this tick yet; the first tick to ask again in

    def tick(self, alive: Collection[int], how_stopped: Message) -> list[Addressed]:
        """A short time has passed; ``alive``: the members that are heard, ``how_stopped``: how this one has stopped."""
        if self.chosen is not None:
            return []
        self._room = TOLD_IN_A_TICK
        here = {self._me, *alive} & set(self._members)
        hubs = sorted(here)[:HUBS]
        said = self._stop(how_stopped, sorted(here) if self._me in hubs else hubs) + self._ask()
        self._wait -= 1
        if self._wait < 0 and min(here) == self._me and here <= self.stopped.keys():
            proposal = self._propose({member: self.stopped[member] for member in sorted(here)})
            if proposal is not None:  # else an earlier ballot of this one may still be under way
                self._proposal = proposal
                self._ballot = max(self._promised, self._ballot)[0] + 1, self._me
                self._wait, self._promises, self._votes = PATIENCE + 2 * (self._every - 1), {}, set()
                self._order = sorted(self._members, key=lambda member: (member not in here, member))
                said += self._ask({"kind": "prepare", "ballot": self._ballot})
        return said

    def _stop(self, how_stopped: Message, to: list[int]) -> list[Addressed]:
        self.stopped[self._me] = message = {"kind": "stopped", **how_stopped}
        waits = self._ticks % self._every != self._turn
        self._ticks += 1
        return [] if waits else [Addressed(member, message) for member in to if member != self._me]

    def hear(self, sender: int, message: Message) -> list[Addressed]:
        """A message has come; returns what is to be said."""
        if self.chosen is not None:
            return [] if message["kind"] == "chosen" else self._say(sender, {"kind": "chosen", "value": self.chosen})
        return getattr(self, f"_{message['kind']}")(sender, message) if message["kind"] in KINDS else []

    def _stopped(self, sender: int, message: Message) -> list[Addressed]:
        self.stopped[sender] = message
        return []

    def _prepare(self, sender: int, message: Message) -> list[Addressed]:
        ballot = _ballot(message)
        if ballot < self._promised:  # to the same one again: the answer before may have been lost
            return []
        self._promised = ballot
        return self._say(sender, {"kind": "promise", "ballot": ballot, "accepted": self._accepted})

    def _promise(self, sender: int, message: Message) -> list[Addressed]:
        # A promise that comes after a quorum has promised is left alone, though it belongs to this ballot. It might
        # tell of a value that was accepted in a higher ballot than those that are known here. The leader would then
        # ask members to accept another value in the same ballot. Members accept both, as they compare ballots and not
        # values, and two values could be chosen. `tick` begins another ballot where one comes to nothing. Not
        # covered: tests that leave this out. They plant four other faults (Forgets, Obeys, Insists, Hasty).
        if _ballot(message) != self._ballot or self._able(self._promises):
            return []
        before, value = message["accepted"]
        self._promises[sender] = (before[0], before[1]), value
        if not self._able(self._promises):
            return []
        # A value that may have been chosen stays chosen: that of the highest ballot, if any was accepted.
        known = max(self._promises.values(), key=lambda accepted: accepted[0])
        self._proposal = self._proposal if known[0] == NONE else known[1]
        return self._ask({"kind": "accept", "ballot": self._ballot, "value": self._proposal})

    def _accept(self, sender: int, message: Message) -> list[Addressed]:
        ballot = _ballot(message)
        if ballot < self._promised:
            return []
        self._promised, self._accepted = ballot, (ballot, message["value"])
        return self._say(sender, {"kind": "accepted_by", "ballot": ballot})

    def _accepted_by(self, sender: int, message: Message) -> list[Addressed]:
        if _ballot(message) != self._ballot:
            return []
        self._votes.add(sender)
        if not self._able(self._votes):
            return []
        self.chosen = self._proposal
        told = {"kind": "chosen", "value": self.chosen}
        return [Addressed(to, told) for to in self._members if to != self._me]

    def _chosen(self, sender: int, message: Message) -> list[Addressed]:
        self.chosen = message["value"]
        return []

    def _say(self, to: int, message: Message) -> list[Addressed]:
        """Say something to one member; what this one says to itself is heard at once."""
        return self.hear(to, message) if to == self._me else [Addressed(to, message)]

    def _ask(self, question: Message | None = None) -> list[Addressed]:
        """Ask as many members as may answer at once; without ``question`` the next ones, what was asked last.

        Once all were asked, those are asked again now and then that have not answered.
        """
        if question is not None:
            self._question, self._unasked = question, list(self._order)
        elif self._ballot < self._promised or not self._question:  # another one leads, or nobody was asked
            return []
        elif not self._unasked and self._ticks >= self._again and self._wait > 0:
            answered = self._votes if self._question["kind"] == "accept" else self._promises.keys()
            self._unasked = [member for member in self._order if member not in answered]
        part, self._unasked = self._unasked[: self._room], self._unasked[self._room :]
        self._room -= len(part)
        self._again = self._ticks + AGAIN if part else self._again
        asked = self._question  # to hear itself may bring the next question
        return [said for member in part for said in self._say(member, asked)]


def _ballot(message: Message) -> tuple[int, int]:
    """The number of a ballot and who leads it; JSON has made a list of them."""
    number, leader = message["ballot"]
    return number, leader
