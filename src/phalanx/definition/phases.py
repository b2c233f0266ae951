"""Steps with several phases, and what a recipe that has some may say besides; losses that tell their weight."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.definition import checks
from phalanx.definition.checks.elsewhere import answering
from phalanx.errors import UsageError

EXAMPLE = "phalanx.Phase(loss_fn, parameters='generator', optimizer=make_optimizer)"


@answering(
    params="it is called parameters: a name of a module, or several",
    loss="it is called loss_fn",
    opt="it is called optimizer",
    frequency="it is called every",
)
@dataclass(frozen=True, eq=False)
class Phase:
    """One of several updates that make a step, for GANs, actor-critic and other alternating updates.

    Parameters
    ----------
    loss_fn : callable
        ``loss_fn(model, batch)``, if its first parameter is called ``model``; else as the recipe's,
        ``loss_fn(output, target)``. Returns the mean loss over the share, or (mean loss, weight).
    parameters : str or sequence of str, optional
        Names of modules or parameters of the model: those that this phase updates. By default all. Others get no
        gradient in it.
    optimizer : callable, optional
        As the recipe's, called with the named parameters of this phase.
    every : int, default 1
        The phase is done in steps 0, ``every``, 2 ``every`` and so on.
    scheduler : callable, optional
        As the recipe's, for this phase's optimizer; stepped once an update.
    name : str, optional
        In reports; by default ``parameters``, where that is one name, else "phase 0" and so on.
    """

    loss_fn: Callable[..., Any]
    parameters: str | Sequence[str] | None = None
    optimizer: Any = None
    every: int = 1
    scheduler: Callable[..., Any] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise UsageError(
                f"loss_fn of a phase is {checks.shown(self.loss_fn)}; it must be callable, as in {EXAMPLE}"
            )
        checks.optimizer("optimizer of a phase", self.optimizer, "optimizer=make_optimizer")
        checks.function("scheduler of a phase", self.scheduler, "scheduler=lambda opt: ...")
        object.__setattr__(self, "every", checks.integer("every of a phase", self.every, least=1))
        names = self.chosen
        if names is not None and (not names or not all(isinstance(name, str) and name for name in names)):
            raise UsageError(
                f"parameters of a phase is {checks.shown(self.parameters)}; it must be a name of a module or "
                f"parameter, or several, as in {EXAMPLE}"
            )

    @property
    def chosen(self) -> list[str] | None:
        """The names in ``parameters``; None: all parameters."""
        if self.parameters is None:
            return None
        return [self.parameters] if isinstance(self.parameters, str) else list(self.parameters)

    @property
    def takes_model(self) -> bool:
        """Whether its loss is called with model and batch."""
        try:
            first = next(iter(inspect.signature(self.loss_fn).parameters), "")
        except (TypeError, ValueError):  # of C, or of a shape that cannot be told
            return False
        return first == "model"

    def covers(self, parameter: str) -> bool:
        """Whether it updates the parameter of this name."""
        names = self.chosen
        return names is None or any(parameter == name or parameter.startswith(f"{name}.") for name in names)


def checked_phases(phases: Any, instead: dict[str, Any]) -> tuple[Phase, ...]:
    """The phases of a recipe; ``instead``: arguments that say for a whole step what a phase says for itself.

    Raises
    ------
    UsageError
        They are none, no step could be without an update, or the recipe says something twice.
    """
    listed = tuple(phases) if isinstance(phases, (list, tuple)) else ()
    if not listed or not all(isinstance(phase, Phase) for phase in listed):
        raise UsageError(f"phases is {checks.shown(phases)}; it must be a list of phases, as in [{EXAMPLE}, ...]")
    if all(phase.every != 1 for phase in listed):
        told = ", ".join(str(phase.every) for phase in listed)
        raise UsageError(f"phases have every={told}, so that some steps would do nothing; give one of them every=1")
    for name, value in instead.items():
        if value is not None:
            raise UsageError(
                f"{name} is given, and so are phases, each of which has its own; leave {name} out, as in {EXAMPLE}"
            )
    names = names_of(listed)
    if len(set(names)) < len(names):
        raise UsageError(f"phases are called {', '.join(names)}; tell them apart: phalanx.Phase(..., name='critic')")
    return listed


def names_of(phases: Sequence[Phase]) -> tuple[str, ...]:
    """What each is called."""
    given = [phase.name or (phase.parameters if isinstance(phase.parameters, str) else "") for phase in phases]
    return tuple(name or f"phase {number}" for number, name in enumerate(given))


def weighted(loss_fn: Callable[[Any, Any], Any], count: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss that tells its weight, so that shares with more to count weigh more.

    Parameters
    ----------
    loss_fn : callable
        ``loss_fn(output, target) -> mean loss``.
    count : callable
        ``count(output, target) -> number of things averaged over``; 0 takes the share out.

    Returns
    -------
    callable
        ``(output, target) -> (mean loss, weight)``.

    Examples
    --------
    >>> tokens = phalanx.weighted(
    ...     lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100),
    ...     lambda output, target: (target != -100).sum(),
    ... )
    """
    return functools.partial(_weighted, loss_fn, count)


def _weighted(loss_fn: Callable[[Any, Any], Any], count: Callable[[Any, Any], Any], output: Any, target: Any) -> Any:
    return loss_fn(output, target), count(output, target)
