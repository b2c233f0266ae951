"""The functions of the front: ``phalanx.train``, a recipe and its run in one call; ``load`` and ``close``."""

from __future__ import annotations

import dataclasses
from typing import Any

from phalanx.definition import Definition
from phalanx.errors import UsageError
from phalanx.options import Options, unknown
from phalanx.recipe import Recipe
from phalanx.result import Result

RECIPE_FIELDS = frozenset(field.name for field in dataclasses.fields(Definition))


def load(path: Any) -> Any:
    """Not in this version: refused with a UsageError."""
    raise UsageError(f"load({str(path)!r}): this version reads no snapshots, as it writes none")


def close() -> None:
    """End what is kept warm for the next run. The inline engine keeps nothing warm, so this has nothing to end."""


def train(make_model: Any, data: Any, loss_fn: Any = None, **arguments: Any) -> Result:
    """``Recipe(make_model, data, loss_fn, ...).train(...)`` in one call.

    Parameters
    ----------
    make_model, data, loss_fn
        As in ``Recipe``. A bare ``nn.Module`` works too; it is copied.
    **arguments
        Any other argument of ``Recipe`` (these define the answer) or of ``Recipe.train`` (these do not).

    Returns
    -------
    Result

    Examples
    --------
    >>> result = phalanx.train(lambda: torch.nn.Linear(4, 3), (x, y), torch.nn.functional.cross_entropy, steps=100)
    """
    options = {name: value for name, value in arguments.items() if name in Options.__annotations__}
    fields = {name: value for name, value in arguments.items() if name not in options}
    for name in fields:
        if name not in RECIPE_FIELDS:
            raise UsageError(unknown(name, RECIPE_FIELDS | set(Options.__annotations__)))
    return Recipe(make_model, data, loss_fn, **fields).train(**options)  # type: ignore[arg-type]
