"""The life of a process that reads a stream: step after step, as far ahead as its channel to the caller takes."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Mapping
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.definition.streams.supply import Supply
from phalanx.engines.processes.messages import DriverChannel, as_told
from phalanx.engines.processes.serialization import pieces_of
from phalanx.frameworks.registry import reading, reduced_sample


def read_stream(
    caller: DriverChannel, definition: Definition, framework: str, state: Mapping[str, Any], first: int
) -> None:
    """Read from a state on, until the run has enough or something fails; then wait for the end of the channel."""

    def warn(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        line: int,
        file: Any = None,
        text: str | None = None,
    ) -> None:
        caller.tell("warning", str(message), category, filename, line)

    with reading(framework, definition)[0]:
        supply = Supply(definition, contextlib.nullcontext())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the caller's process has read this, too
                supply.go_on(state, anyway=False, shown=lambda numbers, _: numbers)
            warnings.showwarning = warn
            for step in itertools.count(first):
                if _enough(definition, supply, step):
                    break
                drawn = supply.draw(step)
                pieces = pieces_of((drawn, supply.state(step + 1)), reduced_sample)
                caller.tell("drawn", b"".join(pieces))
        except ConnectionError:  # the caller has closed it
            return
        except Exception as error:
            with contextlib.suppress(ConnectionError):
                caller.tell("failed", *as_told(error))
        finally:
            supply.close()
    while True:
        caller.sleep(1000)


def _enough(definition: Definition, supply: Supply, step: int) -> bool:
    if definition.epochs is not None:
        return supply.epochs(step) >= definition.epochs
    return definition.total is not None and step >= definition.total
