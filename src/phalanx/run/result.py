"""What a run leaves: the trained model, its history and its digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.definition.fields import Definition
from phalanx.seams import Engine
from phalanx.seams.events import Evaluated, Incident

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Result:
    """The outcome of a run, or its state in the middle.

    Attributes
    ----------
    model : torch.nn.Module, pytree of jax arrays, or model of tinygrad's
        The trained model, the caller's own.
    params : dict of str to the framework's tensor or array
        Its parameters by name.
    loss_history : list of float
        Mean loss of every step.
    metric_history : list of Evaluated
        Every evaluation: ``steps`` done before it, and its ``value``.
    digest : str
        SHA-256 over parameters, buffers, optimizer state and the step number, in hexadecimal.
    steps, samples : int
        Finished steps; samples seen in them.
    replicas, workers : int
        R, which defined the answer, and W, which defined the speed.
    steps_per_epoch : int or None
        None where the caller brought the batches.
    seconds : float
        From the start of the first step to the end of the last.
    startup_seconds : float
        From the call to the start of the first step.
    resumed_from : int or None
        The step at which the run went on from a snapshot of an earlier one; ``seconds`` count from there.
    incidents : sequence of Incident
        Deaths and replacements of workers, and what was rolled back.
    chain : str or None
        With a ``run_dir``: the root of the run's chain, which stands for all of its steps; the same for any number of
        workers, engine, kill and resume.
    """

    model: Any = field(repr=False)
    params: dict[str, Any] = field(repr=False)
    loss_history: list[float] = field(repr=False)
    metric_history: list[Evaluated] = field(repr=False)
    digest: str
    steps: int
    samples: int
    replicas: int
    workers: int
    steps_per_epoch: int | None
    seconds: float
    startup_seconds: float
    resumed_from: int | None = None
    incidents: Sequence[Incident] = field(default=(), repr=False)
    chain: str | None = None

    @property
    def loss(self) -> float | None:
        """Mean loss of the last step; None before the first."""
        return self.loss_history[-1] if self.loss_history else None

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the loss of every step and, on a second axis, the evaluations.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; a new figure's axes by default.

        Returns
        -------
        matplotlib.axes.Axes
            The axes of the loss; ``.figure.savefig(path)`` saves the picture.

        Raises
        ------
        UsageError
            matplotlib is not installed.
        """
        from phalanx.run.plots import plot_history

        title = f"{self.replicas} replicas, {self.steps} steps, digest {self.digest[:12]}"
        return plot_history(self.loss_history, self.metric_history, self.steps_per_epoch, title, ax)


def result_of(definition: Definition, engine: Engine, called: float, opened: float, *, copy: bool) -> Result:
    """The state of a run now, which was called for and opened at these times; ``copy``: independent of the run."""
    exported, run_state = engine.export(copy=copy), engine.run_state
    began, ended = run_state.span or (opened, opened)
    return Result(
        model=exported.model,
        params=exported.params,
        loss_history=list(run_state.loss_history),
        metric_history=list(run_state.evaluated),
        digest=exported.digest,
        steps=len(run_state.loss_history),
        samples=run_state.samples,
        replicas=definition.replicas,
        workers=engine.workers,
        steps_per_epoch=None if definition.data is None else definition.plan.steps_per_epoch,
        seconds=ended - began,
        startup_seconds=began - called,
        resumed_from=run_state.resumed_from,
        incidents=tuple(run_state.incidents),
        chain=run_state.chain,
    )
