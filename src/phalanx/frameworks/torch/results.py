"""A trained model as users get it: the run's own, a copy, or one to look at, with its parameters by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from phalanx.definition.digest import digest_of
from phalanx.errors import UsageError, safe_str
from phalanx.frameworks.torch.optimizer import Updates
from phalanx.frameworks.torch.replica.buffers import Buffers
from phalanx.frameworks.torch.snapshot import entries
from phalanx.seams.records import Exported


def exported(shown: Shown, updates: Updates, steps: int, *, apart: bool, digest: bool) -> Exported:
    """The state as the caller gets it. ``apart``: independent of the run. Without both flags: to look at only."""
    if not (apart or digest):
        return shown.follow()
    hexdigest = digest_of(entries(shown.trained, updates.optimizers), steps)
    given = copied(shown.trained) if apart else shown.trained
    params = {name: parameter.detach() for name, parameter in given.named_parameters()}
    return Exported(lambda: given, params, hexdigest)


class Shown:
    """A model to look at: another object than the one that is trained, over the same memory.

    Its tensors have version counters of their own, which only writes through this model change. Writes that no counter
    sees (through ``.data``, or numpy) are not noticed.

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
        self._before = self._now()

    @functools.cached_property
    def model(self) -> torch.nn.Module:
        """Its parameters, buffers and views of weights are views; all else is a copy as of the first look."""
        self.check()
        pairs = list(zip(self.trained.parameters(), self._params.values(), strict=True))
        storages = {old.untyped_storage()._cdata: new.untyped_storage() for old, new in pairs}
        plain = [pair for pair in pairs if type(pair[0]) is torch.nn.Parameter]  # others know how to be copied
        views = {id(old): torch.nn.Parameter(new, old.requires_grad) for old, new in plain}
        model = copied(self.trained, {"torch": storages, **views})
        self._pairs += zip(model.parameters(), self._weights, strict=True)
        self._pairs += zip(Buffers(model).tensors, self._buffers, strict=True)
        self.follow()
        self._tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._before = self._now()
        return model

    def follow(self) -> Exported:
        """The model to look at; user code may have put weights elsewhere meanwhile."""
        for mine, weight in self._pairs:
            mine.data = weight.data
        names = [name for name, _ in self.model.named_parameters()] if "model" in vars(self) else []
        for name, parameter in zip(names, self.trained.parameters(), strict=False):  # Keras names copies anew
            version, before = self._before[name]
            if (trained := parameter.requires_grad) != before:  # the run froze or thawed it
                self._tensors[name].requires_grad_(trained)
                self._before[name] = version, trained
        return Exported(lambda: self.model, self._params, "", self)

    def _now(self) -> dict[str, tuple[int, bool]]:
        """Of each tensor: torch's counter of writes, and whether it is trained."""
        return {name: (tensor._version, tensor.requires_grad) for name, tensor in self._tensors.items()}

    def check(self) -> None:
        """Refuse what was written, frozen or thawed here.

        Raises
        ------
        UsageError
            It names the tensor, and what to do instead.
        """
        for name, now in self._now().items():
            if now != self._before[name]:
                what = "was written" if now[0] != self._before[name][0] else "was frozen or thawed"
                raise UsageError(
                    f"{name!r} {what}. run.model and run.params are for looking, in every engine, so no step can "
                    "follow; requires_grad may be put back. For training, make it so in make_model, or in user code "
                    "by phalanx.current_step(); or begin another run from a changed copy (run.result().model), with "
                    "warm_start for its weights"
                )


class Detached(TorchFunctionMode):
    """Inside, tensors that a forward pass left in attributes are copied without their history, which cannot be."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Copy a tensor that has a history without it; call all else."""
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
            f"the model ({type(model).__name__}) cannot be copied in the middle of a run ({safe_str(error)}), and "
            "run.model and run.result() are other objects than the one that is trained; use run.params, run.predict "
            "and run.evaluate, or take result() after the run"
        ) from error
