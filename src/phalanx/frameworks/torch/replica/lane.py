"""A model on one device, and what computes replicas with it: batches, forward, backward, buffers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from phalanx.definition import checks
from phalanx.definition.batches import cut
from phalanx.definition.data import Share
from phalanx.definition.fields import Definition
from phalanx.definition.metrics import Metrics
from phalanx.errors import InPartsError, UsageError, safe_str
from phalanx.frameworks.torch.arithmetic import Gradient, word_sum
from phalanx.frameworks.torch.environment import explain
from phalanx.frameworks.torch.model import check_mode, evaluating
from phalanx.frameworks.torch.optimizer import covered
from phalanx.frameworks.torch.replica.buffers import Buffers
from phalanx.frameworks.torch.replica.feed import Feed
from phalanx.frameworks.torch.replica.forward import Forward, NoMean
from phalanx.frameworks.torch.replica.gradient import Collector, drop
from phalanx.frameworks.torch.replica.over_batch import OverBatch
from phalanx.frameworks.torch.replica.watching import watching
from phalanx.frameworks.torch.results import Shown
from phalanx.plan.shares import Parts
from phalanx.seams.records import Computed, Measurement, Named, Todo, Watch, Weights
from phalanx.surroundings import interrupts

RETRAINED = (
    "requires_grad of {!r} was changed in forward or loss_fn, and phalanx puts it back after each pass: change it in "
    "every pass, by phalanx.current_step(), or between steps, by run.freeze, run.thaw or callbacks.Thaw"
)
IN_FORWARD = "use a buffer for what forward updates, or replicas=1"
IN_EVALUATION = "compute the value without writing it, as in w = self.w * 0.9, or write it in training"
EARLY = "had a gradient before the backward pass (.backward() was called inside forward: use torch.autograd.grad there)"


class Lane:
    """Computes replicas one after another, each from the state at the step's start.

    Parameters
    ----------
    definition : Definition
    model : torch.nn.Module
        On its device already.
    batch : callable
        ``batch(key, share)``: a share's samples, where the model is. All generators are seeded for what follows;
        without a key they go on from where they are.
    buffers : Buffers
        The model's.
    no_mean : NoMean
        Warns of the recipe's loss, once.
    host : Feed, optional
        Seeds generators and knows their states, for a loss over the whole batch.
    later : bool, default False
        Whether losses and weights stay unread on the device: all devices get their work before one is waited for.
    chunk : callable, optional
        Reads what an evaluation sees; ``batch`` where there is none.

    Attributes
    ----------
    model : torch.nn.Module
    named : list of (str, torch.nn.Parameter)
    parameters : list of torch.nn.Parameter
    buffers : Buffers
    collector : Collector
    """

    def __init__(
        self,
        definition: Definition,
        model: torch.nn.Module,
        batch: Callable[[int | None, Share], Any],
        buffers: Buffers,
        no_mean: NoMean,
        *,
        later: bool = False,
        host: Feed | None = None,
        chunk: Callable[[int, Share], Any] | None = None,
    ) -> None:
        check_mode(model, definition.modes)
        self.model = model
        self.named = list(model.named_parameters())
        self.parameters = [parameter for _, parameter in self.named]
        places: list[Any] = [part for module in model.modules() for part in (module._parameters, module._modules)]
        self._members = [(place, dict(place)) for place in places]
        self._values = [place.values() for place in places]
        self._ids = self._now()
        self._read_batch, self._read_chunk = batch, chunk or batch
        self.buffers = buffers
        self._shared = definition.replicas > 1
        self.collector = Collector(self.named, written=later or self._shared or math.isfinite(definition.max_norm))
        self._parts = definition.micro_batches
        phases = definition.phases or (None,)
        unread = later and self._parts == 1
        device = self.parameters[0].device
        begin = buffers.begin
        self._forwards = [Forward(definition, model, device, later=unread, phase=one, begin=begin) for one in phases]
        self._measuring = self._forwards[definition.rounds.main]
        self._chosen = [None if phase is None else covered(phase, self.named, model) for phase in phases]
        self._no_mean = no_mean
        self._over: Any = None
        if host is not None and any(map(definition.over_batch, range(len(phases)))):
            self._over = OverBatch(definition, self._forwards, self._batch, host, buffers, self.parameters)
        self._over_batch = [definition.over_batch(phase) for phase in range(len(phases))]
        self._later = later
        self._joins = self._parts == 1
        self._warn_once = functools.cache(checks.warn)

    def gradients(self, todo: Sequence[Todo], watch: Watch | None = None) -> Iterator[Computed]:
        """Compute replicas; runs user code.

        The fold adds a replica with an odd number to the one before, and autograd can do so as soon as a parameter's
        gradient is there, while it is in cache. It does so if nothing is to be multiplied first and nobody looks at
        gradients in between.
        """
        if watch is not None:
            for one in todo:
                computed = self.watched(one, watch)
                self.check_members()
                yield computed
            return
        # Two replicas that were joined hold the very same tensors, and both go into the fold. So `add` and `add_into`
        # of torch's arithmetic leave out entries that are one object. Without that test each joined sum would be
        # added to itself. A gradient in parts would be added in another order. The sum's version counter shows it
        # (`_check_once`). By then the fold has the replica before already, with a wrong sum in it. So that one is
        # computed again into the same tensors, and no more replicas are joined in this process. Not covered: code
        # inside the backward pass that reads `.grad` without a hook on it. It sees the sum.
        previous: tuple[Todo, Gradient] | None = None  # the replica before
        for one in todo:
            onto = previous[1] if previous and one.replica % 2 and previous[0].replica == one.replica - 1 else None
            try:
                computed = self.gradient(one, onto)
            except InPartsError:
                assert previous is not None
                assert onto is not None
                self._joins = False
                for mine, again in zip(onto, self.gradient(previous[0]).gradient or (), strict=True):
                    if mine is not None and again is not None:
                        mine.copy_(again)
                computed = self.gradient(one)
            previous = None
            if computed.gradient is not None and _weight(one, computed.weight) == 1:
                previous = one, computed.gradient
            if one is todo[-1]:
                self.check_members()
            yield computed

    def gradient(self, todo: Todo, onto: Gradient | None = None, watch: Watch | None = None) -> Computed:
        """Compute one replica, and add its gradient to ``onto`` if that gives the same bits; runs user code."""
        trained = self._trained_now()
        try:
            if self._over_batch[todo.phase]:
                return self._of_rows(todo, onto, watch)
            self.buffers.begin()
            versions = self._versions() if self._shared else []
            if self._parts == 1:
                batch = self._batch(todo.key, todo.share, watch)
                loss, weight, named = self._loss(batch, todo, todo.share, watch)
                self._tell_early(watch)
                if onto is not None and not (self._joins and _weight(todo, weight) == 1 and self.collector.joins):
                    onto = None
                taken = None if weight == 0 else self.collector.backward(loss, onto, self._trained(todo.phase))
                read, named = self._read(loss), self._read_named(named) if named else None
            else:
                read, weight, taken, named = self._in_parts(todo, watch)
            if self._shared:
                self._check_unwritten(versions, "in forward, loss_fn or a hook", IN_FORWARD)
            buffers = self.buffers.left()
            if watch is not None:
                for name, value in zip(self.buffers.paths, buffers, strict=True):
                    watch.report("buffer", name, value)
            return Computed(read, weight, taken, buffers, named)
        finally:
            self._retrain(trained)

    def outputs(self, todo: Sequence[Todo]) -> Iterator[bytes]:
        """What replicas say to all for a loss over the whole batch; runs user code."""
        for one in todo:
            try:
                with self._as_found("in forward or a hook"):
                    said = self._over.said(one, keep=len(todo) == 1 and self._parts == 1)
            except Exception as error:
                _explain(error, min(len(piece.samples) for piece in self._over.pieces(one.share)))
                raise
            yield said

    def over_batch(self, said: Sequence[bytes], key: int, phase: int) -> int:
        """Compute that loss from what all said."""
        try:
            with self._as_found("in loss_fn"), checks.comparing(self._no_mean.compared, phase):
                return self._over.compute(said, key, phase, self._trained(phase))
        except Exception as error:
            _explain_loss(error)
            raise

    @contextlib.contextmanager
    def _as_found(self, where: str) -> Iterator[None]:
        """Inside, user code runs; it may neither write parameters nor leave others frozen."""
        trained, versions = self._trained_now(), self._versions() if self._shared else []
        try:
            yield
            if self._shared:
                self._check_unwritten(versions, where, IN_FORWARD)
        finally:
            self._retrain(trained)

    def _of_rows(self, todo: Todo, onto: Gradient | None, watch: Watch | None) -> Computed:
        """Go back from a replica's rows."""
        over, chosen, taken = self._over, self._trained(todo.phase), list[torch.Tensor | None]()
        over.begin(todo, watch)
        with self._as_found("in forward or a hook"):
            for number, seeds in enumerate(over.backward(todo, watch)):
                self._tell_early(None if number else watch)
                if self._parts > 1:
                    self.collector.add(seeds, chosen, first=not number)
                else:  # an own gradient of the loss is added before this replica's, and not to the sum with another's
                    joins = self._joins and not over.takes_up(todo) and self.collector.joins
                    taken = self.collector.backward(seeds, onto if joins else None, chosen)
        if self._parts > 1:
            taken = self.collector.total(1.0)
        outcome = over.outcome
        assert outcome is not None
        named = self._read_named(outcome.named) if outcome.named else None
        return Computed(self._read(outcome.loss), 1.0, taken, over.left(), named)

    def _now(self) -> list[int]:
        return list(map(id, itertools.chain.from_iterable(self._values)))

    def check_members(self) -> None:
        """Refuse parameters that forward put in place of others, or made, and take them out.

        Modules may come and go if they have none. All are looked at in each step, and that takes a microsecond.
        """
        if self._now() == self._ids:
            return
        was, now = dict(self.named), dict(self.model.named_parameters())
        if differing := [name for name in was | now if now.get(name) is not was.get(name)]:
            for place, content in self._members:
                place.clear()
                place.update(content)
            raise UsageError(
                f"forward made, replaced or removed parameter {differing[0]!r}, but the optimizer has those that "
                "make_model made; make all in __init__, and in place of assigning to one, use the new value itself, as "
                "in scale = self.scale.clamp(-1, 1)"
            )
        self._ids = self._now()

    def _trained_now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters]

    def _retrain(self, before: list[bool]) -> None:
        """Undo what user code froze or thawed in a pass: workers and runs that go on would not know of it."""
        if (now := self._trained_now()) != before:
            for parameter, trained in zip(self.parameters, before, strict=True):
                parameter.requires_grad_(trained)
            name = next(name for (name, _), *both in zip(self.named, before, now, strict=True) if both[0] != both[1])
            self._warn_once(RETRAINED.format(name))

    def _in_parts(self, todo: Todo, watch: Watch | None) -> tuple[Any, float | None, Gradient | None, Named | None]:
        """What a replica whose share is cut comes to: the means of its micro-batches, in order.

        Each part's graph is gone before the next one is computed.
        """
        pieces = cut(todo.share, self._parts)
        parts, named_parts = Parts([len(piece.samples) for piece in pieces]), list[tuple[float, Named]]()
        for number, piece in enumerate(pieces):
            batch = self._batch(None if number else todo.key, piece, watch)
            loss, returned, named = self._loss(batch, todo, piece, watch, asks=not number)
            before = parts.weight
            self._tell_early(None if before else watch)
            weight = parts.add(number, self._read(loss), returned)
            if named:
                named_parts.append((weight, self._read_named(named)))
            if weight:
                chosen = self._trained(todo.phase)
                self.collector.add(loss if weight == 1 else loss * weight, chosen, first=not before)
            del loss  # with its graph
        others = _merged(named_parts, len(pieces)) if named_parts else None
        return parts.loss, parts.returned, self.collector.total(parts.weight) if parts.weight else None, others

    def _batch(self, key: int | None, share: Share, watch: Watch | None) -> Any:
        batch = self._read_batch(key, share)
        if watch is not None:
            watch.report("batch", "", batch)
        return batch

    def _trained(self, phase: int) -> list[torch.Tensor] | None:
        """The tensors that get a gradient in this phase of a step; None: no choice is made."""
        chosen = self._chosen[phase]
        return None if chosen is None else [parameter for _, parameter in chosen if parameter.requires_grad]

    def _loss(
        self, batch: Any, todo: Todo, share: Share, watch: Watch | None, *, asks: bool = True
    ) -> tuple[torch.Tensor, Any, Named | None]:
        """The loss of a batch, and the weight and named losses that came with it. Known errors are explained.

        ``asks``: buffers are as at the step's start, so the loss may be asked.
        """
        forward, compared = self._forwards[todo.phase], self._no_mean.compared
        asked = self._no_mean.asks(forward, todo.phase, todo.replica, batch) if asks and watch is None else None
        compute = functools.partial(
            forward.loss, batch, share.origin, watch, 0 if asked is None else len(share.samples)
        )
        try:
            if todo.phase in compared:
                loss, weight, named = compute()
            else:
                with checks.comparing(compared, todo.phase):
                    loss, weight, named = compute()
        except Exception as error:
            _explain(error, len(share.samples))
            raise
        if asked is not None:
            self._no_mean.warn(forward, weight, asked)
        return loss, weight, named

    def _read(self, loss: torch.Tensor) -> Any:
        """A loss as a number, or as a tensor if the device is not waited for yet; in float64 for micro-batches."""
        if not self._later:
            return loss.item()
        read = loss.detach().reshape(())
        return read if self._parts == 1 else read.double()

    def _read_named(self, named: Named) -> Named:
        return {
            name: (self._read(value) if isinstance(value, torch.Tensor) else value, weight)
            for name, (value, weight) in named.items()
        }

    def watched(self, todo: Todo, watch: Watch) -> Computed:
        """Compute one replica by itself, and tell its intermediate values, or what it did to parameters."""
        if not watch.parameters:
            with watching(self.model, watch):
                return self.gradient(todo, watch=watch)
        before = [(parameter.data_ptr(), word_sum(parameter)) for parameter in self.parameters]
        computed = self.gradient(todo, watch=watch)
        for (name, parameter), (address, total) in zip(self.named, before, strict=True):
            if parameter.data_ptr() != address:
                watch.report("written", name, "was given other memory (.data = ...)")
            elif word_sum(parameter) != total:
                watch.report("written", name, "was written")
        return computed

    def _tell_early(self, watch: Watch | None) -> None:
        if watch is not None and watch.parameters:
            for name in (name for name, parameter in self.named if parameter.grad is not None):
                watch.report("early", name, EARLY)

    @functools.cached_property
    def shown(self) -> Shown:
        """The model to look at, with the weights and buffers of now."""
        return Shown(self.model, self.parameters, self.buffers.tensors)

    def rewind(self) -> None:
        """Undo what computing gradients left behind."""
        drop(self.parameters)
        self.buffers.restore()
        self.buffers.of_loss = {}
        if self._over is not None:
            self._over.forget()

    def measure(self, metrics: Metrics, key: int, share: Share, weights: Weights | None) -> Measurement:
        """Begin metrics over a chunk, as ``seams.Framework.measure`` says."""
        versions, trained = self._versions(), self._trained_now()
        with evaluating(self.model), torch.no_grad(), substituted(self.named, weights or {}):
            self.buffers.begin()
            try:
                comparing = checks.comparing(self._no_mean.compared, metrics.key)
                with comparing, interrupts.held(), interrupts.user_code():
                    values = self._measuring.evaluated(metrics, self._read_chunk(key, share), share.origin)
            finally:
                self.buffers.restore()
                self._retrain(trained)
        self.check_members()
        self._check_unwritten(versions, "in an evaluation", IN_EVALUATION)
        return functools.partial(metrics.read, values, len(share.samples))

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def _check_unwritten(self, versions: list[int], where: str, way: str) -> None:
        """Refuse parameters that user code wrote: replicas would see them. A lone replica may write in a step."""
        now = self._versions()
        if now != versions:
            name = next(name for (name, _), *both in zip(self.named, versions, now, strict=True) if both[0] != both[1])
            raise UsageError(
                f"parameter {name!r} was written in place {where}: what follows would start from other weights; {way}"
            )


def _weight(todo: Todo, returned: float | None) -> float:
    return todo.weight if returned is None else returned


def _merged(parts: Sequence[tuple[float, Named]], count: int) -> Named:
    """The named losses of a replica, out of those of its micro-batches, each with the weight of its loss."""
    merged: dict[str, tuple[Any, float | None]] = {}
    for _, named in [*parts, (0.0, {})] if len(parts) < count else parts:
        checks.same_names(parts[0][1], named, "micro-batch")
    for name, (_, own) in parts[0][1].items():
        mean = Parts([1] * len(parts))
        for number, (weight, named) in enumerate(parts):
            value, returned = named[name]
            mean.add(number, value, weight if returned is None else returned)
        merged[name] = (mean.loss, None if own is None else mean.weight)
    return merged


@contextlib.contextmanager
def substituted(named: Sequence[tuple[str, torch.nn.Parameter]], weights: Mapping[str, Any]) -> Iterator[None]:
    """Inside, parameters lie in other memory. Nothing is written, so a process that dies inside changes nothing."""
    kept = [(parameter, parameter.data) for name, parameter in named if name in weights]
    try:
        for name, parameter in named:
            if name in weights:
                parameter.data = torch.as_tensor(weights[name], dtype=parameter.dtype, device=parameter.device)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def _explain_loss(error: Exception) -> None:
    """Raise a clearer error where a loss was given what it cannot take, or where the compiler has come to a limit."""
    explain(error)
    text = safe_str(error)
    if "to be Long" in text or "type Long but" in text:
        raise UsageError(
            f"a loss was called with targets of too few bits ({text}); classes are numbered in int64: convert them "
            "with .astype(numpy.int64) (a tensor: .long())"
        ) from error


def _explain(error: Exception, samples: int) -> None:
    """Raise a clearer error where torch's comes from how the batch was dealt, too."""
    _explain_loss(error)
    text = safe_str(error)
    if isinstance(error, ValueError) and "more than 1 value per channel" in text:
        raise UsageError(
            f"BatchNorm cannot normalise a share of {samples} sample ({text}); raise batch_size or lower replicas so "
            "that every share has at least 2 samples; drop_last=True drops a short last batch"
        ) from error
