"""A certificate of a run: what defined it, on which data, in which environment, and what came out."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from phalanx.checkpoint.chain import CHAIN, Links
from phalanx.checkpoint.files import read
from phalanx.checkpoint.resume import read_any
from phalanx.definition.data import Columns
from phalanx.definition.digest import hashed
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.registry import changed_environment
from phalanx.proof.compare.fields import another
from phalanx.proof.instant import Instant, shown
from phalanx.proof.verify import DIFFERENT, SAME, UNKNOWN, Verified

FORMAT = 1
SEAL = "seal"
MOST_BYTES = 1 << 28


def certify(recipe: Definition, run_dir: pathlib.Path, *, progress: bool | str = "auto") -> dict[str, Any]:
    """The certificate of the run in a directory, as JSON values.

    Raises
    ------
    UsageError
        The directory has no chain, or is another recipe's.
    SnapshotError
        No snapshot there can be used.
    """
    newest = read_any(run_dir)
    if not newest.step:
        raise UsageError(
            f"the newest snapshot in {str(run_dir)!r} is of step 0, so that there is nothing to certify; wait for a "
            "later one, or end the run"
        )
    if differs := another(recipe, newest.recipe):
        raise UsageError(f"the run in {str(run_dir)!r} had another recipe: {differs}; give that one")
    if not (run_dir / CHAIN).exists():
        raise UsageError(f"{str(run_dir)!r} has no chain; give the directory of a run")
    with Links(run_dir / CHAIN) as links:
        if len(links) < newest.step:
            raise UsageError(f"the chain in {str(run_dir)!r} has {len(links)} steps, and the run {newest.step}")
        root = links[newest.step - 1]["link"]
    with Instant(recipe, newest) as instant:
        digest = instant.digest
    found = {
        "certificate": FORMAT,
        "recipe": newest.recipe,
        "data": data_root(recipe, progress=progress),
        "samples": len(recipe.source) if recipe.source is not None else None,
        "environment": newest.environment,
        "steps": newest.step,
        "metrics": newest.metrics,
        "chain": root,
        "digest": digest,
    }
    return {**found, SEAL: sealed(found)}


def sealed(facts: dict[str, Any]) -> str:
    """SHA-256 over all that a certificate says."""
    said = {name: value for name, value in facts.items() if name != SEAL}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def data_root(recipe: Definition, *, progress: bool | str = "auto") -> str | None:
    """The root of a Merkle tree over all samples in their order; None where the caller or a stream brought batches."""
    if recipe.source is None:  # nothing that could be read by index
        return None
    leaves = list(_hashes(recipe, progress))
    while len(leaves) > 1:
        pairs = zip(leaves[::2], [*leaves[1::2], b""] if len(leaves) % 2 else leaves[1::2], strict=True)
        leaves = [hashlib.sha256(left + right).digest() for left, right in pairs]
    return leaves[0].hex()


def _hashes(recipe: Definition, progress: bool | str) -> Iterator[bytes]:
    """A hash of each sample; one that is drawn at random as it is in the first epoch."""
    source = recipe.source
    assert source is not None, "who asks has looked"
    for index in shown(range(len(source)), "phalanx: data", unit="sample", progress=progress):
        if isinstance(source, Columns):
            yield hashed([array[index] for array in source.arrays])
        else:
            with recipe.plan.seeded_sample(0, index):
                yield hashed(source.items[index])


def check_certificate(path: pathlib.Path, recipe: Definition, *, progress: bool | str = "auto") -> Verified:
    """Whether recipe and data at hand are those of a certificate.

    Raises
    ------
    UsageError
        It is no certificate.
    """
    try:
        told = json.loads(read(path.resolve(), MOST_BYTES))
        if told["certificate"] != FORMAT or set(told) < {"recipe", "data", "environment", "chain", "digest", SEAL}:
            raise ValueError("it lacks fields")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{str(path)!r} is no certificate: {error}; give one that phalanx certify wrote") from error
    if sealed(told) != told[SEAL]:
        return Verified(DIFFERENT, 0, "the certificate was changed: its seal is not that of what it says")
    if differs := another(recipe, told["recipe"]):
        return Verified(DIFFERENT, 0, f"the recipe differs: {differs}")
    if data_root(recipe, progress=progress) != told["data"]:
        return Verified(DIFFERENT, 0, "the data differs: its Merkle root is another")
    if changes := changed_environment(told["environment"]):
        return Verified(UNKNOWN, 0, f"recipe and data are the same, but {changes[0]}, so the bits may differ")
    return Verified(SAME, int(told["steps"]), "the same: recipe, data and environment are those of the certificate")
