"""Finds the framework of a recipe by what ``make_model`` returns, and imports it then, not before.

The built-in ones stand in a table. Others are found through the entry points of installed packages, once no known
framework recognises a model. Nothing but the table knows one framework from another.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from phalanx.definition import generators
from phalanx.definition.checks import takes
from phalanx.definition.digest import digest_of
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError, safe_str
from phalanx.frameworks.record import Made, Record
from phalanx.frameworks.record import stored as stored_array
from phalanx.seams import Framework
from phalanx.seams.records import Tensor
from phalanx.surroundings import interrupts

BUILT_IN = ("torch", "jax", "tinygrad")
GROUP = "phalanx.frameworks"  # of entry points, each of which loads to a record
RECORDS: dict[str, Record] = {}
EVERYWHERE: list[Record] = []  # those that every process of any run imports


def register(record: Record) -> None:
    """Make a framework known in this process, and have its generators seeded."""
    RECORDS[record.name] = record
    generators.FRAMEWORKS[record.module] = record.random
    EVERYWHERE[:] = [each for each in RECORDS.values() if each.everywhere]


for _name in BUILT_IN:
    if importlib.util.find_spec(f"phalanx.frameworks.{_name}"):  # a satellite may be left out
        register(importlib.import_module(f"phalanx.frameworks.{_name}.record").RECORD)


@functools.cache
def load_others() -> None:
    """Register the frameworks of other installed packages."""
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name not in RECORDS:
            register(point.load())


def named(framework: str) -> Record:
    """The record with this name.

    Raises
    ------
    UsageError
        There is none.
    """
    if framework not in RECORDS:
        load_others()
    if framework not in RECORDS:
        raise UsageError(f"the framework {framework!r} is not known here ({', '.join(RECORDS)}); install its package")
    return RECORDS[framework]


def recognised(model: Any) -> Record | None:
    """The framework of this model, among those that are known and imported; None if it is of none."""
    imported = (record for record in RECORDS.values() if sys.modules.get(record.module))
    return next((record for record in imported if record.recognises(model)), None)


def open_framework(
    definition: Definition,
    devices: Sequence[str] = (),
    *,
    allow: bool = False,
    processes: int = 1,
    apart: bool = False,
) -> Framework:
    """The recipe's state before its first step, on ``devices`` (none named: where the model is made).

    ``allow``: accelerators may run operations without a deterministic kernel. ``processes``: of the world that this
    one belongs to. ``apart``: the devices are those of worker processes, so that the state here is in host memory.
    """
    with contextlib.ExitStack() as building:
        for record in RECORDS.values():
            building.enter_context(record.building(definition.threads, devices, allow=allow))
        building.enter_context(starting(definition.threads))
        with interrupts.user_code():
            model = _made(definition)
        record = recognised(model)
        if record is None:
            *most, last = [each.returns for each in RECORDS.values()]
            returned = "None (is a return missing?)" if model is None else f"a {type(model).__name__}"
            raise UsageError(f"make_model returned {returned}; it must return {', '.join(most)}, or {last}")
        return record.open(Made(definition, model, devices, allow, processes, apart))


def _made(definition: Definition) -> Any:
    """The model to train: ``own`` of a model that is given, or what a factory returns right after seeding.

    A factory that was the first to use generators, or a framework, is called again: only now can they be seeded.
    """
    make_model, seed = definition.make_model, definition.seed
    given = recognised(make_model)
    if given is not None and given.takes_models:
        return given.own(make_model)
    giving = (record for record in RECORDS.values() if takes(make_model, record.argument, required=True))
    factory = next((record.factory(make_model, seed) for record in giving), make_model)
    try:
        while True:
            generators.seed(seed)
            seeded = _drawing()
            model = factory()
            if recognised(model) is None:
                load_others()
            record = recognised(model)
            if record is None or _drawing().get(record.name, 0) == seeded.get(record.name, 0):
                return model
    except Exception as error:
        called = "it is called without arguments: wrap it in functools.partial or a lambda if it needs some"
        way = called if isinstance(error, TypeError) else "the traceback above says where"
        raise UsageError(f"make_model raised {type(error).__name__}: {safe_str(error)}; {way}") from error


def _drawing() -> dict[str, int]:
    """How many global generators each framework has in use."""
    return {name: len(record.random()) for name, record in RECORDS.items() if record.module in sys.modules}


@contextlib.contextmanager
def starting(threads: int) -> Iterator[None]:
    """Inside, frameworks may start in this process, with so many threads for an operation."""
    names = [name for record in RECORDS.values() for name in record.thread_variables]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def in_use() -> list[str]:
    """The frameworks that are imported here, except those that every process has."""
    return [name for name, record in RECORDS.items() if record.module in sys.modules and not record.everywhere]


def prepare_process(folder: str, frameworks: Sequence[str] = ()) -> None:
    """Import, in a process of our own, what workers will need of these frameworks; no array is made.

    ``folder``: where frameworks may keep what they compile.
    """
    import numpy.random  # noqa: F401  numpy imports it when it is first used

    for record in [*EVERYWHERE, *map(named, frameworks)]:
        record.prepare(folder)


def numeric_environment(framework: str) -> dict[str, Any]:
    """Settings of this process that change bits in a recipe of this framework."""
    return {record.name: record.settings() for record in dict.fromkeys([*EVERYWHERE, named(framework)])}


def adopt_numeric_environment(settings: dict[str, Any]) -> None:
    """Set this process to another one's numeric environment."""
    for name, values in settings.items():
        named(name).adopt(values)


def harmless_warnings(settings: Mapping[str, Any]) -> list[str]:
    """The first words of warnings that nobody needs to see in a worker with these settings."""
    return [message for name in settings for message in named(name).harmless()]


def recorded_environment() -> dict[str, Any]:
    """What decides bits in any recipe, as text, for snapshots."""
    return {name: value for record in EVERYWHERE for name, value in record.recorded().items()}


def as_factory(model: Any) -> Any:
    """A ``make_model`` that returns this model, or a copy."""
    framework = recognised(model)
    return model if framework is not None and framework.takes_models else lambda: model


def reduced(thing: Any, *, alone: bool = False, own: bool = False) -> Any:
    """How a framework's arrays are pickled; NotImplemented for all else.

    ``alone``: as samples of a step. ``own``: none of them shares memory with another.
    """
    for record in EVERYWHERE:
        if (how := record.reduced(thing, alone=alone, own=own)) is not NotImplemented:
            return how
    return NotImplemented


reduced_sample = functools.partial(reduced, alone=True)
reduced_copy = functools.partial(reduced, alone=True, own=True)


def reading(framework: str, definition: Definition) -> tuple[AbstractContextManager[Any], Callable[[Any], Any] | None]:
    """In a process without a model: the context to read samples in, and what makes a batch; None: samples stay."""
    own = named(framework).reading(definition)
    surroundings, collate = own or next(filter(None, (record.reading(definition) for record in EVERYWHERE)))
    samples = own is None or definition.batch_size is None or definition.micro_batches > 1
    samples |= definition.phases is not None and definition.collate_fn is not None  # each phase has keys of its own
    return surroundings, None if samples else definition.collate_fn or collate


def all_devices() -> list[tuple[str, str, str, str]]:
    """Rows (framework, name, description, what is missing): each device here, and each kind that has none."""
    rows: list[tuple[str, str, str, str]] = []
    for name, record in RECORDS.items():
        try:
            rows += [(name, *row) for row in record.available()]
        except UsageError as error:  # it is not installed
            rows.append((name, "any", "", str(error)))
    return rows


def whose(names: Sequence[str]) -> Record:
    """The framework of devices with these names."""
    return next((record for record in RECORDS.values() if record.knows(names)), EVERYWHERE[0])


def digest(model: Any, optimizer: Any = None, step: int | None = None, state: Any = ()) -> str:
    """The digest of a state: equal digests mean equal bits.

    Parameters
    ----------
    model : torch.nn.Module, pytree of jax arrays, or object with tensors of tinygrad
    optimizer : torch.optim.Optimizer, sequence of them, optax state, optimizer of tinygrad, or None
        Its state is included, tensors and scalars.
    step : int or None
        How many optimizer steps led here.
    state : pytree
        What a jax model keeps beside its parameters, as ``forward_fn`` returned it.

    Returns
    -------
    str
        64 hexadecimal digits; equals ``result.digest`` of a run that ended in the same state.
    """
    framework = recognised(model) or EVERYWHERE[0]
    return digest_of(framework.entries(model, optimizer, state), step)


def tensor_of(tensor: Tensor, facts: dict[str, Any]) -> Any:
    """A tensor of a snapshot with these facts, as its framework's own type; for some, as a numpy array."""
    framework = facts.get("framework", EVERYWHERE[0].name)
    return named(framework).tensor_of(tensor)


def stored(leaf: Any) -> Tensor | None:
    """A tensor or array as a snapshot holds it, in memory of its own; None for all else."""
    if isinstance(leaf, np.ndarray):
        return stored_array(leaf)
    candidates = (each.stored(leaf) for each in EVERYWHERE)
    return next((tensor for tensor in candidates if tensor is not None), None)


def weights_of(model: Any, params: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a model by name, as its own framework would load them; ``instead``: other values of parameters."""
    whole = (recognised(model) or EVERYWHERE[0]).weights(model, params, instead)
    if None in whole.values():
        raise UsageError("a parameter has a dtype that safetensors does not have; save it in another way")
    return whole  # type: ignore[return-value]
