"""The digest: SHA-256 over parameters, buffers, optimizer state and the step number.

Each entry contributes its kind, name, dtype and shape, then its bytes in C order. Layout in memory, device, worker
count and engine do not enter. Knows no framework: entries come as bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One named tensor or scalar of a state; ``content`` is a buffer of its bytes in C order."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Any


def leaf_hash(code: str, shape: Sequence[int], content: Any) -> str:
    """SHA-256, in hexadecimal, of a tensor by itself: what it is (``code``: its dtype in safetensors) and its bytes."""
    hashed = hashlib.sha256(json.dumps([code, list(shape)]).encode())
    hashed.update(content)
    return hashed.hexdigest()


def digest_of(entries: Iterable[Entry], step: int | None) -> str:
    """SHA-256, in hexadecimal, of ``entries`` in their order and the number of finished steps."""
    hashed = hashlib.sha256()
    for entry in entries:
        header = json.dumps([entry.kind, entry.name, entry.dtype, list(entry.shape)])
        hashed.update(header.encode() + b"\n")
        hashed.update(entry.content)
    if step is not None:
        hashed.update(json.dumps(["step", step]).encode() + b"\n")
    return hashed.hexdigest()
