"""The global random generators: seeded from keys, and left to the caller as they were found.

Covers ``random``, ``numpy.random`` and, where torch is loaded, torch's CPU generator and those of every CUDA device
in use. Importing this imports no framework.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy as np

from phalanx.interrupts import guarded
from phalanx.plan.keys import MASK32
from phalanx.surroundings import ALONE


def seed(key: int) -> None:
    """Seed every global generator with the 64-bit ``key`` (numpy takes its low 32 bits)."""
    random.seed(key)
    np.random.seed(key & MASK32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(key)
        for generator in torch.cuda.default_generators:  # none before CUDA is in use
            generator.manual_seed(key)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore every global generator on the way out. One thread at a time, as they are the process's."""
    with ALONE:
        yield from _kept()


def _kept() -> Iterator[None]:
    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = None if torch is None else torch.default_generator.get_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch is not None and torch_state is not None:
            torch.default_generator.set_state(torch_state)
            if cuda_states is not None:
                torch.cuda.set_rng_state_all(cuda_states)


class seeded(contextlib.AbstractContextManager[None]):  # noqa: N801  used as a function
    """Seed every global generator with ``key`` inside the block; restore them after it, whenever Ctrl-C comes."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> None:
        try:
            with guarded():
                self._exits.enter_context(kept())
                seed(self._key)
        except BaseException:
            with guarded(leaving=True):
                self._exits.close()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            with guarded():
                self._exits.close()
        except BaseException:
            with guarded(leaving=True):
                self._exits.close()  # does nothing if it was done
            raise
