"""A trained model as users get it: the run's own, a copy, or one to look at, with its parameters by name."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from phalanx.definition import checks
from phalanx.definition.digest import digest_of
from phalanx.errors import UsageError
from phalanx.frameworks.torch.phases import Updates
from phalanx.frameworks.torch.replica.buffers import Buffers
from phalanx.frameworks.torch.snapshot import entries
from phalanx.seams import Exported

FIELDS: Final = [name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict)]
Watched = list[tuple[str, torch.Tensor, tuple[int, bool]]]


def exported(model: torch.nn.Module, updates: Updates, steps: int, *, apart: bool) -> Exported:
    """The state as the caller gets it; ``apart`` makes it independent of the run."""
    told = digest_of(entries(model, updates.optimizers, updates.named), steps)
    given = copied(model) if apart else model
    return Exported(lambda: given, {name: parameter.detach() for name, parameter in given.named_parameters()}, told)


class Shown:
    """A model to look at: another object than the one that is trained, over the same memory.

    Tensors have counters of their own, so that what moves them is the caller's. What is written past those (through
    ``.data``, or numpy) is not seen.

    Parameters
    ----------
    trained : torch.nn.Module
        It is copied when somebody asks for the model.
    weights, buffers : sequence of torch.Tensor
        Where its parameters and buffers lie, in their order.
    """

    def __init__(
        self, trained: torch.nn.Module, weights: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> None:
        self._trained, self._weights, self._buffers = trained, weights, buffers
        names = [name for name, _ in trained.named_parameters()]
        self._params = {name: weight.data for name, weight in zip(names, weights, strict=True)}
        self._pairs = list(zip(self._params.values(), weights, strict=True))
        self._watched = _watched("parameter", self._params.items())
        self._kept: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []
        self._stored: set[str] = set()

    @functools.cached_property
    def model(self) -> torch.nn.Module:
        """Its parameters, buffers and views of weights are views; all else is a copy as of the first look."""
        trained, params = self._trained, self._params.values()
        pairs = list(zip(trained.parameters(), params, strict=True))
        memo: dict[Any, Any] = {"torch": {_address(old): new.untyped_storage() for old, new in pairs}}
        for old, new in pairs:
            if type(old) is torch.nn.Parameter:  # others know how to be copied
                memo[id(old)] = torch.nn.Parameter(new, old.requires_grad)
        model = copied(trained, memo)
        self._pairs += zip(model.parameters(), self._weights, strict=True)
        self._pairs += zip(Buffers(model).tensors, self._buffers, strict=True)
        self.follow()
        self._watched += _watched("parameter", model.named_parameters()) + _watched("buffer", model.named_buffers())
        self._stored = _stored_by_forward(model)
        for path, module in model.named_modules():
            where = f"module {path!r} ({type(module).__name__})" if path else f"the model ({type(module).__name__})"
            own = vars(module)
            self._kept.append(("attribute", where, own, dict(own)))
            self._kept += [(_singular(name), where, own[name], dict(own[name])) for name in FIELDS if name in own]
        return model

    def follow(self) -> Exported:
        """The same, after user code may have put weights elsewhere."""
        for mine, weight in self._pairs:
            mine.data = weight.data
        return Exported(lambda: self.model, self._params, "", self.changed)

    def changed(self) -> str:
        """What the caller changed, in words; not what the model's own forward pass leaves in attributes."""
        for name, tensor, kept in self._watched:
            if (tensor._version, tensor.requires_grad) != kept:
                return f"{name} was written" if tensor._version != kept[0] else f"requires_grad of {name} was changed"
        for kind, where, now, kept in self._kept:
            for name in [] if _equal(now, kept) else {**kept, **now}:
                old, new = kept.get(name), now.get(name)
                ours = kind == "attribute" and (name in self._stored or isinstance(new, torch.Tensor))
                if not ours and not _equal(old, new):
                    return f"{kind} {name!r} of {where} went from {checks.described(old)} to {checks.described(new)}"
        return ""


class Detached(TorchFunctionMode):
    """Inside, tensors that a forward pass left in attributes are copied without their history, which cannot be."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See ``TorchFunctionMode``."""
        if func is torch.Tensor.__deepcopy__ and args[0].grad_fn is not None:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model within what wraps it for several processes, by whose prefix its names would differ."""
    inner = getattr(model, "module", None)
    own = [name for name, _ in model.named_children()]
    return inner if isinstance(inner, torch.nn.Module) and own == ["module"] else model


def copied(model: torch.nn.Module, memo: dict[Any, Any] | None = None) -> torch.nn.Module:
    """An independent copy of the run's model, but for what ``memo`` has in place of its parts."""
    try:
        with Detached():
            return copy.deepcopy(model, memo)
    except Exception as error:
        raise UsageError(
            f"the model ({type(model).__name__}) cannot be copied in the middle of a run ({error}), and run.model and "
            "run.result() are other objects than the one that is trained; use run.params, run.predict and "
            "run.evaluate, or take result() after the run"
        ) from error


def _watched(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> Watched:
    return [(f"{kind} {name!r}", tensor, (tensor._version, tensor.requires_grad)) for name, tensor in named]


def _address(tensor: torch.Tensor) -> int:
    """By which torch finds a storage that was copied already."""
    storage: Any = tensor.untyped_storage()
    return storage._cdata


def _singular(field: str) -> str:
    """What one entry is called: "forward hook", of the field ``_forward_hooks``."""
    return field.strip("_").removesuffix("s").replace("_", " ")


def _stored_by_forward(model: torch.nn.Module) -> set[str]:
    """Names of attributes that forward passes write: sizes, counters, attention maps."""
    forwards = {inspect.unwrap(type(module).forward) for module in model.modules()}
    codes = [forward for forward in forwards if hasattr(forward, "__code__")]
    return {line.argval for code in codes for line in dis.get_instructions(code) if line.opname == "STORE_ATTR"}


def _equal(one: Any, other: Any) -> bool:
    """Whether they are the same, or equal where that is a question of yes and no."""
    try:
        return one is other or bool(one == other)
    except Exception:
        return False
