"""torch as the registry knows it. Data and samples of any recipe may be its tensors, so every process has it."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from phalanx.definition.digest import Entry
from phalanx.definition.fields import Definition
from phalanx.definition.generators import NEAR, Global
from phalanx.frameworks.record import Collate, Made, Record
from phalanx.frameworks.torch import accelerators, environment, snapshot
from phalanx.frameworks.torch.adapter import Torch
from phalanx.frameworks.torch.device import TorchDevice
from phalanx.frameworks.torch.model import checked_new, copied, warn_of_rest
from phalanx.frameworks.torch.replica.feed import default_collate
from phalanx.frameworks.torch.sharing import bytes_of
from phalanx.seams import Framework
from phalanx.seams.records import Tensor

HOST: Any = torch.default_generator
NEAR.append(HOST)
SMALL_BYTES = 4096  # of memory around a tensor that may be pickled with it
OTHERWISE = (
    ", and a model that is passed in is never trained in place; pass a function that makes it: make_model=lambda: ..."
)


class TorchRecord(Record):
    """torch as the registry knows it."""

    name = module = "torch"
    returns = "a plain torch.nn.Module"
    everywhere = takes_models = forks = True

    def __init__(self) -> None:
        self.random = generators_in_use
        self.settings, self.recorded = environment.numeric_environment, environment.recorded_environment
        self.adopt, self.reduced = environment.adopt, reduced
        self.own = functools.partial(copied, "make_model", way_out=OTHERWISE)
        self.tensor_of, self.stored = snapshot.tensor_of, snapshot.stored
        self.spelled, self.facts, self.available = accelerators.spelled, accelerators.facts, accelerators.available

    def recognises(self, model: Any) -> bool:
        """Every module but TorchScript's; ``open`` refuses those that cannot be trained."""
        return isinstance(model, torch.nn.Module) and not isinstance(model, torch.jit.ScriptModule)

    def open(self, made: Made) -> Framework:
        """On the CPU, or on an accelerator; several devices are those of workers, and the state here is on the CPU."""
        definition, model, devices, allow, processes, apart = made
        home = next(checked_new(model).parameters()).device
        warn_of_rest(model, definition)
        if processes > 1:
            devices = accelerators.chosen(devices, home)
        resolved = accelerators.found(devices, definition.replicas // processes, home, apart=apart)
        accelerated = resolved[0].type != "cpu"
        if len(resolved) > 1 or (accelerated and apart):
            return Torch(definition, model, list(map(str, resolved)))
        return TorchDevice(definition, model, resolved[0], allow=allow) if accelerated else Torch(definition, model)

    @contextmanager
    def building(self, threads: int, devices: Sequence[str], *, allow: bool) -> Iterator[None]:
        """Generators, threads and modes are the run's; one at a time."""
        accelerators.prepare(devices, allow=allow)
        with environment.surrounded(threads):
            yield

    def reading(self, definition: Definition) -> tuple[AbstractContextManager[Any], Collate]:
        """With torch's own collating."""
        return environment.surrounded(definition.threads, definition.generators), default_collate

    def prepare(self, folder: str) -> None:
        """Spare a process that will never compile an optimizer the import of torch's compiler (0.7 s).

        torch imports it to exempt ``add_param_group`` from compilation when that is called first; this marks the method
        as exempted. If torch should look for another mark one day, it imports the compiler as before.
        """
        for method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
            plain: Any = getattr(method, "__wrapped__", None)
            if plain is not None:
                setattr(plain, "__dynamo_disable", plain)

    def entries(self, model: Any, optimizer: Any, state: Any) -> Iterator[Entry]:
        """Entries of modules and optimizers of torch's."""
        return snapshot.entries_of_loop(model, optimizer)

    def weights(self, model: Any, params: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Tensor | None]:
        """All that ``model.state_dict()`` has."""
        return snapshot.state_dict(model, instead)


def generators_in_use() -> tuple[Global, ...]:
    """The host's, and those of the accelerators that this process uses; asking starts no device, so it may fork."""
    try:
        kind = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        return HOSTS
    if not kind:
        return HOSTS
    # Asked by name: without one torch caches its answer, and a kind may be registered later.
    module = torch.get_device_module(kind)
    # To start devices only for their generators would take memory.
    if not getattr(module, "is_initialized", module.is_available)():
        return HOSTS
    return _of(module, module.device_count())


@functools.cache
def _of(module: Any, count: int) -> tuple[Global, ...]:
    return *HOSTS, *(_on(module, number) for number in range(count))


def _on(module: Any, number: int) -> Global:
    """The generator of one device; ``module``: what torch has for this kind (``torch.get_device_module``)."""
    listed = getattr(module, "default_generators", ())
    own = listed[number] if len(listed) > number else None  # as an object, if the kind shows them
    which = (number,) if hasattr(module, "set_device") else ()  # kinds of one device, as mps, name none
    # Kinds without a list of generators seed all of theirs at once: then each is seeded before it is used.
    seed_all = getattr(module, "manual_seed_all", None) or module.manual_seed
    kept = functools.partial(_restoring, module.get_rng_state, module.set_rng_state, which)
    return Global(seed_all if own is None else own.manual_seed, kept, own)


def _restoring(get: Callable[..., Any], put: Callable[..., Any], which: tuple[int, ...] = ()) -> Callable[[], Any]:
    """A function that puts a generator back into its present state."""
    return functools.partial(put, get(*which), *which)


def reduced(thing: Any, *, alone: bool, own: bool) -> Any:
    """How a storage is pickled: as its memory, once for all tensors in it. NotImplemented for all else.

    ``alone``, for what only one step needs: a tensor that is a small part of its memory goes without the rest. ``own``:
    a plain tensor goes as numpy's array, which takes a fifth of the time.
    """
    if own and type(thing) is torch.Tensor and _plain(thing):
        return torch.from_numpy, (thing.numpy(),)
    if alone and type(thing) is torch.Tensor and thing.device.type == "cpu" and thing.layout is torch.strided:
        if thing.untyped_storage().nbytes() > 2 * thing.nbytes + SMALL_BYTES:
            cut = thing.detach().clone(memory_format=torch.preserve_format)
            return cut.requires_grad_(thing.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented
    if isinstance(thing, torch.storage.TypedStorage):
        return _typed, (thing._untyped_storage, thing.dtype)
    if isinstance(thing, torch.UntypedStorage) and thing.device.type == "cpu":
        if not thing.nbytes():
            return torch.UntypedStorage, (0,)
        # Not of a memoryview: before Python 3.12.7 the garbage collector crashes on that in a cycle (gh-77894).
        return _untyped, (pickle.PickleBuffer(bytes_of(thing)),)  # type: ignore[arg-type]  numpy before Python 3.12
    return NotImplemented


def _plain(tensor: torch.Tensor) -> bool:
    """Whether numpy has all of a tensor: dense in C order, and nothing beside the values."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.dtype not in NUMPYS:
        return False
    dense, steps = 1, list[int]()
    for size in reversed(tensor.shape):
        steps.append(dense)
        dense *= size
    alone = not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or vars(tensor))
    return alone and tensor.stride() == tuple(reversed(steps))


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _untyped(buffer: Any) -> torch.UntypedStorage:
    return torch.from_numpy(np.frombuffer(buffer, dtype=np.uint8)).untyped_storage()


NUMPYS = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.bool, torch.complex64, torch.complex128,
    }
)  # fmt: skip
HOSTS = (Global(HOST.manual_seed, functools.partial(_restoring, HOST.get_state, HOST.set_state), HOST),)
RECORD = TorchRecord()
