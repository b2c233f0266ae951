"""What optimizers' state consists of. It is found before the first update, so that all of it has a place from then on.

torch makes the state of a parameter in the first update in which it has a gradient. To find out what it will make, a
throw-away copy of one parameter is updated with zeros. Big ones are tried without memory first, by their shapes alone,
which works if an optimizer does not look at numbers. Nothing else is touched, and no random number is drawn.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from phalanx.definition import checks
from phalanx.definition.data import map_tree
from phalanx.definition.plain import check_like, inexact, taking_over
from phalanx.errors import UsageError
from phalanx.frameworks.torch.arithmetic import FOREACH, spec_of
from phalanx.frameworks.torch.optimizer import Updates, step_alone
from phalanx.frameworks.torch.schedules import Named
from phalanx.plan.rounds import Rounds
from phalanx.seams.records import Weights
from phalanx.shared.layout import Spec, StatePiece

Holder = tuple[torch.optim.Optimizer, torch.Tensor]

AVERAGED = "averaged"
LATER_MOMENTUM = 0.5  # any that is not 0
SMALL = 1 << 18  # bytes of a parameter; up to these, an update of it is faster than one of its shape alone


class OptimizerState:
    """The optimizers' state by pieces, as a layout lists them.

    Parameters
    ----------
    updates : Updates
    parameters : sequence of torch.Tensor
    pieces : sequence of StatePiece
        Empty for foreign optimizers, which may keep their state anywhere.
    averages : Averages or None
    """

    def __init__(
        self,
        updates: Updates,
        parameters: Sequence[torch.Tensor],
        pieces: Sequence[StatePiece],
        averages: Averages | None = None,
    ) -> None:
        self._updates, self._described = updates, False
        self._optimizers: list[Any] = [*updates.optimizers, *filter(None, [averages])]
        self._parameters = parameters
        self._pieces = pieces
        holders: dict[tuple[int, int], Holder] = {}
        self._places: list[tuple[Holder, str]] = []
        self._known: set[tuple[int, int, str]] = set()
        for piece in pieces:
            number, _, key = piece.name.partition(".")
            pair = int(number), piece.parameter
            holder = holders.setdefault(pair, (self._optimizers[pair[0]], parameters[piece.parameter]))
            self._places.append((holder, key))
            self._known.add((*pair, key))

    def made(self, absent: Sequence[int]) -> dict[int, torch.Tensor]:
        """Those of the ``absent`` pieces that exist now.

        Raises
        ------
        UsageError
            Updates made state that was not expected.
        """
        present: dict[int, torch.Tensor] = {}
        latest: Holder | None = None
        state: dict[str, Any] | None = None
        for piece in absent:  # runs in each step if parameters get no gradient, so no look-up is done twice
            holder, key = self._places[piece]
            if holder is not latest:
                latest, state = holder, holder[0].state.get(holder[1])
            if state:
                self._check_known(self._pieces[piece].parameter)
                if (value := state.get(key)) is not None:
                    self._check(self._pieces[piece], value)
                    present[piece] = value
        return present

    def adopt(self, pieces: Mapping[int, torch.Tensor], *, more: bool = False) -> None:
        """Use these tensors as pieces, and forget all others, but for what was described; ``more``: keep the others."""
        if not more and not self._described:
            for optimizer in self._optimizers:
                optimizer.state.clear()
        for piece, home in pieces.items():
            (optimizer, parameter), key = self._places[piece]
            optimizer.state[parameter][key] = home

    def on_device(self, piece: int, tensor: torch.Tensor) -> torch.Tensor:
        """A piece that was read in host memory, where its parameter is."""
        (optimizer, parameter), key = self._places[piece]
        return on_device({key: tensor}, parameter, optimizer)[key]

    def foreign(self, indices: Iterable[int]) -> list[Any] | None:
        """All state of optimizers that keep some apart, by value: for each its state by parameter, and all else."""
        for index in indices:
            self._check_known(index)
        if not self._updates.apart:
            return None
        described: list[Any] = []
        for optimizer in self._optimizers:
            state = {index: map_tree(_home, optimizer.state.get(self._parameters[index])) for index in indices}
            beside = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
            described.append(({index: value for index, value in state.items() if value}, beside))
        return described

    def take_foreign(self, described: Sequence[Any] | None, indices: Iterable[int]) -> None:
        """Take over described state of these parameters."""
        self._described = described is not None
        if described is None:
            return
        wanted = set(indices)
        for optimizer, (state, beside) in zip(self._optimizers, described, strict=True):
            optimizer.state.clear()
            for index in wanted & set(state):
                own = map_tree(_own, state[index])
                optimizer.state[self._parameters[index]] = on_device(own, self._parameters[index], optimizer)
            optimizer.state.update(beside)

    def _check(self, piece: StatePiece, value: torch.Tensor) -> None:
        now, expected = _spec(value), piece.spec
        if (now.shape, now.dtype) != (expected.shape, expected.dtype):
            raise _unforeseen(f"{checks.outline(now)} where {checks.outline(expected)} was to be")

    def _check_known(self, index: int) -> None:
        """Refuse state of a parameter that has no place: it would get lost with this process. Hooks may keep some."""
        if self._updates.apart:
            return
        for number, optimizer in enumerate(self._optimizers):
            for key, value in optimizer.state.get(self._parameters[index], {}).items():
                if value is not None and (number, index, key) not in self._known:
                    if not self._updates.custom:
                        raise _unforeseen(f"{key!r}")
                    self._updates.apart = True


class Averages:
    """An average of all parameters over steps, kept as an optimizer keeps its state, so that it is shared as that is.

    Parameters
    ----------
    named : sequence of (str, torch.nn.Parameter)
    rounds : Rounds
        Which updates end a step.
    decay : float
    start : mapping of str to torch.Tensor, or None
        What it goes on from; None: the weights after the first step are the average.
    """

    def __init__(self, named: Named, rounds: Rounds, decay: float, start: Weights | None) -> None:
        self._named, self._rounds, self._decay = named, rounds, decay
        self.param_groups = [{"params": [parameter for _, parameter in named]}]
        self.state = defaultdict[Any, dict[str, torch.Tensor]](dict)
        if start is not None:
            with taking_over("the average"):
                check_like(start, {name: parameter.detach() for name, parameter in named}, AVERAGED)
            for name, each in named:
                self.state[each][AVERAGED] = start[name].to(each.device, copy=True)

    def step(self, update: int) -> None:
        """Once all phases of a step are done, add the weights to the average."""
        if not self._rounds.at(update).last:
            return
        with torch.no_grad():
            if not self.state:
                self.state.update({each: {AVERAGED: each.detach().clone()} for _, each in self._named})
                return
            changing = [(self.state[each][AVERAGED], each) for _, each in self._named if inexact(each.dtype)]
            FOREACH._foreach_lerp_(*zip(*changing, strict=True), 1 - self._decay)

    def named(self) -> dict[str, torch.Tensor] | None:
        """The average by names of parameters; None before the first step."""
        return {name: self.state[each][AVERAGED] for name, each in self._named} if self.state else None


def find_pieces(
    updates: Updates, parameters: Sequence[torch.Tensor], averages: Averages | None = None
) -> list[StatePiece]:
    """All that the optimizers may keep of each parameter: what they keep now, and what updates will add to it.

    Likewise of ``averages``.
    """
    if updates.foreign:
        return []
    homes = {
        (number, id(parameter)): (position, group)
        for number, optimizer in enumerate(updates.optimizers)
        for position, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    known: dict[Any, dict[str, Spec]] = {}
    pieces: list[StatePiece] = []
    for index, parameter in enumerate(parameters):
        for number, optimizer in enumerate(updates.optimizers):  # several, if phases share it
            position, group = homes.get((number, id(parameter)), (-1, None))
            if group is None:
                continue
            alike = number, position, tuple(parameter.shape), parameter.stride(), parameter.dtype
            if alike not in known:
                known[alike] = _tried(optimizer, group, parameter)
            kept = optimizer.state.get(parameter, {}).items()
            specs = {**known[alike], **{key: _spec(value) for key, value in kept if value is not None}}
            pieces += [StatePiece(index, f"{number}.{key}", spec) for key, spec in specs.items()]
    count, kept = len(updates.optimizers), [] if averages is None else parameters
    return pieces + [StatePiece(index, f"{count}.{AVERAGED}", _spec(each)) for index, each in enumerate(kept)]


def check_state(updates: Updates, pieces: Sequence[StatePiece]) -> None:
    """Refuse state of torch's own optimizers that their updates do not make. ``pieces``: what they make.

    Fused kernels of any class assume that state has the parameter's layout, and write wherever that leads.

    Raises
    ------
    ValueError
        There is some; names it.
    """
    expected = {(piece.parameter, piece.name): piece.spec for piece in pieces}
    known = {id(parameter): index for index, (_, parameter) in enumerate(updates.named)}
    tried = {index for index, _ in expected}
    for number, optimizer in enumerate(updates.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                index = known.get(id(parameter))
                if index is None:
                    raise ValueError("its options name other parameters")
                for key, value in optimizer.state.get(parameter, {}).items():
                    if value is None or (updates.foreign and not (group.get("fused") and hasattr(value, "stride"))):
                        continue
                    spec, wanted = _spec(value), expected.get((index, f"{number}.{key}"))
                    same = index not in tried or (wanted is not None and spec[::2] == wanted[::2])
                    like = _spec(parameter) if group.get("fused") and (key != "step" or value.dim()) else spec
                    if not same or spec != like or spec.strides != value.stride():
                        raise ValueError(
                            f"{key} of {updates.named[index][0]} is {spec}, and should be {wanted or like}"
                        )


def _tried(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Spec]:
    """The state that an update in this group makes for such a parameter; empty if it raises, as the real one will."""
    for device in ("meta", "cpu") if parameter.nbytes > SMALL else ("cpu",):
        with contextlib.suppress(Exception):
            return {key: _spec(value) for key, value in _made(optimizer, group, parameter, device).items()}
    return {}


def _made(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor, device: str
) -> dict[str, torch.Tensor]:
    """The state of a throw-away copy of ``parameter`` after an update with zeros, by a throw-away optimizer."""
    zeros = functools.partial(torch.empty_strided, dtype=parameter.dtype, device=device)
    copy = zeros(tuple(parameter.shape), parameter.stride()).zero_()
    copy.grad = zeros(*spec_of(parameter)[:2]).zero_()
    options = {**group, "params": [copy]}
    if type(optimizer) is torch.optim.SGD and not group["momentum"]:
        options["momentum"] = LATER_MOMENTUM  # its state is made when that is first not 0; a scheduler may set it
    if device == "meta" and group.get("fused") and torch.get_default_dtype() == torch.float32:
        options["fused"] = False  # fused kernels need memory; the state is the same where step counts are float32
    if group.get("capturable"):
        options["capturable"] = False  # which the CPU refuses; the state is the same
    return step_alone(optimizer, options)


def _spec(leaf: torch.Tensor) -> Spec:
    strides = torch.empty_like(leaf, device="meta").stride()
    return Spec(tuple(leaf.shape), strides, str(leaf.dtype).removeprefix("torch."), leaf.dtype.itemsize)


def on_device(value: Any, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Any:
    """State of a parameter on its device, whichever it was on; numbers that torch keeps on the host stay there."""
    if parameter.device.type == "cpu" or not isinstance(value, Mapping):
        return value
    group = next(group for group in optimizer.param_groups if any(item is parameter for item in group["params"]))
    stays = () if group.get("fused") or group.get("capturable") else ("step", "mu_product")
    return {
        key: item.to(parameter.device) if isinstance(item, torch.Tensor) and key not in stays else item
        for key, item in value.items()
    }


def _home(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _own(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _unforeseen(what: str) -> UsageError:
    return UsageError(
        f"an update made {what} in the optimizer's state, which a trial before the first step had not made, so it has "
        "no place that worker processes could share; use engine='inline' (same answer)"
    )
