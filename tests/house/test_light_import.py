"""``import phalanx`` costs next to nothing after ``import torch``, and does nothing but import."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.house

HEAVY = {"jax", "matplotlib", "sklearn", "rich", "typer", "tqdm", "cloudpickle", "IPython"}
# What nobody expects of an import: a socket, a process, a look-up of a name.
EFFECTS = "socket. subprocess. os.fork os.posix_spawn os.exec os.system urllib. http."

WATCHED = """
import json, sys, time
import torch
before, seen, watching = {{name.split(".")[0] for name in sys.modules}}, [], True
def watch(event, arguments):
    if watching and event.startswith(tuple({effects!r}.split())):
        seen.append(event)
sys.addaudithook(watch)
started = time.perf_counter()
{statement}
seconds = time.perf_counter() - started
watching = False
tops = sorted({{name.split(".")[0] for name in sys.modules}} - before)
print(json.dumps(dict(tops=tops, seen=seen, milliseconds=seconds * 1e3)))
"""


def observed(statement: str) -> dict:
    """What a statement adds to a fresh interpreter that imported torch: packages, effects, milliseconds."""
    script = WATCHED.format(effects=EFFECTS, statement=statement)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def imported():
    """Five observations of ``import phalanx``, each in an interpreter of its own."""
    return [observed("import phalanx") for _ in range(5)]


def test_importing_loads_nothing_heavy(imported):
    """Importing phalanx loads none of the optional packages, beyond what torch loads by itself."""
    assert [sorted(HEAVY.intersection(one["tops"])) for one in imported] == [[]] * len(imported)


def test_importing_has_no_effects(imported):
    """Importing phalanx opens no socket and starts no process."""
    assert [one["seen"] for one in imported] == [[]] * len(imported)


def test_the_cost_of_importing_is_shown(imported):
    """The milliseconds that phalanx adds to ``import torch`` are printed (pytest -s), and judged by people."""
    milliseconds = [one["milliseconds"] for one in imported]
    print(f"\nimport phalanx after import torch: median {statistics.median(milliseconds):.1f} ms of {len(imported)}")
    print("packages added:", ", ".join(imported[0]["tops"]))


@pytest.mark.parametrize(
    "statement",
    ["import socket; socket.socket().close()", "import subprocess; subprocess.run(['true'])"],
)
def test_an_effect_is_seen(statement):
    """The observation notices a socket and a process."""
    assert observed(statement)["seen"]


def test_a_heavy_package_is_seen():
    """The observation notices a package that torch does not load."""
    assert "typer" in observed("import typer")["tops"]
