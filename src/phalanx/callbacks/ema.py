"""Average weights over steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from phalanx.definition import checks
from phalanx.definition.callback import Callback
from phalanx.definition.plain import check_like, inexact, taking_over
from phalanx.errors import RunError, UsageError

FOREACH: Any = torch


class EMA(Callback):
    """An exponential moving average of the parameters, in ``result.averaged``; evaluations and predictions use it.

    After the first step the average is the weights; after each other it is ``decay * average + (1 - decay) * weights``,
    with the bits of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``. Buffers are those of
    the last step. It is in snapshots, and no part of the digest: training goes on as without it. It has the same bits
    for any number of workers. Workers with devices keep it there. Others wait after each step until it is computed.

    Parameters
    ----------
    decay : float, default 0.999
        From 0 to below 1.
    """

    everywhere = True
    may_fail = True

    def __init__(self, decay: float = 0.999) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise UsageError(f"decay is {checks.shown(decay)}; it must be a number from 0 to below 1, as in EMA(0.999)")
        self._decay = decay
        # What a subclass does in ``step`` is done in the caller's process.
        self.decay_of_workers = decay if type(self) is EMA else None
        self._averaged: dict[str, torch.Tensor] | None = None
        self._kept: Callable[[], Any] | None = None
        self._run: Any = None
        self._resumed = False

    @property
    def averaged(self) -> dict[str, torch.Tensor] | None:
        """The average by names of parameters; None before the first step."""
        return self._averaged if self._kept is None else self._kept()

    def averaged_by(self, averaged: Callable[[], Any] | None) -> None:
        """The run's workers keep the average, which ``averaged()`` returns; None: they do not."""
        self._kept = averaged

    def begin(self, run: Any) -> None:
        """Begin anew, unless the run goes on from a snapshot."""
        self._run = run
        if not self._resumed:
            self._averaged = None
        elif self._averaged is not None and self._kept is None:
            with taking_over("the average"):
                check_like(self._averaged, {name: _tensor(value) for name, value in run.params.items()}, "averaged")
        self._resumed = False

    def step(self, report: Any) -> None:
        """Add the weights to the average."""
        if self._kept is not None:
            return
        params = {name: _tensor(value) for name, value in self._run.params.items()}
        if self._averaged is None:
            self._averaged = {name: value.clone() for name, value in params.items()}
            return
        for name, value in params.items():  # after a resume they are on the CPU
            self._averaged[name] = self._averaged[name].to(value.device)
        # torch cannot add numbers of a byte, as quantized weights that stay frozen have: those stay as they were.
        changing = [(self._averaged[name], value) for name, value in params.items() if inexact(value.dtype)]
        with torch.no_grad():
            FOREACH._foreach_lerp_(*zip(*changing, strict=True), 1 - self._decay)

    def end(self, result: Any) -> None:
        """Take the average from the workers, who end, unless they have lost it."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self._averaged = None
            with contextlib.suppress(RunError):
                self._averaged = kept()

    def state(self) -> dict[str, Any]:
        """The average."""
        return {"averaged": self.averaged}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the average from there."""
        check_like(state, {"averaged": object}, "EMA")
        self._averaged = state["averaged"]
        self._resumed = True


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
