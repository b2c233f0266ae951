"""What a run leaves: the trained model, its history and its digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.tensors import weights_of, write_file
from phalanx.definition.evaluation import DEFAULT_BATCH, check_samples
from phalanx.definition.fields import Definition
from phalanx.definition.plain import distinct_names
from phalanx.errors import UsageError
from phalanx.seams import Engine
from phalanx.seams.records import Evaluated, Incident

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The outcome of a run, or its state in the middle.

    Attributes
    ----------
    model : torch.nn.Module, pytree of jax arrays, or model of tinygrad's
        The trained model, the caller's own.
    params : dict of str to the framework's tensor or array
        Its parameters by name.
    loss_history : list of float
        Mean loss of every step; of steps with phases, of the first phase that is done in every step.
    metric_history : list of Evaluated
        Every evaluation: ``steps`` done before it, and its ``value``.
    digest : str
        SHA-256 over parameters, buffers, optimizer state and the step number, in hexadecimal.
    steps, samples : int
        Finished steps; samples seen in them.
    replicas, workers : int
        R, which defined the answer, and W, which defined the speed.
    steps_per_epoch : int or None
        None where the caller brought the batches, and for a stream of unknown length.
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
    averaged : dict or None
        Parameters by name, averaged by ``callbacks.EMA``; no part of the digest. Buffers are not averaged: with
        ``{**result.model.state_dict(), **result.averaged}`` they are those of the last step. Without EMA, and with an
        optimizer that has ``train()`` and ``eval()`` (a schedule-free one): where it wants the model evaluated.
    best : callbacks.Best or None
        What ``callbacks.SaveBest`` kept: ``metric``, ``value``, ``steps``, ``weights``, ``path``. None if no value was
        a number; ``warm_start=None`` then begins from new weights, so ask for it first.
    predictor : callable or None
        What ``predict`` uses.
    phase_history : dict of str to list of float
        Of steps with phases: the mean loss of every update of each phase, by its name.
    stopped_early : str or None
        Where and by whom, as in "at step 110 of 450 by EarlyStopping('accuracy', patience=4)", if the run, or the one
        that it went on from, was stopped before its end.
    audited : int
        Steps (of steps with phases, updates) that were audited, as ``audit=`` asked, since ``resumed_from``.
    """

    model: Any
    params: dict[str, Any]
    loss_history: list[float]
    metric_history: list[Evaluated]
    digest: str
    steps: int
    samples: int
    replicas: int
    workers: int
    steps_per_epoch: int | None
    seconds: float
    startup_seconds: float
    resumed_from: int | None = None
    incidents: Sequence[Incident] = ()
    chain: str | None = None
    averaged: dict[str, Any] | None = None
    best: Any = None
    predictor: Callable[..., Any] | None = None
    phase_history: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    stopped_early: str | None = None
    audited: int = 0

    def __str__(self) -> str:
        facts: dict[str, Any] = {} if self.loss is None else {"loss": f"{self.loss:.6g}"}
        metrics = {item.name: f"{item.value:.6g} after {item.steps} steps" for item in self.metric_history}
        facts |= distinct_names(metrics, ("loss", "best", "steps"))
        facts["best"] = self.best
        epochs = f", {self.steps / self.steps_per_epoch:.4g} epochs" if self.steps_per_epoch else ""
        resumed = "" if self.resumed_from is None else f", went on from step {self.resumed_from}"
        facts["steps"] = f"{self.steps}{epochs}, {self.samples} samples{resumed}"
        facts["stopped"] = self.stopped_early or None
        facts["seconds"] = f"{self.seconds:.4g}, and {self.startup_seconds:.4g} to start"
        facts["replicas"] = f"{self.replicas}, on {self.workers} worker{'s' * (self.workers != 1)}"
        facts["incidents"] = len(self.incidents) or None
        facts |= {"audited": self.audited or None, "chain": self.chain, "digest": self.digest}
        known = {name: value for name, value in facts.items() if value is not None}
        width = max(map(len, known))
        return "\n".join(f"{name:{width}}  {value}" for name, value in known.items())

    def __repr__(self) -> str:
        loss = "None" if self.loss is None else f"{self.loss:.6g}"
        metrics = "".join(f", {name!r}: {value:.6g}" for name, value in self.metrics.items())[2:]
        shown = f"loss={loss}, metrics={{{metrics}}}, steps={self.steps}, replicas={self.replicas}"
        return f"Result({shown}, workers={self.workers}, digest={self.digest!r})"

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of each metric that was evaluated, by name."""
        return {item.name: item.value for item in self.metric_history}

    @property
    def loss(self) -> float | None:
        """Mean loss of the last step; None before the first."""
        return self.loss_history[-1] if self.loss_history else None

    def predict(self, data: Any, batch_size: int = DEFAULT_BATCH, forward_fn: Callable[..., Any] | None = None) -> Any:
        """Outputs for all samples, in their order, on the CPU; in evaluation mode, in this process.

        Weights are those of ``averaged``, if there are such. ``run.predict`` has the arguments, and uses the workers.

        Raises
        ------
        UsageError
            The output has no row for each sample, or this result is of another process.
        """
        if self.predictor is None:
            raise UsageError("predict() needs the recipe, which this result does not have; call run.predict(data)")
        data = check_samples(data, batch_size)
        return self.predictor(self.model, self.averaged, data, batch_size, forward_fn)

    def save(self, path: Any, *, averaged: bool = False) -> None:
        """Write the model's weights as one safetensors file, which any tool reads without phalanx.

        ``model.load_state_dict(safetensors.torch.load_file(path))`` takes it; a file that is there is replaced.

        Parameters
        ----------
        path : str or path
            Ends in ".safetensors".
        averaged : bool, default False
            Those of ``result.averaged``, in place of the last step's.

        Raises
        ------
        UsageError
            The path has another ending, or there is no average.
        SnapshotError
            The file could not be written.
        """
        if averaged and self.averaged is None:
            raise UsageError("averaged is True, but nothing was averaged; train with callbacks=[callbacks.EMA(0.999)]")
        write_file(path, weights_of(self.model, self.params, (self.averaged or {}) if averaged else {}))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the loss of every step and, in charts below it, the metrics that were evaluated.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw the loss alone; by default a new figure's.

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
        return plot_history(self.loss_history, self.metric_history, title, ax)


def result_of(
    definition: Definition,
    engine: Engine,
    times: tuple[float, float],
    extras: Mapping[str, Any],
    predictor: Callable[..., Any] | None,
    *,
    copy: bool,
) -> Result:
    """The state of a run now. ``times``: of the call, and when the run was open. ``copy``: independent of the run."""
    exported, progress, rounds = engine.export(copy=copy), engine.progress, definition.rounds
    by_phase = rounds.by_phase(progress.loss_history)
    called, opened = times
    began, ended = progress.span or (opened, opened)
    return Result(
        model=exported.model(),
        params=exported.params,
        loss_history=by_phase[rounds.names[rounds.main]],
        metric_history=list(engine.seen.evaluated),
        digest=exported.digest,
        steps=progress.steps,
        samples=progress.samples,
        replicas=definition.replicas,
        workers=engine.workers,
        steps_per_epoch=definition.per_epoch,
        seconds=ended - began,
        startup_seconds=began - called,
        resumed_from=progress.resumed_from,
        incidents=tuple(progress.incidents),
        chain=extras.get("chain"),
        averaged=None if (averaged := extras.get("averaged")) is None else {k: v.clone() for k, v in averaged.items()},
        best=extras.get("best"),
        predictor=predictor,
        phase_history={} if definition.phases is None else by_phase,
        stopped_early=extras.get("stopped_early"),
        audited=progress.audited,
    )
