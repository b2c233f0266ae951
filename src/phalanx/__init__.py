"""phalanx: synchronous data-parallel training. Replicas define the answer; workers define only the speed.

Start reading at ``recipe``: ``Recipe.train`` -> ``run`` -> ``engines.inline`` -> ``step`` -> ``plan.fold``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx import callbacks as callbacks
from phalanx import testing as testing
from phalanx.checkpoint.resume import Loaded, load
from phalanx.definition.evaluation import Evaluation
from phalanx.definition.fields import Phase, weighted
from phalanx.definition.metrics import whole
from phalanx.definition.stream import Stream
from phalanx.errors import (
    CorruptionError,
    LeftError,
    NonFiniteError,
    PhalanxError,
    Preempted,
    RunError,
    SnapshotError,
    StateError,
    UsageError,
    WorkerError,
)
from phalanx.frameworks.registry import digest
from phalanx.plan.orders import Plan
from phalanx.proof.diff import diff
from phalanx.proof.difference import Difference
from phalanx.proof.replay import Replayed, replay
from phalanx.proof.verify import Verified, verify
from phalanx.recipe import Recipe, close, train
from phalanx.run.result import Result
from phalanx.run.run import Run
from phalanx.seams.records import Evaluated, Incident, StepReport
from phalanx.surroundings.presence import current_epoch, current_step

if TYPE_CHECKING:
    from phalanx.lab.many import train_all
    from phalanx.lab.tuning import find_lr, tune

__version__ = "0.1.0"

__all__ = [
    "CorruptionError",
    "Difference",
    "Evaluated",
    "Evaluation",
    "Incident",
    "LeftError",
    "Loaded",
    "NonFiniteError",
    "PhalanxError",
    "Phase",
    "Plan",
    "Preempted",
    "Recipe",
    "Replayed",
    "Result",
    "Run",
    "RunError",
    "SnapshotError",
    "StateError",
    "StepReport",
    "Stream",
    "UsageError",
    "Verified",
    "WorkerError",
    "close",
    "current_epoch",
    "current_step",
    "diff",
    "digest",
    "find_lr",
    "load",
    "replay",
    "train",
    "train_all",
    "tune",
    "verify",
    "weighted",
    "whole",
]


def __getattr__(name: str) -> Any:
    """Names of ``lab``, which nothing else here needs: it is imported when somebody asks."""
    if name in ("find_lr", "tune"):
        from phalanx.lab import tuning

        return getattr(tuning, name)
    if name == "train_all":
        from phalanx.lab.many import train_all

        return train_all
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
