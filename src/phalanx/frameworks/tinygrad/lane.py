"""One device: its copy of the weights, and a program per shape of share, captured once and replayed since.

Loss, gradients and buffers are realized in one call: what is realized together decides which programs there are, and
so the bits. A captured program reads and writes the same memory in every call.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tinygrad.dtype import dtypes
from tinygrad.engine.jit import TinyJit
from tinygrad.helpers import Context
from tinygrad.tensor import Tensor

from phalanx.definition.data import leaves, map_tree
from phalanx.errors import UsageError
from phalanx.frameworks.arrays import NUMBERLESS, Functions, check_leaf
from phalanx.frameworks.tinygrad.devices import RANDOM, kept, put_back
from phalanx.frameworks.tinygrad.model import Model, owned, plain, write
from phalanx.plan.keys import MASK32
from phalanx.seams.records import Computed
from phalanx.surroundings.presence import outside as no_step

# What ``Tensor.manual_seed`` puts before the seed for the device that is used first after it.
FIRST = int.from_bytes(hashlib.sha256((0).to_bytes(4, "big")).digest()[-4:], "big")
REFUSED = NUMBERLESS + "Vc"  # and complex numbers


class Forward(Functions):
    """Calls the recipe's functions, as a plain loop would."""

    kind, called = Tensor, "a scalar tensor of tinygrad"
    is_float = staticmethod(dtypes.is_float)

    def output(self, model: Any, batch: Any) -> Any:
        """The output for a batch."""
        forward_fn = self.definition.forward_fn
        if forward_fn is None:
            return model(**batch) if isinstance(batch, Mapping) else model(self.input(batch))
        return forward_fn(model, self.input(batch))


class Program(NamedTuple):
    """The computation for one shape of share. It is traced twice; the second trace is captured.

    Attributes
    ----------
    inputs : list of Tensor
        Its batch is written here.
    constants : dict
        What a trace returned that is no tensor.
    run : callable
        Computes; the next call overwrites what it returns.
    """

    inputs: list[Tensor]
    constants: dict[str, Any]
    run: Callable[[], Any]


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
        self._unread: Callable[[], Any] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, then buffers."""
        return [*self.params, *self.buffers]

    def take(self, params: Sequence[np.ndarray]) -> None:
        """Write these weights to the device."""
        for tensor, array in zip(self.params, params, strict=True):
            write(tensor, array)

    def begin(self, batch: Batch, key: int, starts: Sequence[np.ndarray]) -> Callable[[], Computed]:
        """Begin to compute loss and gradient; the returned function waits."""
        program = self._prepared("loss", batch, key, starts)
        with Context(TRAINING=1):
            computed = program.run()

        @functools.cache
        def read() -> list[list[np.ndarray]]:  # the first call waits for the device
            return [[plain(tensor) for tensor in part] for part in (computed, self.buffers)]

        def ended() -> Computed:  # in numpy arrays of its own
            (loss, *gradient), buffers = read()
            returned = gradient.pop() if len(gradient) > len(self.params) else program.constants["weight"]
            weight = self._forward.weight(returned)
            return Computed(float(loss), weight, None if weight == 0 else gradient, list(buffers))

        self._unread = read
        return ended

    def output(
        self, batch: Batch, key: int, starts: Sequence[np.ndarray], target_fn: Callable[..., Any] | None = None
    ) -> tuple[Any, Any]:
        """The output for a batch and its target, in an evaluation; in memory of their own."""
        program = self._prepared("output", batch, key, starts)
        with Context(TRAINING=0):
            output = program.run()
        target = self._forward.target(batch.rebuilt(program.inputs), target_fn)
        return map_tree(self._copied, output), map_tree(self._copied, target)

    def measured(self, output: Any, target: Any) -> Any:
        """The loss of what ``output`` returned, or (loss, weight)."""
        return self._forward.measured(output, target)

    def _copied(self, leaf: Any) -> Any:
        return owned(plain(leaf), self.device) if isinstance(leaf, Tensor) else leaf

    def _prepared(self, what: str, batch: Batch, key: int, starts: Sequence[np.ndarray]) -> Program:
        """A program with its inputs written. Earlier outputs of the device are read first: it would overwrite them."""
        if self._unread is not None:
            self._unread()
            self._unread = None
        kind = what, batch.form
        if kind not in self._programs:
            inputs, constants = [owned(array, self.device) for array in batch.arrays], dict[str, Any]()
            traced = functools.partial(self._loss, constants) if what == "loss" else self._output
            self._programs[kind] = Program(inputs, constants, TinyJit(lambda: traced(batch.rebuilt(inputs))))
        program = self._programs[kind]
        write(self._key, np.array([FIRST, key & MASK32], np.uint32))
        for tensor, array in zip([*program.inputs, *self.buffers], [*batch.arrays, *starts], strict=True):
            write(tensor, array)
        return program

    def _loss(self, constants: dict[str, Any], batch: Any) -> list[Tensor]:
        """Loss, gradients, and the weight if it is a tensor, realized with the buffers."""
        with self._traced() as whole:
            params, buffers = list(self._model.params.values()), list(self._model.buffers.values())
            before = [tensor.uop for tensor in params]
            loss, weight = self._forward.loss(self._forward.output(whole, batch), batch)
            self._check_written(loss, before)
            gradient = [
                entry.clone(device=self.device) if entry.device is None else entry for entry in loss.gradient(*params)
            ]
            constants["weight"] = weight
            outputs = [loss, *gradient, *([weight] if isinstance(weight, Tensor) else [])]
            Tensor.realize(*outputs, *buffers)
            outputs = [entry.contiguous() for entry in outputs]  # copies a gradient that is another's transpose
            Tensor.realize(*outputs)
            return outputs

    def _output(self, batch: Any) -> Any:
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
                put_back(zip(RANDOM, streams, strict=True))
                for tensor, own in pairs:
                    tensor.replace(own)
                yield self._model.whole
                self._check_streams()
            self._model.check_places()
        finally:
            for tensor, uop in before:
                tensor.uop = uop

    def _check_streams(self) -> None:
        """Refuse random numbers of another device than the replica's: nobody keys their stream."""
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


class Batch:
    """A batch as numpy arrays, and the tree that they are the leaves of.

    Parameters
    ----------
    tree : Any
        Containers of arrays and numbers.
    origin : str
        The caller's name for it, for messages.
    double : bool
        Whether the model has parameters of 64 bits.

    Raises
    ------
    UsageError
        A leaf cannot become a tensor as it is; names it.
    """

    def __init__(self, tree: Any, origin: str, *, double: bool) -> None:
        names = iter([name for name, _ in leaves(tree, origin, lists=True)])
        self.arrays: list[np.ndarray] = []

        def number(leaf: Any) -> int:
            array = _array(leaf)
            check_leaf(next(names), leaf, array, double=double, refused=REFUSED)
            self.arrays.append(array)
            return len(self.arrays) - 1

        self._numbers = map_tree(number, tree)
        self.form = repr(self._numbers), *((array.shape, array.dtype.str) for array in self.arrays)

    def rebuilt(self, tensors: Sequence[Any]) -> Any:
        """The tree with these in place of its arrays."""
        return map_tree(tensors.__getitem__, self._numbers)


def collate(samples: Sequence[Any]) -> Any:
    """A batch out of samples of one form: their leaves stacked."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, (tuple, list)):
        columns = [collate(list(items)) for items in zip(*samples, strict=True)]
        named: Callable[[Any], Any] = getattr(first, "_make", type(first))
        return named(columns)
    return np.stack([_array(sample) for sample in samples])


def _array(leaf: Any) -> np.ndarray:
    """Python's numbers as tinygrad takes them: floats of 32 bits, integers of 32 bits."""
    if isinstance(leaf, Tensor):
        return plain(leaf)
    if isinstance(leaf, (bool, np.generic, np.ndarray)) or not isinstance(leaf, (int, float)):
        return np.asarray(leaf)
    return np.asarray(leaf, np.float32 if isinstance(leaf, float) else np.int32)
