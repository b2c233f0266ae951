"""A directory in which a run failed before it did a step does not bind the next one to its recipe."""

import numpy as np
import pytest
import torch

import phalanx
from tests.state.runs import assert_same

X, Y = np.random.default_rng(0).standard_normal((20, 5)), np.arange(20) % 3


def recipe(x, **changes):
    options = {"steps": 6, "replicas": 2, "batch_size": 5} | changes
    return phalanx.Recipe(lambda: torch.nn.Linear(5, 3), (x, Y), torch.nn.functional.cross_entropy, **options)


def test_a_mistake_in_the_first_step_is_mended(tmp_path):
    """Data that were float64 are refused in the first step; float32 then begin anew, as in a directory of their own."""
    with pytest.raises(phalanx.PhalanxError, match="float64"):
        recipe(X).train(engine="inline", run_dir=tmp_path / "run")
    x = X.astype(np.float32)
    with pytest.warns(UserWarning, match="did no step, so this one begins anew.*float64"):
        result = recipe(x).train(engine="inline", run_dir=tmp_path / "run")
    expected = recipe(x).train(engine="inline", run_dir=tmp_path / "other")
    assert_same(result, expected)
    assert result.chain == expected.chain
    assert phalanx.verify(recipe(x), tmp_path / "run").status == 0
    assert recipe(x).train(engine="inline", run_dir=tmp_path / "run").resumed_from == 6


def test_a_run_that_did_a_step_is_kept(tmp_path):
    """One that did a step is another recipe's, also if only its first snapshot is there; so is one without a chain."""
    for chain in ("auto", "off"):
        folder = tmp_path / chain

        def stop(report):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            recipe(X.astype(np.float32)).train(engine="inline", run_dir=folder, chain=chain, callbacks=[stop])
        for path in sorted((folder / "snapshots").iterdir())[1:]:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        with pytest.raises(phalanx.UsageError, match="snapshots of another recipe"):
            recipe(X.astype(np.float32), seed=1).train(engine="inline", run_dir=folder, chain=chain)
