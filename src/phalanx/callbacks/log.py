"""What a run writes for people to look at: rows of what was measured, as CSV or for TensorBoard."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.checkpoint import files
from phalanx.checkpoint.files import Held
from phalanx.definition import checks
from phalanx.definition.callback import Callback
from phalanx.definition.plain import check_like, distinct_names
from phalanx.errors import SnapshotError, UsageError

Row = dict[str, float | int]


class Csv:
    """A file with a line for each step, and a column for each metric, empty where it was not evaluated.

    A run that goes on leaves out the lines of steps that are done again, and columns that are empty then. A disk that
    is full stops nothing: lines that do not fit are left out whole, and a metric for which there is no room has no
    column.
    """

    def __init__(self, where: Any, options: Mapping[str, Any]) -> None:
        if options:
            raise UsageError(f"Log('csv') takes no {', '.join(options)}")
        self._target = where
        self._columns: list[str] = []
        self._held = Held()

    def open(self, run: Any, steps: int) -> None:
        """Begin with the lines of the steps that are done."""
        folder = (run.run_dir or pathlib.Path()).resolve()
        self._csv = pathlib.Path(folder / "log.csv" if self._target is None else self._target)
        self._csv.parent.mkdir(parents=True, exist_ok=True)
        try:
            there = self._csv.exists() and (steps or not self._csv.is_symlink())  # a link is replaced, not followed
            names, rows = self._read() if there else ([], [])
            done = [row for row in rows if (row.get("step") or "").isdecimal() and int(row["step"]) < steps]
        except files.MALFORMED as error:
            raise SnapshotError(f"{self._csv} cannot be used: {error}; move it away, or mend it") from error
        if names and "step" not in names:
            raise UsageError(
                f"{str(self._csv)!r} is no log of a run, as its first line names no column 'step', and a log would "
                "replace it; move it away, or name another file: Log('csv', where='other.csv')"
            )
        self._begin(list(dict.fromkeys(name for row in done for name in row if name and row[name])), done)

    def write(self, step: int, row: Row) -> None:
        """Add a line; a new column makes the file anew."""
        row = {"step": step, **row}
        new = [name for name in row if name not in self._columns]
        if new:
            try:
                self._begin([*self._columns, *new], self._read()[1])
            except OSError as error:
                checks.warn(f"{str(self._csv)!r} gets no columns {', '.join(new)}: {error}; the run goes on")
        if self._columns:
            self._log.add(_text(self._columns, [row]))

    def flush(self) -> None:
        """Sync the lines to the disk: a snapshot must not be newer than they are, as they are not written again."""
        with contextlib.suppress(OSError):  # the disk says so to the snapshot, too
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        self._held.let_go()

    def _read(self) -> tuple[Sequence[str], list[dict[str, str]]]:
        """The names of columns, and the rows, that are in the file."""
        reader = csv.DictReader(io.StringIO(files.read(self._csv).decode(errors="replace"), newline=""))
        return reader.fieldnames or (), list(reader)

    def _begin(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """Replace the file by one with the header and these rows."""
        text = _text(columns, [dict(zip(columns, columns, strict=True)), *rows])
        files.replace(self._csv, lambda file: file.write(text))
        self._held.let_go()
        self._held, self._columns = Held(), columns
        self._descriptor = self._held.add(files.open_log(self._csv))
        self._log = files.LineFile(self._descriptor, self._csv)


def _text(columns: list[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    file = io.StringIO(newline="")
    csv.DictWriter(file, columns, extrasaction="ignore").writerows(rows)
    return file.getvalue().encode()


class TensorBoard:
    """An event file; a run that goes on tells TensorBoard to forget the steps that are done again."""

    def __init__(self, where: Any, options: Mapping[str, Any]) -> None:
        self._target, self._options = where, options

    def open(self, run: Any, steps: int) -> None:
        """Begin a file of events; ``steps`` are done."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(f"Log needs tensorboard ({error}); install it: pip install tensorboard") from error
        folder = self._target or (run.run_dir or pathlib.Path()).resolve() / "tensorboard"
        if self._target is None and run.run_dir is not None:
            files.make_folder(folder)
        self._writer = SummaryWriter(
            str(folder), purge_step=steps if steps or run.resumed_from is not None else None, **self._options
        )

    def write(self, step: int, row: Row) -> None:
        """Add a scalar for each value."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is buffered, and end."""
        self._writer.close()


KINDS = {"csv": Csv, "tensorboard": TensorBoard}


class Log(Callback):
    """Writes loss, gradient norm, learning rate and all evaluations of each step; those of phases as "loss/critic".

    What it writes has no clock in it: a run that was killed and resumed leaves the same log as one that was not.

    Parameters
    ----------
    to : "csv" or "tensorboard"
        The latter needs the library of that name. ``docs/callbacks.md`` shows a callback of ten lines for others.
    where : str or path, optional
        The CSV file, or TensorBoard's folder. By default "log.csv" or "tensorboard" in the run's directory, or here.
    **options
        For ``SummaryWriter``.

    Raises
    ------
    UsageError
        ``to`` is something else, or the library is missing.
    """

    may_fail = True

    def __init__(self, to: str, where: Any = None, **options: Any) -> None:
        if to not in KINDS:
            others = (
                "'csv' or 'tensorboard'; a callback of ten lines logs to wandb, mlflow and others: docs/callbacks.md"
            )
            raise UsageError(f"to is {checks.shown(to)}; it must be {others}")
        self.where, self._make = where, functools.partial(KINDS[to], where, options)
        self._make()  # which refuses options
        self._writer: Any = None
        self._run: Any = None
        self._row: Row | None = None
        self._step = 0

    def begin(self, run: Any) -> None:
        """Open it; where a run goes on, with its first step: until then the run may be refused."""
        self._run, self._row = run, None
        if run.resumed_from is None and not run.steps:  # over hosts a process may keep a run that another has begun
            self._opened(0)

    def step(self, report: Any) -> None:
        """Note a step; it is written when the next one comes, with what is evaluated until then."""
        self._write()
        if self._writer is None:
            self._opened(report.step)
        values = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr, "samples": report.samples}
        for name, phase in report.phases.items():
            values |= {f"{what}/{name}": value for what, value in zip(phase._fields, phase[:3], strict=False)}
        values |= report.columns
        known = {k: v for k, v in values.items() if not math.isnan(v) or k.partition("/")[0] != "lr"}
        self._step, self._row = report.step, ({} if report.epoch is None else {"epoch": report.epoch}) | known

    def evaluated(self, values: Mapping[str, float]) -> None:
        """Add what was evaluated to the step's row."""
        if self._row is not None:
            self._row |= distinct_names(values, self._row)

    def end(self, result: Any) -> None:
        """Write what is left, and close it."""
        if self._writer is not None:
            self._write()
            self._writer.close()
            self._writer = None

    def state(self) -> dict[str, Any]:
        """No state. All rows are written before a snapshot; a resumed run writes the rows after it again."""
        if self._writer is not None:
            self._write()
            self._writer.flush()
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """All that is needed is in what was written."""
        check_like(state, {}, "Log")

    def _opened(self, steps: int) -> None:
        writer = self._make()
        writer.open(self._run, steps)
        self._writer = writer

    def _write(self) -> None:
        if self._row is not None:
            row, self._row = self._row, None
            self._writer.write(self._step, row)
