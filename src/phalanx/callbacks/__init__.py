"""What is done beside training, step by step: stop early, keep the best, average weights, thaw, write logs.

A callback is a function ``f(report)``, or an object with any of these hooks. Nothing has to be inherited; ``Callback``
says which attributes count:

==================== ==================================================================================================
``begin(run)``       before the first step, with the run; after ``load``, where the run goes on from a snapshot
``step(report)``     after each step, before anything is evaluated
``evaluated(values)`` after an evaluation, with its values by name
``end(result)``      when the run is closed; None where no whole state is left
``state()``          what is to be kept in snapshots: numbers, text, tensors, lists and dicts of them
``load(state)``      the same again, when a run goes on from a snapshot
==================== ==================================================================================================

Over several hosts, callbacks are called in the first process; one with ``everywhere = True`` in all of them, as one
must be that calls ``run.stop()``.
"""

import sys
from typing import TYPE_CHECKING

from phalanx.callbacks.best import Best as Best
from phalanx.callbacks.best import EarlyStopping as EarlyStopping
from phalanx.callbacks.best import SaveBest as SaveBest
from phalanx.callbacks.ema import EMA as EMA
from phalanx.callbacks.log import Log as Log
from phalanx.callbacks.thaw import Thaw as Thaw
from phalanx.definition import checks
from phalanx.definition.callback import Callback as Callback

__all__ = ["EMA", "Best", "Callback", "EarlyStopping", "Log", "SaveBest", "Thaw"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        hint = f"; {checks.CALLBACKS[name]}" if name in checks.CALLBACKS else ""
        # `from phalanx.callbacks import ...` replaces an AttributeError by an ImportError without the hint.
        imported = hint and sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
        raise (ImportError if imported else AttributeError)(f"module {__name__!r} has no attribute {name!r}{hint}")
