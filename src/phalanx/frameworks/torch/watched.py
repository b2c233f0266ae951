"""What a scheduler finds in place of parameters and of the optimizer's state: lists that notice it, and a refusal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from phalanx.errors import UsageError

WAY_OUT = "do it after the update, in optimizer.register_step_post_hook(lambda optimizer, *_: ...)"


class Watched(list[Any]):
    """Parameters of a group that call ``told`` when somebody looks at them."""

    def __init__(self, parameters: Sequence[Any], told: Callable[[], None]) -> None:
        super().__init__(parameters)
        self.told = told


class Withheld(defaultdict[Any, Any]):
    """What a scheduler finds in place of the optimizer's state."""


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(list, name)

    def noted(self: Watched, *arguments: Any) -> Any:
        self.told()
        return plain(self, *arguments)

    return noted


def refuse_state(*_: Any) -> NoReturn:
    """Say that a scheduler must not look at the optimizer's state."""
    raise UsageError(
        "scheduler looks at the optimizer's state, of which each worker has a part; let the optimizer do what depends "
        f"on it: {WAY_OUT}"
    )


for _name in ("__iter__", "__len__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__reversed__",
              "__add__", "__iadd__", "append", "extend", "insert", "remove", "pop", "clear", "copy", "index", "sort",
              "reverse", "count"):  # fmt: skip
    setattr(Watched, _name, _noting(_name))
for _name in ("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "get", "items",
              "keys", "values", "clear", "pop", "popitem", "update", "setdefault", "copy"):  # fmt: skip
    setattr(Withheld, _name, refuse_state)
