"""One replica's part in a step: computed, and found again if something in it was not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx import interrupts
from phalanx.contracts import Computed, Framework, Steppable
from phalanx.data import Share
from phalanx.definition import Definition
from phalanx.errors import NonFiniteError, PhalanxError, WorkerError, spell_samples
from phalanx.plan import replica_key


def begin(
    framework: Steppable, definition: Definition, t: int, replicas: Sequence[int], shares: Sequence[Share]
) -> Iterator[Computed]:
    """Gradients of these replicas in step ``t``, each computed when it is asked for."""
    keys = [replica_key(definition.seed, t, replica, definition.replicas) for replica in replicas]
    return framework.gradients([(key, shares[replica]) for key, replica in zip(keys, replicas, strict=True)])


def compute(computing: Iterator[Computed], t: int, replica: int, share: Share) -> Computed:
    """What one replica computes in step ``t``; what user code raises becomes a WorkerError with the address."""
    try:
        with interrupts.breakable():
            return next(computing)
    except PhalanxError as error:
        error.add_note(f"at step {t}, replica {replica}, samples {spell_samples(share.samples)}")
        raise
    except Exception as error:
        raise WorkerError(
            f"{type(error).__name__} in user code at step {t}, replica {replica}, samples "
            f"{spell_samples(share.samples)}: {error}",
            step=t,
            replica=replica,
            samples=share.samples,
        ) from error


def measure(framework: Framework, metric_fn: Callable[..., Any], key: int, share: Share) -> tuple[float, float]:
    """(mean, weight) of a metric over one chunk; what user code raises becomes a WorkerError with the samples."""
    try:
        return framework.measure(metric_fn, key, share)
    except PhalanxError:
        raise
    except Exception as error:
        samples = spell_samples(share.samples)
        message = f"{type(error).__name__} in user code while evaluating samples {samples}: {error}"
        raise WorkerError(message, samples=share.samples) from error


def blame(
    framework: Steppable, definition: Definition, t: int, shares: Sequence[Share], hosted: Sequence[int]
) -> NonFiniteError:
    """Name the replica. A replica-step is a pure function, so it can simply be computed again."""
    for replica in hosted:
        share = shares[replica]
        if not len(share.samples):
            continue
        computed = compute(begin(framework, definition, t, [replica], shares), t, replica, share)
        if computed.gradient is None:
            continue
        what = None if math.isfinite(computed.loss) else f"the loss is {computed.loss}"
        if what is None and not framework.arithmetic.finite(computed.gradient):
            what = "the gradient has values that are not finite"
        if what is not None:
            return NonFiniteError(
                f"{what} at step {t}, replica {replica}, samples {spell_samples(share.samples)}; nothing was updated. "
                "Look at these samples, lower the learning rate or set max_norm; on_nonfinite='skip' goes on without "
                "such steps",
                step=t,
                replica=replica,
                samples=share.samples,
            )
    return NonFiniteError(
        f"the mean loss or gradient of step {t} is not finite, though no replica's is when computed again; nothing was "
        "updated. Either their sum overflows (lower the loss or the weights that loss_fn returns), or the model does "
        "not compute the same twice",
        step=t,
    )
