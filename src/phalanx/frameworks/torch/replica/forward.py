"""From a batch to a loss: the recipe's ``forward_fn``, ``target_fn`` and ``loss_fn``, or their defaults.

Knows how a sample is taken apart, what a loss may look like, and what it is a mean of. Models of Hugging Face take a
dict with ``labels``, leave out those that are -100, and return an output with ``loss`` and ``logits``. Nothing says
which labels count: all, or all but the first, if each position predicts the next. The gradient of the loss shows it:
it is zero at positions that do not count. Other losses that are means over something else than samples cause a warning
if they return no weight: the mean over replicas is another number.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from phalanx.definition import checks, generators
from phalanx.definition.data import is_pair, leaves, map_tree, target_of
from phalanx.definition.fields import WEIGHED, Definition, Phase
from phalanx.definition.metrics import Metrics
from phalanx.errors import UsageError
from phalanx.frameworks.torch.environment import autocast
from phalanx.frameworks.torch.model import evaluating
from phalanx.frameworks.torch.replica.tokens import IGNORED, TokenMean
from phalanx.seams.records import Named, Watch

LOOKS = 64
TOLERANCES, COARSE = {torch.float64: 1e-9, torch.float32: 1e-4}, 2e-2  # relative, of means of parts
TAKES_MODEL = "; loss_takes='model' calls loss_fn(model, batch) instead (docs/cookbook.md has Mixup)"
CALLS = (
    "; phalanx calls model(x) where it is (x, y), model(**batch) where it is a dict, else model(batch); for anything "
    "else pass forward_fn=lambda model, batch: ..., and target_fn=lambda batch: ... for the target"
)
UNLIKE = "comes to something else for a share than the mean of what it comes to for two parts of it"
WRAPPED = (
    "If it is the mean of something else, say of how many: phalanx.weighted(loss_fn, count), or return (loss, count)"
)
RETURNED = (
    "Return the weight, too: (loss, what it is the mean of), as (batch['labels'] != -100).sum(). Labels are counted "
    "here where forward_fn=lambda model, batch: model(**batch) returns the whole output, not its loss; if that was "
    "divided by num_items_in_batch: leave that out"
)
OTHERWISE = ". If it compares samples, give it all: loss_fn=..., loss_over='batch'. Or take replicas=1"
MOST_NAMES, LONGEST_NAME = 8, 64  # of named losses; as JSON, with quotes


class Forward:
    """Calls the model on a batch, as the recipe says.

    Parameters
    ----------
    definition : Definition
    model : torch.nn.Module
        On its device already.
    device : torch.device
        Where batches are moved to.
    later : bool, default False
        Whether a weight that lies on the device is not read yet.
    phase : Phase, optional
        The phase of a step whose loss it is; None: the recipe's loss.
    begin : callable
        Puts buffers back to the step's start.

    Attributes
    ----------
    told : bool or None
        Whether the last loss is a mean over samples; None where nobody asked, or it cannot be told.
    """

    def __init__(
        self,
        definition: Definition,
        model: torch.nn.Module,
        device: torch.device,
        *,
        later: bool = False,
        phase: Phase | None = None,
        begin: Callable[[], object] = bool,
    ) -> None:
        self._loss_fn: Callable[..., Any] | None = definition.loss_fn if phase is None else phase.loss_fn
        fields = definition if phase is None else phase
        self._takes_model, self._over_batch = fields.loss_takes == "model", fields.loss_over == "batch"
        check_stateless(self._loss_fn)
        self._definition = definition
        self._model = model
        self._device = device
        self._later, self._begin = later, begin
        self.told: bool | None = None
        self._tokens = TokenMean() if self._loss_fn is None and definition.replicas > 1 else None
        self._double = any(parameter.dtype == torch.float64 for parameter in model.parameters())

    def output(self, batch: Any, origin: str, forward_fn: Callable[..., Any] | None = None) -> Any:
        """The model's output for ``batch``; ``forward_fn``: in place of the recipe's."""
        forward_fn = forward_fn or self._definition.forward_fn
        try:
            if forward_fn is not None:
                return forward_fn(self._model, batch)
            if is_pair(batch):
                return self._model(self._input(batch[0], f"{origin}[0]"))
            if isinstance(batch, Mapping):
                return self._model(**{name: self._input(value, f"{origin}[{name!r}]") for name, value in batch.items()})
            return self._model(self._input(batch, origin))
        except Exception as error:
            error.add_note(f"{checks.BATCH} {checks.outline(batch)}{'' if forward_fn else CALLS}")
            raise

    def target(self, batch: Any, target_fn: Callable[..., Any] | None = None) -> Any:
        """The target for ``batch``; ``target_fn``: in place of the recipe's."""
        target_fn = target_fn or self._definition.target_fn
        return self._tensor(target_of(batch)) if target_fn is None else target_fn(batch)

    def loss(
        self, batch: Any, origin: str, watch: Watch | None = None, samples: int = 0
    ) -> tuple[torch.Tensor, Any, Named | None]:
        """The scalar loss of ``batch``, and the weight and the named losses that were returned with it, if any were.

        A weight that lies on a device is a function that waits for it. ``samples``: how many there are, if it is to be
        found out whether the loss is a mean over them; ``told`` says so afterwards.
        """
        self.told = None
        if samples and (self._takes_model or self._loss_fn is None):
            # Before autocast: it would keep casts of weights that have no graph.
            self.told = self._is_mean(functools.partial(self._loss, origin=origin), batch, samples=samples)
            self._begin()
        with autocast(self._device, self._definition.precision):
            value = self._loss(batch, origin, watch, samples)
        return self._checked(value, batch, origin)

    def _is_mean(self, loss: Callable[..., Any], *given: Any, samples: int) -> bool | None:
        """Whether a loss of a batch, or of output and target, is a mean over samples; None where that cannot be told.

        Such a mean is the mean of what it is for two parts, weighted by their sizes. These have no common divisor: two
        halves of eight samples have equally many of a class in one case of four, and class weights would not show then.
        Where the model is called, dropout and batch norm are as in evaluations. Nothing is compiled for these sizes.
        """
        again = len(given) == 1  # the model is called
        rows = torch.arange(samples, device=self._device)
        cut = next((size for size in range(samples // 2, 0, -1) if math.gcd(size, samples) == 1), 0)
        owned = {**self._definition.generators, **generators.find({"model": self._model})}
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()

        def pick(leaf: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            if not again and leaf.shape[1:2] == (samples,):
                raise LookupError  # either axis may be that of samples
            return leaf.view(samples, *leaf.shape[1:])[part]  # raises where the first one is not

        def value(part: torch.Tensor) -> Any:
            picked = map_tree(lambda leaf: pick(leaf, part), given)
            if again:
                self._begin()
            try:
                return _split("", loss(*picked))[0]
            except Exception:
                if again or len(part) == 1:  # a model may need a certain number, and a loss two
                    raise
                return math.nan

        quiet, unanswered = warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception)
        with generators.kept(owned), evaluating(self._model), torch.no_grad(), eager, quiet, unanswered:
            whole, one, other = (value(part) for part in (rows, rows[:cut], rows[cut:]) if cut)
            allowed = TOLERANCES.get(whole.dtype, COARSE) * max(map(abs, (whole, one, other)))
            if abs(whole - other - (one - other) * cut / samples) <= allowed:
                return True if abs(one - other) > allowed else None
            return False if value(rows) - whole == 0 else None  # it draws random numbers, or is not finite
        return None

    def rows(self, batch: Any, origin: str) -> tuple[Any, Any]:
        """The output of a share, and what a loss over the whole batch takes beside it."""
        with autocast(self._device, self._definition.precision):
            return self.output(batch, origin), self._seen(batch)

    def of_rows(self, output: Any, seen: Any) -> tuple[torch.Tensor, Any, Named | None]:
        """The loss of all shares' rows, as ``loss`` has it of one share."""
        with autocast(self._device, self._definition.precision):
            return self._checked(self._of_rows(output, seen), seen, "target")

    def _seen(self, batch: Any) -> Any:
        if not self._takes_model or self._definition.target_fn is not None:
            return self.target(batch)
        return self.to_device(batch)

    def _of_rows(self, output: Any, seen: Any) -> Any:
        loss_fn = self._loss_fn
        assert loss_fn is not None, "a recipe refuses that"
        with checks.noting(output, seen):
            return loss_fn(self._model, output, seen) if self._takes_model else loss_fn(output, seen)

    def _checked(self, value: Any, batch: Any, origin: str) -> tuple[torch.Tensor, Any, Named | None]:
        """A loss, and what came with it, out of what user code returned."""
        name = "loss_fn" if self._loss_fn else "forward_fn" if self._definition.forward_fn else "the model"
        loss, weight, named = _split(name, value)
        if self._over_batch and weight is not None:
            raise UsageError(WEIGHED)
        if weight is None and self._tokens is not None:
            weight = self._tokens.weight(value, loss, batch)
        self._check_loss(name, loss, batch, origin)
        if self._later and isinstance(weight, torch.Tensor) and weight.device.type != "cpu":
            return loss, functools.partial(checks.weight, name, weight), named
        return loss, None if weight is None else checks.weight(name, weight), named

    def _loss(self, batch: Any, origin: str, watch: Watch | None = None, samples: int = 0) -> Any:
        loss_fn = self._loss_fn
        if self._takes_model and not self._over_batch:
            assert loss_fn is not None, "a recipe refuses that"
            return loss_fn(self._model, self.to_device(batch))
        output = self.output(batch, origin)
        if watch is not None:
            watch.report("output", "", output)
        if self._over_batch:
            return self._of_rows(output, self._seen(batch))
        if loss_fn is None:
            return output
        target = self.target(batch)
        with checks.noting(output, target, TAKES_MODEL):
            value = loss_fn(output, target)
        if samples and not isinstance(value, tuple):  # of a loss and its weight
            self.told = self._is_mean(loss_fn, output, target, samples=samples)
        return value

    def evaluated(self, metrics: Metrics, batch: Any, origin: str) -> list[Any]:
        """What metrics see of the model's output and target for ``batch``."""
        tells = self._loss_fn is None and isinstance(batch, Mapping) and "labels" in batch
        apart = tells or (self._takes_model and not self._over_batch)  # the loss calls the model itself
        output = target = None
        if metrics.takes_output or not apart:
            with autocast(self._device, self._definition.precision):
                output = self.output(batch, origin, metrics.forward_fn)
            target = self.target(batch, metrics.target_fn) if metrics.targets else None
        if tells:
            loss = functools.partial(self._told, batch, origin, metrics.forward_fn)
        else:
            whole = self._takes_model and not (self._over_batch and self._definition.target_fn)  # it takes the batch
            loss = functools.partial(self._measured, output, self.to_device(batch) if whole else target)
        return metrics.see(output, target, _home, loss)

    def _told(self, batch: Any, origin: str, forward_fn: Callable[..., Any] | None) -> Any:
        """A model's own loss of a chunk, and how many labels it is the mean of: its gradient shows that."""
        with autocast(self._device, self._definition.precision), torch.enable_grad():
            value = self.output(batch, origin, forward_fn)
        loss, weight, _ = _split("the model", value)
        weight = TokenMean().weight(value, loss, batch) if weight is None else weight
        return _weighted(loss, weight)

    def _measured(self, output: Any, seen: Any) -> Any:
        """The loss of a chunk; ``seen``: its target, or the batch where the loss takes that."""
        loss_fn = self._loss_fn
        with autocast(self._device, self._definition.precision), checks.noting(output, seen):
            if self._over_batch:
                value = self._of_rows(output, seen)
            elif loss_fn is None:
                value = output
            else:
                value = loss_fn(self._model if self._takes_model else output, seen)
        return _weighted(*_split("loss_fn" if loss_fn else "the model", value)[:2])

    def to_device(self, batch: Any) -> Any:
        """``batch`` with its tensors on the model's device."""
        if self._device.type == "cpu":
            return batch
        to = operator.methodcaller("to", self._device)
        moves = torch.Tensor, PackedSequence  # the sizes of the latter stay on the host
        return map_tree(lambda leaf: to(leaf) if isinstance(leaf, moves) else leaf, batch, PackedSequence)

    def _tensor(self, value: Any) -> Any:
        return value if isinstance(value, torch.Tensor) else self.to_device(as_tensors(value))

    def _input(self, value: Any, path: str) -> Any:
        """An input of the default forward: float64 is refused where no parameter is."""
        value = self._tensor(value)
        if not self._double:
            for name, leaf in [(path, value)] if isinstance(value, torch.Tensor) else leaves(value, path):
                if getattr(leaf, "dtype", None) == torch.float64:
                    raise UsageError(
                        f"{name} is float64, but the model's parameters are not; dtypes are never changed behind your "
                        "back: convert it with .astype(numpy.float32) (a tensor: .float(), a number: "
                        "torch.tensor(number)), or the model with .double()"
                    )
        return value

    def _check_loss(self, name: str, loss: Any, batch: Any, origin: str) -> None:
        if self._loss_fn is None and isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise UsageError(
                f"loss_fn is missing: {name} returned a tensor of shape {tuple(loss.shape)}, which is no loss; pass "
                "one, as in loss_fn=torch.nn.functional.cross_entropy, or return the loss, as in loss.mean()"
            )
        if not isinstance(loss, torch.Tensor):
            _refuse_loss(name, f"a {type(loss).__name__}", "a scalar tensor: the mean loss over the share")
        if loss.numel() != 1 or loss.is_complex():
            shape = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
            _refuse_loss(name, shape, "a real scalar: average it, as in loss.mean()")
        if not loss.requires_grad:
            _refuse_loss(name, "a loss without a gradient", "one computed from the model's output without detach()")
        if loss.dtype == torch.float64 and not self._double:
            doubles = [path for path, leaf in leaves(batch, origin) if getattr(leaf, "dtype", None) == torch.float64]
            guess = f" ({doubles[0]} is float64)" if doubles else ""
            _refuse_loss(
                name,
                f"a float64 loss for a model that is not{guess}",
                "one in the model's dtype: convert the target with .astype(numpy.float32) (a tensor: .float())",
            )


def _weighted(loss: Any, weight: Any) -> Any:
    loss = _detached(loss) if _is_number(loss) or isinstance(loss, torch.Tensor) else loss
    return loss if weight is None else (loss, weight)


def _home(leaf: Any) -> Any:
    """A tensor in memory of its own on the CPU."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone() if leaf.device.type == "cpu" else leaf.detach().cpu()


def as_tensors(value: Any) -> Any:
    """Numpy arrays and plain numbers become tensors; all else stays as it is."""
    if isinstance(value, np.ndarray):
        return torch.tensor(value)
    if isinstance(value, (bool, int, float, np.generic)):
        return torch.as_tensor(value)
    return value


def _split(name: str, value: Any) -> tuple[Any, Any, Named | None]:
    """(loss, weight or None, named losses or None) of what a loss or a model returned."""
    if isinstance(value, torch.Tensor):
        return value, None, None
    if isinstance(value, tuple):
        loss, weight = value if len(value) == 2 else (value, None)
        if type(loss) is not dict:
            return loss, weight, None
        value = {**loss, "loss": (loss.get("loss"), weight)}  # as phalanx.weighted makes it
    if isinstance(value, Mapping):
        if value.get("loss") is None:
            way = "" if name == "loss_fn" else "pass loss_fn=, or give the batch the labels that the model needs, or "
            got = f"{name} returned {checks.outline(value)}, which has no 'loss'"
            raise UsageError(f"{got}; {way}return the mean loss as 'loss'")
        return (*_pair(value["loss"]), _named(name, value)) if type(value) is dict else (value["loss"], None, None)
    return getattr(value, "loss", value), None, None


def _pair(value: Any) -> tuple[Any, Any]:
    return value if isinstance(value, tuple) and len(value) == 2 else (value, None)


def _named(name: str, output: dict[Any, Any]) -> Named | None:
    """What a plain dict has beside the loss, if all of it are numbers; else it is the output of a model."""
    pairs = {key: _pair(value) for key, value in output.items() if key != "loss"}
    if not all(_is_number(value) and (weight is None or _is_number(weight)) for value, weight in pairs.values()):
        return None
    if len(pairs) > MOST_NAMES or any(not isinstance(key, str) or len(json.dumps(key)) > LONGEST_NAME for key in pairs):
        raise UsageError(
            f"{name} returned {checks.outline(output)}; beside 'loss' there may be {MOST_NAMES} named losses, whose "
            f"names are strings of at most {LONGEST_NAME - 2} characters: leave some out, or shorten their names"
        )
    return {
        key: (_detached(value), None if weight is None else checks.weight(f"{name}, for {key!r},", weight))
        for key, (value, weight) in sorted(pairs.items())
    } or None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else float(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, (int, float, np.integer, np.floating))


def _refuse_loss(name: str, got: str, wanted: str) -> NoReturn:
    raise UsageError(f"{name} returned {got}; it must return {wanted}, or (that, weight)")


def check_stateless(loss_fn: Any) -> None:
    """Refuse a loss with parameters: they would never be trained, as the optimizer gets the model's."""
    if isinstance(loss_fn, torch.nn.Module) and any(True for _ in loss_fn.parameters()):
        raise UsageError(
            f"loss_fn is a {type(loss_fn).__name__} with parameters, which would not be trained; make it a part of the "
            "model, let forward return the loss, and pass loss_fn=None"
        )


class NoMean:
    """Warns once of a loss that is no mean over samples, and returned no weight. Losses of replica 0 are looked at.

    Parameters
    ----------
    replicas : int
        Of the recipe.
    compared : iterable, optional
        What ``compared`` begins with.

    Attributes
    ----------
    compared : set
        The phases and metrics whose losses were called, and compare outputs and targets of sizes that fit.
    """

    def __init__(self, replicas: int, compared: Iterable[Any] = ()) -> None:
        self.compared = set[Any](compared)
        self._looks = LOOKS if replicas > 1 else 0
        self._asked = set[int]()  # phases

    def asks(self, forward: Forward, phase: int, replica: int, batch: Any) -> str | None:
        """Whether a loss is asked about its batch; a text is what is said of it if that tells nothing.

        It is the first of replica 0, and one that may ignore targets: a first share may be one without padding. A
        device is waited for in the very first only.
        """
        if not self._looks:
            return None
        ignored, waits = _option(forward._loss_fn, "ignore_index", IGNORED), self._looks == LOOKS
        self._looks -= 1
        if _has(batch, ignored, waits=waits):
            return f"seems to ignore targets of {ignored}, which the data has"
        if replica or phase in self._asked:
            return None
        self._asked.add(phase)
        return ""

    def warn(self, forward: Forward, weight: Any, reason: str) -> None:
        """Warn of a loss that was asked, unless it is such a mean or returned a weight."""
        loss_fn = forward._loss_fn
        settled = reason or weight is not None
        if _option(loss_fn, "weight", None) is not None:
            reason = "has class weights"
        elif forward.told is not None:
            reason = "" if forward.told else reason or UNLIKE
        if settled or reason:
            self._looks = 0
        if reason and weight is None:
            own = "the model's own loss" if forward._definition.forward_fn is None else "the loss of forward_fn"
            who, way = ("loss_fn", WRAPPED) if loss_fn else (own, RETURNED)
            checks.warn(
                f"{who} {reason}, so it is no mean over samples, and it returns no weight: the replicas' mean differs "
                f"from the whole batch's. {way}{OTHERWISE}"
            )


def _has(batch: Any, target: int, *, waits: bool) -> bool:
    """Whether some integer in a batch is this one; ``waits``: on devices, too."""
    tensors = [leaf for _, leaf in leaves(batch, "", lists=True) if isinstance(leaf, torch.Tensor)]
    whole = [leaf for leaf in tensors if not leaf.is_floating_point() and (waits or leaf.device.type == "cpu")]
    return any(bool((leaf == target).any()) for leaf in whole)


def _option(loss_fn: Any, name: str, default: Any) -> Any:
    """An option of a loss module, or of a partial over a loss function; only torch's own losses are understood."""
    if isinstance(loss_fn, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)):
        return getattr(loss_fn, name)
    if isinstance(loss_fn, functools.partial):
        return loss_fn.keywords.get(name, default)
    return default
