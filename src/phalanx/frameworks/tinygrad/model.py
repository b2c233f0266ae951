"""The state of a tinygrad run: the user's model with its tensors, and the optimizer that updates them.

The optimizer is applied to the mean gradient in one captured program.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad.device import Buffer
from tinygrad.dtype import dtypes
from tinygrad.engine.jit import TinyJit
from tinygrad.helpers import Context
from tinygrad.nn.optim import Adam, Optimizer, OptimizerGroup
from tinygrad.nn.state import get_state_dict
from tinygrad.tensor import Tensor

from phalanx.definition.fields import Definition
from phalanx.errors import UsageError, safe_str
from phalanx.frameworks.arithmetic import Gradient
from phalanx.frameworks.arrays import State
from phalanx.frameworks.tinygrad import devices

EXAMPLE = "optimizer=functools.partial(tinygrad.nn.optim.AdamW, lr=1e-3)"
NARROW = (dtypes.bfloat16, *dtypes.fp8s)  # what numpy has no dtype for


@dataclass(frozen=True)
class Model:
    """What ``make_model`` returned, and its tensors by name, each once. They are never written.

    Attributes
    ----------
    whole : object
        The model. While its functions are traced for a device, its tensors are those of that device.
    params, buffers : dict of str to Tensor
        Those that are trained, and those marked by ``is_param_(False)``, in the order of ``get_state_dict``.
    listed : sequence of Tensor
        All of them as ``get_parameters`` gives them to an optimizer, tied ones more than once.
    """

    whole: Any
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    listed: Sequence[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, then buffers."""
        return [*self.params.values(), *self.buffers.values()]

    @property
    def home(self) -> str:
        """The device on which it was made.

        Raises
        ------
        UsageError
            It is on several devices.
        """
        homes = sorted({str(tensor.device) for tensor in self.tensors})
        if len(homes) > 1:
            raise UsageError(f"make_model returned a model spread over {homes}; put it on one device")
        return homes[0]

    def check_places(self) -> None:
        """Refuse a forward pass that put other tensors in the place of the model's.

        Raises
        ------
        UsageError
            It did; names the first one.
        """
        own = {id(tensor) for tensor in self.listed}
        for name, tensor in get_state_dict(self.whole).items():
            if id(tensor) not in own:
                raise UsageError(
                    f"forward put another tensor in the place of the model's {name!r}, which a captured program would "
                    "not see; write into the one that is there: .assign(...)"
                )

    def copied(self, contents: Mapping[str, np.ndarray], device: str) -> Any:
        """A model of its own for the caller, with these contents on a device."""
        memo: dict[int, Any] = {}
        for name, tensor in {**self.params, **self.buffers}.items():
            memo[id(tensor)] = owned(contents[name], device).is_param_(tensor.is_param)
        return copy.deepcopy(self.whole, memo)


def opened(whole: Any) -> Model:
    """A model's tensors, realized together.

    Raises
    ------
    UsageError
        It cannot be copied, has no parameters, or has one that cannot be trained.
    """
    everything = get_state_dict(whole)
    named = each_once(everything)
    if not any(tensor.is_param for tensor in named.values()):
        raise UsageError(
            f"make_model returned a {type(whole).__name__} without trainable parameters; leave .is_param_(True) for "
            "some"
        )
    for name, tensor in named.items():
        _check(name, tensor)
    for device in sorted({str(tensor.device) for tensor in named.values()}):
        devices.opened(device)  # says what is missing for it
    Tensor.realize(*named.values())
    model = Model(whole, *parted(named), list(everything.values()))
    _check_copies(model)
    return model


def each_once(named: Mapping[str, Tensor], known: Iterable[Tensor] = ()) -> dict[str, Tensor]:
    """Tensors by name, tied ones under their first name, without the ``known`` ones."""
    seen = set(map(id, known))
    first: dict[int, str] = {}
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    return {name: named[name] for number, name in first.items() if number not in seen}


def parted(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those that are trained, and those that are not."""
    params = {name: tensor for name, tensor in named.items() if tensor.is_param}
    return params, {name: tensor for name, tensor in named.items() if not tensor.is_param}


def numbers_of(named: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The numbers of tensors by name."""
    return {name: plain(tensor) for name, tensor in named.items()}


def plain(tensor: Tensor) -> np.ndarray:
    """The numbers of a tensor, in memory of their own; waits for its device."""
    if tensor.uop.has_buffer_identity() and tensor.uop.is_realized:  # 0.1 ms instead of 3 ms
        return tensor.uop.buffer.numpy().reshape(tensor.shape)  # type: ignore[union-attr, return-value]
    return tensor.numpy()


def owned(array: np.ndarray, device: str) -> Tensor:
    """A tensor of the run's own on a device, with memory that ``write`` writes and captured programs see."""
    flat = Tensor(np.array(array).reshape(-1), device=device).contiguous().realize()
    return flat if array.ndim == 1 else flat.reshape(array.shape)


def write(tensor: Tensor, array: np.ndarray) -> None:
    """Write these numbers into a tensor's memory; ``array`` must not change until the device has read it."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    source = Buffer("PYTHON", tensor.numel(), tensor.dtype, opaque=memoryview(content))  # type: ignore[arg-type]
    tensor.uop.base.buffer.copy_from(source)  # type: ignore[union-attr]


def _check(name: str, tensor: Tensor) -> None:
    if tensor.dtype in NARROW:
        raise UsageError(
            f"{name} of the model is {tensor.dtype}, which cannot be folded exactly in this version; keep weights in "
            "float32 or float16 and cast them in forward"
        )
    if tensor.is_param and not dtypes.is_float(tensor.dtype):
        raise UsageError(
            f"{name} of the model is {tensor.dtype}{list(tensor.shape)} and would be trained; mark what is not a "
            "parameter: .is_param_(False)"
        )
    if tensor.device is None:
        raise UsageError(
            f"{name} of the model is a constant without memory; make it as a tensor of values: Tensor([1.0])"
        )


def _check_copies(model: Model) -> None:
    try:
        copy.deepcopy(model.whole, {id(tensor): tensor for tensor in model.listed})
    except Exception as error:
        raise UsageError(
            f"make_model returned a {type(model.whole).__name__} that cannot be copied ({safe_str(error)}), and the "
            "result is a copy; keep what cannot be copied out of it, or give it a __deepcopy__"
        ) from error


class Update:
    """The recipe's optimizer over the first device's parameters.

    Parameters
    ----------
    definition : Definition
    listed : sequence of Tensor
        What the optimizer is made from: that device's tensors, as ``get_parameters`` lists those of the model.
    params : sequence of Tensor
        The parameters among them, each once.

    Attributes
    ----------
    optimizer : Optimizer
    """

    def __init__(self, definition: Definition, listed: Sequence[Tensor], params: Sequence[Tensor]) -> None:
        self.optimizer = _made(definition, listed)
        _check_optimizer(self.optimizer, params)
        self._params = params
        self._gradient = [owned(np.zeros(tensor.shape, plain(tensor).dtype), str(tensor.device)) for tensor in params]
        self.state = each_once(get_state_dict(self.optimizer), listed)
        for tensor in self.state.values():  # in memory that is there before the first step, and stays
            tensor.replace(owned(plain(tensor), str(tensor.device)))
        self._apply = TinyJit(self._traced)
        self._numbers = dict(_numbers(self.optimizer))

    @property
    def lr(self) -> float:
        """The learning rate of the next step, read from the device."""
        lr = getattr(self.optimizer, "lr", None)
        return float(plain(lr).reshape(-1)[0]) if isinstance(lr, Tensor) else math.nan

    def step(self, gradient: Gradient) -> None:
        """Update the parameters; they are read only when somebody asks."""
        for tensor, entry in zip(self._gradient, gradient, strict=True):
            write(tensor, entry)
        with Context(TRAINING=1):
            self._apply()
        if self._numbers != (now := dict(_numbers(self.optimizer))):
            name = next(name for name in now if self._numbers.get(name) != now[name])
            raise UsageError(
                f"the optimizer changes its number {name!r} in a step, and a captured program would do so only once; "
                "keep it in a Tensor, and assign to that"
            )

    def _traced(self) -> None:
        for tensor, entry in zip(self._params, self._gradient, strict=True):
            tensor.grad = entry
        Tensor.realize(*self.optimizer.schedule_step())
        for tensor in self._params:
            tensor.grad = None


def state_of(model: Any, optimizer: Any, _: Any) -> State:
    """The state of a loop written by hand: a model, and an optimizer, several, or none."""
    named = each_once(get_state_dict(model))
    whole = optimizer if not isinstance(optimizer, Sequence) or len(optimizer) != 1 else optimizer[0]
    state = {} if whole is None else each_once(get_state_dict(whole), named.values())
    params, buffers = parted(named)
    return State(numbers_of(params), numbers_of(buffers), numbers_of(state))


def _made(definition: Definition, listed: Sequence[Tensor]) -> Optimizer:
    try:
        with Context(TRAINING=1):
            if definition.optimizer is None:
                return Adam(list(listed), lr=definition.lr)
            optimizer = definition.optimizer(list(listed))
    except Exception as error:
        raise UsageError(
            f"optimizer raised {type(error).__name__}: {safe_str(error)}; it is called with get_parameters(model), as "
            f"in {EXAMPLE}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer returned a {type(optimizer).__name__}; for a model of tinygrad it must return one of "
            f"tinygrad.nn.optim, as in {EXAMPLE}"
        )
    return optimizer


def _check_optimizer(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Refuse one that updates other tensors than those it was given, or the same twice."""
    own = [id(tensor) for tensor in optimizer.params]
    if len(set(own)) < len(own) or set(own) - {id(tensor) for tensor in params}:
        raise UsageError(
            "optimizer returned one for other parameters than those that it was called with, or for some of them "
            f"twice; pass on what it is called with, as in {EXAMPLE}"
        )


def _numbers(optimizer: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The plain numbers among an optimizer's attributes."""
    for name, value in vars(optimizer).items():
        if isinstance(value, (bool, int, float)):
            yield prefix + name, value
    if isinstance(optimizer, OptimizerGroup):
        for number, inner in enumerate(optimizer.optimizers):
            yield from _numbers(inner, f"{prefix}optimizers.{number}.")
