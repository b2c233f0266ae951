"""What is measured of a model's outputs: chunk by chunk, wherever that is computed, and then put together in order.

A metric has three parts: ``see`` an output beside its target, ``read`` what that gave (waits for devices), and ``fold``
the readings of all chunks. Chunks are the same for any number of workers, and are folded in order, so values are too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from phalanx.definition import checks
from phalanx.definition.data import is_array, map_tree
from phalanx.definition.evaluation.folding import averaged, joined, measured
from phalanx.errors import UsageError

Home = Callable[[Any], Any]  # a leaf of an output, in host memory and as memory of its own
EXAMPLE = "metric_fn=lambda output, target: (output.argmax(1) == target).float().mean()"
OBJECT = ("update", "compute", "reset")  # what metrics that keep a state have


class Mean:
    """A function that returns a mean over the samples that it is given, or (mean, weight)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def see(self, output: Any, target: Any, home: Home) -> Any:
        """The function's value for a chunk."""
        return self._function(output, target)

    def read(self, value: Any, samples: int) -> tuple[float, float]:
        """(mean, weight) of a chunk."""
        return measured(value, samples)

    def fold(self, readings: Sequence[tuple[float, float]]) -> float:
        """The weighted mean of all chunks."""
        return averaged(readings)


class Folded:
    """A metric object that keeps a state, as torchmetrics has them: each chunk's state is merged in order."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def see(self, output: Any, target: Any, home: Home) -> Any:
        """The state of a fresh metric after this chunk."""
        fresh = self._fresh()
        fresh.update(_at_home(output, home), _at_home(target, home))
        return fresh

    def read(self, value: Any, samples: int) -> Any:
        """The same."""
        return value

    def fold(self, readings: Sequence[Any]) -> Any:
        """The value of all states together."""
        total = copy.deepcopy(readings[0])  # not a fresh one: those warn that nothing was seen
        for reading in readings[1:]:
            _merge(total, reading)
        return _scalars(total.compute())

    def _fresh(self) -> Any:
        metric = copy.deepcopy(self._metric)
        metric.reset()
        return metric


def _merge(total: Any, other: Any) -> None:
    """Put a metric's state to another's; of collections, metric by metric."""
    if hasattr(total, "merge_state"):
        total.merge_state(other)
    elif callable(getattr(total, "keys", None)):
        for name in total.keys():  # noqa: SIM118  a collection is no dict: iterating gives modules
            _merge(total[name], other[name])
    else:
        raise UsageError(
            f"metric_fn has a {type(total).__name__}, whose states cannot be merged (it has no merge_state); "
            "take a version of its library that has one, or compute it over all outputs: phalanx.whole(function)"
        )


class Whole:
    """A function of all outputs and all targets at once; see ``phalanx.whole``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = getattr(function, "__name__", "metric")
        self._function = function

    def see(self, output: Any, target: Any, home: Home) -> Any:
        """Outputs and targets of a chunk."""
        return _at_home(output, home), _at_home(target, home)

    def read(self, value: Any, samples: int) -> Any:
        """The same, and how many samples these are."""
        return value, samples

    def fold(self, readings: Sequence[Any]) -> Any:
        """The function's value."""
        pairs, samples = zip(*readings, strict=True)
        outputs, targets = ([pair[side] for pair in pairs] for side in (0, 1))
        return _scalars(self._function(joined(outputs, samples, "output"), joined(targets, samples, "target")))


class Predictions:
    """The outputs themselves, joined in order."""

    def see(self, output: Any, target: Any, home: Home) -> Any:
        """Outputs of a chunk."""
        return _at_home(output, home)

    def read(self, value: Any, samples: int) -> Any:
        """The same, and how many samples these are."""
        return value, samples

    def fold(self, readings: Sequence[Any]) -> Any:
        """All outputs."""
        outputs, samples = zip(*readings, strict=True)
        return joined(outputs, samples, "output")


def whole(metric_fn: Callable[[Any, Any], Any]) -> Whole:
    """A metric over all predictions at once, such as AUC, F1 or perplexity: no mean over batches equals those.

    Parameters
    ----------
    metric_fn : callable
        ``metric_fn(outputs, targets) -> number``, called once per evaluation, in the caller's process, with the outputs
        and targets of all samples, in order, on the CPU.

    Returns
    -------
    Whole
        For ``Evaluation`` and ``run.evaluate``, alone or in a dict or list.

    Raises
    ------
    UsageError
        ``metric_fn`` cannot be called.

    Examples
    --------
    >>> f1 = phalanx.whole(lambda output, target: sklearn.metrics.f1_score(target, output.argmax(1), average="macro"))
    """
    if not callable(metric_fn):
        raise UsageError(f"metric_fn is {checks.shown(metric_fn)}; it must be a function of all outputs and targets")
    return Whole(metric_fn)


class Metrics:
    """Several metrics over the same outputs, by name.

    Parameters
    ----------
    metric_fn : callable, metric object, or list or dict of them
        Named by key, else by ``__name__`` or the class.
    forward_fn : callable, optional
        In place of the recipe's.
    targets : bool, default True
        Whether targets are looked at.
    single : bool, default False
        Whether outputs are of one sample, without an axis for samples.

    Raises
    ------
    UsageError
        Something of it cannot be called, or two have one name.
    """

    def __init__(
        self,
        metric_fn: Any,
        forward_fn: Callable[..., Any] | None = None,
        *,
        targets: bool = True,
        single: bool = False,
    ) -> None:
        self.forward_fn = forward_fn
        self.targets = targets
        self._single = single
        self._metrics = {name: _metric(value) for name, value in _named(metric_fn).items()}

    def see(self, output: Any, target: Any, home: Home) -> list[Any]:
        """What each metric sees of a chunk."""
        if self._single:
            home = functools.partial(_with_axis, home)
        return [metric.see(output, target, home) for metric in self._metrics.values()]

    def read(self, values: Sequence[Any], samples: int) -> list[Any]:
        """What each metric reads of what it saw; waits for devices."""
        return [metric.read(value, samples) for metric, value in zip(self._metrics.values(), values, strict=True)]

    def fold(self, chunks: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The value of each metric, by name, given what was read of all chunks in order."""
        columns = zip(*chunks, strict=True)
        folded = {
            name: metric.fold(column) for (name, metric), column in zip(self._metrics.items(), columns, strict=True)
        }
        return dict(_flat(folded))


def _metric(value: Any) -> Any:
    if isinstance(value, (Whole, Predictions)):
        return value
    return Folded(value) if _is_object(value) else Mean(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, (Whole, Predictions)) or all(callable(getattr(value, name, None)) for name in OBJECT)


def _named(metric_fn: Any) -> dict[str, Any]:
    if isinstance(metric_fn, Mapping):
        pairs = [(str(name), value) for name, value in metric_fn.items()]
    elif isinstance(metric_fn, (list, tuple)):
        pairs = [(name_of(value), value) for value in metric_fn]
    else:
        pairs = [(name_of(metric_fn), metric_fn)]
    named = dict(pairs)
    if not pairs or not all(callable(value) or _is_object(value) for value in named.values()):
        raise UsageError(
            f"metric_fn is {checks.shown(metric_fn)}; it must be callable, or a list or dict of those, as in {EXAMPLE}"
        )
    if len(named) < len(pairs):
        raise UsageError(
            f"metric_fn has several metrics of one name ({', '.join(name for name, _ in pairs)}); use a dict"
        )
    return named


def name_of(metric: Any) -> str:
    """What a metric is called where nobody names it."""
    return getattr(metric, "__name__", type(metric).__name__ if hasattr(metric, "compute") else "metric").replace(
        "<lambda>", "metric"
    )


def _flat(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Metrics that give several values by name become as many."""
    for name, value in values.items():
        if isinstance(value, _Several):
            yield from ((f"{name}/{inner}", number) for inner, number in value.items())
        else:
            yield name, value


class _Several(dict[str, float]):
    """Values by name, of one metric."""


def _scalars(value: Any) -> Any:
    """What a metric computed, as a float; or several by name."""
    if isinstance(value, Mapping):
        return _Several({str(name): _scalars(item) for name, item in value.items()})
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"metric_fn computed {checks.described(value)}; it must be one number, or a dict of numbers by name"
        ) from None


def _with_axis(home: Home, leaf: Any) -> Any:
    return home(leaf)[None] if is_array(leaf) else leaf


def _at_home(tree: Any, home: Home) -> Any:
    return map_tree(home, tree)
