"""The torch framework on an accelerator: a copy of the model there, batches that come ahead, and few waits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from phalanx.definition.data import Share
from phalanx.definition.fields import Definition
from phalanx.definition.metrics import Metrics
from phalanx.errors import UsageError, safe_str
from phalanx.frameworks.torch import accelerators
from phalanx.frameworks.torch.adapter import Torch
from phalanx.frameworks.torch.arithmetic import DeviceArithmetic, Gradient
from phalanx.frameworks.torch.model import checked, put
from phalanx.frameworks.torch.replica.buffers import Buffers, Left
from phalanx.frameworks.torch.replica.feed import DeviceFeed, Feed, opened
from phalanx.frameworks.torch.replica.forward import NoMean
from phalanx.frameworks.torch.replica.lane import Lane
from phalanx.seams import Arithmetic
from phalanx.seams.records import Captured, Computed, Exported, Measurement, Todo, Watch, Weights

ALIGNED = 64  # bytes: four values of the widest dtype
INSTEAD = {  # docs/devices.md has each with its code
    "adaptive_avg_pool2d": "use AvgPool2d where sizes divide, or pool to one element",
    "adaptive_max_pool2d": "use MaxPool2d where sizes divide",
    "pool3d": "pool height and width in 2-D, then depth in 1-D",
    "nll_loss2d": "flatten what cross_entropy gets to two dimensions, and its target to one",
    "upsample": "interpolate bilinearly, or multiply by the matrix that interpolates",
    "reflection_pad": "join the tensor and its flipped borders with torch.cat",
    "grid_sampler": "look the neighbours up by indexing, and weight them",
    "ctc_loss": "compute this loss on the CPU, and move it back",
    "embedding_bag": "use Embedding, and the maximum over each bag",
    "cumsum": "multiply by a triangular matrix of ones",
    "max_unpooling": "scatter values into zeros by their indices",
    "median": "take the middle of what sort returns",
}


class TorchDevice(Torch):
    """Implements ``seams.Framework`` for PyTorch on an accelerator.

    Parameters
    ----------
    definition : Definition
    model : torch.nn.Module
        What ``make_model`` made, inside ``building``.
    device : torch.device
    allow : bool
        Whether operations without a deterministic kernel are allowed.
    """

    def __init__(self, definition: Definition, model: torch.nn.Module, device: torch.device, *, allow: bool) -> None:
        self._arithmetic = DeviceArithmetic()
        self.arithmetic: Arithmetic = self._arithmetic
        self._device, self._of_workers = device, ()
        kernels = accelerators.Deterministic(device, allow=allow)
        with self._surrounded(definition, kernels), accelerators.watched([device]):
            self.opened = functools.partial(opened, pins=device.type != "cpu" and accelerators.can_pin())
            self._build(definition, checked(model), movable=False)

    def _lane_on(self, definition: Definition, model: torch.nn.Module) -> Lane:
        put(model, self._device)
        host = Feed(definition, model, self._shapes)
        ahead = definition.collate_fn is None and definition.micro_batches == 1
        self._feed = DeviceFeed(host, self._device, ahead=ahead)
        return Lane(
            definition,
            model,
            self._feed.batch,
            Buffers(model, definition.buffers),
            NoMean(definition.replicas),
            later=True,
            host=host,
            chunk=self._feed.measured,
        )

    def gradients(self, todo: Sequence[Todo], watch: Watch | None = None) -> Iterator[Computed]:
        self._feed.begin(todo)
        for item in todo:
            with self._explained():
                begun = self._lane.gradient(item) if watch is None else self._lane.watched(item, watch)
            computed = _weighted(begun)
            if item is todo[-1]:
                self._lane.check_members()
            yield computed

    def outputs(self, todo: Sequence[Todo]) -> Iterator[bytes]:
        computing = super().outputs(todo)
        for _ in todo:
            with self._explained():
                said = next(computing)
            yield said

    def over_batch(self, said: Sequence[bytes], key: int, phase: int) -> float:
        with self._explained():
            return super().over_batch(said, key, phase)

    def norm(
        self, gradient: Gradient, losses: Sequence[Any], buffers: Sequence[tuple[int, Left]] | None = None
    ) -> Callable[..., list[float]]:
        """Only what this returns waits for the device. Before that the next batches are read, and buffers are settled.

        A plain loop enqueues its update behind the backward pass. Here the device idles from the norm to the first
        kernel of the update. So all that does not depend on the norm is enqueued before, and the numbers are on their
        way to the host before the next batches are on theirs to the device.
        """
        with accelerators.watched([self._device]):
            whole = self._updates.enqueue_norm(gradient, self._device)
            begun = self._arithmetic.begin_read([whole, *losses])
            self._lane.buffers.prepare(buffers)
        following, self.following = self.following, None
        for todo in [] if following is None else following():
            self._feed.read_ahead(todo)
        return begun

    def update(self, step: int, gradient: Gradient, buffers: Sequence[tuple[int, Left]] | None) -> None:
        with accelerators.watched([self._device]):
            super().update(step, gradient, buffers or None)

    def rewind(self) -> None:
        try:
            super().rewind()
        except RuntimeError:  # a device that is lost; what was raised of it is being handled
            if accelerators.answers(self._device):
                raise
        self._feed.forget()

    def measure(self, metrics: Metrics, key: int, share: Share, weights: Weights | None) -> Measurement:
        with accelerators.watched([self._device]):
            begun = super().measure(metrics, key, share, weights)
        return accelerators.watched([self._device])(begun)

    def export(self, steps: int, *, copy: bool, digest: bool = True) -> Exported:
        with accelerators.watched([self._device]):
            return super().export(steps, copy=copy, digest=digest)

    def capture(self, *, copy: bool) -> Captured:
        with accelerators.watched([self._device]):
            return super().capture(copy=copy)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Inside, the device is given something to compute by user code; known errors are explained."""
        try:
            with accelerators.watched([self._device]):
                yield
        except RuntimeError as error:
            if "does not have a deterministic implementation" not in safe_str(error):
                raise
            name = str(error).split(" does not have")[0]
            instead = next((way for part, way in INSTEAD.items() if part in name), "use another operation")
            raise UsageError(
                f"{name} has no deterministic kernel on {self._device}, so equal bits cannot be promised; {instead}, "
                "or give the promise up: nondeterministic='allow'"
            ) from error


def _weighted(computed: Computed) -> Computed:
    """What a replica computed, with its weight read; at weight 0 the gradient is dropped.

    The norm's kernel adds in another order where memory begins at an odd address, as views may. A gradient that has
    travelled never does, so those that stay must not either.
    """
    if callable(computed.weight):
        computed.weight = computed.weight()
        if computed.weight == 0:
            computed.gradient = None
    if computed.gradient is not None:
        computed.gradient = [
            entry if entry is None or entry.data_ptr() % ALIGNED == 0 else entry.clone() for entry in computed.gradient
        ]
    return computed
