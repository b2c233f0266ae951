"""The surroundings of a run in this process, and what of them a snapshot records."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from tinygrad import helpers
from tinygrad.device import Device
from tinygrad.helpers import Context
from tinygrad.tensor import Tensor

from phalanx.definition import generators
from phalanx.errors import UsageError

# Settings of tinygrad's that choose other programs, and so other bits, or other defaults of dtypes.
SETTINGS = (
    "NOOPT", "IMAGE", "FLOAT16", "WINO", "USE_TC", "TC_OPT", "TRANSCENDENTAL", "NOLOCALS", "SPLIT_REDUCEOP",
    "DISABLE_FAST_IDIV", "FUSE_OPTIM", "EMULATED_DTYPES", "DEFAULT_FLOAT", "DEFAULT_INT", "ALLOW_TF32", "PCONTIG",
    "USE_ATOMICS", "NUM_CPU_THREADS",
)  # fmt: skip


RANDOM = ("_seed", "_device_seeds", "_device_rng_counters")  # where ``Tensor`` keeps the state of its generators


def kept() -> Callable[[], None]:
    """Puts tinygrad's generators back into the state that they have now."""
    return functools.partial(_put_back, [(name, getattr(Tensor, name)) for name in RANDOM])


def _put_back(before: Sequence[tuple[str, Any]]) -> None:
    for name, value in before:
        setattr(Tensor, name, value)


GENERATOR = generators.Global(Tensor.manual_seed, kept)


class Environment(contextlib.AbstractContextManager[None]):
    """A context, entered once at a time: inside, generators may be seeded, and programs are chosen by fixed rules.

    Never by timing them (``BEAM``): that would choose by chance, and with the program the bits. Programs are compiled
    in this process (``PARALLEL``): those that tinygrad would start for that run the caller's script again. What was
    scheduled before under other settings is not taken over (``SCACHE``).

    Parameters
    ----------
    threads : int
        How many threads share an operation on the CPU.
    owned : mapping
        Generators of user code, to be restored as the global ones are.
    """

    def __init__(self, threads: int, owned: Mapping[str, Any] | None = None) -> None:
        self._threads = threads
        self._owned = owned
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> None:
        _check_thread()
        if helpers.getenv("JITBEAM", 0):
            raise UsageError(
                "JITBEAM is set in the environment: tinygrad would choose programs by timing them, and bits with them; "
                "unset it"
            )
        with contextlib.ExitStack() as exits:
            exits.enter_context(generators.kept(self._owned))
            Tensor.manual_seed(0)
            exits.enter_context(Context(BEAM=0, PARALLEL=0, SCACHE=0, NUM_CPU_THREADS=self._threads))
            self._exits = exits.pop_all()

    def __exit__(self, *_: object) -> None:
        self._exits.close()


def _check_thread() -> None:
    """Refuse other threads than that in which tinygrad compiled first: its cache on disk is that one's alone.

    Raises
    ------
    UsageError
        This is another.
    """
    try:
        helpers.db_connection().cursor().close()
    except sqlite3.ProgrammingError as error:
        raise UsageError(
            "tinygrad computes only in the thread in which it was used first, and this is another; run the recipe "
            "there, or use tinygrad in no other thread before"
        ) from error


def recorded(device: str) -> dict[str, str]:
    """What changes bits and is not in a recipe, as text; the device by what it is, not by its number."""
    settings = {name: str(getattr(helpers, name).value) for name in SETTINGS}
    compiler = {"compiler": _compiler()} if device.split(":")[0] == "CPU" else {}
    return {"tinygrad": version("tinygrad"), **settings, **compiler, "device": described(device)}


@functools.cache
def _compiler() -> str:
    """The first line that the C compiler for the CPU says of itself."""
    told = subprocess.run([helpers.getenv("CC", "clang"), "--version"], capture_output=True, text=True, check=False)
    return told.stdout.partition("\n")[0]


def described(device: str) -> str:
    """A device's kind, its program compiler, and what it says of itself."""
    opened: Any = Device[device]
    told = [getattr(opened, name, None) for name in ("device_name", "driver_version", "arch")]
    known = [str(text) for text in told[:2] if text] or [str(text) for text in told[2:] if text]
    return " ".join([device.split(":")[0], type(opened.renderer).__name__, *known])
