"""``phalanx tune``: what is measured, and what advice follows from it."""

import functools
import json

import pytest
import torch

import phalanx
from phalanx.lab.tuning import Choice, Tuned, advised, candidates
from tests.families import FAMILIES
from tests.shell.test_command_line import phalanx_command

RECIPE = """
import torch, phalanx
x = torch.arange(64.0).reshape(32, 2) / 64
recipe = phalanx.Recipe(lambda: torch.nn.Linear(2, 3), (x, torch.arange(32) % 3), torch.nn.functional.cross_entropy,
                        replicas=4, batch_size=8, steps=3)
"""

SCHEDULED = RECIPE.replace(
    "steps=3)",
    """epochs=30, scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
                        schedule_every="epoch", schedule_on="val")
evaluation = phalanx.Evaluation({"val": lambda output, target: output.sum()}, recipe.data)""",
)


def row(replicas, workers, rate, *, threads=1, price=None):
    return Choice(replicas, workers, threads, 64 / rate, rate, price, 0)


@pytest.mark.longest
def test_the_table(tmp_path):
    """From the shell: the plain loop with each number of threads, then R up to the batch, also of a short recipe."""
    (tmp_path / "job.py").write_text(RECIPE)
    done = phalanx_command("tune", "job.py", "--seconds", "1", "--json", "--plot", "out/tune.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {choice["replicas"] for choice in told["rows"]} == {1, 2, 4, 8}
    assert told["rows"][0]["price"] == 1.0
    assert all(choice["samples_per_second"] > 0 for choice in told["rows"])
    assert all((choice["price"] is None) == (choice["workers"] + choice["threads"] > 2) for choice in told["rows"])
    assert f"replicas={told['replicas']}" in told["advice"]
    assert (tmp_path / "out/tune.png").stat().st_size > 1000


def test_ways_that_are_tried():
    """No more workers than replicas or cores, no smaller shares than a sample; the recipe's own R is among them."""
    recipe = FAMILIES["mlp"].recipe(6, batch_size=8)
    ways = candidates(recipe, 4)
    assert {way[0] for way in ways} == {1, 2, 4, 6, 8}
    assert [threads for replicas, _, threads in ways if replicas == 1] == [1, 2, 4]
    assert max(workers for _, workers, _ in ways) == 4
    assert all(workers <= replicas for replicas, workers, _ in ways)
    assert candidates(FAMILIES["mlp"].recipe(1, batch_size=1), 1) == [(1, 1, 1)]


def test_the_largest_that_costs_nothing_is_advised():
    """R = 4 trains as fast as R = 2, within noise, and leaves room for more workers; R = 8 does not."""
    rows = [row(1, 1, 100, price=1.0), row(1, 1, 150, threads=2), row(2, 1, 99, price=1.01), row(2, 2, 200)]
    rows += [row(4, 1, 95, price=1.05), row(4, 2, 195), row(8, 1, 50, price=2.0), row(8, 2, 110)]
    found = advised(64, rows)
    assert (found.replicas, found.workers, found.threads) == (4, 2, 1)
    assert found.advice.startswith("take replicas=4 with workers=")
    assert "1.30 times the plain loop on its best number of threads" in found.advice
    assert found.advice.endswith("shares have 16 samples.")


def test_the_plain_loop_may_be_best():
    """Where every cut costs more than workers gain, the plain loop with its best threads is advised."""
    rows = [row(1, 1, 100, price=1.0), row(1, 1, 150, threads=2), row(2, 1, 60, price=1.67), row(2, 2, 110)]
    found = advised(64, rows)
    assert (found.replicas, found.workers, found.threads) == (1, 1, 2)
    assert found.advice == "take replicas=1 with threads=2: the plain loop trains 150 samples/s here."


@pytest.mark.long
def test_nothing_is_changed_by_tuning():
    """A recipe ends in the digest that it had before it was tuned."""
    recipe = FAMILIES["mlp"].recipe(2)
    before = recipe.train(engine="inline").digest
    found = phalanx.tune(recipe, seconds=0.1)
    assert isinstance(found, Tuned)
    assert recipe.train(engine="inline").digest == before


@pytest.mark.long
def test_ways_that_a_recipe_cannot_go_are_left_out(monkeypatch):
    """A schedule that ends with the recipe does not end the measuring; without worker processes, W = 1 is measured."""
    once = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=3)
    recipe = FAMILIES["mlp"].recipe(2, steps=3, epochs=None, scheduler=once)
    start = phalanx.Recipe.start

    def refused(self, **options):
        if options["workers"] > 1:
            raise phalanx.UsageError("workers: this framework computes in one process")
        return start(self, **options)

    monkeypatch.setattr(phalanx.Recipe, "start", refused)
    found = phalanx.tune(recipe, seconds=0.1)
    assert {row.workers for row in found.rows} == {1}
    assert {row.replicas for row in found.rows} >= {1, 2, 4, 8}


def test_samples_are_counted():
    """Short batches count for what they are: 12 samples a step at most, though batch_size says 1,000."""
    x, y = FAMILIES["mlp"].data
    found = phalanx.tune(FAMILIES["mlp"].recipe(1, data=(x[:12], y[:12]), batch_size=1000), seconds=0.05)
    row = found.rows[0]
    assert row.samples_per_second * row.seconds < 120


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "long"])
def test_seconds_are_a_number(seconds):
    """Anything else is refused by name."""
    with pytest.raises(phalanx.UsageError, match=r"seconds is .*seconds=60"):
        phalanx.tune(FAMILIES["mlp"].recipe(2), seconds)


def test_data_is_needed():
    """A recipe whose batches the caller brings has nothing to train on."""
    with pytest.raises(phalanx.UsageError, match="data is None"):
        phalanx.tune(FAMILIES["mlp"].recipe(2, data=None, epochs=None))


@pytest.mark.long
def test_schedules_by_epochs_and_metrics(tmp_path):
    """What schedules go by: tune leaves them out, check and chaos evaluate it; all three refused such a file."""
    (tmp_path / "job.py").write_text(SCHEDULED)
    for arguments in (["tune", "--seconds", "0.1"], ["check"], ["chaos", "--kills", "1"]):
        done = phalanx_command(arguments[0], "job.py", *arguments[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
