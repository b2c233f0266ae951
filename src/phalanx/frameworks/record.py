"""What a framework says of itself before it is needed: the record that it registers. Records import nothing heavy."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from phalanx.definition.digest import Entry, digest_of
from phalanx.definition.fields import Definition
from phalanx.definition.generators import Global
from phalanx.errors import UsageError
from phalanx.seams import Framework
from phalanx.seams.records import CODES, Tensor

Collate = Callable[[Any], Any]


class Made(NamedTuple):
    """A model, and where it is to be trained; see ``registry.open_framework``.

    Attributes
    ----------
    definition : Definition
    model : Any
        What ``make_model`` returned.
    devices : sequence of str
    again : callable
        Makes the same model once more.
    allow : bool
    part : (int, int)
    """

    definition: Definition
    model: Any
    devices: Sequence[str]
    again: Callable[[], Any]
    allow: bool
    part: tuple[int, int]


class Record:
    """A framework as the registry knows it. ``recognises`` and ``open`` have to be there, the rest may be.

    Attributes
    ----------
    name : str
        What snapshots call it.
    module : str
        What is imported where it is in use.
    returns : str
        What ``make_model`` returns, in words.
    everywhere : bool
        Whether it may be in any recipe, beside the one whose model it is, so that all processes of a run have it.
    takes_models : bool
        Whether a recipe may have a model in place of a factory.
    argument : str
        A parameter of ``make_model`` that the framework has a value for; none if empty.
    thread_variables : sequence of str
        What says in the environment of a process how many threads it starts with; it looks once.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    returns: ClassVar[str]
    everywhere: ClassVar[bool] = False
    takes_models: ClassVar[bool] = False
    argument: ClassVar[str] = ""
    thread_variables: ClassVar[Sequence[str]] = ()

    def recognises(self, model: Any) -> bool:
        """Whether this is a model, or parameters, of the framework, whose ``module`` is imported."""
        raise NotImplementedError

    def open(self, made: Made) -> Framework:
        """The state before the first step."""
        raise NotImplementedError

    def random(self) -> Sequence[Global]:
        """Its global random generators; asked for while its module is imported."""
        return ()

    def own(self, model: Any) -> Any:
        """What is trained, of a model that a recipe has in place of a factory."""
        return model

    def factory(self, make_model: Callable[..., Any], seed: int) -> Callable[[], Any]:
        """``make_model`` with its ``argument``."""
        raise NotImplementedError

    def building(self, threads: int, devices: Sequence[str], *, allow: bool) -> AbstractContextManager[Any]:
        """Within this a model is made, of whatever framework."""
        return contextlib.nullcontext()

    def reading(self, definition: Definition) -> tuple[AbstractContextManager[Any], Collate] | None:
        """Where no model is: what samples are read in, and what makes a batch of them; None: samples stay samples."""
        return None

    def prepare(self, folder: str) -> None:
        """Import, in a process that others are forked from, what they need. ``folder``: for what they compile."""

    def settings(self) -> dict[str, Any]:
        """Settings of this process that change bits, to be adopted by others; can be pickled."""
        return {}

    def adopt(self, settings: dict[str, Any]) -> None:
        """Set this process to another one's settings."""

    def harmless(self) -> Sequence[str]:
        """How warnings begin that nobody needs to see in a worker."""
        return ()

    def reduced(self, thing: Any, *, alone: bool) -> Any:
        """How a parcel takes its arrays along (``alone``: without memory beside them); NotImplemented for all else."""
        return NotImplemented

    def recorded(self) -> dict[str, Any]:
        """What decides bits in any recipe, as text: versions, and settings of this process."""
        return {}

    def knows(self, names: Sequence[str]) -> bool:
        """Whether these are names of devices as this framework alone writes them."""
        return False

    def spelled(self, names: Sequence[str], replicas: int) -> list[str]:
        """These devices one by one: a kind alone becomes the devices that it has, at most one per replica."""
        return list(names)

    def facts(self, names: Sequence[str]) -> dict[str, str]:
        """What it says of these devices."""
        return {}

    def available(self) -> list[tuple[str, str, str]]:
        """Name, what it is, and what is missing for it: every device here, and every kind without one."""
        return []

    def digest(self, model: Any, optimizer: Any, step: int | None, state: Any) -> str:
        """The digest of such a state after ``step`` steps."""
        return digest_of(self.entries(model, optimizer, state), step)

    def entries(self, model: Any, optimizer: Any, state: Any) -> Iterable[Entry]:
        """A state of a loop written by hand, by name."""
        raise NotImplementedError

    def tensor_of(self, stored: Tensor) -> Any:
        """A tensor of a snapshot in memory of its own: the framework's, or numpy's."""
        return array_of(stored)

    def stored(self, leaf: Any) -> Tensor | None:
        """One of its arrays as a snapshot holds it, in memory of its own; None for all else."""
        return None

    def weights(self, model: Any, params: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Tensor | None]:
        """A model's weights by name; ``instead``: other values of parameters. None: of a dtype without a code."""
        return {name: stored(np.asarray(instead.get(name, value))) for name, value in params.items()}


def adapter(framework: str, packages: str) -> Any:
    """The adapter of an optional framework in this package; ``packages``: what it needs.

    Raises
    ------
    UsageError
        They are not installed.
    """
    try:
        return importlib.import_module(f"phalanx.frameworks.{framework}.adapter")
    except ImportError as error:
        way = f"install it: pip install 'phalanx[{framework}]'"
        raise UsageError(f"this needs {packages} ({error}); {way}") from error


class Unshared:
    """Stands for ``seams.Sharing`` where a state is not shared with other processes: says why.

    Parameters
    ----------
    why : str
    """

    portable = False
    moving_seconds = 0.0

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(self._why)


def array_of(stored: Tensor) -> np.ndarray:
    """A stored tensor as a numpy array of its own."""
    return np.frombuffer(bytearray(stored.content), dtype=np.dtype(stored.dtype)).reshape(stored.shape)


def stored(array: np.ndarray) -> Tensor | None:
    """The same for numpy's arrays."""
    return Tensor(str(array.dtype), array.shape, np.array(array, order="C")) if str(array.dtype) in CODES else None
