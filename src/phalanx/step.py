"""What a step is: gradients of the replicas, fold, screen, update. ``state[t+1] = step(state[t], t)``.

Two halves: ``propose`` computes and changes nothing, ``commit`` changes the state. Reads top to bottom; every worker
runs the same lines and meets the others through its link. Knows no device, file, process or clock; the framework
computes, the plan decides the order.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from phalanx.definition import checks, generators
from phalanx.definition.data import Columns, Share, spelled
from phalanx.definition.fields import Definition
from phalanx.definition.metrics import Metrics
from phalanx.errors import NonFiniteError, PhalanxError, RunError, UsageError, WorkerError, spell_samples
from phalanx.plan.fold import fold_values
from phalanx.plan.keys import loss_key, replica_key
from phalanx.plan.rounds import Moment
from phalanx.plan.shares import share_weights
from phalanx.seams import Arithmetic, Framework, Link
from phalanx.seams.records import Computed, Measurement, Part, Todo, Vector, Weights
from phalanx.surroundings import interrupts
from phalanx.surroundings.presence import CURRENT

T = TypeVar("T")
OverBatch = Callable[[Sequence[bytes], int, int], float]  # what all said, a key, a phase
ABSENT = Part(0.0, 0.0, returned=False, samples=0)
UNCOUNTED = (
    "every replica of {} has weight 0: loss_fn counted nothing to average over in the whole batch; nothing was "
    "updated. on_nonfinite='skip' goes on without such steps; or leave such batches out, or raise batch_size"
)


@dataclass(slots=True)
class Proposal:
    """The first half of a step, done: everything computed, nothing changed yet.

    Attributes
    ----------
    loss : float
        Weighted mean of the replicas' losses; NaN where every weight is 0, so that the step is skipped.
    norm : float
        2-norm of the mean gradient, before clipping.
    gradient : Vector
        The mean gradient, as far as this worker owns it.
    accepted : bool
        False if something is not finite and the recipe says to skip such steps.
    parts : list of float
        Loss and weight of each replica, alternating; 0 and 0 for a replica that has no part in the mean.
    named : dict of str to float
        Weighted means of the replicas' named losses.
    """

    loss: float
    norm: float
    gradient: Vector
    accepted: bool
    parts: list[float]
    named: dict[str, float]


def propose(
    framework: Framework,
    link: Link,
    definition: Definition,
    t: int,
    shares: Sequence[Share],
    gradients: Callable[..., Iterator[Computed]] | None = None,
    compare: Callable[[], object] = bool,
    over_batch: OverBatch | None = None,
) -> Proposal:
    """Compute step ``t``, or update ``t`` if steps have phases: gradients of the replicas, fold, screen.

    ``gradients`` and ``over_batch`` take the place of the framework's. ``compare`` is called when all replicas are
    computed everywhere, and nothing is folded yet.

    Raises
    ------
    WorkerError
        User code raised.
    NonFiniteError
        A loss or gradient is not finite and ``on_nonfinite="stop"``.

    After any error the state is the one before the step.
    """
    try:
        ran = [replica for replica in link.hosted if len(shares[replica].samples)]
        moment, work = definition.rounds.at(t), todo(definition, t, ran, shares)
        of_all = definition.over_batch(moment.phase)
        wrote = join(framework, link.hosted, link.share, definition, t, shares, over_batch) if of_all else 0.0
        computing, of_replica = (gradients or framework.gradients)(work), {one.replica: one for one in work}
        mine = [
            _part(framework, link, definition, computing, moment, replica, of_replica.get(replica))
            for replica in link.hosted
        ]
        parts = link.all_gather([part._replace(wrote=wrote) for part in mine] if of_all else mine)
        check_losses(parts)  # before replicas are compared, which those that come from unlike losses would differ in
        compare()
        check_consistent(parts, framework.written)
        weight = _counted(parts, definition, moment)
        gradient = link.mean(1.0 if of_all else weight or 1.0)
        norm, parts = link.norm(gradient, parts)
        if of_all:
            parts, weight = whole(parts)
        loss, norm = (mean_loss(parts, weight), norm) if weight else (math.nan, math.nan)
        accepted = definition.on_nonfinite == "ignore" or _finite(framework.arithmetic, link, loss, norm, gradient)
        if not accepted and definition.on_nonfinite == "stop":
            raise blame(framework, definition, t, shares, link.hosted)
    except BaseException:
        framework.rewind()
        raise
    finally:
        CURRENT.step = None
    flat_parts = [value for part in parts for value in (part.loss, part.weight)]
    return Proposal(loss, norm, gradient, accepted, flat_parts, named_means(parts) if first_ran(parts).named else {})


def join(
    framework: Framework,
    hosted: Sequence[int],
    exchange: Callable[[Iterable[bytes]], list[bytes]],
    definition: Definition,
    t: int,
    shares: Sequence[Share],
    over_batch: OverBatch | None = None,
) -> float:
    """Compute a loss over the whole batch: outputs here, the exchange of all, and the loss, alike in every worker.

    Raises
    ------
    WorkerError
        User code raised.
    """
    moment = definition.rounds.at(t)
    ran = [replica for replica, share in enumerate(shares) if len(share.samples)]
    work = todo(definition, t, [replica for replica in hosted if replica in ran], shares)
    outputs = framework.outputs(work)
    said = exchange(compute(outputs, moment, replica, shares[replica]) if replica in ran else b"" for replica in hosted)
    here = [replica for replica in ran if shares[replica].samples[0] >= 0]  # others' samples are in other processes
    if not work and here:  # only user code knows the types of containers, as of a model's output
        compute(framework.outputs(todo(definition, t, here[:1], shares)), moment, here[0], shares[here[0]])
        framework.rewind()
    try:
        with interrupts.user_code():
            key = loss_key(definition.seed, moment.step, moment.phase)
            return (over_batch or framework.over_batch)(said, key, moment.phase)
    except PhalanxError as error:
        error.add_note(f"at {moment}, in the loss over the whole batch")
        raise
    except Exception as error:
        raise WorkerError(
            f"{type(error).__name__} in user code at {moment}, in the loss over the whole batch: {spelled(error)}",
            step=moment.step,
        ) from error


def prepare(framework: Framework, definition: Definition, t: int, shares: Sequence[Share]) -> None:
    """Before replicas of step ``t`` are computed apart from a step: compute what they need of others here."""
    if definition.over_batch(definition.rounds.at(t).phase):
        join(framework, range(definition.replicas), list, definition, t, shares)


def whole(parts: Sequence[Part]) -> tuple[list[Part], float]:
    """The parts of a step whose loss is over the whole batch, and their weight: one has it all, the others nothing."""
    first = first_ran(parts)
    return [part if part is first else ABSENT for part in parts], 1.0


def first_ran(parts: Sequence[Part]) -> Part:
    """That of the first replica with samples; with logical readers replica 0 may have no more."""
    return next((part for part in parts if part.samples), parts[0])


def commit(framework: Framework, link: Link, t: int, proposal: Proposal) -> None:
    """Take the state to the one after step ``t``; a step that is skipped leaves it as it was."""
    if not proposal.accepted:
        framework.rewind()
    link.commit(t, proposal.gradient if proposal.accepted else None)


def _part(
    framework: Framework,
    link: Link,
    definition: Definition,
    computing: Iterator[Computed],
    moment: Moment,
    replica: int,
    work: Todo | None,
) -> Part:
    """Take the next replica's gradient, weigh it and hand it to the fold; ``work`` is None if it has no samples."""
    if work is None:
        link.push(replica, 0, None, [])
        return ABSENT
    computed = compute(computing, moment, replica, work.share)
    samples = len(work.share.samples)
    part = weighed(computed.loss, computed.weight, work.weight, samples, definition.replicas)
    if computed.named:
        part = part._replace(named=computed.named)
    gradient = computed.gradient if part.weight else None
    if gradient is not None and part.weight != 1:
        gradient = framework.arithmetic.scale(gradient, part.weight)
    link.push(replica, samples, gradient, computed.buffers)
    return part


def weighed(loss: Any, returned: float | None, known: float, samples: int, replicas: int) -> Part:
    """What a replica adds to the mean, and with which weight. A lone replica has the weight 1, or 0.

    ``returned`` is the weight that the loss returned; ``known`` is used where it returned none.
    """
    weight = known if returned is None else returned
    if weight and replicas == 1:
        weight = 1.0
    return Part(loss if weight else 0.0, weight, returned is not None, samples)


def check_losses(parts: Sequence[Part]) -> None:
    """Refuse a step in which workers came to different losses over the whole batch."""
    if len({part.wrote for part in parts if part.samples}) > 1:
        raise UsageError(
            "workers came to different losses of one batch, or wrote different values into buffers in loss_fn, which "
            "sees the outputs of all replicas (loss_over='batch'); nothing was updated. What it computes must follow "
            "from its arguments and the model, not from a process, a clock, or what it keeps elsewhere; if it does, a "
            "processor or memory computes wrongly"
        )


def check_consistent(parts: Sequence[Part], written: Sequence[str] = ()) -> None:
    """Refuse a step in which replicas returned weights or names that others did not, or workers' options differ.

    ``written``: the buffers that the optimizer wrote in the last update. Where workers each did it, they compare them.
    """
    if written and not parts[0].options and len({part.lr for part in parts} - {0.0}) > 1:
        raise UsageError(
            f"the optimizer or its step hook wrote buffers ({', '.join(written)}), and workers came to different "
            "values; what it writes must follow from weights, buffers and gradients, not from a process or a clock"
        )
    first = first_ran(parts)
    for replica, part in enumerate(parts):
        if part.options != parts[0].options:
            raise UsageError(
                "workers have come to different options of the optimizer, which each takes from its own scheduler: lr "
                f"is {parts[0].lr} for replica 0 and {part.lr} for replica {replica}, checksums of all options are "
                f"{parts[0].options:.0f} and {part.options:.0f}; nothing was updated. What a scheduler does must "
                "follow from the step and the loss, not from a clock, a process id, weights, or a counter outside of "
                "it; random numbers that it draws are the same everywhere"
            )
        if (part.named or first.named) and part.samples:
            checks.same_names(first.named, part.named, "replica")
    if len({part.returned for part in parts if part.samples}) > 1:
        raise UsageError("loss_fn returned a weight for some replicas and none for others; return it always or never")


def total_weight(parts: Sequence[Part]) -> float | None:
    """The sum of weights, which the gradient is divided by; None where every weight is 0."""
    return fold_values([part.weight or None for part in parts], operator.add)


def _counted(parts: Sequence[Part], definition: Definition, moment: Moment) -> float | None:
    weight = total_weight(parts)
    if weight is None and definition.on_nonfinite != "skip":
        raise RunError(UNCOUNTED.format(moment), step=moment.step)
    return weight


def mean_loss(parts: Sequence[Part], weight: float) -> float:
    """The mean of the replicas' losses, given the sum of their weights."""
    terms = [(part.loss if part.weight == 1 else part.weight * part.loss) if part.weight else None for part in parts]
    total = fold_values(terms, operator.add)
    assert total is not None
    return total if weight == 1 else total / weight


def named_means(parts: Sequence[Part]) -> dict[str, float]:
    """The means of named losses, made as that of the loss; NaN where every weight is 0."""
    means: dict[str, float] = {}
    for name in first_ran(parts).named:
        pairs = [part.named[name] if part.named else (0.0, 0.0) for part in parts]
        rows = [
            weighed(float(value), returned, part.weight, 1, len(parts))
            for part, (value, returned) in zip(parts, pairs, strict=True)
        ]
        weight = total_weight(rows)
        means[name] = mean_loss(rows, weight) if weight else math.nan
    return means


def _finite(arithmetic: Arithmetic, link: Link, loss: float, norm: float, gradient: Vector) -> bool:
    """Check the norm (one pass), and elements only if it is not finite: a norm may overflow by itself."""
    return math.isfinite(loss) and (math.isfinite(norm) or link.all_true(arithmetic.finite(gradient)))


def todo(definition: Definition, t: int, replicas: Sequence[int], shares: Sequence[Share]) -> list[Todo]:
    """What there is to compute for these replicas in step ``t``, which is the current one from here on."""
    seed, count = definition.seed, definition.replicas
    step, phase, *_ = definition.rounds.at(t)
    CURRENT.step, CURRENT.epoch = step, shares[0].epoch
    weights = share_weights([len(share.samples) for share in shares])
    return [
        Todo(replica, replica_key(seed, step, replica, count, phase), shares[replica], weights[replica], phase)
        for replica in replicas
    ]


def following(
    definition: Definition, hosted: Sequence[int], planned: Callable[[int], Sequence[Share]], t: int, horizon: int
) -> list[Todo]:
    """What step ``t`` will compute, unless the data may change before it. Only columns are watched for changes."""
    if t >= (definition.updates or 0) or (t >= horizon and not isinstance(definition.source, Columns)):
        return []
    shares = planned(t)
    return todo(definition, t, [replica for replica in hosted if len(shares[replica].samples)], shares)


def compute(computing: Iterator[T], moment: Moment, replica: int, share: Share) -> T:
    """What one replica computes at this moment; what user code raises becomes a WorkerError with the address."""
    try:
        with interrupts.user_code():
            return next(computing)
    except PhalanxError as error:
        error.add_note(f"at {moment}, replica {replica}, samples {spell_samples(share.samples)}")
        raise
    except Exception as raised:
        error = raised
        if isinstance(raised, RuntimeError) and isinstance(raised.__cause__, StopIteration):
            error = raised.__cause__  # raised by user code: a generator turns it into a RuntimeError
        raise WorkerError(
            f"{type(error).__name__} in user code at {moment}, replica {replica}, samples "
            f"{spell_samples(share.samples)}: {spelled(error)}",
            step=moment.step,
            replica=replica,
            samples=share.samples,
        ) from error


def measure(
    framework: Framework, metrics: Metrics, key: int, share: Share, weights: Weights | None = None
) -> Measurement:
    """Begin metrics over one chunk; what user code raises becomes a WorkerError with the samples."""
    owned = metrics.generators
    with generators.kept(owned) if owned else contextlib.nullcontext():
        generators.reseed(owned, key)
        begun = _measured(functools.partial(framework.measure, metrics, key, share, weights), share)
    return functools.partial(_measured, begun, share)


def _measured(function: Callable[[], T], share: Share) -> T:
    try:
        return function()
    except PhalanxError:
        raise
    except Exception as error:
        samples = spell_samples(share.samples)
        message = f"{type(error).__name__} in user code while evaluating samples {samples}: {spelled(error)}"
        raise WorkerError(message, samples=share.samples) from error


def blame(
    framework: Framework, definition: Definition, t: int, shares: Sequence[Share], hosted: Sequence[int]
) -> NonFiniteError:
    """Name the replica with a loss or gradient that is not finite. Replica-steps are pure: they are computed again."""
    moment = definition.rounds.at(t)
    for replica in sorted(hosted):
        share = shares[replica]
        if not len(share.samples):
            continue
        computed = compute(framework.gradients(todo(definition, t, [replica], shares)), moment, replica, share)
        if computed.gradient is None:
            continue
        (loss,) = framework.arithmetic.read([computed.loss])
        what = None if math.isfinite(loss) else f"the loss is {loss}"
        if what is None and not framework.arithmetic.finite(computed.gradient):
            what = "the gradient has values that are not finite"
        if what is not None:
            of_all = definition.over_batch(moment.phase)  # each replica's gradient comes from all rows
            samples = np.concatenate([each.samples for each in shares]) if of_all else share.samples
            samples = samples[samples >= 0]  # those of a stream that other processes read have no number here
            where = "" if of_all else f"replica {replica}, "
            return NonFiniteError(
                f"{what} at {moment}, {where}samples {spell_samples(samples)}; nothing was updated. "
                "Look at these samples, lower the learning rate or set max_norm; on_nonfinite='skip' goes on without "
                "such steps",
                step=moment.step,
                replica=None if of_all else replica,
                samples=samples,
            )
    return NonFiniteError(
        f"the mean loss or gradient of {moment} is not finite, though no replica's is that was computed here, computed "
        "again; nothing was updated. If other hosts take part, one of them names the replica; else their sum overflows "
        "(lower the loss or the weights that loss_fn returns), or the model does not compute the same twice",
        step=moment.step,
    )
