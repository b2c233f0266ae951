"""What is measured of a chunk of samples, and how the readings of all chunks become one value.

A metric has three methods. ``see`` takes an output and its target. ``read`` waits for the devices and returns a
reading. ``fold`` combines the readings of all chunks. Neither chunks nor their order depend on the number of workers,
so the values do not either.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from phalanx.definition import checks, generators
from phalanx.definition.data import is_array, map_tree
from phalanx.definition.joining import joined
from phalanx.definition.plain import hashed
from phalanx.definition.reachable import held_by, installed
from phalanx.errors import UsageError
from phalanx.plan.fold import fold_values
from phalanx.plan.keys import evaluation_key

Home = Callable[[Any], Any]  # copies a leaf of an output into host memory
OWN_LOSS = "loss"
EXAMPLE = "metric_fn=lambda output, target: (output.argmax(1) == target).float().mean()"
OWN = " (Evaluation takes its own, and collate_fn)"
OBJECT = ("update", "compute", "reset")  # methods of a metric object that keeps a state
SEVERAL = "; several metrics are a dict of functions, as in Evaluation({'a': a, 'b': b}, data)"


class Mean:
    """A function that returns a mean over the samples that it is given, or (mean, weight)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def see(self, output: Any, target: Any, home: Home) -> Any:
        """The function's value for a chunk."""
        return self._function(output, target)

    def read(self, value: Any, samples: int) -> tuple[float, float]:
        """(mean, weight) of a chunk.

        Raises
        ------
        UsageError
            The function returned neither a number nor a pair of them, or the weight is negative.
        """
        pair: tuple[Any, Any] = value if isinstance(value, tuple) and len(value) == 2 else (value, samples)
        try:
            mean, weight = float(pair[0]), float(pair[1])
        except (TypeError, ValueError, RuntimeError):
            mean, weight = math.nan, math.nan
        if not 0 <= weight < math.inf:
            shown = ", ".join(map(checks.described, pair)) if pair is value else checks.described(value)
            raise UsageError(
                f"metric_fn returned {shown}; it must return a mean, or (mean, weight) with a finite weight of at "
                f"least 0{SEVERAL * isinstance(value, dict)}"
            )
        return mean, weight

    def fold(self, readings: Sequence[tuple[float, float]]) -> float:
        """The weighted mean of all chunks, in order, folded as replicas are.

        Raises
        ------
        UsageError
            Every weight is 0.
        """
        value = fold_values([mean * weight if weight else None for mean, weight in readings], operator.add)
        weight = fold_values([weight for _, weight in readings], operator.add)
        if value is None or not weight:
            raise UsageError("metric_fn returned weight 0 for every chunk; there is nothing to average over")
        return value / weight


class Loss(Mean):
    """The recipe's own loss, with the weight that it returns, or else that of the samples.

    A framework computes it, as it knows what a loss takes, and what it is the mean of.
    """

    def __init__(self) -> None:
        super().__init__(_unasked)


def _unasked(output: Any, target: Any) -> Any:
    raise UsageError("the recipe's own loss was asked of a framework that does not tell it; give a function instead")


class Folded:
    """A metric object that keeps a state, as torchmetrics has them: each chunk's state is merged in order."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def see(self, output: Any, target: Any, home: Home) -> Any:
        """The state of a fresh metric after this chunk."""
        fresh = copy.deepcopy(self.metric)
        fresh.reset()
        fresh.update(_at_home(output, home), _at_home(target, home))
        return fresh

    def read(self, value: Any, samples: int) -> Any:
        """The state itself."""
        return value

    def fold(self, readings: Sequence[Any]) -> Any:
        """The value of all states together."""
        total = copy.deepcopy(readings[0])  # not a fresh one: those warn that nothing was seen
        for reading in readings[1:]:
            _merge(total, reading)
        for part in total.modules() if hasattr(total, "modules") else ():
            if hasattr(part, "distributed_available_fn"):  # of torchmetrics, which would add up a group's processes:
                part.distributed_available_fn = _nobody  # each of them has seen all samples
        return _numbers(total.compute())


def _nobody() -> bool:
    return False


def _merge(total: Any, other: Any) -> None:
    """Merge the state of one metric into another's; of collections, metric by metric."""
    if hasattr(total, "merge_state"):
        total.merge_state(other)
    elif callable(getattr(total, "keys", None)):
        for name in total.keys():  # noqa: SIM118  a collection is no dict: iterating gives modules
            _merge(total[name], other[name])
    else:
        raise UsageError(
            f"metric_fn has a {type(total).__name__}, whose states cannot be merged (it has no merge_state); take a "
            "version of its library that has one, or compute it over all outputs: phalanx.whole(function)"
        )


def check_merges(metric: Any) -> None:
    """Refuse an object whose library refuses to merge it, of a collection each, before hours of training.

    Raises
    ------
    UsageError
        Its class has to see all in order, or does not say that it need not.
    """
    several = callable(getattr(metric, "keys", None))  # a collection, which is no dict
    for one in [metric[name] for name in metric.keys()] if several else [metric]:  # noqa: SIM118
        merges = next((kind for kind in type(one).__mro__ if "merge_state" in vars(kind)), object)
        of_library = "full_state_update" in vars(merges) and installed(merges.__module__)
        if of_library and (one.full_state_update is not False or one.dist_sync_on_step):
            raise UsageError(
                f"metric_fn has a {type(one).__name__}, whose states its library does not merge, as its "
                "full_state_update is not False, and there are several chunks; compute it over all outputs: "
                "phalanx.whole(function). In a class of your own write full_state_update = False if update() does not "
                "read what it has summed up"
            )


class Predictions:
    """The outputs themselves, joined in order."""

    def see(self, output: Any, target: Any, home: Home) -> Any:
        """Outputs of a chunk."""
        return _at_home(output, home)

    def read(self, value: Any, samples: int) -> Any:
        """The outputs, and how many samples they have."""
        return value, samples

    def fold(self, readings: Sequence[Any]) -> Any:
        """All outputs."""
        outputs, samples = zip(*readings, strict=True)
        return joined(outputs, samples, "output")


class whole(Predictions):  # noqa: N801  used as a function
    """A metric over all predictions at once, such as AUC, F1 or perplexity: no mean over batches equals those.

    It goes into ``Evaluation`` and ``run.evaluate``, alone or in a dict or list.

    Parameters
    ----------
    metric_fn : callable
        ``metric_fn(outputs, targets) -> number``, called once per evaluation, in the caller's process, with the outputs
        and targets of all samples, in order, on the CPU.

    Raises
    ------
    UsageError
        ``metric_fn`` cannot be called.

    Examples
    --------
    >>> f1 = phalanx.whole(lambda output, target: sklearn.metrics.f1_score(target, output.argmax(1), average="macro"))
    """

    def __init__(self, metric_fn: Callable[[Any, Any], Any]) -> None:
        if not callable(metric_fn):
            raise UsageError(
                f"metric_fn is {checks.shown(metric_fn)}; it must be a function of all outputs and targets"
            )
        self.__name__ = getattr(metric_fn, "__name__", "metric")
        self._function = metric_fn

    def see(self, output: Any, target: Any, home: Home) -> Any:
        """Outputs and targets of a chunk."""
        return _at_home((output, target), home)

    def fold(self, readings: Sequence[Any]) -> Any:
        """The function's value."""
        pairs, samples = zip(*readings, strict=True)
        outputs, targets = zip(*pairs, strict=True)
        output, target = joined(outputs, samples, "output"), joined(targets, samples, "target")
        with checks.noting(output, target, OWN):
            return _numbers(self._function(output, target))


class Metrics:
    """Several metrics over the same outputs, by name.

    Parameters
    ----------
    metric_fn : callable, metric object, or list or dict of them
        Named by key, else by ``__name__`` or the class.
    forward_fn, target_fn, collate_fn : callable, optional
        In place of the recipe's.
    targets : bool, default True
        Whether targets are looked at.
    single : bool, default False
        Whether outputs are of one sample, without an axis for samples.

    Raises
    ------
    UsageError
        A metric cannot be called, or two have one name.

    Attributes
    ----------
    watched : bool
        Whether a chunk is measured again, which reveals what code keeps from chunk to chunk.
    decisive : container of str
        Those of the metrics by which the run goes.
    """

    def __init__(
        self,
        metric_fn: Any,
        forward_fn: Callable[..., Any] | None = None,
        target_fn: Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        *,
        targets: bool = True,
        single: bool = False,
    ) -> None:
        if single and collate_fn is not None:
            raise UsageError(
                "collate_fn of an evaluation is given, but the recipe's batch_size is None, which hands samples over "
                "as they are; drop one"
            )
        self.forward_fn, self.target_fn, self.collate_fn = forward_fn, target_fn, collate_fn
        self.targets = targets
        self.watched, self.decisive = False, frozenset[str]()
        self._single = single
        self._metrics = _named(metric_fn)

    def check_merges(self) -> None:
        """Refuse objects that cannot be merged: there are several chunks."""
        for metric in self._metrics.values():
            if isinstance(metric, Folded):
                check_merges(metric.metric)

    @property
    def holders(self) -> dict[str, Any]:
        """Its functions."""
        return {"evaluation": (self.forward_fn, self.target_fn, self.collate_fn, self._metrics)}

    @functools.cached_property
    def generators(self) -> generators.Owned:
        """Random generators that its functions own."""
        return generators.find(self.holders)

    @property
    def takes_output(self) -> bool:
        """Whether another is."""
        return not all(isinstance(metric, Loss) for metric in self._metrics.values())

    @property
    def names(self) -> dict[str, bool]:
        """The metrics' names, and whether each is the whole name: objects may compute several values."""
        return {name: isinstance(metric, Mean) for name, metric in self._metrics.items()}

    @property
    def key(self) -> Any:
        """The names and code of its functions: the same if a loop makes a function anew each time."""
        functions = [
            self.forward_fn,
            self.target_fn,
            *(each for one in self._metrics.values() for each in vars(one).values()),
        ]
        return (*self._metrics, *(getattr(each, "__code__", type(each)) for each in functions))

    def with_outputs(self) -> Metrics:
        """The same metrics, and the outputs after them."""
        other = copy.copy(self)
        other._metrics = {**self._metrics, "": Predictions()}
        return other

    def see(self, output: Any, target: Any, home: Home, loss: Callable[[], Any] | None = None) -> list[Any]:
        """What each metric sees of a chunk; ``loss()`` is the recipe's own, or (that, weight)."""
        if self._single:
            home = functools.partial(_with_axis, home)
        with checks.noting(output, target, OWN):
            return [
                loss() if loss and isinstance(metric, Loss) else metric.see(output, target, home)
                for metric in self._metrics.values()
            ]

    def read(self, values: Sequence[Any], samples: int) -> list[Any]:
        """What each metric reads of what it saw; waits for devices."""
        return [metric.read(value, samples) for metric, value in zip(self._metrics.values(), values, strict=True)]

    def fold(self, chunks: Sequence[Sequence[Any]], seed: int) -> dict[str, Any]:
        """The value of each metric, by name, given what was read of all chunks in order.

        A metric with several values counts as several metrics. What they draw is keyed, as what is drawn in chunks is.
        """
        values: dict[str, Any] = {}
        with generators.kept(self.generators):
            generators.seed(evaluation_key(seed, len(chunks)), self.generators)
            for (name, metric), column in zip(self._metrics.items(), zip(*chunks, strict=True), strict=True):
                value = metric.fold(column)
                several = isinstance(value, dict) and type(metric) is not Predictions  # whose outputs may be a dict
                values |= {f"{name}/{key}": each for key, each in value.items()} if several else {name: value}
        return values


def differing(names: Iterable[str], pairs: Iterable[tuple[Sequence[Any], Sequence[Any]]]) -> set[str]:
    """The metrics that differ in some pair of readings, bit by bit: all of them where outputs that follow differ."""
    found = set[str]()
    for pair in pairs:
        unlike = [name for name, *both in zip([*names, ""], *pair, strict=False) if len(set(map(_told, both))) > 1]
        found.update(names if "" in unlike else unlike)
    return found


def _told(reading: Any) -> bytes:
    """Bytes that stand for a reading: of a metric object, for its state."""
    return hashed(reading if isinstance(reading, tuple) else held_by(reading))


def _metric(value: Any) -> Any:
    """Wrap a metric so that it can see, read and fold; None if it is no metric."""
    if isinstance(value, Predictions):
        return value
    if isinstance(value, str):
        return Loss() if value == OWN_LOSS else None
    if all(callable(getattr(value, name, None)) for name in OBJECT):
        return Folded(value)
    if callable(getattr(value, "update_state", None)):  # of Keras: called with (target, output), and it keeps both
        raise UsageError(
            f"metric_fn has a {type(value).__name__}, which keeps what it has seen and cannot be merged; write a "
            "function of a chunk, as in lambda output, target: (output.argmax(1) == target).float().mean()"
        )
    return Mean(value) if callable(value) else None


def _named(metric_fn: Any) -> dict[str, Any]:
    """Metrics by name."""
    if isinstance(metric_fn, Mapping):
        pairs = [(str(name), _metric(value)) for name, value in metric_fn.items()]
    else:
        listed = metric_fn if isinstance(metric_fn, (list, tuple)) else [metric_fn]
        pairs = [(name_of(value), _metric(value)) for value in listed]
    if not pairs or None in [metric for _, metric in pairs]:
        raise UsageError(
            f"metric_fn is {checks.shown(metric_fn)}; it must be callable, or 'loss' for the recipe's own, or a list "
            f"or dict of those, as in {EXAMPLE}"
        )
    named = dict(pairs)
    if len(named) < len(pairs):
        raise UsageError(
            f"metric_fn has several metrics of one name ({', '.join(name for name, _ in pairs)}); use a dict"
        )
    return named


def name_of(metric: Any) -> str:
    """The default name of a metric."""
    if isinstance(metric, str):
        return metric
    return getattr(metric, "__name__", type(metric).__name__ if hasattr(metric, "compute") else "metric").replace(
        "<lambda>", "metric"
    )


def _numbers(value: Any) -> float | dict[str, Any]:
    """What a metric computed, as a float; or several by name."""
    if isinstance(value, Mapping):
        numbers = dict[str, Any]()
        for name, each in value.items():
            inner = _numbers(each)
            several = isinstance(inner, dict)
            numbers |= {f"{name}/{key}": number for key, number in inner.items()} if several else {str(name): inner}
        return numbers
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
