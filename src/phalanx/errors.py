"""The exception tree. Every error carries its facts as fields, not only as text.

PhalanxError
├── UsageError          the call is wrong (also a ValueError); names the argument, the value, the way out
└── RunError            the run went wrong; ``result`` is the last good state
    ├── WorkerError     user code raised; always raised from the user's own exception
    ├── NonFiniteError  a loss or a gradient is not finite
    ├── SnapshotError   a snapshot cannot be written or used
    ├── LeftError       another process of the world ended the run early
    └── Preempted       SIGTERM came; a snapshot was written
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

SHOWN_SAMPLES = 8


class PhalanxError(Exception):
    """Base of every error that phalanx raises on purpose.

    Attributes
    ----------
    result : phalanx.Result or None
        For errors in the middle of a run, the last good state: as after the last step that ended. Where the model
        cannot be copied it is the run's own.
    """

    result: Any = None


class UsageError(PhalanxError, ValueError):
    """The call is wrong: the message names the argument, its value and the way out."""


class RunError(PhalanxError):
    """The run went wrong.

    Attributes
    ----------
    step : int or None
        The step that failed, counted from 0.
    replica : int or None
        The replica that failed, if one did.
    samples : tuple of int
        Indices into the data of the samples that the replica (or the step) was given.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        replica: int | None = None,
        samples: Iterable[int] = (),
    ) -> None:
        super().__init__(message)
        self.step = step
        self.replica = replica
        self.samples = tuple(int(sample) for sample in samples)


class WorkerError(RunError):
    """User code (data, model, loss) raised; ``__cause__`` is the user's own exception."""


class NonFiniteError(RunError):
    """A loss or a gradient is NaN or infinite; nothing was updated."""


class SnapshotError(RunError):
    """A snapshot cannot be written, or is not whole, damaged or of another version."""


class LeftError(RunError):
    """Another process of the world ended its run before all steps were done."""


class Preempted(RunError):  # noqa: N818  the field's word
    """SIGTERM came while ``train`` ran with a ``run_dir``: the state was saved; the same call again continues."""


def spell_samples(samples: Collection[int]) -> str:
    """Sample indices as an error message shows them: the first few, then how many more."""
    shown = ", ".join(str(int(sample)) for sample in itertools.islice(samples, SHOWN_SAMPLES))
    more = len(samples) - SHOWN_SAMPLES
    return f"[{shown}, ... and {more} more]" if more > 0 else f"[{shown}]"
