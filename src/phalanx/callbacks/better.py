"""Which of two values of a metric is better."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from phalanx.definition import checks
from phalanx.errors import UsageError

LARGE = re.compile(r"acc|auc|f1|f_?score|precision|recall|r2|iou|dice|bleu|rouge|correct", re.IGNORECASE)
SMALL = re.compile(r"loss|err|mse|mae|rmse|perplexity|ppl|nll|wer|cer|entropy", re.IGNORECASE)


class Better:
    """A metric by name, and whether large or small values of it are good.

    Parameters
    ----------
    metric : str
    mode : "min", "max" or "auto"
        "auto": as the metric's name says.
    min_delta : float
        By how much a value has to be better to count.

    Raises
    ------
    UsageError
        An argument is wrong, or the name says nothing.
    """

    def __init__(self, metric: str, mode: str, min_delta: float = 0.0) -> None:
        if not isinstance(metric, str) or not metric:
            raise UsageError(f"metric is {checks.shown(metric)}; it must be the name of a metric of evaluation=")
        checks.choice("mode", mode, ("auto", "min", "max"))
        if not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            raise UsageError(f"min_delta is {checks.shown(min_delta)}; it must be a number of at least 0")
        large, small = bool(LARGE.search(metric)), bool(SMALL.search(metric))
        if mode == "auto" and large == small:
            raise UsageError(
                f"metric is {metric!r}, of which the name does not say whether more is better; add mode='max' or 'min'"
            )
        self.metric = metric
        self._sign = 1 if mode == "max" or (mode == "auto" and large) else -1
        self._min_delta = min_delta

    def of(self, values: Mapping[str, float]) -> float | None:
        """The metric's value, if it was evaluated.

        Raises
        ------
        UsageError
            There is no such metric: another evaluation would not have it either.
        """
        if self.metric in values:
            return values[self.metric]
        folder = self.metric.rpartition("/")[0]
        if any(name.rpartition("/")[0] == folder for name in values):
            raise UsageError(
                f"metric is {self.metric!r}, but what is evaluated is {', '.join(values)}; name one of those"
            )
        return None  # of another evaluation, that was not due

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value improves on the best so far; NaN never does."""
        return not math.isnan(value) and (than is None or self._sign * (value - than) > self._min_delta)

    def rank(self, value: float) -> float:
        """Sorts the best value first."""
        return math.inf if math.isnan(value) else -self._sign * value
