"""A trained model as users get it: the run's own, a copy, or one to look at, with its parameters by name."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from phalanx.definition import checks
from phalanx.definition.digest import digest_of
from phalanx.errors import UsageError
from phalanx.frameworks.torch.optimizer import Updates
from phalanx.frameworks.torch.replica.buffers import Buffers
from phalanx.frameworks.torch.snapshot import entries
from phalanx.seams.records import Exported

DICTS: Final = [name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict)]
ATTRIBUTES: Final = "in the attributes"


def exported(shown: Shown, updates: Updates, steps: int, *, apart: bool, digest: bool) -> Exported:
    """The state as the caller gets it; ``apart`` makes it independent of the run; with neither it is for looking."""
    if not (apart or digest):
        return shown.follow()
    told = digest_of(entries(shown.trained, updates.optimizers, updates.named), steps)
    given = copied(shown.trained) if apart else shown.trained
    return Exported(lambda: given, {name: parameter.detach() for name, parameter in given.named_parameters()}, told)


class Shown:
    """A model to look at: another object than the one that is trained, over the same memory.

    Its tensors have counters of their own, so that only those who look move them. What is written past those (through
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
        self.trained, self._weights, self._buffers = trained, weights, buffers
        names = [name for name, _ in trained.named_parameters()]
        self._tensors = self._params = {name: weight.data for name, weight in zip(names, weights, strict=True)}
        self._pairs = list(zip(self._params.values(), weights, strict=True))
        self._fields: dict[str, dict[str, Any]] = {}  # of modules, by what is said of an entry that changed
        self._stored: set[str] = set()
        self._before = self._now()

    @functools.cached_property
    def model(self) -> torch.nn.Module:
        """Its parameters, buffers and views of weights are views; all else is a copy as of the first look."""
        self._check()
        pairs = list(zip(self.trained.parameters(), self._params.values(), strict=True))
        storages = {old.untyped_storage()._cdata: new.untyped_storage() for old, new in pairs}
        plain = [pair for pair in pairs if type(pair[0]) is torch.nn.Parameter]  # others know how to be copied
        views = {id(old): torch.nn.Parameter(new, old.requires_grad) for old, new in plain}
        model = copied(self.trained, {"torch": storages, **views})
        self._pairs += zip(model.parameters(), self._weights, strict=True)
        self._pairs += zip(Buffers(model).tensors, self._buffers, strict=True)
        self.follow()
        self._tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for path, module in model.named_modules():
            own, of = vars(module), f"of {f'run.model.{path}'.rstrip('.')} ({type(module).__name__}) went"
            self._fields |= {f"in {name} {of}": own[name] for name in DICTS if name in own}
            self._fields[f"{ATTRIBUTES} {of}"] = own
        self._stored = _stored_by_forward(model)
        self._before = {told: dict(now) for told, now in self._now().items()}
        return model

    def follow(self) -> Exported:
        """What may be looked at, after user code may have put weights elsewhere."""
        for mine, weight in self._pairs:
            mine.data = weight.data
        return Exported(lambda: self.model, self._params, "", self._check)

    def _now(self) -> dict[str, dict[str, Any]]:
        versions = {name: tensor._version for name, tensor in self._tensors.items()}
        trained = {name: tensor.requires_grad for name, tensor in self._tensors.items()}
        return {
            "was written: torch's counter of that went": versions,
            "was frozen or thawed: requires_grad went": trained,
            **self._fields,
        }

    def _check(self) -> None:
        """Refuse what was changed, but for attributes that the model's own forward pass leaves."""
        now = self._now()
        for told in () if _equal(now, self._before) else now:
            before, after = self._before[told], now[told]
            for name in () if _equal(before, after) else {**before, **after}:
                old, new = before.get(name), after.get(name)
                left = told.startswith(ATTRIBUTES) and (name in self._stored or isinstance(new, torch.Tensor))
                if not left and not _equal(old, new):
                    raise UsageError(
                        f"{name!r} {told} from {checks.described(old)} to {checks.described(new)}. run.model and "
                        "run.params are for looking, in every engine, so no step can follow: put back what is no "
                        "weight. For training, make it so in make_model, or in user code by phalanx.current_step(); or "
                        "begin another run from a changed copy (run.result().model), with warm_start for its weights"
                    )


class Detached(TorchFunctionMode):
    """Inside, tensors that a forward pass left in attributes are copied without their history, which cannot be."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See ``TorchFunctionMode``."""
        if func is torch.Tensor.__deepcopy__ and args[0].grad_fn is not None:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


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
