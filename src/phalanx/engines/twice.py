"""Computes a replica twice from the same state, which reveals faults of user code and of machines.

In steps 0, 1, 10, 100 and so on, and in the first step of a process, every worker computes its first replica twice.
This reveals what user code keeps outside the state from call to call. The later steps reveal what acts late: a teacher
that equals its student at first, a queue that is used once it is full.

In an audited step one replica is computed again by the worker after the one that hosts it; a worker that is alone
computes its first one twice. This reveals a processor that computes wrongly. Only checksums are exchanged. The first
step of workers does the same. There the other worker has computed other samples before, which reveals what code keeps
from its first call.

Evaluations are watched likewise: of some, the worker that has the first chunk measures that again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator, MutableSequence, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from phalanx.definition import checks
from phalanx.definition.batches import BatchShares
from phalanx.definition.data import Share
from phalanx.definition.fields import Definition
from phalanx.definition.metrics import Metrics, differing
from phalanx.definition.reachable import Place, differences, holding, put_back, values
from phalanx.errors import CorruptionError, PhalanxError, StateError, spell_samples
from phalanx.plan.audit import Audit, joined
from phalanx.plan.keys import evaluation_key
from phalanx.seams import Arithmetic, Framework, Link
from phalanx.seams.records import Captured, Computed, Measurement, Todo, Watch, Weights, packed
from phalanx.step import Proposal, compute, measure, prepare, propose, todo
from phalanx.surroundings.presence import CURRENT, outside

Facts = dict[str, Any]

STEPS = (0, *(10**power for power in range(16)))
ALL = range(1 << 62)
SHOWN = 6  # changes that a message names
HELD = re.compile(r"\._(?:modules|buffers|parameters)\['(.*?)'\]")
STATE = re.compile(r"model\b.*\._(?:buffers|parameters)\[")
UNSEEN = "nothing in sight (an operation that does not come to the same twice, a generator, a clock, faulty memory)"
ALLOW = "nondeterministic='allow' makes this a warning"
WAYS = (
    "What code keeps from call to call differs from worker to worker, and is lost with one: keep it in a buffer of the "
    "model that is equal on all replicas (for a loss, too: put its module into the model, and let forward_fn return "
    f"it), or make it a function of the step: phalanx.current_step(). {ALLOW}"
)
KEEPS = (
    "What code keeps from call to call differs from worker to worker. Measure all samples at once, by phalanx.whole, "
    "or by an object with update, compute, reset and merge_state, as torchmetrics has them; what a model needs in "
    "evaluations, let training write into a buffer"
)
WRONG = (
    "nothing was updated. A processor or memory computes wrongly, or the model does not come to the same twice, as "
    "phalanx check tells. phalanx verify RUN FILE computes the replica once more and says which value was wrong; the "
    "same call goes on from the newest snapshot"
)


FIRST = "code of yours keeps what its first call came to, as a cache does (if self.mean is None: self.mean = ...)"


class Audited(NamedTuple):
    """What an audited step computes again (the last replica of ``work``), which worker hosts it, and which audits it.

    ``first``: no audit was asked for, but it is the first step of these workers.
    """

    work: list[Todo]
    host: int
    auditor: int
    first: bool


class Twice:
    """Proposes steps with a framework, in some of which a replica is computed twice.

    Parameters
    ----------
    definition : Definition
    framework : Framework
    allow : bool or None
        Whether a different outcome only causes a warning, once, by the worker that computes the first replica. None:
        nothing is computed twice.
    audit : Audit, optional
    blocks : sequence of sequence of int, optional
        The replicas of each worker; by default there is one.
    worker : int
        The number of this worker.
    sums : mutable sequence of float
        Where each worker writes the checksum of its outcome in an audited step.
    began : int, optional
        The first update of all workers.

    Attributes
    ----------
    due : container of int
        The updates in which something may be computed twice.
    """

    def __init__(
        self,
        definition: Definition,
        framework: Framework,
        *,
        allow: bool | None,
        audit: Audit | None = None,
        blocks: Sequence[Sequence[int]] | None = None,
        worker: int = 0,
        sums: MutableSequence[float] | memoryview[float] | None = None,
        began: int | None = None,
    ) -> None:
        self._definition, self._framework = definition, framework
        self._allow, self._audit = allow, audit
        self._blocks, self._worker = blocks or [range(definition.replicas)], worker
        self._sums = [0.0] if sums is None else sums
        self._began = began if allow is False and len(self._blocks) > 1 else None
        self._lenient, self._doubted = allow, set[str]()
        self._after = definition.rounds.updates
        self._checked: set[int] = set()  # updates in which every worker computes its first replica twice
        self.due: Container[int] = self._checked if audit is None else ALL
        for step in STEPS:
            self.begin(self._after(step))

    def begin(self, update: int) -> None:
        """The process begins at this update: the remaining updates of its step are computed twice, too."""
        if self._allow is not None:
            step = self._definition.rounds.at(update).step
            self._checked |= set(range(update, self._after(step + 1)))

    def propose(self, link: Link, t: int, shares: Sequence[Share]) -> Proposal:
        """Do ``step.propose``, with an audit and checks where this step has them.

        Raises
        ------
        StateError
            The first replica had another outcome when it was computed again, or left more behind than buffers.
        CorruptionError
            The audited replica had another outcome when it was computed again.
        """
        if t not in self.due:
            return propose(self._framework, link, self._definition, t, shares)
        self._update, self._audited = t, None
        audited = self._audit is not None and self._audit.due(t)
        self._alone = audited and len(self._blocks) == 1
        if (audited and not self._alone) or t == self._began:
            ran = [replica for replica, share in enumerate(shares) if len(share.samples)]
            last = self._blocks[-1][0]
            replica = last if last in ran else ran[0]
            if self._audit is not None and audited:
                replica = self._audit.replica(t, ran)
            host = next(worker for worker, block in enumerate(self._blocks) if replica in block)
            work = todo(self._definition, t, joined(replica, self._blocks[host], ran), shares)
            self._audited = Audited(work, host, (host + 1) % len(self._blocks), not audited)
        watched = self.gradients, self._compare, self._over_batch
        return propose(self._framework, link, self._definition, t, shares, *watched)

    def _over_batch(self, said: Sequence[bytes], key: int, phase: int) -> float:
        """Compute a loss over the whole batch, twice where this step is checked."""
        compute = functools.partial(self._framework.over_batch, said, key, phase)
        outcome = compute()
        if self._allow is not None and self._update in self._checked and not (self._allow and self._worker):
            before = self._held()
            if compute() != outcome:
                what = f"the loss over the whole batch of {self._moment(phase)} came to something else, or wrote "
                what += "something else into buffers, when it was computed again from the same outputs"
                self._tell(what, self._since(before))
        return outcome

    def gradients(self, todo: Sequence[Todo]) -> Iterator[Computed]:
        """Yield all replicas; those that are computed once more are computed before."""
        audited, events = self._audited, defaultdict[str, list[Any]](list)
        before: Facts | None = None
        checked = self._allow is not None and self._update in self._checked
        if todo and (self._alone or (checked and not (self._allow and todo[0].replica))):
            watch = Watch(lambda kind, name, value: events[kind].append((name, value)), parameters=True)
            first = self._computed(todo[:1], watch)
            if events["early"] or (events["written"] and self._definition.replicas > 1):
                changed = [f"{name!r} {how}" for name, how in events["early"] + events["written"]]
                self._report(todo[0], "left more behind than buffers", changed)
            if events["written"]:  # a lone replica may write parameters, and has done so now
                return itertools.chain([first], self._each(todo[1:], None))
            before = noted(self._framework.arithmetic, first)
        if audited is not None and audited.auditor == self._worker:  # after samples of this worker's own
            self._sums[self._worker] = checksum(self._framework.arithmetic, self._computed(audited.work))
        return self._each(todo, before)

    def _each(self, todo: Sequence[Todo], before: Facts | None) -> Iterator[Computed]:
        """Yield the replicas; compare the first with ``before``, and note the audited one for the auditor."""
        audited = self._audited
        hosted = audited.work[-1].replica if audited is not None and audited.host == self._worker else None
        for one, computed in zip(todo, self._framework.gradients(todo), strict=True):
            if one.replica == hosted:
                self._sums[self._worker] = checksum(self._framework.arithmetic, computed)
            before, known = None, before
            if known is not None and known != (after := noted(self._framework.arithmetic, computed)):
                what = ", ".join(name for name, value in known.items() if value != after.get(name))
                self._differ(one, what, (known, after))
            yield computed

    def _computed(self, work: Sequence[Todo], watch: Watch | None = None) -> Computed:
        """Compute some replicas in turn; returns the last."""
        computing, moment = self._framework.gradients(work, watch), self._definition.rounds.at(self._update)
        return [compute(computing, moment, one.replica, one.share) for one in work][-1]

    def peek(self, update: int) -> dict[str, Any] | None:
        """The outcome of the first replica of an update, as JSON values; the state stays as it is.

        None where that says nothing or is not available: brought batches and streams, user code that raises, or code
        that may have another outcome each time.
        """
        definition, framework = self._definition, self._framework
        if self._allow is not False or definition.source is None:
            return None
        written: list[str] = []
        watch = Watch(lambda kind, *_: written.append(kind) if kind == "written" else None, parameters=True)
        with contextlib.suppress(Exception), framework.environment, outside():
            before = framework.capture(copy=True) if definition.replicas == 1 else None
            try:
                shares = BatchShares(definition, framework.opened).planned(update)
                prepare(framework, definition, update, shares)
                computing = framework.gradients(todo(definition, update, [0], shares), watch)
                return noted(framework.arithmetic, compute(computing, definition.rounds.at(update), 0, shares[0]))
            finally:
                framework.rewind()
                if written and before is not None:  # a lone replica may write parameters
                    framework.adopt(Captured(before.weights, {}, {}))
        return None

    def _compare(self) -> None:
        """Compare host and auditor, if there is one. All workers have passed a barrier, so both checksums are there."""
        if self._audited is None:
            return
        (*_, one), host, auditor, first = self._audited
        sums = int(self._sums[host]), int(self._sums[auditor])
        if sums[0] != sums[1] and first:
            what = f"came to something else in worker {auditor}, which had computed other samples before"
            self._report(one, f"{what}, than in worker {host}", [FIRST, UNSEEN])
        elif sums[0] != sums[1]:
            what = f"came to something else in worker {auditor}, which computed it again, than in worker {host}"
            raise self._corruption(one, what, sums, (host, auditor))

    def _differ(self, one: Todo, what: str, both: tuple[Facts, Facts]) -> None:
        """Report a replica with two outcomes in this process: what changed in user code, or that nothing did."""
        changed = self._changed(one)
        if self._alone and self._update not in self._checked and changed == [UNSEEN]:
            again = f"came to {what} when worker 0 computed it again, which is alone"
            raise self._corruption(one, again, (total(both[1]), total(both[0])), (0, 0))
        self._report(one, f"came to {what} when it was computed again from the same state", changed)

    def readings(
        self, metrics: Metrics, shares: Sequence[Share], chunks: Sequence[int], weights: Weights | None,
        tick: Callable[[], object], at_once: int = 1,
    ) -> list[Any]:  # fmt: skip
        """What metrics read of these chunks, in order.

        ``tick`` is called before each. So many are measured ``at_once`` as there are devices.
        """

        def begin(chunk: int, share: Share | None = None, metrics: Metrics = metrics) -> Measurement:
            tick()
            key = evaluation_key(self._definition.seed, chunk)
            return measure(self._framework, metrics, key, share or shares[chunk], weights)

        held = {**metrics.holders, **self._definition.holders, **self._framework.held}
        kept = holding(held) if (watched := metrics.watched and 0 in chunks) else []
        read, begun = list[Any](), deque[Measurement]()
        for chunk in chunks:
            begun.append(begin(chunk))
            if len(begun) == at_once:
                read.append(begun.popleft()())
        read += [finish() for finish in begun]
        if watched:
            self._look_again(metrics, shares, read[0], kept, begin)
        return read

    def _look_again(
        self, metrics: Metrics, shares: Sequence[Share], first: Sequence[Any], kept: Sequence[Place],
        begin: Callable[..., Measurement],
    ) -> None:  # fmt: skip
        """Measure the first chunk again, after others. That shows what code keeps from call to call: a running mean.

        It does not show a cache of the first call. So what code held before that is put back for a moment, and another
        chunk comes first. It is one sample, many times: as unlike as can be, and of the size that compiled code knows.
        """
        own, looked = shares[0], metrics.with_outputs()
        other = replace(own, samples=np.full_like(own.samples, shares[-1].samples[0]))

        def look(share: Share) -> Sequence[Any]:
            with contextlib.suppress(PhalanxError):  # a metric may need several samples, or two classes
                return begin(0, share, looked)()
            return ()

        now = [(place, place.copy()) for place, _ in kept]
        try:
            after = look(other), look(own)
            changed = put_back(kept)
            fresh = (look(other), look(own)) if changed else after
            names = differing(metrics.names, [(first, after[1]), *zip(after, fresh, strict=True)])
            decide = not self._lenient and names & metrics.decisive
            for name in sorted(decide or names - self._doubted):
                what = f"metric {name!r} of samples {spell_samples(own.samples)} came to something else when they were"
                seen = ", ".join(dict.fromkeys(changed)) or UNSEEN
                message = f"{what} measured again, from the same weights; what changed in between: {seen}. {KEEPS}"
                if decide:
                    raise StateError(f"{message}. The run goes by it; {ALLOW}", samples=own.samples)
                checks.warn(message)
                self._doubted.add(name)
        finally:
            put_back(now)

    def _changed(self, one: Todo) -> list[str]:
        """What user code holds, apart from the state, that changes when the replica is computed once more."""
        before = self._held()
        with contextlib.suppress(Exception):
            list(self._framework.gradients([one]))
        return self._since(before)

    def _held(self) -> Any:
        return values({**self._definition.holders, **self._framework.held})

    def _since(self, before: Any) -> list[str]:
        """The paths of what user code holds that is something else now."""
        paths = differences(before, self._held())
        return [HELD.sub(r".\1", path) for path in paths if not STATE.match(path)] or [UNSEEN]

    def _report(self, one: Todo, what: str, changed: Sequence[str]) -> None:
        self._tell(f"{self._named(one)}, {what}", changed, replica=one.replica, samples=one.share.samples)

    def _tell(self, what: str, changed: Sequence[str], **address: Any) -> None:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        message = f"{what}; what changed in between: {', '.join(changed[:SHOWN])}{more}. {WAYS}"
        if not self._allow:
            raise StateError(message, step=CURRENT.step, **address)
        checks.warn(message)
        self._allow = None  # which updates are due stays the same in all workers

    def _corruption(self, one: Todo, what: str, sums: tuple[int, int], workers: tuple[int, int]) -> CorruptionError:
        return CorruptionError(
            f"{self._named(one)}, {what}; {WRONG}", workers=workers, sums=sums, step=CURRENT.step,
            replica=one.replica, samples=one.share.samples,
        )  # fmt: skip

    def _moment(self, phase: int) -> str:
        name = self._definition.rounds.names[phase]
        return f"step {CURRENT.step}, phase {name!r}" if name else f"step {CURRENT.step}"

    def _named(self, one: Todo) -> str:
        return f"replica {one.replica} of {self._moment(one.phase)}, samples {spell_samples(one.share.samples)}"


def noted(arithmetic: Arithmetic, computed: Computed) -> Facts:
    """The outcome of a replica, in numbers that can be compared."""
    return {
        "another loss": repr(arithmetic.read([computed.loss])),
        "another weight": computed.weight,
        "another gradient": arithmetic.checksum(computed.gradient or []),
        "other buffers": arithmetic.checksum(computed.buffers),
        **({"other named losses": packed(computed.named).decode()} if computed.named else {}),
    }


def checksum(arithmetic: Arithmetic, computed: Computed) -> int:
    """The outcome of a replica as one number of 32 bits."""
    return total(noted(arithmetic, computed))


def total(facts: Facts) -> int:
    """One number of 32 bits that stands for all facts."""
    return zlib.crc32(repr(facts).encode())
