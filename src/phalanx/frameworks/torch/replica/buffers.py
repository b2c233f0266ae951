"""Buffers: replicas start each step from the same ones; after it they are settled by one rule.

A buffer whose bytes are equal on all replicas that ran keeps those bytes (a folded mean of equal floats would change
constants). Otherwise floating and complex ones become the mean, weighted by sample count and added in the fold's order;
others, and floats of a byte, which torch cannot add, take the first replica's. A recipe may say otherwise by name. So
replicas themselves carry nothing from step to step and may run anywhere. Then the optimizers are stepped; what they or
their hooks write into buffers is kept.

A queue is no running statistic, and its mean is nonsense. It shows where a step leaves most slices as they are, while
replicas write others unlike. A moving average leaves what it has come to: zeros of inputs that are always 0, and
constants of codes that were never used. So slices in which all elements are equal say nothing, and none of one element.
In its first two steps a codebook may come to the same bits by rounding: 0.99 t / 0.99 c. So the third step is judged;
where steps have phases, the third of each phase, as each writes what it likes.

On a device nothing is read back. Buffers are taken to be written by every forward pass: no counter of torch's tells
(batch norm writes its statistics uncounted), and comparing would wait for the device. Whether replicas left equal bytes
is found out, and decided, on the device, for all buffers of a dtype together: a model may have hundreds of small ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch

from phalanx.definition.checks import answer, warn
from phalanx.definition.fields import matches
from phalanx.definition.plain import inexact
from phalanx.errors import UsageError
from phalanx.frameworks.torch.arithmetic import WHOLE, bytes_of, checksum, copy_all, is_dense, same_bytes
from phalanx.plan.fold import fold_mean
from phalanx.plan.shares import share_weights

Left = list[torch.Tensor]  # all buffers that are not None, as a forward pass left them
LAST = 2  # the update, of those of a phase, in which a queue is refused
LOOKED = frozenset((*range(LAST + 1), *(10**power for power in range(1, 16))))
QUEUE = (
    "buffer {0!r} looks like a queue: replicas wrote different values into a part of it, and left the rest as it was. "
    "Their mean is not what one device would have. Let loss_fn write it, which sees the whole batch with "
    "loss_over='batch' (docs/batch_losses.md). Or say how it is settled: buffers={{{0!r}: 'first'}} keeps what the "
    "first replica wrote, 'mean' averages it; or use replicas=1 (all are part of the answer)"
)


class Buffers:
    """The buffers of one model, as they were at the step's start and as forward passes leave them.

    A buffer in the memory of a parameter is that parameter, and is not handled here.

    Parameters
    ----------
    model : torch.nn.Module
    rules : mapping of str to str, optional
        "mean", "first" or "refuse" by names, as in a recipe.

    Attributes
    ----------
    of_loss : dict of int to torch.Tensor
        What a loss over the whole batch wrote in this step, by number.
    told : float
        A checksum of what the last update wrote into buffers, for workers to compare; 0 where none was seen here.
    """

    def __init__(self, model: torch.nn.Module, rules: Mapping[str, str] | None = None) -> None:
        self._model = model
        self._places = _places(model)
        self.told = 0.0
        self._warn_once = functools.cache(warn)
        self._tensors = [module._buffers[name] for _, module, name in self._places]
        self._remote = any(tensor.device.type != "cpu" for tensor in self.tensors)  # looking at bytes would wait
        self._checked = False
        self._prepared: Left | None = None
        self.of_loss: dict[int, torch.Tensor] = {}
        self.begin_here()
        rules, paths = rules or {}, self.paths
        for wanted in rules:
            if not any(matches(wanted, path) for path in paths):
                raise UsageError(f"buffers names {wanted!r}, and no buffer is called so; {answer(wanted, paths, {})}")
        self._rules = [next((rule for name, rule in rules.items() if matches(name, path)), "") for path in paths]
        self._means = [
            inexact(start.dtype) and rule != "first" for start, rule in zip(self.starts, self._rules, strict=True)
        ]

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

    def begin_here(self) -> None:
        """The step's start is what the buffers are now."""
        self._start = [None if tensor is None else tensor.detach().clone() for tensor in self._tensors]
        self._dirty = False

    def rehome(self, starts: Left) -> None:
        """Keep the step's start in other memory, and take its values from there."""
        values = iter(starts)
        self._start = [None if start is None else next(values) for start in self._start]
        self._write()

    def expect(self) -> None:
        """Another worker settles the step's start: look there before the next forward pass."""
        self._dirty, self.told, self.of_loss = bool(self._places), 0.0, {}

    def begin(self) -> None:
        """Announce a forward pass: it starts from the step's start."""
        self.restore()
        self._dirty = bool(self._places)

    def restore(self) -> None:
        """Put the step's start back, undoing what a forward pass wrote or assigned."""
        if self._dirty:
            self._write()
            self._dirty = False

    def keep(self) -> list[str]:
        """Take what the optimizers have just written as the step's start; returns of which. Devices do not compare."""
        now = self.left("the optimizer or its step hook")
        pairs = zip(self.starts, now, strict=True)
        wrote = {path: pair for path, pair in zip(self.paths, pairs, strict=True) if pair[0] is not pair[1]}
        self.told = 0.0 if self._remote else 1.0 + checksum([value for _, value in wrote.values()])
        copy_all(wrote.values())
        self._dirty = bool(self._places)
        return list(wrote)

    def left(self, where: str = "forward") -> Left:
        """The buffers as the forward pass left them: copies, or the step's start itself where nothing changed."""
        if not self._checked:
            self._check_places()
        if not self._places:
            return []
        buffers: Left = []
        now: dict[int, torch.Tensor] = {}
        for (path, module, name), tensor, start in zip(self._places, self._tensors, self._start, strict=True):
            value = module._buffers.get(name)
            if start is None and value is None:
                continue
            if start is None or value is None or (value.shape, value.dtype) != (start.shape, start.dtype):
                raise UsageError(
                    f"buffer {path!r} went from {_spell(start)} to {_spell(value)} in {where}, but buffers must keep "
                    "shape and dtype; create it in __init__ as it is to be, or keep it in a plain attribute"
                )
            if now.setdefault(id(tensor), value) is not value:
                raise UsageError(f"buffer {path!r} is shared by modules, but {where} assigned it in only some of them")
            if self._remote:
                buffers.append(value.detach())
            else:
                buffers.append(start if same_bytes(value, start) else value.detach().clone())
        if self._remote:
            for row in self._rows:
                row.put(buffers, row.flat(buffers))
        return buffers

    def settle(self, replicas: Sequence[tuple[int, Left]], count: int = -1, *, later: bool = False) -> None:
        """Write the settled buffers of one step, given (samples, buffers) of each replica that ran, in order.

        ``count``: how often this phase was done before. ``later``: on a device, the model's own follow before the next
        forward pass, as nobody looks at them before.
        """
        if not self._places:
            return
        if count in LOOKED or "refuse" in self._rules:
            self._look(count, list(zip(*(left for _, left in replicas), strict=True)))
        if self._remote:
            settled, self._prepared = self._prepared or self._settled(replicas), None
            settled = self._after_loss(settled)
            copy_all(zip(self.starts, settled, strict=True))
            self._dirty = True
            if not later:
                self.restore()
            return
        for start, value in zip(self.starts, self._after_loss(self._mean(replicas)), strict=True):
            if value is not start:
                start.copy_(value)
        self._write()
        self._dirty = False

    def _mean(self, replicas: Sequence[tuple[int, Left]]) -> Left:
        """The settled buffers in host memory; some are the step's start itself, or a replica's."""
        weights = share_weights([samples for samples, _ in replicas])
        columns = zip(*(left for _, left in replicas), strict=True)
        return [
            mean_of(column, weights) if mean and not _alike(column) else column[0]
            for column, mean in zip(columns, self._means, strict=True)
        ]

    def _after_loss(self, settled: Left) -> Left:
        """What a loss over the whole batch wrote stands in place of what was settled."""
        written, self.of_loss = self.of_loss, {}
        return [written.get(number, value) for number, value in enumerate(settled)]

    @contextlib.contextmanager
    def shown(self, replicas: Sequence[tuple[int, Left]]) -> Iterator[None]:
        """Inside, the model has the buffers as these replicas left them, settled: a loss over the batch may write them.

        What it writes is what ``settle`` comes to. The model gets other tensors meanwhile: the graph of a forward pass
        may hold its own, and those must not be written before the backward pass.
        """
        kept = self._tensors, self._start, [module._buffers[name] for _, module, name in self._places]
        values = iter(self._settled(replicas) if self._remote else self._mean(replicas))
        self._start = [None if start is None else next(values) for start in self._start]
        clones = {
            id(tensor): start.clone() for tensor, start in zip(kept[0], self._start, strict=True) if start is not None
        }
        self._tensors = [clones.get(id(tensor)) for tensor in kept[0]]  # one buffer of two modules stays one
        try:
            self._place(self._tensors)
            yield
            left = zip(self.left("loss_fn"), self.starts, strict=True)
            self.of_loss = {number: value for number, (value, start) in enumerate(left) if value is not start}
        finally:
            self._tensors, self._start, before = kept
            self._place(before)

    def _place(self, tensors: Sequence[torch.Tensor | None]) -> None:
        for (_, module, name), tensor in zip(self._places, tensors, strict=True):
            module._buffers[name] = tensor

    def prepare(self, replicas: Sequence[tuple[int, Left]] | None) -> None:
        """Begin to settle on a device, before it is known whether the step counts; ``settle`` takes what came of it."""
        self._prepared = self._settled(replicas) if replicas and self._places and self._remote else None

    def _settled(self, replicas: Sequence[tuple[int, Left]]) -> Left:
        """The settled buffers on a device, in memory of their own."""
        settled, weights = self.starts, share_weights([samples for samples, _ in replicas])
        home = [value.device for value in settled]
        lefts = [[value.to(at) for value, at in zip(left, home, strict=True)] for _, left in replicas]
        for row in self._rows:
            row.put(settled, row.settled([row.flat(left) for left in lefts], weights))
        return settled

    def _look(self, count: int, columns: Sequence[Sequence[torch.Tensor]]) -> None:
        """Refuse buffers that differ and may not, or that are queues; a queue that is seen late causes a warning."""
        for path, start, rule, column in zip(self.paths, self.starts, self._rules, columns, strict=True):
            if rule == "refuse" and not _alike(column):
                raise UsageError(
                    f"buffer {path!r} differs over replicas, which buffers={{...: 'refuse'}} refuses; say 'mean' or "
                    "'first', or write the same on all replicas"
                )
            if not rule and count in LOOKED and count >= LAST and is_queue(start, column):
                owner = self._model.get_submodule(path.rpartition(".")[0])
                if type(owner).__module__.startswith("torch."):
                    continue
                if count == LAST:
                    raise UsageError(QUEUE.format(path))
                self._warn_once(QUEUE.format(path))

    @functools.cached_property
    def _rows(self) -> list[FlatBuffers]:
        """All buffers, by dtype, and those of which the first replica's is taken."""
        numbers: dict[tuple[torch.dtype, bool], list[int]] = {}
        for number, (start, mean) in enumerate(zip(self.starts, self._means, strict=True)):
            numbers.setdefault((start.dtype, mean), []).append(number)
        return [FlatBuffers(self.starts, mine, mean=mean) for (_, mean), mine in numbers.items()]

    def _write(self) -> None:
        """Put the buffers back to the step's start. Equal ones stay unwritten: constants may be read-only."""
        changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (_, module, name), tensor, start in zip(self._places, self._tensors, self._start, strict=True):
            module._buffers[name] = tensor
            if tensor is None or start is None:
                continue
            if (self._remote and is_dense(tensor)) or not same_bytes(tensor, start):  # expanded: cannot be written
                if tensor.shape != start.shape:
                    tensor.resize_(start.shape)  # as forward did, which is refused
                changed.append((tensor, start))
        copy_all(changed)

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


def _alike(column: Sequence[torch.Tensor]) -> bool:
    return all(same_bytes(column[0], other) for other in column[1:])


def is_queue(start: torch.Tensor, column: Sequence[torch.Tensor]) -> bool:
    """Whether replicas wrote some slices unlike, and none wrote most others, whose elements are not all equal."""
    if start.dtype not in WHOLE or not start.is_floating_point() or _alike(column):
        return False
    bits, *others = (value.view(WHOLE[start.dtype]) for value in (start, *column))
    moved = torch.stack([value != bits for value in others]).any(0)
    for dim, length in enumerate(start.shape):
        rows, written = (each.movedim(dim, 0).reshape(length, -1) for each in (start, moved))
        if 2 * int(((rows != rows[:, :1]).any(1) & ~written.any(1)).sum()) > length:
            return True
    return False


class FlatBuffers:
    """Buffers of one dtype on a device, one after another in flat memory.

    Parameters
    ----------
    starts : Left
        All buffers of the model.
    numbers : sequence of int
        Those of this dtype.
    mean : bool
        Whether they become a mean where they differ, and not the first replica's.
    """

    def __init__(self, starts: Left, numbers: Sequence[int], *, mean: bool) -> None:
        own = [starts[number] for number in numbers]
        self._numbers, self._shapes = numbers, [value.shape for value in own]
        self._sizes = [value.numel() for value in own]
        self._mean = mean
        # Made before gradients travel: a copy to a device waits for its stream, which hangs once a peer is gone.
        self._cuts = _cuts(tuple(self._sizes), own[0].device)

    def flat(self, buffers: Left) -> torch.Tensor:
        """A copy of the values, of all the model's buffers, that belong here."""
        return torch.cat([buffers[number].reshape(-1) for number in self._numbers])

    def put(self, buffers: Left, flat: torch.Tensor) -> None:
        """Put the parts of ``flat`` in their places among all buffers."""
        for number, shape, part in zip(self._numbers, self._shapes, flat.split(self._sizes), strict=True):
            buffers[number] = part.view(shape)

    def settled(self, replicas: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """The settled values, of what each replica left."""
        first, *others = replicas
        if not others or not self._mean:
            return first
        mine = bytes_of(first)
        equal = torch.stack([torch.eq(mine, bytes_of(other)) for other in others]).all(0)
        differing = torch.logical_not(equal.view(-1, first.itemsize).all(1))
        # Over numbers without a fraction, so that the order of additions changes nothing.
        counts, ends = self._cuts
        up_to = torch.cat([ends.new_zeros(1), differing.cumsum(0)])
        buffer_of = torch.searchsorted(ends, torch.arange(len(first), device=ends.device), right=True)
        alike = up_to[ends] == up_to[ends - counts]
        return torch.where(alike[buffer_of], first, mean_of(replicas, weights))


@functools.lru_cache(64)
def _cuts(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The sizes, and the ends of stretches of these sizes, on a device; by hand, buffers are seen anew in each step."""
    counts = torch.tensor(sizes).to(device)
    return counts, counts.cumsum(0)


def mean_of(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted mean, added in the fold's order."""
    terms = [value if weight == 1 else value * weight for value, weight in zip(values, weights, strict=True)]
    return fold_mean(terms, weights, torch.add)


def _spell(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
