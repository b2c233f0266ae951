"""One process of a campaign over hosts: trains a file's recipe with the others, and tells as JSON lines what it does.

Its argument is JSON: file, arguments, workers, folder and lost_after.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

from phalanx.cli.common import load_recipe
from phalanx.definition.plain import hashed
from phalanx.errors import PhalanxError

PACE, HELD = 0.05, 0.5  # seconds that a step takes at least; and while a host is down, so that the run does not end
SOON = 8  # steps that are held so; on a loaded machine a host takes longer to come back, and the next ones wait longer


class StepPrinter:
    """Tells of each step and each incident, and goes slowly enough for faults to come between."""

    everywhere = True

    def __init__(self, hold: pathlib.Path, enough: pathlib.Path) -> None:
        self._hold, self._enough = hold, enough
        self._run: Any = None
        self._heard = self._held = 0

    def begin(self, run: Any) -> None:
        """Have the run, for its incidents."""
        self._run = run

    def step(self, report: Any) -> None:
        """Tell of it, and wait."""
        incidents = self._run.incidents
        for incident in incidents[self._heard :]:
            tell(kind=incident.kind, who=incident.worker, at=incident.step, why=incident.why)
        self._heard = len(incidents)
        tell(step=report.step, workers=self._run.worker_pids)
        self._held = self._held + 1 if self._hold.exists() else 0
        held = HELD * 2 ** min(5, max(0, self._held - SOON))
        time.sleep(0 if self._enough.exists() else held if self._held else PACE)


def tell(**facts: Any) -> None:
    """Print a line."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Train, and tell how it ended."""
    from phalanx.lab.falls import ENOUGH, HOLD, SNAPSHOT_EVERY

    given = json.loads(sys.argv[1])
    folder = pathlib.Path(given["folder"])
    recipe, evaluation, _ = load_recipe(given["file"], given["arguments"])
    try:
        result = recipe.train(
            engine="distributed", evaluation=evaluation, workers=given["workers"], progress=False,
            callbacks=[StepPrinter(folder / HOLD, folder / ENOUGH)], lost_after=given["lost_after"],
            run_dir=folder / "run", snapshot_every=SNAPSHOT_EVERY,
        )  # fmt: skip
    except PhalanxError as error:
        tell(error=type(error).__name__, why=str(error))
    else:
        tell(digest=result.digest, losses=hashed(json.dumps(result.loss_history)).hex())


if __name__ == "__main__":
    main()
