"""A state as bytes that travel from one process of a run to the others; every tensor is checked when it arrives."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

from phalanx.checkpoint import tensors
from phalanx.errors import SnapshotError
from phalanx.seams.snapshots import Captured

LENGTHS = struct.Struct("<3Q")


def packed(state: Captured, more: dict[str, Any]) -> bytes:
    """``state``, and JSON values beside it."""
    files = [io.BytesIO(), io.BytesIO()]
    parts = (state.weights, state.training)
    hashes = [tensors.write(file, part) for file, part in zip(files, parts, strict=True)]
    text = json.dumps({"facts": state.facts, "hashes": hashes, "more": more}).encode()
    pieces = [text, *(file.getvalue() for file in files)]
    return LENGTHS.pack(*map(len, pieces)) + b"".join(pieces)


def unpacked(data: bytes) -> tuple[Captured, dict[str, Any]]:
    """What was packed.

    Raises
    ------
    SnapshotError
        It is not what ``packed`` makes, or was damaged on the way.
    """
    try:
        first, second, third = LENGTHS.unpack_from(data)
        start = LENGTHS.size
        if len(data) != start + first + second + third:
            raise ValueError("its length is wrong")
        found = json.loads(data[start : start + first])
        view = memoryview(data)[start + first :]
        weights, training = (
            tensors.read(part, hashes)
            for part, hashes in zip((view[:second], view[second:]), found["hashes"], strict=True)
        )
        return Captured(weights, training, found["facts"]), found["more"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise SnapshotError(f"the state that rank 0 sent cannot be used: {error}") from error
