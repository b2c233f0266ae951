"""The step that is computed, for user code that depends on it: an annealed temperature, a curriculum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from phalanx.errors import UsageError


class Current:
    """What this process computes, or reads for.

    Attributes
    ----------
    step : int or None
        Counted from 0; None outside of steps.
    """

    step: int | None = None


CURRENT = Current()


def current_step() -> int:
    """The step that is computed, counted from 0: in a dataset, ``collate_fn``, ``forward_fn``, the model or a loss.

    It is the same in every worker, so what follows from it needs no state that has to be kept from call to call.

    Raises
    ------
    UsageError
        No step is computed: in an evaluation, say, or in a call of your own.

    Examples
    --------
    >>> def forward(self, x):
    ...     if self.training:
    ...         self.tau.fill_(max(0.1, 1 - phalanx.current_step() / 1000))  # a buffer: evaluations need it, too
    ...     return torch.softmax(self.layer(x) / self.tau, -1)
    """
    if CURRENT.step is None:
        raise UsageError(
            "phalanx.current_step() was called where no step is computed: in an evaluation, a call of your own, a "
            "stream, or code that is compiled (where it would be a constant); call it in a step's dataset, collate_fn, "
            "forward_fn, model or loss_fn. What evaluations need, too, keep in a buffer: self.tau.fill_(...) if "
            "self.training"
        )
    return CURRENT.step


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Inside, no step is computed."""
    step, CURRENT.step = CURRENT.step, None
    try:
        yield
    finally:
        CURRENT.step = step
