"""Picks the framework of a recipe and imports it then, not before.

What ``make_model`` returns decides: a ``torch.nn.Module``, a tree of jax arrays, or an object with tensors of tinygrad.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.definition.plain import changes
from phalanx.errors import UsageError
from phalanx.frameworks.jax import outside
from phalanx.frameworks.jax.outside import threads as threads
from phalanx.frameworks.tinygrad import outside as outside_tinygrad
from phalanx.seams import Framework
from phalanx.shared.layout import Contents, apart
from phalanx.shared.memory import Memory
from phalanx.surroundings import interrupts

NOTHING = contextlib.nullcontext()


def open_framework(
    definition: Definition,
    devices: Sequence[str] = (),
    *,
    allow: bool = False,
    part: tuple[int, int] = (0, 1),
    making: AbstractContextManager[Any] = NOTHING,
) -> Framework:
    """The recipe's state before its first step, on ``devices`` (none named: where the model is made).

    ``allow``: on accelerators, operations without a deterministic kernel, too. ``part``: which of how many processes
    this is, where each drives devices of its own. ``making``: within which the model is made.
    """
    from phalanx.frameworks.torch.adapter import Torch, building
    from phalanx.frameworks.torch.devices import accelerators, names
    from phalanx.frameworks.torch.devices.lanes import TorchLanes
    from phalanx.frameworks.torch.model import home_of

    accelerators.prepare(devices, allow=allow)
    with building(definition.threads), outside.threads(definition.threads):
        with interrupts.user_code():
            try:
                with making:
                    model = _made(definition)
            except UsageError:
                if making is NOTHING:
                    raise
                model = _made(definition)  # once more, with memory that can also grow
        if outside_tinygrad.is_model(model):
            outside_tinygrad.check_alone(part)
            return opened_tinygrad().Tinygrad(definition, devices, model)
        if not outside.is_pytree(model):
            found = names.found(devices, definition.replicas // part[1], home_of(model))
            if len(found) > 1 or found[0].type != "cpu":
                again = functools.partial(_made, definition)
                return TorchLanes(definition, found, model, again, allow=allow, part=part)
            return Torch(definition, model)
        if part[1] > 1 and len(devices) > 1:
            raise UsageError(
                f"devices is {list(devices)}, but of several processes each drives one jax device in this version; use "
                "one process for all of them, or leave devices out"
            )
        return opened_jax().Jax(definition, devices, model)


def sparing(memory: Memory, contents: Contents) -> AbstractContextManager[Any]:
    """Within this, a model is made that shares what is frozen with all other processes of the run."""
    from phalanx.frameworks.torch.sharing.sparing import LEAST, Sparing  # only torch's weights can be frozen

    places = [(contents.storages[number], offset) for number, offset in apart(contents)[0].items()]
    large = [place for place in places if place[0] >= LEAST]
    return Sparing(memory, large) if large else NOTHING


def prepare_process(cache: str | None) -> None:
    """Import, in a process of our own, what workers will need; no array is made.

    ``cache``: a folder for what jax compiles; None if jax is not needed.
    """
    import numpy.random  # noqa: F401  numpy imports it when it is first used

    import phalanx.frameworks.torch.adapter
    import phalanx.frameworks.torch.devices.lanes
    from phalanx.frameworks.torch import process
    from phalanx.frameworks.torch.devices import names  # noqa: F401
    from phalanx.frameworks.torch.sharing import sparing  # noqa: F401

    process.without_compiler()
    if cache is not None:
        import phalanx.frameworks.jax.adapter  # noqa: F401
        from phalanx.frameworks.jax.environment import share_programs

        share_programs(cache)


def numeric_environment(framework: str) -> dict[str, Any]:
    """Settings of this process that change bits in a recipe of this framework."""
    from phalanx.frameworks.torch import process

    found = {"torch": process.numeric_environment()}
    if framework == "jax":
        from phalanx.frameworks.jax import environment

        found["jax"] = environment.settings()
    return found


def changed_environment(recorded: Mapping[str, Any]) -> list[str]:
    """What decides bits and is not as it was when an environment was recorded, in words."""
    return changes(recorded_environment(), recorded)


def recorded_environment() -> dict[str, Any]:
    """The same and the framework's version as text, for snapshots."""
    from phalanx.frameworks.torch import process

    return process.recorded_environment()


def as_factory(model: Any) -> Any:
    """A ``make_model`` that gives this model, or a copy."""
    from phalanx.frameworks.torch.model import is_module

    return model if is_module(model) else functools.partial(_the, model)


def _the(model: Any) -> Any:
    return model


def adopt_numeric_environment(settings: dict[str, Any]) -> None:
    """Set this process to another one's."""
    from phalanx.frameworks.torch import process

    process.adopt(settings["torch"])
    if "jax" in settings:
        from phalanx.frameworks.jax import environment

        environment.adopt(settings["jax"])


def reduced(thing: Any) -> Any:
    """How a parcel takes a framework's arrays along; NotImplemented for all else."""
    from phalanx.frameworks.torch import process

    return process.reduced(thing)


def reduced_sample(thing: Any) -> Any:
    """The same for the samples of a step."""
    from phalanx.frameworks.torch import process

    return process.reduced_sample(thing)


def reading(
    framework: str, definition: Definition
) -> tuple[contextlib.AbstractContextManager[Any], Callable[[Any], Any] | None]:
    """Where no model is: what samples are read in, and what makes a batch of them; None where samples stay samples."""
    if framework == "jax":
        from phalanx.frameworks.jax import environment, forward

        surroundings, collate = environment.Environment(definition.generators), forward.collate
    else:
        from phalanx.frameworks.torch.environment import Environment
        from phalanx.frameworks.torch.replica.feed import default_collate

        surroundings, collate = Environment(definition.threads, definition.generators), default_collate
    samples = definition.batch_size is None or definition.micro_batches > 1 or framework == "tinygrad"
    samples |= definition.phases is not None and definition.collate_fn is not None  # each phase has keys of its own
    return surroundings, None if samples else definition.collate_fn or collate


def _made(definition: Definition) -> Any:
    """What ``make_model`` returns right after seeding; only a jax one has a ``key`` to ask for."""
    from phalanx.frameworks.torch.model import made

    make_model, seed = definition.make_model, definition.seed
    if outside_tinygrad.is_model(make_model):
        return make_model  # never written
    if not outside.takes_key(make_model, required=True):
        with outside_tinygrad.seeded(seed) as seeded:
            model = made(make_model, seed)
        # else it was the first to import tinygrad: once more, now that its generators can be seeded
        return model if seeded or not outside_tinygrad.is_model(model) else _made(definition)
    opened_jax()
    from phalanx.frameworks.jax.tree import prng_key, words

    return made(functools.partial(make_model, key=prng_key(words(seed))), seed)


def opened_jax() -> Any:
    """The jax adapter; says what to install where it cannot be imported."""
    try:
        from phalanx.frameworks.jax import adapter
    except ImportError as error:
        raise UsageError(f"this needs jax and optax ({error}); install them: pip install 'phalanx[jax]'") from error
    return adapter


def opened_tinygrad() -> Any:
    """The tinygrad adapter; says what to install where it cannot be imported."""
    try:
        from phalanx.frameworks.tinygrad import adapter
    except ImportError as error:
        raise UsageError(f"this needs tinygrad ({error}); install it: pip install 'phalanx[tinygrad]'") from error
    return adapter
