"""Keeps the chain of a run: a link for every step, and now and then a digest of the state beside it.

So recipes are compared by what they compute. If this run did the step at which a later run goes on, the chain has its
link. Else this run computes one replica of it when it stops. It also notes where the recipe can be found again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from phalanx.checkpoint import files
from phalanx.checkpoint.chain import BROUGHT, CHAIN, ChainFile, Links, body_of, missing, records, records_of
from phalanx.checkpoint.directory import RunDirectory
from phalanx.checkpoint.saver import Pacing
from phalanx.checkpoint.snapshot import tensors_of
from phalanx.checkpoint.tensors import leaf
from phalanx.definition.batches import Drawn
from phalanx.definition.fields import Definition
from phalanx.definition.plain import Each, check_like, hashed
from phalanx.errors import SnapshotError, UsageError
from phalanx.frameworks.registry import recorded_environment
from phalanx.seams import Engine, Observer
from phalanx.seams.records import Captured, StepReport, Training

SHARE = 0.004  # of the time, at most, for digests of the state, with "auto"
SECONDS = 5.0  # between two of them, at least
TRAINING, SCHEDULE = "training", "schedule"  # kinds of records
NEXT = "next.json"
LOADED = "phalanx_file_"  # begins the names of modules that were loaded for their recipe
SAMPLES = 32  # hexadecimal digits of the hash of what was dealt


class Chained(Observer):
    """Adds a link to the chain for every step.

    Parameters
    ----------
    directory : RunDirectory
    definition : Definition
    every : int or None
        Steps from one digest of the state to the next; None: so seldom that it costs next to nothing; 0: none.
    recipe : dict
        The recipe as it is described.
    link : str, optional
        The newest one of the run that this one goes on from.

    Attributes
    ----------
    link : str or None
        The newest one.
    """

    def __init__(
        self, directory: RunDirectory, definition: Definition, every: int | None, recipe: Any, link: Any = None
    ) -> None:
        self._directory = directory
        self._definition = definition
        self._every = every
        self._recipe, self.link = recipe, link
        self._chain: ChainFile | None = None
        self._brought = ""
        self._early: list[tuple[str, dict[str, Any]]] = []  # records of before the link that they follow was added
        self._added = False
        self._pacing = Pacing(every, SECONDS, SHARE)

    def begin(self, engine: Engine, run: Any = None) -> None:
        """Go on with the chain, or begin one; note recipe and environment, and the state as it is."""
        self._engine = engine
        done = engine.progress.steps
        try:
            phases, rounds = self._definition.phases or (), self._definition.rounds
            pairs = len(rounds.every) * self._definition.replicas + len(phases) * 3
            missed = missing(self._directory.root / CHAIN, engine.seen.kept)
            known = None if missed else self.link
            self._chain = ChainFile(self._directory.root / CHAIN, done - len(missed), pairs, known)
            for report, brought in missed:
                self._chain.add(fields_of(report, self._definition, brought))
            if engine.progress.resumed_from is None:  # else this run may be refused yet
                self._chain.cut()
        except OSError as error:
            where = str(self._directory.root / CHAIN)
            raise UsageError(f"the run's chain, {where!r}, cannot be written: {error}; mend that file") from error
        self._directory.before_writing.append(self._chain.sync)
        remember(self._directory.root, self._definition)
        facts = {"recipe": self._recipe, "environment": recorded_environment(), "replicas": self._definition.replicas}
        where, arguments = origin_of(self._definition)
        home = {"origin": where, "arguments": arguments, "source": source_hash((where or "").rpartition(":")[0])}
        if where is None:  # this script made it by the function of a file, as the shell may have done before
            for before in records(self._directory.root / CHAIN, "run"):
                made = before.get("recipe")
                if (
                    before.get("origin")
                    and isinstance(made, dict)
                    and {**made, "beside": {}} == {**self._recipe, "beside": {}}
                ):
                    home = {name: before.get(name) for name in home}
        self._chain.record("run", step=done, **home, **facts)
        self.link = self._chain.root
        self._note_early(self._chain)
        if self._every != 0:
            self._digest(self._chain, done)

    def brought(self, batch: Any) -> None:
        """The next step's samples are these, brought by the caller or a stream."""
        self._brought = brought_as(batch)

    def retrained(self, change: Training) -> None:
        """Note it, so that steps can be computed again."""
        self._early.append((TRAINING, change._asdict()))
        if self._chain is not None and self._engine.seen.complete:
            self._note_early(self._chain)

    def scheduled(self, value: float | None) -> None:
        """Note it, as evaluations are not computed again; also that there was none, or it would seem to be lost."""
        self._early.append((SCHEDULE, {"values": [] if value is None else [repr(value)]}))

    def _note_early(self, chain: ChainFile) -> None:
        for kind, facts in self._early:
            chain.record(kind, step=self._engine.progress.steps, **facts)
        self._early.clear()

    def horizon(self, steps: int) -> int:
        """The step after which the next digest is due, or, with "auto", probably is."""
        return self._pacing.horizon(steps)

    def step(self, report: StepReport) -> None:
        """Add the step's link; digest the state if that is due."""
        assert self._chain is not None, "no step comes before begin"
        self._directory.check_alone()
        brought, self._brought, self._added = self._brought, "", True
        self.link = self._chain.add(fields_of(report, self._definition, brought))
        self._note_early(self._chain)
        self._pacing.stepped(report.seconds)
        if self._pacing.due(report.step + 1):
            self._digest(self._chain, report.step + 1)

    def left(self) -> dict[str, Any]:
        """The newest link."""
        return {"chain": self.link}

    def end(self) -> None:
        """Keep what a replica of the next step computes, for a run that goes on from here, and write no more."""
        if self._chain is None:
            return
        if self._added and self._directory.held:
            self._keep_next(self._chain.root)
        self._chain.close()

    def _keep_next(self, link: str) -> None:
        state = self._engine.progress
        with contextlib.suppress(Exception):  # of user code, or the state is lost, or the disk is full
            whole = self._engine.seen.complete and not state.between_phases and self._directory.has(state.steps)
            if whole and (noted := self._engine.peek()):
                text = json.dumps({"step": state.steps, "link": link, "replica": noted}).encode()
                files.replace(self._directory.root / NEXT, lambda file: file.write(text))

    def _digest(self, chain: ChainFile, steps: int) -> None:
        began = time.monotonic()
        chain.record("state", step=steps, leaves=leaves_now(self._engine))
        self._pacing.took(began)


def retrained_in(root: pathlib.Path | None) -> dict[int, list[Training]]:
    """What was frozen and thawed in a run, as ``noted_in`` reads it."""
    return noted_in(root, TRAINING, _training)


def scheduled_in(root: pathlib.Path | None) -> dict[int, list[list[float]]]:
    """With which values a run stepped its schedule after its epochs, as ``noted_in`` reads it."""
    return noted_in(root, SCHEDULE, lambda record: list(map(float, record["values"])))


def _training(record: Any) -> Training:
    check_like([record["names"], record["trained"]], [Each(str), bool], "a record of what was frozen")
    return Training(tuple(record["names"]), record["trained"])


def noted_in(root: pathlib.Path | None, kind: str, of: Callable[[Any], Any]) -> dict[int, list[Any]]:
    """Records of one kind in a run that has a chain, by how many steps were done before; ``of`` reads one.

    Raises
    ------
    SnapshotError
        The chain is damaged.
    """
    changes: dict[int, list[Any]] = {}
    if root is None or not files.is_there(root / CHAIN):
        return changes
    with files.used(records_of(root / CHAIN)), Links(root / CHAIN) as links:
        for record in records(root / CHAIN, "run", kind):
            step = record["step"]
            if record["kind"] != kind:  # the run went on from there, and later steps were done again
                changes = {done: listed for done, listed in changes.items() if done <= step}
            elif step <= len(links) and links.before(step) == record["link"]:
                changes.setdefault(step, []).append(of(record))
    return changes


class Behaviour:
    """What is known of a step that an earlier run did or would have done next.

    Parameters
    ----------
    root : path
        The run's directory.
    step : int
        After how many steps its snapshot was.

    Attributes
    ----------
    link : dict or None
        What the chain says of the step.
    replica : dict or None
        What one replica computed, if there is no link.
    """

    def __init__(self, root: pathlib.Path, step: int) -> None:
        self.step = step
        self.link: dict[str, Any] | None = None
        self.replica: dict[str, Any] | None = None
        with contextlib.suppress(SnapshotError, OSError), Links(root / CHAIN) as links:
            if links.first <= step < len(links):
                self.link = links[step]
            elif links.first < step == len(links):
                with contextlib.suppress(*files.MALFORMED):
                    saved = json.loads(files.read(root / NEXT))
                    if (saved["step"], saved["link"]) == (step, links.root):
                        self.replica = dict(saved["replica"])

    def of_replica(self, now: dict[str, Any]) -> str:
        """How a replica that was computed now differs from the earlier run's, in words."""
        what = [name for name, value in (self.replica or now).items() if now.get(name) != value]
        return f"replica 0 of step {self.step} comes to {', '.join(what)} than before" if what else ""

    def of_step(self, fields: dict[str, Any]) -> str:
        """How the step that was done now differs from the earlier run's; ``fields``: as its link has them."""
        assert self.link is not None, "who asks has looked"
        now: dict[str, Any] = json.loads(body_of(fields))
        what = [name for name in now if now[name] != self.link.get(name)]
        shown = f": loss {now['loss']}, and {self.link.get('loss')} before" if "loss" in what else ""
        return f"step {self.step} comes to another {', '.join(what)}{shown}" if what else ""

    def of_other_samples(self, samples: str) -> bool:
        """Whether the caller brought another batch for the step, so that it cannot be compared."""
        assert self.link is not None, "who asks has looked"
        return samples.startswith(BROUGHT) and samples != self.link.get("samples")


def fields_of(report: StepReport, definition: Definition, brought: str = "") -> dict[str, Any]:
    """What a link says of a step; ``brought``: the hash of the batch, if the caller brought it."""
    dealt = brought or hashlib.sha256(definition.plan.indices(report.step).tobytes()).hexdigest()[:SAMPLES]
    phases = {name: list(phase[:3]) for name, phase in report.phases.items()}
    return {
        "step": report.step, "samples": dealt, "loss": report.loss, "norm": report.grad_norm, "lr": report.lr,
        "losses": list(report.parts[0::2]), "weights": list(report.parts[1::2]),
        **({"phases": phases} if phases else {}),
    }  # fmt: skip


def brought_as(batch: Any) -> str:
    """A hash of what the caller or a stream brought for a step."""
    return batch.hash[:SAMPLES] if isinstance(batch, Drawn) else BROUGHT + hashed(batch).hex()[:SAMPLES]


def leaves_of(captured: Captured) -> dict[str, str]:
    """A hash of each tensor of a state, by name: parameters, buffers, optimizer state; as snapshots have them, too."""
    return {name: leaf(tensor) for name, tensor in tensors_of(captured.weights, captured.training).items()}


def leaves_now(engine: Engine) -> dict[str, str]:
    """The same of the state that an engine has."""
    captured = engine.capture()
    try:
        return leaves_of(captured)
    finally:
        captured.release()


_HERE: weakref.WeakValueDictionary[str, Definition] = weakref.WeakValueDictionary()


def remember(path: pathlib.Path, definition: Definition) -> None:
    """Note that a run of this recipe works in this directory, in this process."""
    _HERE[os.path.realpath(path)] = definition


def recall(path: pathlib.Path) -> Definition | None:
    """The recipe whose run worked in a directory in this process, if anybody still has it."""
    return _HERE.get(os.path.realpath(path))


_ORIGINS: weakref.WeakKeyDictionary[Definition, tuple[str, dict[str, Any]]] = weakref.WeakKeyDictionary()


def remember_origin(definition: Definition, where: str, arguments: dict[str, Any]) -> None:
    """Note which function returned a recipe, as ``FILE:NAME``, and with which arguments."""
    _ORIGINS[definition] = where, arguments


def origin_of(definition: Definition) -> tuple[str | None, dict[str, Any] | None]:
    """``FILE:NAME`` of the function that returned a recipe, and its arguments; or of a module's name for the recipe.

    A script that has no main guard is left out: whoever loads it for its recipe would train it again.
    """
    if definition in _ORIGINS:
        return _ORIGINS[definition]
    home = getattr(definition.make_model, "__module__", None)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if name in ("__main__", home) or name.startswith(LOADED) else None
        names = [name for name, value in list(vars(module).items()) if value is definition] if file else []
        if file and names and (name != "__main__" or _is_guarded(file)):
            return f"{os.path.realpath(file)}:{names[0]}", None
    return None, None


def source_hash(path: str) -> str | None:
    """A hash of a file, to be shown beside its name; None where there is no such file, or it cannot be read."""
    with contextlib.suppress(OSError):
        if os.path.isfile(path):  # a pipe would never end
            return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    return None


def _is_guarded(file: str) -> bool:
    """Whether a script asks if it is the one that was started."""
    with contextlib.suppress(OSError):
        return "__main__" in pathlib.Path(file).read_text(errors="replace")
    return False
