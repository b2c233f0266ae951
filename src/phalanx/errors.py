"""The exception tree: every exception class of the package, each with its facts as fields, not only as text.

PhalanxError
├── UsageError          the call is wrong (also a ValueError); names the argument, the value, the way out
└── RunError            the run went wrong; ``result`` is the last good state
    ├── WorkerError     user code raised; always raised from the user's own exception
    ├── NonFiniteError  a loss or a gradient is not finite
    ├── StateError      a replica gave another value when it was computed again: user code keeps state of its own
    ├── CorruptionError an audit found that two workers computed different values
    ├── SnapshotError   a snapshot cannot be written or used
    ├── PeersLostError  so many processes of the world are lost, or did not come, that this one may not go on
    │   └── SeveredError    the connection to another host is gone
    ├── LeftError       another process of the world ended the run early
    ├── Preempted       SIGTERM came; a snapshot was written
    ├── LostError       workers ended in a way that took the run's state with them
    ├── StartError      the process that starts workers has ended
    └── PeerError       another rank of the backend is gone (also a RuntimeError); ``phalanx.backend.PeerError``

Users see LostError and StartError as RunErrors, and SeveredError as a PeersLostError. Trouble and InPartsError never
leave the package: they break off work within it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

SHOWN_SAMPLES = 8
VALUE_CHARACTERS = 1000  # of a value in a sentence
SHOWN_CHARACTERS = 20_000  # of what an exception says, or of a traceback


class PhalanxError(Exception):
    """Base of every error that phalanx raises on purpose.

    Attributes
    ----------
    result : phalanx.Result or None
        For errors in the middle of a run, the last good state: the one after the last finished step. It is a copy;
        if the model cannot be copied, it is the run's own.
    recipe : phalanx.Recipe or None
        The recipe of the run in which a step failed, for ``phalanx.replay(error)``.
    batch : Any
        The batch that the caller brought for that step.
    phase : str
        The recipe's phase in which it failed; empty if the recipe has none.
    """

    result: Any = None
    recipe: Any = None
    batch: Any = None
    phase: str = ""


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


class StateError(RunError):
    """A replica, or a metric by which the run goes, came to another value when it was computed again."""


class CorruptionError(RunError):
    """An audit found that a replica gave another value when it was computed again; nothing was updated.

    Attributes
    ----------
    workers : (int, int)
        The worker that hosts the replica, and the one that computed it again. A lone worker is both.
    sums : (int, int)
        A checksum of what each of them computed.
    """

    def __init__(
        self, message: str, *, workers: tuple[int, int] = (0, 0), sums: tuple[int, int] = (0, 0), **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.workers, self.sums = workers, sums


class SnapshotError(RunError):
    """A snapshot cannot be written, or is incomplete, damaged or of another version."""


class LeftError(RunError):
    """Another process of the world ended its run before all steps were done."""


class PeersLostError(RunError):
    """So many other processes are lost, or never came, that this one may not go on; or they went on without it.

    Snapshots are good.
    """


class Preempted(RunError):  # noqa: N818  the field's word
    """SIGTERM came while ``train`` ran with a ``run_dir``: the state was saved; the same call again continues."""


class LostError(RunError):
    """The state of a run is lost."""


class StartError(RunError):
    """The process that starts workers has ended, or it hung and was killed."""


class SeveredError(PeersLostError):
    """The connection to another host is gone, or it delivered data that is not of this run."""


class PeerError(RunError, RuntimeError):
    """Another rank has ended, runs another operation, or is late. The group cannot be used any more."""


class Trouble(Exception):  # noqa: N818  not an error: how a step is left
    """Another worker failed, or the run is over: leave the step as it is."""


class InPartsError(Exception):
    """Backward delivered a gradient in parts, as checkpoints do that run a backward pass of their own."""


def spell_samples(samples: Collection[int]) -> str:
    """Sample indices as an error message shows them: the first few, then how many more."""
    shown = ", ".join(str(int(sample)) for sample in itertools.islice(samples, SHOWN_SAMPLES))
    more = len(samples) - SHOWN_SAMPLES
    return f"[{shown}, ... and {more} more]" if more > 0 else f"[{shown}]"


def safe_str(thing: object, spell: Callable[[object], str] = str) -> str:
    """``str(thing)`` or ``repr(thing)``, of a bounded length. Never raises: user code may have written it."""
    try:
        return shortened(spell(thing))
    except Exception as error:
        return f"(its {spell.__name__}() raised {type(error).__name__})"


def shortened(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """A text with its middle left out, if it is long."""
    more, half = len(text) - most, most // 2
    return f"{text[:half]} ... {more:,} more characters ... {text[-half:]}" if more > 0 else text
