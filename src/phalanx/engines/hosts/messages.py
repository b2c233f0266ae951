"""Every message that comes from outside, and the one place where it is read: datagrams, and what a store has.

``KINDS`` says which messages there are, and ``Door`` of which type and range each field is. What does not fit is
dropped and counted, and no exception leaves the door. A text comes out of it as one that a terminal can show. So
whoever takes a message from here may rely on its form.

A message is JSON behind a MAC. Without a secret everybody can make its key (``key_of``): then it keeps jobs apart, and
guards against nobody. A datagram has at most MOST_BYTES, so none is cut into fragments: sets of ranks travel as bits,
what is said of members is what has changed, and texts are cut. This file uses the standard library alone.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

VERSION = b"1"
MAC_BYTES = 32
MOST_BYTES = 1200  # of a datagram: it fits into one packet nearly everywhere
MOST_MEMBERS = 2048  # of a world
MOST_TEXT_BYTES = 900  # of a text in it
NEWCOMERS = 3  # that an incarnation takes in; others ask again
TEXT, WORD, HOST = 600, 64, 60  # characters
STORED = 4000  # of a text in a store, which may be longer
MANY = 1 << 20  # workers or processors of a host
WAYS = "ended", "failed", "closed", "done", "stopped", "leaves"
FOREIGN, OTHER_VERSION, MALFORMED = "of another job", "of another version", "malformed"
Read = Callable[[Any], Any]  # takes a value as JSON has it; returns it made harmless, and raises if it does not fit

# The fields of each kind of message; "?": or null. Every datagram has those of the envelope, and one of the four below.
ENVELOPE = "run? from id port count "
KINDS = {
    "look": "",
    "beat": "run number members hears places? asks",
    "bye": "way why",
    # What "say" may be: a newcomer's words, then those of an agreement (``plan.membership``).
    "join": "kind facts host sees proof",
    "prove": "kind proof",  # what a join has to have in it before it counts
    "done": "kind finished",
    "refused": "kind",
    "stopped": "kind number step? open each wide hears",
    "prepare": "kind number ballot",
    "promise": "kind number ballot accepted",
    "accept": "kind number ballot value",
    "accepted_by": "kind number ballot",
    "chosen": "kind number value",
}
INCARNATION = "run number wrong step? lost joined source keeper each shared wide store"
BITS = "members", "hears", "finished", "lost"  # sets of ranks
# What a process puts into the store of its world when a run begins: those of these that others print or compute with.
ABOUT = "doubts host cores place"


def key_of(secret: bytes, job: str) -> bytes:
    """The key of a job: with a secret nobody else can make it."""
    return hmac.digest(secret or b"none", f"phalanx {job}".encode(), hashlib.sha256)


def fits(condition: object) -> None:
    """Refuse a value. No text: what does not fit is counted only."""
    if not condition:
        raise ValueError


def whole(least: int, most: int = 1 << 62) -> Read:
    """An integer of a range."""

    def read(value: Any) -> int:
        fits(type(value) is int and least <= value <= most)
        return value

    return read


def text(most: int) -> Read:
    """A text of a bounded length. A terminal obeys only the ends of its lines; all else is as ``repr`` shows it."""

    def read(value: Any) -> str:
        fits(type(value) is str and len(value) <= most)
        return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in value)

    return read


def bits(ranks: Iterable[int]) -> str:
    """A set of ranks as a text."""
    number = 0
    for rank in ranks:
        number |= 1 << rank
    return base64.b64encode(number.to_bytes((number.bit_length() + 7) // 8, "little")).decode()


def ranks_of(value: str, size: int) -> list[int]:
    """The ranks in a text that ``bits`` has made; there are none from ``size`` on."""
    return list(_ranks_of(value, size))


@functools.lru_cache(maxsize=64)  # all who hear all others say the same
def _ranks_of(value: str, size: int) -> tuple[int, ...]:
    number = int.from_bytes(base64.b64decode(value, validate=True), "little")
    fits(number >> size == 0)
    return tuple(rank for rank, bit in enumerate(bin(number)[:1:-1]) if bit == "1")


def cut(value: str) -> str:
    """A text that is not longer than a message may have, as JSON spells it."""
    while len(value) > TEXT or len(json.dumps(value)) > MOST_TEXT_BYTES:
        value = value[: len(value) * 9 // 10]
    return value


def flag(value: Any) -> bool:
    """True or False."""
    fits(type(value) is bool)
    return value


def row(*each: Read) -> Read:
    """A list of a fixed length."""
    return lambda value: [read(item) for read, item in zip(each, value, strict=True)]


def several(each: Read) -> Read:
    """A list of any length."""
    return lambda value: [each(item) for item in value]


def table(name: Read, each: Read) -> Read:
    """A dict of any length."""
    return lambda value: {name(key): each(item) for key, item in value.items()}


class Door:
    """Reads what comes from outside.

    Parameters
    ----------
    key : bytes
        Of the job.
    size : int
        Of its world: there are no ranks from this on.

    Attributes
    ----------
    dropped : Counter of str
        How many messages did not fit, by why.
    """

    def __init__(self, key: bytes, size: int = MOST_MEMBERS) -> None:
        self.key, self.size, self.dropped = key, size, Counter[str]()
        rank, number, port, long = whole(0, size - 1), whole(0), whole(1, 65535), text(TEXT)
        place, ballot = row(text(WORD), port), row(number, whole(-1))

        def name(value: str) -> str:
            fits(str(rank(int(value))) == value)
            return value

        types = (
            (number, "run number id count"),
            (whole(-1), "step source newest"),
            (port, "port"),
            (rank, "from keeper"),
            (lambda value: ranks_of(value, size), "members hears finished lost"),
            (whole(1, MANY), "each"),
            (several(whole(0, MANY)), "cores"),
            (flag, "open sees shared wide asks"),
            (text(WORD), "kind facts proof hello welcome"),
            (long, "why wrong"),
            (text(HOST), "host"),
            (lambda value: WAYS[WAYS.index(value)], "way"),
            (place, "place store"),
            (table(name, place), "places"),
            (table(name, row(text(WORD), port, text(HOST))), "joined roster"),
            (table(text(STORED), text(STORED)), "doubts"),
            (ballot, "ballot"),
            (self._chosen, "value"),
            (self._accepted, "accepted"),
            (lambda value: self._record(KINDS[value["kind"]], value), "say"),
            (lambda value: self._record(KINDS["beat"], value), "beat"),
            (lambda value: self._record(KINDS["bye"], value), "bye"),
            (flag, "look"),
            (lambda value: row(self._fields["way"], long)(value), "left"),
            (lambda value: value | self._record(ABOUT, {each: value[each] for each in ABOUT.split()}), "about"),
        )
        self._fields: dict[str, Read] = {each: read for read, names in types for each in names.split()}

    def seal(self, message: Any, where: str = "") -> bytes:
        """A message as it travels, or as it lies in a store at this key."""
        content = message if where else _packed(message)
        body = VERSION + json.dumps(content, default=repr, separators=(",", ":")).encode()
        return self.mac(where.encode() + body) + body

    def open(self, data: bytes) -> dict[str, Any] | None:
        """The message in a datagram; None if there is none that fits."""

        def read(message: Any) -> dict[str, Any]:
            kind = next(each for each in ("beat", "say", "look", "bye") if each in message)
            return self._record(ENVELOPE + kind, message)

        return self._opened(data, "", read)

    def open_value(self, name: str, where: str, data: bytes) -> Any:
        """What lies in a store at a key, of the type that fields of this name have; None if it does not fit."""
        return self._opened(data, where, self._fields[name])

    def mac(self, content: bytes) -> bytes:
        """What only those can make who have the key."""
        return hmac.digest(self.key, content, hashlib.sha256)

    def _opened(self, data: bytes, where: str, read: Read) -> Any:
        mac, body, why = data[:MAC_BYTES], data[MAC_BYTES:], FOREIGN
        if hmac.compare_digest(mac, self.mac(where.encode() + body)):
            why = MALFORMED if body.startswith(VERSION) else OTHER_VERSION
            with contextlib.suppress(Exception):  # whatever JSON can raise, for deep nesting or long numbers
                fits(why == MALFORMED)
                return read(json.loads(body.removeprefix(VERSION)))
        self.dropped[why] += 1
        return None

    def _record(self, names: str, value: Any) -> dict[str, Any]:
        """A dict that has exactly these fields."""
        fits(value.keys() == set(names.replace("?", "").split()))
        return {
            name: None if value[name] is None and f"{name}?" in names.split() else self._fields[name](value[name])
            for name in value
        }

    def _accepted(self, value: Any) -> list[Any]:
        """A ballot and what was accepted in it, or none of both."""
        ballot, chosen = value
        fits((chosen is None) == (ballot == [0, -1]))
        return [self._fields["ballot"](ballot), chosen and self._chosen(chosen)]

    def _chosen(self, value: Any) -> dict[str, Any]:
        """An incarnation whose parts go with each other."""
        read = self._record(INCARNATION, value)
        fits(read["keeper"] not in read["lost"] and len(read["joined"]) <= NEWCOMERS)
        fits(read["wrong"] or (read["step"] is not None and read["source"] not in [-1, *read["lost"]]))
        return read


def _packed(value: Any) -> Any:
    """A message with its sets of ranks as texts."""
    if not isinstance(value, (dict, list)):
        return value
    if isinstance(value, list):
        return [_packed(item) for item in value]
    return {name: bits(item) if name in BITS and _is_set(item) else _packed(item) for name, item in value.items()}


def _is_set(value: Any) -> bool:
    return type(value) is list and all(type(rank) is int and 0 <= rank < MOST_MEMBERS for rank in value)
