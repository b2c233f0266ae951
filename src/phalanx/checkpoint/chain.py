"""A run's chain: a file with one link per step, each a hash over the link before and what the step did.

The root, which is the last link, stands for all steps: it is the same wherever and however often parts of the run were
done. All lines have the same width, so that a link is read without those before it. What belongs to the run but not
into the root (which recipe, digests of the state) lies beside it, as records that name the link to which they belong.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.checkpoint import files
from phalanx.checkpoint.files import MALFORMED, Held
from phalanx.definition import checks
from phalanx.errors import SnapshotError
from phalanx.seams.records import StepReport
from phalanx.surroundings import system

CHAIN, RECORDS, ASIDE = "chain.jsonl", ".records.jsonl", "chain.earlier-{}.jsonl"
FORMAT = 1
BEGINNING = "0" * 64
LINK = slice(10, 74)  # where a line has its link
BROUGHT = "brought:"  # begins the hash of a batch that the caller brought
MOST_HEADER, MOST_STEPS, MOST_WIDTH = 4096, 1 << 60, 1 << 26
LINE, REPLICA = 320, 54  # bytes that a line takes at most, and each replica's loss and weight in it


def line_after(previous: str, body: str, width: int) -> str:
    """A step's line: its link, which is the SHA-256 over the link before and ``body``, and ``body``, what it did."""
    link = hashlib.sha256(bytes.fromhex(previous) + body.encode()).hexdigest()
    return f'{{"link": "{link}", {body[1:]}'.ljust(width - 1) + "\n"


def body_of(fields: Any) -> str:
    """What a step did as JSON; a number that is not finite as text, as JSON has none."""
    try:
        return json.dumps(fields, allow_nan=False)
    except ValueError:
        return json.dumps(_plain(fields))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class ChainFile:
    """Writes a chain, from its beginning or going on with one.

    Parameters
    ----------
    path : path
    steps : int
        How many are done. Later links are of steps that will be done again; the first new link removes them.
    replicas : int
        As many losses and weights fit into a line.
    link : str, optional
        The newest link, as the snapshot of ``steps`` steps has it. It is what the chain goes on from.

    Attributes
    ----------
    root : str
        The newest link, 64 hexadecimal digits.

    Raises
    ------
    OSError
        It cannot be opened.
    """

    def __init__(self, path: pathlib.Path, steps: int, replicas: int, link: str | None = None) -> None:
        self.root = self._before = link or BEGINNING
        self._target = path
        self._width = LINE + REPLICA * replicas
        self._held = Held()
        self._broken = False
        self._waiting: list[str] | None = []  # records, until the first new link is added
        try:
            self._descriptor = self._held.add(files.open_log(path))
            self._records = self._held.add(files.open_log(records_of(path)))
            self._first, self._end = steps, self._end_of(steps)
        except BaseException:
            self.close()
            raise

    def add(self, fields: dict[str, Any]) -> str:
        """Add the link of a step; returns it. A full disk ends the file, not the run, and is warned of once."""
        line = line_after(self.root, body_of(fields), self._width)
        self.root = line[LINK]
        if not self._broken and self._held.mine:
            try:
                self.cut()
                if len(line) != self._width:
                    raise ValueError(f"a line of {len(line)} bytes does not fit into {self._width}")
                self._write(line)
            except (OSError, ValueError) as error:
                self._broken = True
                checks.warn(f"{str(self._target)!r} ends here: {error}; the run goes on")
        return self.root

    def record(self, kind: str, **facts: Any) -> None:
        """Add what is no part of the root, bound to the newest link."""
        line = json.dumps({"kind": kind, "link": self.root, **facts}) + "\n"
        if self._waiting is not None:
            self._waiting.append(line)
        elif self._held.mine:
            with contextlib.suppress(OSError):
                os.write(self._records, line.encode())

    def sync(self) -> None:
        """Sync links and records to the disk: a snapshot must not be newer than they are."""
        for descriptor in (self._descriptor, self._records) if self._held.mine else ():
            os.fsync(descriptor)

    def close(self) -> None:
        """Write no more."""
        self._held.let_go()

    def _end_of(self, steps: int) -> int | None:
        """Where the links of ``steps`` steps end; None if the file lacks them, or its lines are too narrow."""
        with contextlib.suppress(SnapshotError, KeyError, OSError), Links(self._target) as links:
            if links.first < steps <= len(links) and links.width >= self._width:
                root = links[steps - 1]["link"]
                if self._before in (BEGINNING, root):
                    self.root, self._width = root, links.width
                    return links.offset(steps)
        return None

    def cut(self) -> None:
        """Before the first new link: cut off steps to be done again, or begin anew; write the records that waited."""
        if self._waiting is None:
            return
        # Nothing is cut when the file is opened. A run that goes on may still be refused at its first step, and then
        # no file of the earlier run may have changed. It was cut at once for a run that went on from step 0, also
        # where that run was refused. Records wait for the same reason. If no link follows they are dropped, and both
        # files stay as they were. `Chained.begin` cuts at once only where there is no earlier run. The file may have
        # no link to go on from. Then it is kept under another name, as it alone can prove its steps. Not covered: a
        # kill in the middle of this. The next run begins at its snapshot, which has a link of its own.
        waiting, self._waiting = self._waiting, None
        if self._end is None:
            self._set_aside()
        os.ftruncate(self._descriptor, self._end or 0)
        if self._end is None:
            if not self._first:
                os.ftruncate(self._records, 0)
            facts = {"chain": FORMAT, "width": self._width, "first": self._first, "before": self._before}
            self._write(json.dumps(facts) + "\n")
        os.write(self._records, "".join(waiting).encode())

    def _set_aside(self) -> None:
        """Keep a file that cannot be gone on with under another name. It has links, which only it can prove."""
        if not self._first or not os.fstat(self._descriptor).st_size:
            return  # its steps will all be done again
        names = (self._target.with_name(ASIDE.format(number)) for number in itertools.count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        os.rename(self._target, aside)
        self._descriptor = self._held.add(files.open_log(self._target))
        checks.warn(
            f"{str(self._target)!r} cannot go on after step {self._first - 1}: that link is missing or damaged, or its "
            f"lines are too short for this recipe. It is kept as {aside.name!r}, and a new chain begins there"
        )

    def _write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._descriptor, data) :]


class Links(contextlib.AbstractContextManager["Links"]):
    """Reads any link of a chain by its step; an incomplete last line does not count.

    Parameters
    ----------
    path : path

    Attributes
    ----------
    first : int
        The step of the first link: not 0 where earlier ones were lost.
    width : int
        Bytes of a line.

    Raises
    ------
    SnapshotError
        It is no chain, or cannot be read.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        with files.used(path):
            self._descriptor = files.opened(path, os.O_RDONLY)
        try:
            header = system.read_at(self._descriptor, MOST_HEADER, 0).partition(b"\n")
            fields = json.loads(header[0])
            if fields["chain"] != FORMAT or not header[1]:
                raise ValueError(f"it is of format {fields['chain']!r}")
            self.first, self.width = int(fields["first"]), int(fields["width"])
            if not 0 <= self.first <= MOST_STEPS or not 0 < self.width <= MOST_WIDTH:
                raise ValueError(f"it begins at step {self.first}, with lines of {self.width} bytes")
            self._before = str(fields.get("before", BEGINNING))
            if len(bytes.fromhex(self._before)) != hashlib.sha256().digest_size:
                raise ValueError("the link before its first is none")
            self._base = len(header[0]) + 1
            self._count = max(0, (os.fstat(self._descriptor).st_size - self._base) // self.width)
        except (OSError, *MALFORMED) as error:
            self.close()
            raise SnapshotError(f"{path} is no chain of links: {error}") from error

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """After how many steps the last link was made; 0 where there is none."""
        return self.first + self._count if self._count else 0

    def __getitem__(self, step: int) -> dict[str, Any]:
        """What the line of a step says. Its link is checked: a hash over the link before and all that it says."""
        return self.fields(step, whole=True)

    def fields(self, step: int, *, whole: bool = False) -> dict[str, Any]:
        """What the line of a step says; ``whole``: its link is checked, too."""
        try:
            line = self.line(step)
            fields = json.loads(line)
            if fields["step"] != step or len(bytes.fromhex(fields["link"])) != hashlib.sha256().digest_size:
                raise ValueError("it is another step's")
            body = "{" + line[LINK.stop + 3 :].rstrip()
            if whole and line_after(self.before(step), body, self.width) != line:
                raise ValueError("its link is not that of what it says and of the link before")
            float(fields.get("loss", 0))
            lists = [fields.get("losses", []), fields.get("weights", []), *fields.get("phases", {}).values()]
            if not all(isinstance(one, list) for one in lists):
                raise ValueError("losses, weights or phases are no lists")
        except MALFORMED as error:
            raise SnapshotError(f"{self.path} is damaged at step {step}: {error}") from error
        return fields

    def check(self, begin: int) -> None:
        """Raise if a line from step ``begin`` on is damaged."""
        for step in range(max(begin, self.first), len(self)):
            self.fields(step, whole=True)

    def brought(self, step: int) -> bool:
        """Whether the caller brought the batch of a step."""
        return str(self.fields(step).get("samples")).startswith(BROUGHT)

    def losses(self, step: int) -> list[Any]:
        """The loss of each update of a step: of each of its phases, if it has some."""
        fields = self.fields(step)
        return [loss for phase in fields.get("phases", {"": [fields.get("loss")]}).values() for loss in phase[:1]]

    def before(self, step: int) -> str:
        """The link before that of a step."""
        return self.fields(step - 1)["link"] if step > self.first else self._before

    def line(self, step: int) -> str:
        """The line of a step as it is in the file."""
        return system.read_at(self._descriptor, self.width, self.offset(step)).decode(errors="replace")

    def offset(self, step: int) -> int:
        """Where the line of a step begins."""
        return self._base + (step - self.first) * self.width

    @property
    def root(self) -> str:
        """The last link."""
        return self[len(self) - 1]["link"] if self._count else self._before

    def close(self) -> None:
        """Read no more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def missing(path: pathlib.Path, kept: Sequence[tuple[StepReport, str]]) -> list[tuple[StepReport, str]]:
    """The newest steps, as far as the chain lacks them: the process that wrote it fell before it had added them."""
    with contextlib.suppress(SnapshotError), Links(path) as links:
        return [one for one in kept if one[0].step >= len(links) >= kept[0][0].step]
    return []


def records_of(path: pathlib.Path) -> pathlib.Path:
    """Where the records beside a chain lie."""
    return path.with_name(path.name.removesuffix(".jsonl") + RECORDS)


def records(path: pathlib.Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """The records of some kinds beside a chain, oldest first; incomplete lines are left out.

    Raises
    ------
    SnapshotError
        They cannot be read.
    """
    beside = records_of(path)
    if not files.is_there(beside):
        return
    with files.used(beside):
        lines = files.read(beside).splitlines()
    for line in lines:
        with contextlib.suppress(*MALFORMED):
            record = json.loads(line)
            if record["kind"] in kinds and isinstance(record["step"], int):
                yield record
