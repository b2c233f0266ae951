"""Columns must stay what they are while a run is open: workers have them as they were, this process as they are."""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np

from phalanx.definition.data import Columns, Samples, content
from phalanx.errors import UsageError

WHOLE_BYTES: Final = 1 << 18  # of a column that is compared whole
ROWS: Final = 32  # of others


class Unchanged:
    """Notices that the caller changes columns in place.

    Tensors count their changes. Arrays of numpy do not, so they are compared, whole or at some rows, when asked for.

    Parameters
    ----------
    source : Columns, Samples or None
    """

    def __init__(self, source: Columns | Samples | None) -> None:
        self._arrays = source.arrays if isinstance(source, Columns) else ()
        self._versions = [_version(array) for array in self._arrays]
        self._sums = [_checksum(array) for array in self._arrays]

    def check(self, *, contents: bool) -> None:
        """Refuse to go on with other data; ``contents``: look at what numpy's arrays hold, too.

        Raises
        ------
        UsageError
            A column was changed since this was made.
        """
        for number, array in enumerate(self._arrays):
            changed = _version(array) != self._versions[number]
            if changed or (contents and _checksum(array) != self._sums[number]):
                raise UsageError(
                    f"data was changed in place while the run was open (column {number} of {len(self._arrays)}), which "
                    "workers do not see; change it between runs, pass a dataset that computes samples, or bring "
                    "batches yourself: data=None, then run.step(batch)"
                )


def _version(array: Any) -> int | None:
    """How often a tensor was changed; None for what does not count."""
    try:
        return getattr(array, "_version", None)
    except RuntimeError:  # made in inference mode
        return None


def _checksum(array: Any) -> int | None:
    if _version(array) is not None:
        return None
    if array.nbytes <= WHOLE_BYTES:
        return zlib.crc32(content(array)[-1])
    rows = np.unique(np.linspace(0, array.shape[0] - 1, ROWS).astype(np.int64))
    return zlib.crc32(b"".join(content(array[int(row)])[-1] for row in rows))
