"""A framework that phalanx has never heard of: that of docs/frameworks.md, found as an installed package's."""

import contextlib
import functools
import importlib
import io
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import phalanx
from phalanx.definition import generators
from phalanx.definition.digest import Entry, digest_of
from phalanx.frameworks import registry

X = np.random.default_rng(0).standard_normal((32, 3))
Y = X @ np.array([1.0, -2.0, 0.5])
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()


def block(language):
    """What the page shows in this language."""
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]


def recipe(**changes):
    facts = {"replicas": 4, "batch_size": 8, "steps": 6, "lr": 0.1, "shuffle": False}
    return phalanx.Recipe(importlib.import_module("lines").Line, (X, Y), **(facts | changes))


def by_hand(replicas, batch_size, steps, lr, fault=None):
    """The digest of a loop over shares, for a plan without shuffling."""
    np.random.seed(0)
    w = np.random.standard_normal(3)
    for step in range(steps):
        at = np.arange(step * batch_size, (step + 1) * batch_size) % len(X)
        gradients = [2 * X[share].T @ (X[share] @ w - Y[share]) / len(share) for share in np.array_split(at, replicas)]
        while len(gradients) > 1:
            pairs = zip(gradients[::2], gradients[1::2], strict=True)
            gradients = [left + right for left, right in pairs]
        w = w - lr * (gradients[0] if fault == "sum" else gradients[0] / replicas)
    return digest_of([Entry("parameter", "w", "float64", w.shape, w.tobytes())], steps)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with an entry point is on the path; afterwards nobody knows it any more."""
    (tmp_path / "lines.py").write_text(block("python"))
    folder = tmp_path / "lines-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lines\nVersion: 1.0\n")
    group, entry = re.fullmatch(r'\[project.entry-points."(.*)"\]\nlines = "(.*)"\n', block("toml")).groups()
    (folder / "entry_points.txt").write_text(f"[{group}]\nlines = {entry}\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.load_others.cache_clear()
    yield
    registry.RECORDS.pop("lines", None)
    generators.FRAMEWORKS.pop("lines", None)
    sys.modules.pop("lines", None)
    registry.load_others.cache_clear()


def test_it_trains_as_a_loop_by_hand(installed):
    """It ends in the bits of a loop by hand, on the workers that it is given: this process."""
    result = recipe().train()
    assert result.digest == by_hand(4, 8, 6, 0.1) == phalanx.digest(result.model, step=6)
    assert result.digest != by_hand(4, 8, 6, 0.1, fault="sum")
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


def test_what_the_page_shows(installed):
    """The lines that use it print that digests are equal."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(block("py"), {})
    assert printed.getvalue() == "True\n"


@pytest.mark.parametrize("changes", [{"precision": "bfloat16"}, {"micro_batches": 2}, {"scheduler": max}])
def test_what_it_does_not_have_is_refused(installed, changes):
    """Arguments that it would ignore are refused by name; without them it trains."""
    with pytest.raises(phalanx.UsageError, match=f"{next(iter(changes))} is .*a line does not have"):
        recipe(**changes).train(engine="inline")
    assert recipe(max_norm=0.1).train().digest != recipe().train().digest


def test_it_is_refused_in_workers(installed):
    """It computes in one process, and says so."""
    with pytest.raises(phalanx.UsageError, match="computes in one process; leave workers out"):
        recipe().train(engine="processes", workers=2)


def test_without_an_entry_point_it_is_nobodys(installed, monkeypatch):
    """Without the entry point the message says what a model may be."""
    monkeypatch.setattr(registry, "load_others", functools.cache(bool))
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
    monkeypatch.setattr(importlib.import_module("lines").RECORD, "random", lambda: one)
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
