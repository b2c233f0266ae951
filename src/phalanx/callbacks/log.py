"""Write what was measured to where people look at it: a CSV file, TensorBoard."""

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

LIKE: dict[str, Any] = {"csv": {"columns": Each(str)}, "tensorboard": {"open": bool}}  # what their states have


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


class Log:
    """Writes loss, gradient norm, learning rate and all evaluations of each step; those of phases as "loss/critic".

    What it writes has no clock in it: a run that was killed and resumed leaves the same log as one that was not.

    Parameters
    ----------
    to : "csv" or "tensorboard"
        The latter needs the library of that name. ``docs/callbacks.md`` shows a callback of ten lines for others.
    where : path-like, optional
        The CSV file, or TensorBoard's folder. By default "log.csv" or "tensorboard" in the run's directory, or here.
    **options
        For ``SummaryWriter``.

    Raises
    ------
    UsageError
        ``to`` is something else, or the library is missing.
    """

    KINDS: ClassVar[Mapping[str, Any]] = {"csv": Csv, "tensorboard": TensorBoard}

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


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"Log needs {package} ({error}); install it: pip install {package}") from error
