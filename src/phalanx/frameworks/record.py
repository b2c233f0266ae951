"""The record that a framework registers: what it says of itself before it is needed. Records import nothing heavy."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from phalanx.definition.digest import Entry
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
    allow : bool
    processes : int
        Of the world that this one belongs to.
    apart : bool
        Whether the devices are those of worker processes: in this one the state is in host memory.
    """

    definition: Definition
    model: Any
    devices: Sequence[str]
    allow: bool
    processes: int
    apart: bool


class Record:
    """A framework as the registry knows it. ``recognises`` and ``open`` are required.

    Attributes
    ----------
    name : str
        What snapshots call it.
    module : str
        What is imported where it is in use.
    returns : str
        What ``make_model`` returns, in words.
    everywhere : bool
        Whether recipes of other frameworks may use it, too, so that every process of a run imports it.
    takes_models : bool
        Whether ``make_model`` may be a model instead of a factory.
    forks : bool
        Whether each of several devices has a worker process.
    argument : str
        A parameter of ``make_model`` that the framework passes a value for; empty: there is none.
    thread_variables : sequence of str
        Environment variables for its number of threads. It reads them once, when it starts.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    returns: ClassVar[str]
    everywhere: ClassVar[bool] = False
    takes_models: ClassVar[bool] = False
    forks: ClassVar[bool] = False
    argument: ClassVar[str] = ""
    thread_variables: ClassVar[Sequence[str]] = ()

    def recognises(self, model: Any) -> bool:
        """Whether this is a model, or parameters, of the framework, whose ``module`` is imported."""
        raise NotImplementedError

    def open(self, made: Made) -> Framework:
        """The state before the first step."""
        raise NotImplementedError

    def random(self) -> Sequence[Global]:
        """Its global random generators; called only while its module is imported."""
        return ()

    def own(self, model: Any) -> Any:
        """The model to train, for one that a recipe has instead of a factory."""
        return model

    def factory(self, make_model: Callable[..., Any], seed: int) -> Callable[[], Any]:
        """``make_model`` with its ``argument``."""
        raise NotImplementedError

    def building(self, threads: int, devices: Sequence[str], *, allow: bool) -> AbstractContextManager[Any]:
        """The context in which a model is made, of whatever framework."""
        return contextlib.nullcontext()

    def reading(self, definition: Definition) -> tuple[AbstractContextManager[Any], Collate] | None:
        """In a process without a model: the context to read samples in, and what makes a batch; None: samples stay."""
        return None

    def prepare(self, folder: str) -> None:
        """Import what workers need, in the process that they are forked from. ``folder``: for what they compile."""

    def settings(self) -> dict[str, Any]:
        """Settings of this process that change bits. Other processes adopt them, so they can be pickled."""
        return {}

    def adopt(self, settings: dict[str, Any]) -> None:
        """Set this process to another one's settings."""

    def harmless(self) -> Sequence[str]:
        """The first words of warnings that nobody needs to see in a worker."""
        return ()

    def reduced(self, thing: Any, *, alone: bool, own: bool) -> Any:
        """How its arrays are pickled (``alone``: without the memory around them); NotImplemented for all else."""
        return NotImplemented

    def recorded(self) -> dict[str, Any]:
        """What decides bits in any recipe, as text: versions, and settings of this process."""
        return {}

    def knows(self, names: Sequence[str]) -> bool:
        """Whether these device names are written as only this framework writes them."""
        return False

    def spelled(self, names: Sequence[str], replicas: int) -> list[str]:
        """These devices one by one: a kind alone becomes the devices that it has, at most one per replica."""
        return list(names)

    def facts(self, names: Sequence[str]) -> dict[str, str]:
        """What it says of these devices."""
        return {}

    def available(self) -> list[tuple[str, str, str]]:
        """Rows (name, description, what is missing): each device here, and each kind that has none."""
        return []

    def entries(self, model: Any, optimizer: Any, state: Any) -> Iterable[Entry]:
        """The state of a loop written by hand, as named entries."""
        raise NotImplementedError

    def tensor_of(self, stored: Tensor) -> Any:
        """A tensor of a snapshot in memory of its own: the framework's, or numpy's."""
        return array_of(stored)

    def stored(self, leaf: Any) -> Tensor | None:
        """One of its arrays as a snapshot holds it, in memory of its own; None for all else."""
        return None

    def weights(self, model: Any, params: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Tensor | None]:
        """A model's weights by name; ``instead`` replaces parameters. None: snapshots have no code for the dtype."""
        return {name: stored(np.asarray(instead.get(name, value))) for name, value in params.items()}


class OptionalRecord(Record):
    """A framework in this package that may not be installed: its adapter is imported when it is needed.

    Attributes
    ----------
    packages : str
        What it needs, in words.
    """

    packages: ClassVar[str]

    @property
    def adapter(self) -> Any:
        """The module.

        Raises
        ------
        UsageError
            What it needs is not installed.
        """
        try:
            return importlib.import_module(f"phalanx.frameworks.{self.name}.adapter")
        except ImportError as error:
            way = f"install it: pip install 'phalanx[{self.name}]'"
            raise UsageError(f"this needs {self.packages} ({error}); {way}") from error

    def available(self) -> list[tuple[str, str, str]]:
        """The devices that it can use here, and what others need."""
        return self.adapter.available()

    def entries(self, model: Any, optimizer: Any, state: Any) -> Iterable[Entry]:
        """Entries of the parameters, and of what the optimizer keeps."""
        return self.adapter.state_of(model, optimizer, state).entries()


class Unshared:
    """Takes the place of ``seams.Sharing`` where a state cannot be shared with other processes. Its error says why.

    Parameters
    ----------
    why : str
    """

    portable = False
    moving_seconds = 0.0
    devices = ()
    averages = keep_average = listen = None

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(self._why)


def array_of(stored: Tensor) -> np.ndarray:
    """A stored tensor as a numpy array of its own."""
    return np.frombuffer(bytearray(stored.content), dtype=np.dtype(stored.dtype)).reshape(stored.shape)


def stored(array: np.ndarray) -> Tensor | None:
    """A numpy array as a snapshot holds it; None if snapshots have no code for its dtype."""
    # Flat, as the bytes of an array without axes cannot be taken: bytearray() takes it for a number.
    flat = np.array(array, order="C").reshape(-1)
    return Tensor(str(array.dtype), array.shape, flat) if str(array.dtype) in CODES else None
