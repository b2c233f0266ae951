"""Write what was measured to where people look at it: a CSV file, TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import math
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from phalanx.callbacks.table import Csv, Row
from phalanx.checkpoint import files
from phalanx.definition import checks
from phalanx.definition.plain import Each, check_like
from phalanx.errors import UsageError

LIKE: dict[str, Any] = {  # what their states have
    "csv": {"columns": Each(str)}, "tensorboard": {"open": bool}, "wandb": {"id": str}, "mlflow": {"id": str},
}  # fmt: skip


class Writer(Protocol):
    """Where rows go: one per step, with the values that were evaluated after it."""

    def open(self, run: Any, state: Mapping[str, Any] | None) -> None:
        """Begin, or go on from what ``state`` gave at the snapshot."""
        ...

    def write(self, step: int, row: Row) -> None:
        """Take a step's row."""
        ...

    def state(self) -> dict[str, Any]:
        """What it takes to go on."""
        ...

    def close(self) -> None:
        """All rows are written."""
        ...


class TensorBoard:
    """An event file; after a resume, TensorBoard is told to forget the steps that are done again."""

    def __init__(self, where: Any, options: Mapping[str, Any]) -> None:
        self._target, self._options = where, options

    def open(self, run: Any, state: Mapping[str, Any] | None) -> None:
        """See ``Writer.open``."""
        module = _module("torch.utils.tensorboard", "tensorboard")
        folder = self._target or (run.run_dir or pathlib.Path()).resolve() / "tensorboard"
        if self._target is None and run.run_dir is not None:
            files.make_folder(folder)
        self._writer = module.SummaryWriter(str(folder), purge_step=run.steps if state else None, **self._options)

    def write(self, step: int, row: Row) -> None:
        """See ``Writer.write``."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def state(self) -> dict[str, Any]:
        """See ``Writer.state``."""
        self._writer.flush()
        return {"open": True}

    def close(self) -> None:
        """See ``Writer.close``."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, gone on with after a resume; ``where`` is the project."""

    def __init__(self, where: Any, options: Mapping[str, Any]) -> None:
        self._target, self._options = where, options

    def open(self, run: Any, state: Mapping[str, Any] | None) -> None:
        """See ``Writer.open``."""
        wandb = _module("wandb", "wandb")
        self._callers = wandb.run is not None
        if self._callers:
            _check_plain("wandb", self._target, self._options)
            self._run = wandb.run
            return
        again = {} if state is None else {"id": state["id"], "resume": "allow"}
        self._run = wandb.init(project=self._target, **{**self._options, **again})

    def write(self, step: int, row: Row) -> None:
        """See ``Writer.write``; wandb drops steps that it had before a resume."""
        self._run.log(row, step=step)

    def state(self) -> dict[str, Any]:
        """See ``Writer.state``."""
        return {"id": self._run.id}

    def close(self) -> None:
        """See ``Writer.close``."""
        if not self._callers:
            self._run.finish()


class MLflow:
    """A run of MLflow, gone on with after a resume; ``where`` is the experiment.

    MLflow keeps a value for each time that it is told one, so steps that it had before a resume are not told again.
    """

    def __init__(self, where: Any, options: Mapping[str, Any]) -> None:
        self._target, self._options = where, options
        self._had: dict[str, int] = {}

    def open(self, run: Any, state: Mapping[str, Any] | None) -> None:
        """See ``Writer.open``."""
        self._mlflow = _module("mlflow", "mlflow")
        self._run, self._had = self._mlflow.active_run(), {}
        self._callers = self._run is not None
        if self._callers:
            _check_plain("mlflow", self._target, self._options)
            return
        if self._target is not None:
            self._mlflow.set_experiment(self._target)
        again = {} if state is None else {"run_id": state["id"]}
        self._run = self._mlflow.start_run(**{**self._options, **again})
        if state is not None:
            client, run_id = self._mlflow.MlflowClient(), state["id"]
            for name in client.get_run(run_id).data.metrics:
                self._had[name] = max(value.step for value in client.get_metric_history(run_id, name))

    def write(self, step: int, row: Row) -> None:
        """See ``Writer.write``."""
        new = {name: float(value) for name, value in row.items() if step > self._had.get(name, -1)}
        if new:
            self._mlflow.log_metrics(new, step=step, run_id=self._run.info.run_id)

    def state(self) -> dict[str, Any]:
        """See ``Writer.state``."""
        return {"id": self._run.info.run_id}

    def close(self) -> None:
        """See ``Writer.close``."""
        if not self._callers:
            self._mlflow.end_run()


class Log:
    """Writes loss, gradient norm, learning rate and all evaluations of each step; those of phases as "loss/critic".

    What it writes has no clock in it: a run that was killed and resumed leaves the same log as one that was not.

    Parameters
    ----------
    to : "csv", "tensorboard", "wandb" or "mlflow"
        Through the library of that name, which has to be installed ("csv": none).
    where : path-like or str, optional
        The CSV file, TensorBoard's folder, the project of wandb, the experiment of MLflow. By default "log.csv" or
        "tensorboard" in the run's directory, or here. A run of wandb or MLflow that is open already is written to, and
        left open.
    **options
        For ``SummaryWriter``, ``wandb.init`` or ``mlflow.start_run``.

    Raises
    ------
    UsageError
        ``to`` is something else; or ``where`` or options are given, and a run of wandb or MLflow is open.
    """

    KINDS: ClassVar[Mapping[str, Any]] = {"csv": Csv, "tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}

    def __init__(self, to: str, where: Any = None, **options: Any) -> None:
        checks.choice("to", to, tuple(self.KINDS))
        self._like = LIKE[to]
        self._writer: Writer = self.KINDS[to](where, options)
        self._state: Mapping[str, Any] | None = None
        self._open = False
        self._row: Row | None = None
        self._step = 0

    def begin(self, run: Any) -> None:
        """Open it, or go on where the snapshot was."""
        state, self._state = self._state, None
        self._row = None
        self._writer.open(run, state)
        self._open = True

    def step(self, report: Any) -> None:
        """Note a step; it is written when the next one comes, with what is evaluated until then."""
        self._flush()
        epoch = {} if report.epoch is None else {"epoch": report.epoch}
        values = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr, "samples": report.samples}
        for name, phase in report.phases.items():
            values |= {f"{what}/{name}": value for what, value in phase._asdict().items()}
        self._row = {
            **epoch,
            **{k: v for k, v in values.items() if not math.isnan(v) or k.partition("/")[0] != "lr"},
        }
        self._step = report.step

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Add what was evaluated to the step's row."""
        if self._row is not None:
            self._row |= values

    def end(self, result: Any) -> None:
        """Write what is left, and close it."""
        if self._open:
            self._flush()
            self._writer.close()
            self._open = False

    def state(self) -> dict[str, Any]:
        """How far it is."""
        self._flush()
        return self._writer.state() if self._open else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        check_like(state, dict, "Log")
        if state:
            check_like({name: state.get(name) for name in self._like}, self._like, "Log")
        self._state = state or None

    def _flush(self) -> None:
        if self._row is not None:
            row, self._row = self._row, None
            self._writer.write(self._step, row)


def _check_plain(kind: str, where: Any, options: Mapping[str, Any]) -> None:
    """What a run that is open already was opened with cannot be changed."""
    if where is not None or options:
        raise UsageError(
            f"Log({kind!r}) was given {', '.join(filter(None, ['where' if where is not None else '', *options]))}, but "
            f"a run of {kind} is open, and would be written to; end it before, or use Log({kind!r}) alone"
        )


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"Log needs {package} ({error}); install it: pip install {package}") from error
