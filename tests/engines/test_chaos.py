"""Chaos as users run it: the nemesis kills by its seed, the checker compares."""

import dataclasses
import json
import subprocess
import sys

import pytest

from phalanx.lab import chaos
from tests.families import ADAMW, FAMILIES

FILE = """
import functools, torch, phalanx

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

generator = torch.Generator().manual_seed(0)
x, y = torch.randn(48, 4, generator=generator), torch.randint(3, (48,), generator=generator)
recipe = phalanx.Recipe(
    make_model, (x, y), torch.nn.functional.cross_entropy, replicas=4, batch_size=12, steps=150,
    optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
)
"""


@pytest.mark.long
def test_a_campaign_kills_and_finds_nothing_wrong():
    """Ten kills or more over a few runs: the same digests, nothing left, and a pause for each replacement."""
    recipe = FAMILIES["conv_norm"].recipe(4, steps=150, optimizer=ADAMW)
    trials = chaos.campaign(recipe, 10, 3, 3, lambda one: None)
    assert sum(one.kills for one in trials) >= 10
    assert [(one.right, one.problem) for one in trials] == [(True, "")] * len(trials)
    assert [one.seed for one in trials] == list(range(3, 3 + len(trials)))
    assert any(one.pauses for one in trials)


def test_the_checker_can_say_no():
    """Compared with another digest or other losses, the same run is wrong."""
    recipe = FAMILIES["mlp"].recipe(4, steps=20)
    quiet = recipe.train(engine="inline")
    assert chaos.trial(recipe, quiet, 1, 0, 2).right
    for other in ({"digest": "0" * 64}, {"loss_history": [*quiet.loss_history[:-1], 0.0]}):
        assert not chaos.trial(recipe, dataclasses.replace(quiet, **other), 1, 0, 2).right


@pytest.mark.campaign
def test_the_command_tells(tmp_path):
    """``phalanx chaos FILE`` ends with 0 and one JSON object."""
    (tmp_path / "recipe.py").write_text(FILE)
    command = [sys.executable, "-m", "phalanx", "chaos", "recipe.py", "--kills", "3", "--workers", "2", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["wrong"], facts["problems"]) == (0, [])
    assert facts["kills"] >= 3


@pytest.mark.long
@pytest.mark.parametrize(("workers", "words"), [("5", "4 replicas"), ("0", "--workers")])
def test_the_command_refuses_in_words(tmp_path, workers, words):
    """More workers than replicas, or none: exit code 2 and a sentence."""
    (tmp_path / "recipe.py").write_text(FILE)
    command = [sys.executable, "-m", "phalanx", "chaos", "recipe.py", "--workers", workers]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 2
    assert words in done.stderr
