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

from phalanx.plan.keys import MASK32


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
    """Restore every global generator on the way out."""
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


@contextlib.contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed every global generator with ``key`` inside the block; restore them after it."""
    with kept():
        seed(key)
        yield
