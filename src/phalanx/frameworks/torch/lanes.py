"""The torch framework over several devices of one process, or on one accelerator.

Each device has a copy of the model and computes a block of replicas. A parameter has one owner among the devices: there
its gradients are added up, and there the recipe's own optimizer, one over the owners' parameters, updates it. So the
optimizer's state exists once over all devices. Then the owner's bytes are copied to the others.

One thread gives all devices their work, in turn, and waits for nothing until each has all of it. More threads cannot:
torch's random generators belong to the process, and are seeded before each replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from phalanx.definition.data import Share
from phalanx.definition.evaluation import Metrics
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.record import Unshared
from phalanx.frameworks.torch import accelerators, arithmetic
from phalanx.frameworks.torch.adapter import Torch
from phalanx.frameworks.torch.arithmetic import DeviceArithmetic, Gradient, bytes_of, placed, same_bytes
from phalanx.frameworks.torch.model import check_apart, checked, hooked, put, same
from phalanx.frameworks.torch.optimizer import updates_of
from phalanx.frameworks.torch.replica.buffers import Buffers, Left
from phalanx.frameworks.torch.replica.feed import DeviceFeed, Feed
from phalanx.frameworks.torch.replica.forward import AmbiguousMean, Unread
from phalanx.frameworks.torch.replica.lane import Lane
from phalanx.plan.fold import Placement, dealt, hosts
from phalanx.seams import Arithmetic, Lanes
from phalanx.seams.records import Captured, Computed, Exported, Measurement, Todo, Training, Watch, Weights


class TorchLanes(Torch):
    """Implements ``seams.Framework`` for PyTorch on several devices.

    Parameters
    ----------
    definition : Definition
    devices : sequence of torch.device
        Of one kind, at most one per replica.
    model : Any
        What ``make_model`` made, inside ``building``.
    again : callable
        Makes the same model once more, for another device.
    allow : bool
        Whether operations without a deterministic kernel are allowed.
    part : (int, int)
        Which of how many processes this is: it computes its block of the replicas.

    Attributes
    ----------
    devices : tuple of torch.device
    """

    def __init__(
        self,
        definition: Definition,
        devices: Sequence[torch.device],
        model: Any,
        again: Callable[[], Any],
        *,
        allow: bool,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.arithmetic: Arithmetic = DeviceArithmetic()
        self.devices = tuple(devices)
        self.sharing: Any = Unshared(
            f"the model is on {self.devices[0]}, but worker processes compute on the CPU in this version; use "
            "engine='inline'"
        )
        with self._surrounded(definition, accelerators.Deterministic(devices, allow=allow)):
            rank, processes = part
            placement = hosts(definition.replicas, processes, len(devices))[1][rank]
            first = checked(model)
            models = [first, *(same(first, checked(again())) for _ in devices[1:])]
            check_apart(definition, models)
            with accelerators.watched(self.devices):
                self._build_lanes(definition, models, placement)

    def _build_lanes(self, definition: Definition, models: Sequence[torch.nn.Module], placement: Placement) -> None:
        self._find_compiled(definition, models[0])
        ambiguous = AmbiguousMean(definition)
        self._lanes: list[Lane] = []
        self._feeds: list[DeviceFeed] = []
        for own, device in zip(models, self.devices, strict=True):
            put(own, device)
            host = Feed(definition, own, self._shapes)
            ahead = definition.collate_fn is None and definition.micro_batches == 1
            self._feeds.append(DeviceFeed(host, device, ahead=ahead))
            self._lanes.append(Lane(definition, own, self._feeds[-1].batch, Buffers(own), ambiguous, later=True))
        self._lane = self._lanes[0]
        self._lane_of = {replica: number for number, block in enumerate(placement.blocks) for replica in block}
        sizes = [parameter.nbytes for parameter in self._lane.parameters]
        owners = self._own(definition, dealt(sizes, len(self._lanes)))
        if self._updates.foreign:  # it may look at several parameters at once
            owners = self._own(definition, [0] * len(sizes))
        self._exchange = Exchange(placement, self.devices, owners, self._lanes)
        self.lanes: Lanes | None = self._exchange
        self._exchange.spread()  # the optimizer's factory may have changed parameters
        self._freeze_alike()

    def _own(self, definition: Definition, owners: Sequence[int]) -> Sequence[int]:
        """Give each parameter an owner, and make one optimizer over the owners' parameters."""
        named = [self._lanes[owner].named[index] for index, owner in enumerate(owners)]
        hooks = [hooked(parameter) for _, parameter in named]
        self._updates = updates_of(definition, named, self._lane.model)
        if len(self._lanes) > 1 and [hooked(parameter) for _, parameter in named] != hooks:
            raise UsageError(
                "optimizer registers hooks on parameters, but each of several devices has parameters of its own; "
                "register them in make_model, or name one device"
            )
        return owners

    def gradients(self, todo: Sequence[Todo], watch: Watch | None = None) -> Iterator[Computed]:
        """Every device gets a replica to compute before the first gradient is asked for."""
        for feed in self._feeds:
            feed.begin(todo)
        count = len(self._lanes)
        for start in range(0, len(todo), count):
            begun: list[Computed | Exception] = []
            for item in todo[start : start + count]:
                try:
                    begun.append(self._begin(item, watch))
                except Exception as error:
                    begun.append(error)  # raised at that replica's turn, after those before it
                    break
            for computed in begun:
                if isinstance(computed, Exception):
                    raise computed
                yield _weighted(computed)

    def norm(self, gradient: Gradient) -> float:
        """Only here does a step wait for its devices."""
        with accelerators.watched(self.devices):
            whole = self._updates.enqueue_norm(gradient, self.devices[0])
        following, self._exchange.following = self._exchange.following, None
        for todo in [] if following is None else following():
            self._feeds[self._lane_of[todo.replica]].read_ahead(todo)
        with accelerators.watched(self.devices):
            return whole.item()

    def update(self, step: int, gradient: Gradient, buffers: Sequence[tuple[int, Left]] | None) -> None:
        with accelerators.watched(self.devices):
            self._updates.apply(step, gradient)
            self._exchange.spread()
            self._settle(buffers or [])
        if not self._describable:
            self._describe()

    def schedule(self, value: float | Training, epoch: int | None = None) -> None:
        """A schedule may freeze parameters, so all copies of the model freeze the same."""
        super().schedule(value, epoch)
        self._freeze_alike()

    def rewind(self) -> None:
        for lane, feed in zip(self._lanes, self._feeds, strict=True):
            lane.rewind()
            feed.forget()

    def measure(self, metrics: Metrics, key: int, share: Share, weights: Weights | None) -> Measurement:
        """Chunks go to the devices in turn. A chunk is always computed on the same one."""
        number = int(share.samples[0]) // len(share.samples) % len(self.devices)
        device = self.devices[number]
        with accelerators.watched([device]), accelerators.current(device):
            begun = self._lanes[number].measure(metrics, key, share, weights)

        def read() -> list[Any]:
            with accelerators.watched([device]):
                return begun()

        return read

    def export(self, steps: int, *, copy: bool, digest: bool = True) -> Exported:
        """The exported model is on the first device."""
        with accelerators.watched(self.devices):
            return super().export(steps, copy=copy, digest=digest)

    def capture(self, *, copy: bool) -> Captured:
        with accelerators.watched(self.devices):
            return super().capture(copy=copy)

    def adopt(self, state: Captured) -> None:
        """The other devices take over what the first has."""
        super().adopt(state)
        with torch.no_grad():
            for lane in self._lanes[1:]:
                for mine, theirs in zip(lane.parameters, self._lane.parameters, strict=True):
                    mine.copy_(theirs)
        self._spread_buffers()
        self._freeze_alike()

    def _begin(self, todo: Todo, watch: Watch | None) -> Computed:
        """Give a device a replica to compute; runs user code."""
        number = self._lane_of[todo.replica]
        device = self.devices[number]
        try:
            with accelerators.watched([device]), accelerators.current(device):
                lane = self._lanes[number]
                return lane.gradient(todo) if watch is None else lane.watched(todo, watch)
        except RuntimeError as error:
            if "does not have a deterministic implementation" not in str(error):
                raise
            name = str(error).split(" does not have")[0]
            raise UsageError(
                f"{name} has no deterministic kernel on {device}, so equal bits cannot be promised; use another "
                "operation, or give the promise up: nondeterministic='allow'"
            ) from error

    def _settle(self, buffers: Sequence[tuple[int, Left]]) -> None:
        """Settle buffers on the first device, and copy them to the others."""
        if not buffers:
            return
        home = self.devices[0]
        gathered = [(samples, [value.to(home, non_blocking=True) for value in values]) for samples, values in buffers]
        self._lane.buffers.settle(gathered)
        self._spread_buffers()

    def _spread_buffers(self) -> None:
        for lane in self._lanes[1:]:
            lane.buffers.settle([(1, self._lane.buffers.starts)])

    def _freeze_alike(self) -> None:
        for index, (_, parameter) in enumerate(self._updates.named if len(self._lanes) > 1 else ()):
            for lane in self._lanes:
                if lane.parameters[index].requires_grad != parameter.requires_grad:
                    lane.parameters[index].requires_grad_(parameter.requires_grad)


def _weighted(computed: Computed) -> Computed:
    """What a replica computed, with its weight read; at weight 0 the gradient is dropped."""
    if isinstance(computed.weight, Unread):
        computed.weight = computed.weight.read()
        if computed.weight == 0:
            computed.gradient = None
    return computed


class Exchange:
    """Implements ``engines.hosts.link.TravellingLanes``: who owns which parameter, and copies to and from owners.

    Copies between devices are torch's own. Each waits for earlier work of both devices; the host waits for nothing.

    Parameters
    ----------
    placement : Placement
        Which device computes which replicas.
    devices : sequence of torch.device
    owners : sequence of int
        The number of the device that updates each parameter.
    lanes : sequence of Lane
        What each device computes with.
    """

    def __init__(
        self, placement: Placement, devices: Sequence[torch.device], owners: Sequence[int], lanes: Sequence[Lane]
    ) -> None:
        self.placement = placement
        self._lanes = lanes
        self._homes = devices
        self._places = [devices[owner] for owner in owners]
        self._owners = owners
        self.following: Callable[[], Sequence[Todo]] | None = None

    def moved(self, vector: Gradient) -> Gradient:
        with accelerators.watched(self._homes):
            return placed(vector, self._places)

    @property
    def sizes(self) -> list[int]:
        return [start.nbytes for start in self._lanes[0].buffers.starts]

    @property
    def blanks(self) -> list[torch.Tensor]:
        return [arithmetic.blank(arithmetic.spec_of(parameter)) for parameter in self._lanes[0].parameters]

    def home(self, vector: Gradient) -> Gradient:
        """Waits for the devices."""
        return [None if entry is None else entry.cpu() for entry in vector]

    def outward(self, left: Sequence[torch.Tensor]) -> list[bytes | None]:
        pairs = zip((value.cpu() for value in left), self._lanes[0].buffers.starts, strict=True)
        return [None if same_bytes(value, start.cpu()) else bytes_of(value).numpy().tobytes() for value, start in pairs]

    def inward(self, pieces: Sequence[bytes | bytearray | None]) -> Left:
        buffers: Left = []
        for piece, start in zip(pieces, self._lanes[0].buffers.starts, strict=True):
            if piece is None:
                buffers.append(start)
            else:
                value = torch.frombuffer(bytearray(piece), dtype=start.dtype).reshape(start.shape)
                buffers.append(value.to(start.device))
        return buffers

    def spread(self) -> None:
        """Copy every parameter from its owner to the other devices."""
        with torch.no_grad():
            for number, owner in enumerate(self._owners):
                updated = self._lanes[owner].parameters[number]
                for lane in self._lanes:
                    if lane is not self._lanes[owner]:
                        lane.parameters[number].copy_(updated, non_blocking=True)
