"""Digests, SHA-256 each, of a state and of single tensors.

The digest of a state covers each entry's kind, name, dtype and shape, then its bytes in C order, and last the step
number. It does not depend on layout in memory, device, worker count or engine.
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
    sha = hashlib.sha256(json.dumps([code, list(shape)]).encode())
    sha.update(content)
    return sha.hexdigest()


def digest_of(entries: Iterable[Entry], step: int | None) -> str:
    """SHA-256, in hexadecimal, of ``entries`` in their order and the number of finished steps."""
    sha = hashlib.sha256()
    for entry in entries:
        header = json.dumps([entry.kind, entry.name, entry.dtype, list(entry.shape)])
        sha.update(header.encode() + b"\n")
        sha.update(entry.content)
    if step is not None:
        sha.update(json.dumps(["step", step]).encode() + b"\n")
    return sha.hexdigest()
