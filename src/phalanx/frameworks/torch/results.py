"""A trained model as users get it: the run's own, or a copy, with its parameters by name and its digest."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from phalanx.definition.digest import digest_of
from phalanx.errors import UsageError
from phalanx.frameworks.torch.phases import Updates
from phalanx.frameworks.torch.snapshot import entries
from phalanx.seams import Exported


def exported(model: torch.nn.Module, updates: Updates, steps: int, *, apart: bool, digest: bool) -> Exported:
    """The state as the caller gets it; ``apart`` makes it independent of the run."""
    told = digest_of(entries(model, updates.optimizers, updates.named), steps) if digest else ""
    return shown(copied(model) if apart else model, told)


def shown(model: torch.nn.Module, digest: str = "") -> Exported:
    """A model as the caller gets it; its parameters share memory with it."""
    return Exported(model, {name: parameter.detach() for name, parameter in model.named_parameters()}, digest)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model within what wraps it for several processes, by whose prefix its names would differ."""
    inner = getattr(model, "module", None)
    own = [name for name, _ in model.named_children()]
    return inner if isinstance(inner, torch.nn.Module) and own == ["module"] else model


def copied(model: torch.nn.Module, same: Sequence[torch.nn.Parameter] = ()) -> torch.nn.Module:
    """An independent copy of the run's model; of the parameters in ``same`` the copy shares the memory, if it can."""
    plain = [one for one in same if type(one) is torch.nn.Parameter]  # others know how to be copied
    shared = {id(one): torch.nn.Parameter(one.data, one.requires_grad) for one in plain}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise UsageError(
            f"the model ({type(model).__name__}) cannot be copied in the middle of a run ({error}); do not keep "
            "tensors with a gradient in its attributes, or take result() after the run"
        ) from error
