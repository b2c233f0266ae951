"""A framework that phalanx has never heard of, found by an entry point of an installed package."""

import subprocess
import sys

import numpy as np
import pytest

import phalanx
from phalanx.definition import generators
from phalanx.frameworks import registry
from tests.contract import plain

X = np.random.default_rng(0).standard_normal((32, 3))
Y = X @ np.array([1.0, -2.0, 0.5])


def recipe(**changes):
    facts = {"replicas": 4, "batch_size": 8, "steps": 6, "lr": 0.1, "shuffle": False}
    return phalanx.Recipe(plain.Line, (X, Y), **(facts | changes))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with an entry point is on the path; afterwards nobody knows it any more."""
    folder = tmp_path / "plain-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{registry.GROUP}]\nplain = tests.contract.plain:RECORD\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.load_others.cache_clear()
    yield
    registry.RECORDS.pop("plain", None)
    generators.FRAMEWORKS.pop(plain.__name__, None)
    registry.load_others.cache_clear()


def test_it_trains_as_a_loop_by_hand(installed):
    """It ends in the bits of a loop by hand, on the workers that it is given: this process."""
    result = recipe().train()
    assert result.digest == plain.by_hand(X, Y, 4, 8, 6, 0.1) == phalanx.digest(result.model, step=6)
    assert result.loss_history[-1] < result.loss_history[0]
    assert result.workers == 1


def test_it_goes_on_from_a_snapshot(installed, tmp_path):
    """Broken off and called again, it ends as if it had not been."""
    with recipe().start(run_dir=tmp_path / "run", snapshot_every=1) as run:
        for report in run:
            if report.step == 2:
                break
    result = recipe().train(run_dir=tmp_path / "run")
    assert result.steps == 6
    assert result.digest == recipe().train().digest


def test_it_is_evaluated(installed):
    """A metric sees outputs and targets."""
    with recipe().start() as run:
        run.step()
        error = run.evaluate(lambda output, target: float(((output - target) ** 2).mean()), (X, Y), batch_size=16)
    assert error > 0


def test_it_is_refused_in_workers(installed):
    """It computes in one process, and says so."""
    with pytest.raises(phalanx.UsageError, match="the model is plain, which computes in one process"):
        recipe().train(engine="processes", workers=2)


def test_without_an_entry_point_it_is_nobodys():
    """Without the package the message says what a model may be."""
    with pytest.raises(phalanx.UsageError, match="make_model returned a Line; it must return a plain torch"):
        recipe().train(engine="inline")


def test_an_unknown_framework_is_named():
    """A name that no record has is refused with those that there are."""
    with pytest.raises(phalanx.UsageError, match=r"'mxnet' is not known here \(torch, jax, tinygrad\)"):
        registry.named("mxnet")


def test_a_record_is_asked_for_its_generators(installed, monkeypatch):
    """What it draws from is seeded before its model is made, also by the first that imports it."""
    seeds = []
    one = (generators.Global(seeds.append, lambda: bool),)
    monkeypatch.setattr(plain.RECORD, "random", lambda: one)
    recipe().train()
    assert seeds[0] == 0
    assert len(set(seeds)) > 4 * 6 - 2


@pytest.mark.long
def test_importing_phalanx_imports_no_other_framework():
    """Records of all are there, and nothing of theirs but torch is imported."""
    code = (
        "import sys, phalanx; from phalanx.frameworks import registry; "
        "print(*registry.RECORDS, *(name for name in ('jax', 'optax', 'tinygrad') if name in sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["torch", "jax", "tinygrad"]
