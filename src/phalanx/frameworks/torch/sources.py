"""Data as torch reads it: columns become tensors over the same memory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from phalanx.definition.data import Columns, Samples, Source


def opened(source: Source) -> Source:
    """See ``seams.Framework.opened``."""
    if isinstance(source, Samples):
        return source
    return Columns(tuple(map(_column, source.arrays)), source.rebuild, torch.from_numpy)


def _column(array: Any) -> torch.Tensor:
    """A column as a tensor over the same memory, read-only arrays and memory maps too: columns are never written.

    torch has no negative or odd strides, as reversed views and fields of records have: those are copied.
    """
    if isinstance(array, torch.Tensor):
        return array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            return torch.from_numpy(np.asarray(array))
        except ValueError:
            return torch.from_numpy(np.array(array))
