"""The memory in which parameters lie, and how all tensors over it come to lie in another."""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from phalanx.frameworks.torch.arithmetic import view
from phalanx.seams import Places
from phalanx.shared.layout import Spec

DISPATCH = "__torch_dispatch__"
NEGATIVE: Any = torch  # its name for a view of the negatives is private


def rebind(parameters: Sequence[torch.Tensor], storages: Sequence[int], places: Places) -> None:
    """Make every tensor of this process that lies in a parameter's storage lie in another memory instead.

    Not only the parameters: a view of a weight that is kept as a plain attribute must go on seeing the weight.

    Parameters
    ----------
    parameters : sequence of torch.Tensor
    storages : sequence of int
        The number of each parameter's storage.
    places : dict
        The new memory, and the offset there, of some storages by their number.
    """
    homes: dict[int, torch.UntypedStorage] = {}
    for parameter, number in zip(parameters, storages, strict=True):
        storage = parameter.untyped_storage()
        if number in places and storage.nbytes() and storage.data_ptr() not in homes:
            homes[storage.data_ptr()] = home_at(places[number], storage.nbytes())
    if not homes:
        return
    tensors = _tensors()
    if not {id(parameter) for parameter in parameters} <= {id(tensor) for tensor in tensors}:
        gc.unfreeze()  # user code froze what it had made, which is not listed then
        tensors = _tensors()
    for tensor in tensors:
        home = homes.get(_address(tensor))
        if home is not None:
            tensor.data = placed(tensor, home)


def home_at(place: tuple[mmap.mmap, int], size: int) -> torch.UntypedStorage:
    """A stretch of memory as a storage."""
    return view(*place, Spec((size,), (1,), "uint8", 1)).untyped_storage()


def placed(tensor: torch.Tensor, home: torch.UntypedStorage) -> torch.Tensor:
    """What a tensor would be if its storage were this one."""
    place = (tensor.storage_offset(), tensor.size(), tensor.stride())
    moved = torch.empty(0, dtype=tensor.dtype).set_(home, *place)
    moved = moved.conj() if tensor.is_conj() else moved
    return NEGATIVE._neg_view(moved) if tensor.is_neg() else moved


def storages_of(parameters: Sequence[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Every storage by its address in this process, in the order of the parameters."""
    return {storage.data_ptr(): storage for storage in (parameter.untyped_storage() for parameter in parameters)}


def _tensors() -> list[torch.Tensor]:
    return [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    """Of its storage; 0 for what has none of the usual kind."""
    pretends = getattr(type(tensor), DISPATCH) != getattr(torch.Tensor, DISPATCH)  # as fake tensors do: without memory
    if pretends or tensor.layout != torch.strided or tensor.device.type != "cpu" or is_lazy(tensor):
        return 0
    with contextlib.suppress(RuntimeError):  # what is left of a function transform that has ended
        return tensor.untyped_storage().data_ptr()
    return 0


def bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    """Its memory."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
