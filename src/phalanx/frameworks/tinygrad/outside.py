"""tinygrad as seen before it is known to be needed: nothing here imports it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.definition.generators import TINYGRAD
from phalanx.errors import UsageError

RANDOM = TINYGRAD


def is_model(value: Any) -> bool:
    """Whether there is a tensor of tinygrad in ``value``, an object or a tree. False where it was never imported."""
    module = sys.modules.get("tinygrad")
    if module is None or isinstance(value, type):
        return False
    kind, seen, left = module.Tensor, set[int](), [value]
    while left:
        item = left.pop()
        if isinstance(item, kind):
            return True
        if id(item) not in seen:
            seen.add(id(item))
            left += _inside(item)
    return False


def are_names(devices: Sequence[str]) -> bool:
    """Whether these are names of devices as tinygrad writes them: in capitals, which torch and jax have none in."""
    return bool(devices) and all(name.split(":")[0].isupper() for name in devices)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[bool]:
    """Have tinygrad draw from ``seed`` inside the block; whether that could be said, as it is imported already."""
    with kept() as there:
        if there:
            sys.modules["tinygrad"].Tensor.manual_seed(seed)
        yield there


@contextlib.contextmanager
def kept() -> Iterator[bool]:
    """Restore tinygrad's generators on the way out, if it is imported already."""
    module = sys.modules.get("tinygrad")
    before = {} if module is None else {name: getattr(module.Tensor, name) for name in RANDOM}
    try:
        yield module is not None
    finally:
        for name, value in before.items():
            setattr(module.Tensor, name, value)  # type: ignore[union-attr]


def _inside(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple)):
        return list(item)
    return list(getattr(item, "__dict__", {}).values()) if not isinstance(item, type) else []


def check_alone(part: tuple[int, int]) -> None:
    """Refuse to be one of several processes."""
    if part[1] > 1:
        raise UsageError(
            f"this is one of {part[1]} processes, but a recipe with tinygrad computes in one; use one process, with "
            "several devices"
        )
