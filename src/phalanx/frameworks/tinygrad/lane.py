"""One device: its copy of the weights, and a program per shape of share, captured once and replayed since.

Loss, gradients and buffers are realized together, in one call, as what is realized together decides which programs
there are, and so the bits. A captured program reads and writes the same memory in every call.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tinygrad.dtype import dtypes
from tinygrad.engine.jit import TinyJit
from tinygrad.helpers import Context
from tinygrad.tensor import Tensor

from phalanx.definition.data import map_tree
from phalanx.errors import UsageError
from phalanx.frameworks.tinygrad.environment import RANDOM, kept
from phalanx.frameworks.tinygrad.forward import Batch, Forward, plain
from phalanx.frameworks.tinygrad.model import Model, owned, write
from phalanx.plan.keys import MASK32
from phalanx.seams import Computed
from phalanx.surroundings.presence import outside as no_step

# What ``Tensor.manual_seed`` puts before the seed for the device that is used first after it.
FIRST = int.from_bytes(hashlib.sha256((0).to_bytes(4, "big")).digest()[-4:], "big")


class Lane:
    """A device with its own copy of the model's tensors.

    Parameters
    ----------
    device : str
    model : Model
    forward : Forward

    Attributes
    ----------
    params, buffers : list of Tensor
        The device's own, in the model's order.
    """

    def __init__(self, device: str, model: Model, forward: Forward) -> None:
        self.device = device
        self.params = [owned(plain(tensor), device) for tensor in model.params.values()]
        self.buffers = [owned(plain(tensor), device).is_param_(False) for tensor in model.buffers.values()]
        self._model = model
        self._forward = forward
        self._key = owned(np.zeros(2, np.uint32), device)
        self._programs: dict[Any, Program] = {}
        self._unread: Pending | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, then buffers."""
        return [*self.params, *self.buffers]

    def take(self, params: Sequence[np.ndarray]) -> None:
        """Have these weights."""
        for tensor, array in zip(self.params, params, strict=True):
            write(tensor, array)

    def begin(self, batch: Batch, key: int, starts: Sequence[np.ndarray]) -> Callable[[], Computed]:
        """Begin to compute loss and gradient; what is returned waits for them."""
        program = self._prepared("loss", batch, key, starts)
        self._unread = pending = Pending(program, self.buffers, self._forward.weight)
        return pending.record

    def output(self, batch: Batch, key: int, starts: Sequence[np.ndarray]) -> tuple[Any, Any]:
        """The output for a batch and its target, in an evaluation; in memory of their own."""
        program = self._prepared("output", batch, key, starts)
        found = program.call(), self._forward.target(batch.rebuilt(program.inputs))
        return map_tree(self._copied, found[0]), map_tree(self._copied, found[1])

    def _copied(self, leaf: Any) -> Any:
        return owned(plain(leaf), self.device) if isinstance(leaf, Tensor) else leaf

    def _prepared(self, what: str, batch: Batch, key: int, starts: Sequence[np.ndarray]) -> Program:
        """A program with its inputs in place; what the device computed before is read, as it would be overwritten."""
        if self._unread is not None:
            self._unread.finish()
            self._unread = None
        kind = what, batch.form
        if kind not in self._programs:
            inputs = [owned(array, self.device) for array in batch.arrays]
            traced = self._loss if what == "loss" else self._output
            self._programs[kind] = Program(inputs, lambda told: traced(batch.rebuilt(inputs), told), what == "loss")
        program = self._programs[kind]
        write(self._key, np.array([FIRST, key & MASK32], np.uint32))
        for tensor, array in zip([*program.inputs, *self.buffers], [*batch.arrays, *starts], strict=True):
            write(tensor, array)
        return program

    def _loss(self, batch: Any, told: dict[str, Any]) -> list[Tensor]:
        """Loss, gradients, and the weight if it is a tensor, realized with the buffers."""
        with self._traced() as whole:
            params, buffers = list(self._model.params.values()), list(self._model.buffers.values())
            before = [tensor.uop for tensor in params]
            loss, weight = self._forward.loss(whole, batch)
            self._check_written(loss, before)
            gradient = [
                entry.clone(device=self.device) if entry.device is None else entry for entry in loss.gradient(*params)
            ]
            in_tensor = isinstance(weight, Tensor)
            told |= {"weight": None if in_tensor else weight, "in a tensor": in_tensor}
            found = [loss, *gradient, *([weight] if in_tensor else [])]
            Tensor.realize(*found, *buffers)
            found = [entry.contiguous() for entry in found]  # of a gradient that is another's transpose, a copy
            Tensor.realize(*found)
            return found

    def _output(self, batch: Any, told: dict[str, Any]) -> Any:
        with self._traced() as whole:
            return self._forward.output(whole, batch)

    @contextlib.contextmanager
    def _traced(self) -> Iterator[Any]:
        """The model, with this device's tensors and a random stream of its own for as long as functions are traced."""
        pairs = list(zip(self._model.tensors, self.tensors, strict=True))
        before = [(tensor, tensor.uop) for pair in pairs for tensor in pair]
        counter = Tensor([0, 0], device=self.device, dtype=dtypes.uint32)
        try:
            with no_step(), contextlib.ExitStack() as drawn:
                drawn.callback(kept())
                self._forward.seed()
                streams = 0, {self.device: self._key}, {self.device: counter}
                for name, value in zip(RANDOM, streams, strict=True):
                    setattr(Tensor, name, value)
                for tensor, own in pairs:
                    tensor.replace(own)
                yield self._model.whole
                self._check_streams()
            self._model.check_places()
        finally:
            for tensor, uop in before:
                tensor.uop = uop

    def _check_streams(self) -> None:
        """Refuse random numbers of another device than the replica's: their stream would be nobody's."""
        others = sorted(set(Tensor._device_seeds) - {self.device})
        if others:
            raise UsageError(
                f"a random tensor was made on {others[0]}, but its replica is computed on {self.device}, and only that "
                "device's numbers are keyed; name the device: Tensor.randn(..., device=x.device)"
            )

    def _check_written(self, loss: Tensor, before: Sequence[Any]) -> None:
        """Refuse parameters that a forward pass writes, and those that the loss does not depend on."""
        reached = loss.uop.toposort()
        for (name, tensor), uop in zip(self._model.params.items(), before, strict=True):
            if tensor.uop is not uop:
                raise UsageError(
                    f"forward writes into the parameter {name!r}, which only the optimizer may; mark it as no "
                    "parameter: .is_param_(False)"
                )
            if uop not in reached:
                raise UsageError(
                    f"the loss does not depend on the parameter {name!r}, and tinygrad's optimizers need a gradient "
                    "for each; leave it out of the model, or mark it: .is_param_(False)"
                )


class Program:
    """What is computed for one shape of share on one device: traced twice, the second time for good.

    Parameters
    ----------
    inputs : sequence of Tensor
        Where it finds its batch.
    traced : callable
        ``traced(told)`` computes tensors; ``told`` takes what is no tensor.
    training : bool
    """

    def __init__(self, inputs: Sequence[Tensor], traced: Callable[[dict[str, Any]], Any], training: bool) -> None:
        self.inputs = inputs
        self.told: dict[str, Any] = {}
        self._program: Callable[[], Any] = TinyJit(lambda: traced(self.told))
        self._training = int(training)

    def call(self) -> Any:
        """Compute; what is returned is overwritten by the next call."""
        with Context(TRAINING=self._training):
            return self._program()


class Pending:
    """What a device computes for a replica, until it is read.

    Parameters
    ----------
    program : Program
        Is called here.
    buffers : sequence of Tensor
        The device's.
    weight : callable
        Checks a weight that the loss told.
    """

    def __init__(self, program: Program, buffers: Sequence[Tensor], weight: Callable[[Any], float | None]) -> None:
        self._found: Sequence[Tensor] = program.call()
        self._told: Any = program.told["weight"]
        self._in_tensor: bool = program.told["in a tensor"]
        self._buffers = buffers
        self._weight = weight
        self._read: tuple[list[np.ndarray], list[np.ndarray]] | None = None

    def finish(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Loss, gradients and the weight, and buffers, read from the device once."""
        if self._read is None:
            self._read = [plain(tensor) for tensor in self._found], [plain(tensor) for tensor in self._buffers]
        return self._read

    def record(self) -> Computed:
        """It in numpy arrays of its own."""
        (loss, *gradient), buffers = self.finish()
        weight = self._weight(gradient.pop() if self._in_tensor else self._told)
        return Computed(float(loss), weight, None if weight == 0 else gradient, list(buffers))
