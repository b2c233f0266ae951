"""A certificate: a run that was verified, as a file with all that is needed to train it again and compare."""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

from phalanx.checkpoint.chain import CHAIN, Links
from phalanx.checkpoint.files import read
from phalanx.checkpoint.resume import read_any
from phalanx.errors import UsageError
from phalanx.frameworks.registry import changed_environment
from phalanx.proof.compare.fields import another
from phalanx.proof.instant import Instant
from phalanx.proof.verify import DIFFERENT, SAME, UNKNOWN, Verified, verify
from phalanx.recipe import Recipe

FORMAT = 1
FIELDS = {"recipe", "environment", "steps", "chain", "digest"}
MOST_BYTES = 1 << 28


def certify(
    recipe: Recipe, run_dir: pathlib.Path, *, workers: int = 1, progress: bool | str = "auto"
) -> tuple[Verified, dict[str, Any]]:
    """What came of verifying a run, and its certificate as JSON values, which is empty if it is not what it says.

    Raises
    ------
    UsageError
        The directory has no chain, or no snapshot of a later step than 0.
    SnapshotError
        No snapshot there can be used.
    """
    newest = read_any(run_dir)
    if not newest.step:
        raise UsageError(
            f"the newest snapshot in {str(run_dir)!r} is of step 0, so that there is nothing to certify; wait for a "
            "later one, or end the run"
        )
    found = verify(recipe, run_dir, workers=workers, progress=progress)
    if found.status != SAME:
        return found, {}
    with Links(run_dir / CHAIN) as links, Instant(recipe, newest) as instant:
        root, digest = links[newest.step - 1]["link"], instant.digest
    told = {"certificate": FORMAT, "recipe": newest.recipe, "environment": newest.environment, "steps": newest.step}
    return found, {**told, "chain": root, "digest": digest}


def check_certificate(
    path: pathlib.Path, recipe: Recipe, *, workers: int = 1, progress: bool | str = "auto"
) -> Verified:
    """Train the recipe at hand, and compare chain and digest with those of a certificate.

    Raises
    ------
    UsageError
        It is no certificate.
    """
    try:
        told = json.loads(read(path.resolve(), MOST_BYTES))
        if told["certificate"] != FORMAT or set(told) < FIELDS or not isinstance(told["steps"], int):
            raise ValueError("it lacks fields")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{str(path)!r} is no certificate: {error}; give one that phalanx certify wrote") from error
    if differs := another(recipe, told["recipe"]):
        return Verified(DIFFERENT, 0, f"the recipe differs: {differs}")
    if changes := changed_environment(told["environment"]):
        return Verified(UNKNOWN, 0, f"the recipe is the same, but {changes[0]}, so the bits may differ")
    with (
        tempfile.TemporaryDirectory(prefix="phalanx-") as folder,
        recipe.start(workers=workers, run_dir=folder, progress=progress) as run,
    ):
        for report in run:
            if report.step + 1 >= told["steps"]:
                break
        result = run.result()
    if (result.steps, result.chain, result.digest) == (told["steps"], told["chain"], told["digest"]):
        return Verified(SAME, result.steps, f"the same: {result.steps} steps, trained again, end in chain and digest")
    ends = f"{result.steps} steps, trained again, end in the chain {result.chain} and the digest {result.digest}"
    return Verified(DIFFERENT, result.steps, f"{ends}; the certificate has {told['chain']} and {told['digest']}")
