"""What a callback may say of itself, and what holds for one that says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Callback:
    """A base for callbacks, with all that one may say of itself. Nothing has to be inherited.

    A function ``f(report)``, or any object with a hook, is a callback, too; attributes of these names count there.

    Attributes
    ----------
    everywhere : bool
        Whether it is called in all processes of a run over several hosts, and not in the first one only. One that calls
        ``run.stop()`` must be.
    gradients : sequence of str
        Names of parameters, or patterns, of which ``report.gradients`` is to have the mean gradients.
    waits_for : str or None
        The name of a metric without which it has nothing to do: a run that does not evaluate it is refused.
    thaws_in : int or None
        The epoch that it waits for; a run that ends earlier warns.
    decay_of_workers : float or None
        Of an average that workers with devices may keep in its place; it gets that by ``averaged_by(ask)``.
    writes_best : bool
        Whether two of its class that wait for one metric would write the same files.
    may_fail : bool
        Whether a run goes on, with a warning, where it raises an ``OSError``.
    """

    everywhere: bool = False
    gradients: Sequence[str] = ()
    waits_for: str | None = None
    thaws_in: int | None = None
    decay_of_workers: float | None = None
    writes_best: bool = False
    may_fail: bool = False


def said(callback: Any) -> Callback:
    """What a callback says of itself."""
    if isinstance(callback, Callback):
        return callback
    all_said = Callback()
    vars(all_said).update(
        {name: getattr(callback, name) for name in Callback.__annotations__ if hasattr(callback, name)}
    )
    return all_said
