"""``phalanx check`` without a file: what a report of a fault has to say of a machine."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

import phalanx
from phalanx.lab import machine
from phalanx.recipe import Recipe


def told(*words, **environment):
    """What the command printed, and how it ended."""
    command = [sys.executable, "-m", "phalanx", "check", *words]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200)


@pytest.mark.long
def test_a_machine_says_what_a_report_needs():
    """One JSON object: versions, processor, cores, limits, settings, and the digests of three recipes; no secret."""
    done = told("--json", OMP_NUM_THREADS="1", PHALANX_SECRET="nobody may read this", MY_TOKEN="nor this")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["versions"]["phalanx"] == phalanx.__version__
    assert facts["environment"]["OMP_NUM_THREADS"] == "1"
    assert facts["settings"]["cpu"]
    assert facts["cores"]["usable"] >= 1
    assert facts["limits"]["open files"] > 0
    assert facts["memory"]["available"] > 1e6
    recipes = facts["recipes"]
    assert len({told["digest"] for told in recipes.values()}) == len(machine.MODELS) == 3
    assert all(told["same with two workers"] is True for told in recipes.values())
    assert "nobody may" not in done.stdout
    assert "nor this" not in done.stdout


def test_the_built_in_recipes_are_the_same_each_time_they_are_made(monkeypatch):
    """Their data follows from nothing but the code; a machine that computes otherwise has another digest."""
    monkeypatch.setattr(machine, "MODELS", {"perceptron": machine.MODELS["perceptron"]})
    (first,), (second,) = (list(machine.digests().values()) for _ in range(2))
    assert first == second
    monkeypatch.setattr(machine, "STEPS", machine.STEPS + 1)
    (other,) = machine.digests().values()
    assert other["digest"] != first["digest"]


@pytest.mark.long
def test_a_recipe_that_fails_is_told(monkeypatch):
    """Its error stands in the place of its digest."""

    def fails(*_, **__):
        raise phalanx.WorkerError("nothing could be mapped")

    monkeypatch.setattr(Recipe, "train", fails)
    assert {told["digest"] for told in machine.digests().values()} == {None}
    assert {told["error"] for told in machine.digests().values()} == {"WorkerError: nothing could be mapped"}


def test_a_package_that_is_not_installed_has_its_version(monkeypatch):
    """Phalanx may be imported from a folder, without what pip writes down."""

    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", unknown)
    assert machine.described()["versions"].keys() == {"python", "phalanx", "torch", "numpy"}


@pytest.mark.long
def test_devices_need_a_file():
    """What cannot be done without a recipe is refused, with the way out, and not left aside."""
    for words in (("--devices", "cuda"), ("--steps", "7")):
        done = told(*words)
        assert done.returncode == 2
        assert f"{words[0]} is {words[1]}, but FILE is missing; give the file of a recipe" in done.stderr
