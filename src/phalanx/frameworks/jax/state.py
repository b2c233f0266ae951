"""The state of a run: parameters and the optimizer's state, and both as named entries, for digests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.digest import Entry
from phalanx.frameworks.jax.tree import named, plain, strong


@dataclass
class State:
    """What changes from step to step: two trees of arrays that are replaced, never written."""

    params: Any
    optimizer: Any


def entries(params: Any, optimizer: Any) -> Iterator[Entry]:
    """Parameters, then the optimizer's state, by name."""
    for kind, tree in (("parameter", params), ("optimizer", optimizer)):
        for name, leaf in named(tree).items():
            numbers = plain(strong(leaf))
            content = numbers.reshape(-1).view(np.uint8)
            yield Entry(kind, name, str(numbers.dtype), numbers.shape, content)
