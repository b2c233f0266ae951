"""A run's directory: snapshots, of which the newest whole one counts, a log of events, and a lock."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any

from phalanx.checkpoint import files, snapshot, tensors
from phalanx.checkpoint.chain import CHAIN, body_of, missing
from phalanx.checkpoint.snapshot import Snapshot
from phalanx.definition import checks
from phalanx.errors import CorruptionError, PhalanxError, SnapshotError, UsageError, safe_str
from phalanx.seams import Engine, Observer
from phalanx.seams.records import Incident, Progress, Seen, StepReport, Training
from phalanx.surroundings import system

SNAPSHOTS, LOG, LOCK, BATCH = "snapshots", "events.jsonl", "lock", "failure.safetensors"
MARK = "world-"  # how names of folders begin by which hosts see that they share the directory; who goes on is in them
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
NAME = re.compile(r"step-[0-9]{12}")
# What a line of the log has if it is an event: types of fields that others read; None stands for one that is not there.
FIELDS = {
    "event": str, "step": int, "time": (int, float, NoneType), "seconds": (int, float, NoneType),
    "total": (int, NoneType), "metrics": (dict, NoneType), "losses": (dict, NoneType),
}  # fmt: skip
KINDS = {"step": {**FIELDS, "samples": int}, "error": {**FIELDS, "step": (int, NoneType)}}
DIGITS = 20  # of a whole number, with its sign; a longer one is read as a float
MOST = 1 << 37  # seconds since 1970, of which a calendar has no more, and steps


class RunDirectory:
    """A directory that one run at a time works in.

    Parameters
    ----------
    path : str or path
    keep : int
        How many snapshots stay.
    seize : bool
        Whether to work in it though another process has the lock, as that one has fallen. If it lives, it ends.

    Attributes
    ----------
    root : path
        The same without links: later changes of links do not matter.
    before_writing : list of callable
        Called before a snapshot is written.

    Raises
    ------
    UsageError
        It cannot be made or written, or another run works in it.
    """

    def __init__(self, path: Any, keep: int, *, seize: bool = False) -> None:
        self.path = pathlib.Path(path)
        self._keep = keep
        self.before_writing: list[Callable[[], None]] = []
        self.taken: SnapshotError | None = None  # by another run; whatever writes next raises it, too
        self._held = files.Held()
        try:
            self.root = _made(self.path)
            self._lock = self._held.add(files.locked(self.root / LOCK, seize=seize))
            # The lock alone is not enough. Some file systems give it to two runs, and over hosts a process may seize
            # it from one that is stopped. So whoever comes last leaves a mark here, and goes on. The earlier run
            # looks for its own mark before it writes (`check_alone`, `note`), and ends. A mark that cannot be read
            # stops nothing. Rejected: record locks, by which two runs of one process do not see each other, and a pid
            # in the file, which is wrong across containers. Not covered: what the earlier run writes between its look
            # and the later mark. NFS may take seconds to show one.
            self._mine = uuid.uuid4().hex.encode()
            system.write_at(self._lock, self._mine, 0)
            self._log = files.LineFile(self._held.add(files.open_log(self.root / LOG)), self.root / LOG)
            for folder in (self.root, self.root / SNAPSHOTS):
                files.clear_away(folder)
        except BaseException as error:
            self._held.let_go()
            if isinstance(error, (OSError, ValueError)):
                raise _refusal(self.path, error) from error
            raise

    @property
    def held(self) -> bool:
        """Whether this process works in it: not any more once it was closed, and not in a forked child."""
        return self._held.mine

    def has(self, step: int) -> bool:
        """Whether there is a snapshot of this step."""
        return snapshot.is_one(self.root / SNAPSHOTS / f"step-{step:012d}")

    @property
    def _alone(self) -> bool:
        """Whether the mark of this run, which holds the directory, is still the last one; so it is if none is read."""
        with contextlib.suppress(OSError):
            return system.read_at(self._lock, len(self._mine), 0) == self._mine
        return True

    def check_alone(self) -> None:
        """Notice that another run works here, too: on some file systems both have the lock.

        Whoever came last goes on. NFS may show its mark only after some seconds.

        Raises
        ------
        SnapshotError
            Another run's mark is in the lock file; this run writes nothing any more.
        """
        if self.held and not self._alone:
            self.close()
            self.taken = SnapshotError(
                f"another run has begun in {str(self.path)!r}, or the other hosts did not hear this one and go on "
                "without it, so this one ends and writes no more. If its file system gave two runs the lock, give each "
                "a directory of its own, or a file system with locks"
            )
        if self.taken is not None:
            raise self.taken

    def check_own(self, step: int) -> None:
        """Refuse to go on from the snapshot of a step if somebody else may have put it there.

        Raises
        ------
        UsageError
            Says what belongs to whom, and the ways out.
        """
        folder = self.root / SNAPSHOTS
        if why := files.of_others([self.root, folder, self.root / CHAIN, folder / f"step-{step:012d}"]):
            raise UsageError(
                f"run_dir is {str(self.path)!r}, of which {why}, so that this run would train on what they put there; "
                f"chmod -R o-w (or chown) it if all of it is yours, or go on all the same with resume='anyway'"
            )

    def write(self, state: Snapshot) -> None:
        """Write a snapshot, then remove those that are too old; what is good is removed only after that.

        Raises
        ------
        OSError
            It could not be written; those that were there still are.
        """
        folder = self.root / SNAPSHOTS
        self.check_alone()
        if not self.held:
            raise OSError("this process does not hold the directory")
        if not files.is_folder(folder):
            raise OSError(f"{str(folder)!r} is no folder any more")
        for prepare in self.before_writing:
            prepare()
        target = folder / f"step-{state.step:012d}"
        files.remove(target)  # of an earlier run, and damaged, or it would not be written again
        snapshot.write(state, target)
        # Newer ones could not be read, and do not count.
        older = [path for step, path in snapshot_folders(self.root).items() if step <= state.step]
        for path in older[self._keep :]:
            with contextlib.suppress(OSError):
                if snapshot.is_one(path):  # what is no snapshot was put there by somebody else
                    files.remove(path)

    def note(self, kind: str, **facts: Any) -> None:
        """Add a line to the log, unless another run works here. A log that cannot be written stops nothing."""
        if self.held and self._alone:
            line = body_of({"time": _now(), "event": kind, **facts}) + "\n"
            self._log.add(line.encode())

    def close(self) -> None:
        """Let others work here."""
        self._held.let_go()


class EventLog(Observer):
    """Writes what happens in a run into the log of its directory, a line for each step and each incident.

    Parameters
    ----------
    directory : RunDirectory
        Closed at the end: no observer that began after this one needs it any more.
    differs : sequence of str
        How the recipe differs from that of the snapshot from which the run goes on, as far as that is known then.
    total : int or None
        How many steps the recipe has, if that is known.
    """

    def __init__(self, directory: RunDirectory, differs: Sequence[str], total: int | None = None) -> None:
        self._directory = directory
        self._differs = differs
        self._total = total
        self._begun: dict[str, Any] | None = None  # how a resumed run begins, until its first event is noted
        self._seen = Seen(Progress())

    def begin(self, engine: Engine, run: Any = None) -> None:
        """Note how the run begins."""
        self._seen = engine.seen
        facts = {"time": _now(), "step": engine.progress.steps, "workers": engine.workers, "pid": os.getpid()}
        if engine.progress.resumed_from is None and not facts["step"]:
            self._directory.note("start", **facts)
        else:
            self._begun = facts
        for report, _ in missing(self._directory.root / CHAIN, engine.seen.kept):
            self.step(report)

    def happened(self, incident: Incident) -> None:
        """Note it."""
        self._note(incident.kind, step=incident.step, worker=incident.worker, why=incident.why)

    def failed(self, error: PhalanxError) -> None:
        """Note what ended the run, so that the same samples can raise it again."""
        where = {name: getattr(error, name, None) for name in ("step", "replica")}
        where |= {"phase": error.phase} if error.phase else {}
        where |= {"workers": error.workers, "sums": error.sums} if isinstance(error, CorruptionError) else {}
        samples = list(getattr(error, "samples", ()))
        if error.batch is not None:
            with contextlib.suppress(OSError):
                where["batch"] = tensors.write_tree(self._directory.root / BATCH, error.batch)
        self._note("error", error=type(error).__name__, why=safe_str(error), samples=samples, **where)

    def retrained(self, change: Training) -> None:
        """Note it."""
        self._note("thaw" if change.trained else "freeze", step=self._seen.progress.steps, names=list(change.names))

    def step(self, report: StepReport) -> None:
        """Note what the step was."""
        measured = {} if report.metric is None else {"metric": report.metric, "metrics": dict(report.metrics)}
        columns = report.columns if report.losses or report.phases else {}
        measured |= {"losses": columns} if columns else {}
        self._note(
            "step", step=report.step, loss=report.loss, grad_norm=report.grad_norm, lr=report.lr,
            seconds=report.seconds, **measured, epoch=report.epoch, samples=report.samples,
        )  # fmt: skip

    def end(self) -> None:
        """Note that the run ended, and let go of the directory. A forked child does not hold it, and does neither."""
        self._note("end", step=self._seen.progress.steps, total=self._total, stopped_by=self._seen.stopped_by)
        self._directory.close()

    def _note(self, kind: str, **facts: Any) -> None:
        if self._begun is not None:
            begun, self._begun = self._begun, None
            self._directory.note("resume", **begun, **({"differs": list(self._differs)} if self._differs else {}))
        self._directory.note(kind, **facts)


def events(folder: pathlib.Path, *, newest_first: bool = False) -> Iterator[dict[str, Any]]:
    """The events in the log of a run, without what is None in them; a line that is torn, or no event, is left out.

    Raises
    ------
    UsageError
        There is no log that can be read.
    """
    try:
        lines = files.read(folder / LOG).splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(folder)!r} has no {LOG}, or none that can be read: {error}; give a run_dir") from error
    for line in reversed(lines) if newest_first else lines:
        with contextlib.suppress(*files.MALFORMED):
            parsed = json.loads(line, parse_int=lambda digits: (int if len(digits) <= DIGITS else float)(digits))
            event = {name: value for name, value in parsed.items() if value is not None}
            typed = all(isinstance(event.get(name), kind) for name, kind in KINDS.get(event["event"], FIELDS).items())
            if typed and all(-1 <= event.get(name, 0) < MOST for name in ("step", "time")):
                yield event


def _now() -> float:
    return round(time.time(), 3)


def at_work(path: pathlib.Path) -> bool:
    """Whether a run works in a directory now, as far as this user may look."""
    with contextlib.suppress(OSError), os.fdopen(files.opened(path / LOCK, os.O_RDONLY)) as lock:
        try:
            system.lock(lock.fileno(), shared=True)
        except BlockingIOError:
            return True
    return False


def _made(path: pathlib.Path) -> pathlib.Path:
    """The folder of a run, made if it is not there, with one for its snapshots; without links on the way.

    Raises
    ------
    UsageError
        It is a snapshot.
    OSError
        It cannot be made, or a link would lead snapshots elsewhere.
    """
    if (path / snapshot.MANIFEST).exists():
        raise UsageError(
            f"run_dir is {str(path)!r}, which is a snapshot, not a run's directory; choose another, or begin from it "
            "with warm_start"
        )
    root = path.resolve(strict=path.is_symlink())
    files.make_folder(root)
    files.make_folder(root / SNAPSHOTS)
    return root


def _refusal(path: pathlib.Path, error: Exception) -> UsageError:
    if isinstance(error, BlockingIOError):
        return UsageError(
            f"run_dir is {str(path)!r}, in which another run is at work; wait for it, close it if it is one of this "
            "process, or choose another directory"
        )
    if isinstance(error, OSError) and error.errno in NO_LOCKS:
        return UsageError(
            f"run_dir is {str(path)!r}, on a file system that locks no files ({error.strerror}); mount it with locks, "
            "or choose a directory on another, and copy it when the run has ended"
        )
    why = f"{error.strerror} ({error.filename})" if isinstance(error, OSError) and error.strerror else str(error)
    return UsageError(f"run_dir is {str(path)!r}, which cannot be used: {why}; choose a directory that may be written")


def newest_of(path: pathlib.Path) -> Snapshot | None:
    """The newest snapshot of a run that is whole; None if there is none. Damaged ones are skipped, with a warning.

    Raises
    ------
    SnapshotError
        There are some, and all are damaged.
    """
    refused: list[str] = []
    for folder in snapshot_folders(path).values():
        try:
            newest = snapshot.read(folder)
        except SnapshotError as error:
            refused.append(str(error))
            continue
        if refused:
            checks.warn(f"{'; '.join(refused)}; going on from step {newest.step} instead")
        return newest
    if refused:
        raise SnapshotError(
            f"no snapshot in {str(path)!r} can be used: {'; '.join(refused)}; mend them, or choose another run_dir to "
            "begin anew"
        )
    return None


def mark(path: pathlib.Path, run: int) -> None:
    """Mark a directory as that of a run over hosts, so that each of them can see whether it sees the same one."""
    with contextlib.suppress(OSError):  # one that cannot be listed may still be marked
        for old in path.glob(f"{MARK}*"):
            with contextlib.suppress(OSError):  # somebody else's stays; it names another run
                files.remove(old)
    with contextlib.suppress(OSError):  # then nobody sees the mark
        os.mkdir(path / f"{MARK}{run}")


def is_marked(path: pathlib.Path, run: int) -> bool:
    """Whether this is the directory that was marked so."""
    return os.path.lexists(path / f"{MARK}{run}")


def first(path: pathlib.Path, word: str) -> str:
    """The word of who came first; "" if it cannot be read. A link is made at once or not at all, over networks too."""
    with contextlib.suppress(OSError):
        os.symlink(word, path)
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def newest_step(path: pathlib.Path) -> int:
    """The step of a run's newest snapshot, damaged or not; -1 if there is none, or it cannot be listed."""
    with contextlib.suppress(SnapshotError):
        return next((step for step, folder in snapshot_folders(path).items() if snapshot.is_one(folder)), -1)
    return -1


def snapshot_folders(path: pathlib.Path) -> dict[int, pathlib.Path]:
    """Folders of a run's snapshots by their steps, newest first.

    Raises
    ------
    SnapshotError
        They cannot be listed, or lie behind a link.
    """
    folder = path / SNAPSHOTS
    if folder.is_symlink():
        raise SnapshotError(f"{str(folder)!r} is a symbolic link, which is not followed; give the run that it leads to")
    with files.used(folder):
        snapshots = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    return {int(path.name.removeprefix("step-")): path for path in sorted(snapshots, reverse=True)}
