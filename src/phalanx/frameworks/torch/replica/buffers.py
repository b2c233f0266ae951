"""Buffers: replicas start each step from the same ones; after it they are settled by one rule.

A buffer whose bytes are equal on all replicas that ran keeps those bytes (a folded mean of equal floats would change
constants). Otherwise floating and complex ones become the mean, weighted by sample count and added in the fold's order;
others take the first replica's. So replicas themselves carry nothing from step to step and may run anywhere.

On a device nothing is read back. Small buffers are taken to be written by every forward pass: no counter of torch's
tells (batch norm writes its statistics uncounted), and comparing would wait for the device. Whether replicas left equal
bytes is found out, and decided, on the device. Large ones, such as masks, are taken to be constants as long as
autograd's counter says so, and are compared from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.errors import UsageError
from phalanx.frameworks.torch.arithmetic import FOREACH, bytes_of, is_dense, same_bytes
from phalanx.plan import share_weights
from phalanx.plan.fold import fold_mean

SMALL_BYTES = 1 << 18
FIRST, EVERY = 8, 256  # looks at a large buffer: so many at first, and again from so many to so many
Left = list[torch.Tensor]  # all buffers that are not None, as a forward pass left them

Mark = tuple[int | None, int | None, int]  # versions of a buffer and of its start, and which start


class Compared:
    """How a model's buffers are compared with what they are at the step's start, and with those of other replicas.

    By looking at the bytes.
    """

    def unwritten(self, number: int, value: torch.Tensor, tensor: torch.Tensor | None, start: torch.Tensor) -> bool:
        """Whether forward left the buffer with this number (``tensor``, now ``value``) as it was at the start."""
        return same_bytes(value, start)

    def write(self, tensors: Sequence[torch.Tensor | None], starts: Sequence[torch.Tensor | None]) -> None:
        """Copy the step's start into the buffers where they differ: constants may lie in memory that is read-only."""
        for tensor, start in zip(tensors, starts, strict=True):
            if tensor is not None and start is not None and not same_bytes(tensor, start):
                tensor.copy_(start)

    def equal(self, tensors: Sequence[torch.Tensor | None], starts: Sequence[torch.Tensor | None]) -> None:
        """Hear that both are the same now: bytes say so themselves."""

    def settled(self, values: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        """What a buffer becomes, of which the replicas left ``values``; the first itself if it stays as that is."""
        first = values[0]
        if all(same_bytes(first, other) for other in values[1:]):
            return first
        return mean_of(values, weights) if first.is_floating_point() or first.is_complex() else first


class Versions(Compared):
    """On a device: by autograd's counters, and without waiting."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []  # as of when buffers and starts were equal
        self._looks: dict[int, int] = {}  # how often a large buffer was looked at

    def unwritten(self, number: int, value: torch.Tensor, tensor: torch.Tensor | None, start: torch.Tensor) -> bool:
        """See ``Compared.unwritten``."""
        if value is not tensor or start.nbytes <= SMALL_BYTES or self._marks[number] != _mark(tensor, start):
            return False
        self._looks[number] = looks = self._looks.get(number, -1) + 1
        return looks % EVERY > FIRST or same_bytes(value, start)

    def write(self, tensors: Sequence[torch.Tensor | None], starts: Sequence[torch.Tensor | None]) -> None:
        """See ``Compared.write``."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, (tensor, start) in enumerate(zip(tensors, starts, strict=True)):
            if tensor is None or start is None or not tensor.numel():
                continue
            if not is_dense(tensor):  # expanded memory cannot be written, so it is looked at
                super().write([tensor], [start])
            elif start.nbytes <= SMALL_BYTES or self._marks[number] != _mark(tensor, start):
                pairs.append((tensor, start))
        if pairs:
            FOREACH._foreach_copy_([tensor for tensor, _ in pairs], [start for _, start in pairs])
        self.equal(tensors, starts)

    def equal(self, tensors: Sequence[torch.Tensor | None], starts: Sequence[torch.Tensor | None]) -> None:
        """See ``Compared.equal``."""
        self._marks = [_mark(*pair) for pair in zip(tensors, starts, strict=True)]

    def settled(self, values: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        """See ``Compared.settled``; which of the two it is, is decided on the device."""
        first = values[0]
        others = [value for value in values[1:] if value is not first]
        if not others or not (first.is_floating_point() or first.is_complex()):
            return first
        mine = bytes_of(first)
        alike = torch.stack([torch.eq(mine, bytes_of(other)).all() for other in others]).all()
        return torch.where(alike, first, mean_of(values, weights))


def _mark(tensor: torch.Tensor | None, start: torch.Tensor | None) -> Mark:
    return None if tensor is None else tensor._version, None if start is None else start._version, id(start)


class Buffers:
    """The buffers of one model, as they were at the step's start and as forward passes leave them.

    A buffer in the memory of a parameter is that parameter, and no business of this class.

    Parameters
    ----------
    model : torch.nn.Module
    contents : Compared
        How buffers and the step's start are compared.
    """

    def __init__(self, model: torch.nn.Module, contents: Compared | None = None) -> None:
        self._model = model
        self._contents = Compared() if contents is None else contents
        self._places = _places(model)
        self._tensors = [module._buffers[name] for _, module, name in self._places]
        self._checked = False
        self._begin_here()

    @property
    def starts(self) -> Left:
        """The buffers as they are at the step's start, those that are not None."""
        return [start for start in self._start if start is not None]

    @property
    def tensors(self) -> Left:
        """The model's own, those that are not None."""
        return [tensor for tensor in self._tensors if tensor is not None]

    @property
    def paths(self) -> list[str]:
        """Their names in the model, in the same order."""
        return [path for (path, _, _), start in zip(self._places, self._start, strict=True) if start is not None]

    def renew(self) -> None:
        """The step's start is what the buffers are now."""
        self._begin_here()

    def _begin_here(self) -> None:
        self._start = [None if tensor is None else tensor.detach().clone() for tensor in self._tensors]
        self._contents.equal(self._tensors, self._start)
        self._dirty = False

    def rehome(self, starts: Left) -> None:
        """Keep the step's start in other memory, and take its values from there."""
        values = iter(starts)
        self._start = [None if start is None else next(values) for start in self._start]
        self._write()

    def expect(self) -> None:
        """Another worker settles the step's start: look there before the next forward pass."""
        self._dirty = bool(self._places)

    def begin(self) -> None:
        """Announce a forward pass: it starts from the step's start."""
        self.restore()
        self._dirty = bool(self._places)

    def restore(self) -> None:
        """Put the step's start back, undoing what a forward pass wrote or assigned."""
        if self._dirty:
            self._write()
            self._dirty = False

    def left(self) -> Left:
        """The buffers as the forward pass left them: copies, or the step's start itself where nothing changed."""
        if not self._checked:
            self._check_places()
        if not self._places:
            return []
        found: Left = []
        now: dict[int, torch.Tensor] = {}
        for number, (tensor, start) in enumerate(zip(self._tensors, self._start, strict=True)):
            path, module, name = self._places[number]
            value = module._buffers.get(name)
            if start is None and value is None:
                continue
            if start is None or value is None or (value.shape, value.dtype) != (start.shape, start.dtype):
                raise UsageError(
                    f"buffer {path!r} went from {_spell(start)} to {_spell(value)} in forward, but buffers must keep "
                    "shape and dtype; create it in __init__ as it is to be, or keep it in a plain attribute"
                )
            if now.setdefault(id(tensor), value) is not value:
                raise UsageError(f"buffer {path!r} is shared by modules, but forward assigned it in only some of them")
            unwritten = self._contents.unwritten(number, value, tensor, start)
            found.append(start if unwritten else value.detach().clone())
        return found

    def settle(self, replicas: Sequence[tuple[int, Left]]) -> None:
        """Write the settled buffers of one step, given (samples, buffers) of each replica that ran, in order."""
        if not self._places:
            return
        weights = share_weights([samples for samples, _ in replicas])
        columns = zip(*(left for _, left in replicas), strict=True)
        settled = [self._contents.settled(list(column), weights) for column in columns]
        for start, value in zip(self.starts, settled, strict=True):
            if value is not start:
                start.copy_(value)
        self._write()
        self._dirty = False

    def _write(self) -> None:
        """The buffers are what they are at the step's start."""
        for (_, module, name), tensor in zip(self._places, self._tensors, strict=True):
            module._buffers[name] = tensor
        with torch.no_grad():
            self._contents.write(self._tensors, self._start)

    def _check_places(self) -> None:
        self._checked = True
        known = {path for path, _, _ in self._places}
        for path, _, _ in _places(self._model):
            if path not in known:
                raise UsageError(f"buffer {path!r} appeared in forward; register it in __init__ with its final shape")


def _places(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    """(path, module, name) of every buffer, None entries included."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return [
        (f"{prefix}.{name}" if prefix else name, module, name)
        for prefix, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if tensor is None or not tensor.numel() or tensor.untyped_storage().data_ptr() not in parameters
    ]


def mean_of(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted mean, added in the fold's order."""
    terms = [value if weight == 1 else value * weight for value, weight in zip(values, weights, strict=True)]
    return fold_mean(terms, weights, torch.add)


def _spell(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
