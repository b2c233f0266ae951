"""A log as a CSV file."""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Mapping
from typing import Any

from phalanx.checkpoint import files
from phalanx.checkpoint.files import Held
from phalanx.definition import checks
from phalanx.errors import UsageError

Row = dict[str, float | int]
MOST_BYTES = 1 << 44  # of a file that is read


class Csv:
    """A file with a line for each step, and a column for each metric, empty where it was not evaluated.

    After a resume the lines of steps that are done again are cut off first, so that none is there twice. A disk that is
    full stops nothing: lines that do not fit are left out whole, and a metric for which there is no room has no column.
    """

    def __init__(self, where: Any, options: Mapping[str, Any]) -> None:
        if options:
            raise UsageError(f"Log('csv') takes no {', '.join(options)}")
        self._target = where
        self._columns: list[str] = []
        self._held = Held()

    def open(self, run: Any, state: Mapping[str, Any] | None) -> None:
        """See ``Writer.open``."""
        folder = (run.run_dir or pathlib.Path()).resolve()
        self._csv = pathlib.Path(folder / "log.csv" if self._target is None else self._target)
        self._csv.parent.mkdir(parents=True, exist_ok=True)
        columns = [] if state is None else list(state["columns"])
        lines = [] if state is None or not self._csv.exists() else self._lines()
        done = [line[: len(columns)] for line in lines if line and line[0].isdigit() and int(line[0]) < run.steps]
        self._begin(columns, done)

    def write(self, step: int, row: Row) -> None:
        """See ``Writer.write``; a new column makes the file anew."""
        row = {"step": step, **row}
        new = [name for name in row if name not in self._columns]
        if new:
            try:
                self._begin([*self._columns, *new], self._lines())
            except OSError as error:
                checks.warn(f"{str(self._csv)!r} gets no columns {', '.join(new)}: {error}; the run goes on")
        if self._columns:
            self._log.add(_text([[row.get(name, "") for name in self._columns]]))

    def state(self) -> dict[str, Any]:
        """See ``Writer.state``."""
        return {"columns": list(self._columns)}

    def close(self) -> None:
        """See ``Writer.close``."""
        self._held.let_go()

    def _lines(self) -> list[list[str]]:
        """Those that are there, without the header."""
        text = files.read(self._csv, MOST_BYTES).decode(errors="replace")
        return list(csv.reader(io.StringIO(text, newline="")))[1:]

    def _begin(self, columns: list[str], lines: list[list[str]]) -> None:
        """A file with the header and these lines takes the place of the one that is there."""
        whole = [line + [""] * (len(columns) - len(line)) for line in lines]
        files.replace(self._csv, lambda file: file.write(_text([columns, *whole])))
        self._held.let_go()
        self._held, self._columns = Held(), columns
        self._log = files.Log(self._held.add(files.open_log(self._csv)))


def _text(lines: list[list[Any]]) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file).writerows(lines)
    return file.getvalue().encode()
