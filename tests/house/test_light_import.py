"""``import phalanx`` adds little to ``import torch``, and does nothing but import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.house

HEAVY = {"jax", "tinygrad", "matplotlib", "sklearn", "rich", "typer", "tqdm", "cloudpickle", "IPython"}
# What nobody expects of an import: a socket, a process, a look-up of a name.
EFFECTS = "socket. subprocess. os.fork os.posix_spawn os.exec os.system urllib. http."

WATCHED = """
import json, sys
import torch
before, seen, watching = {{name.split(".")[0] for name in sys.modules}}, [], True
def watch(event, arguments):
    if watching and event.startswith(tuple({effects!r}.split())):
        seen.append(event)
sys.addaudithook(watch)
{statement}
watching = False
tops = sorted({{name.split(".")[0] for name in sys.modules}} - before)
print(json.dumps(dict(tops=tops, seen=seen)))
"""


def observed(statement: str) -> dict:
    """What a statement adds to a fresh interpreter that imported torch: packages and effects."""
    script = WATCHED.format(effects=EFFECTS, statement=statement)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, stdin=subprocess.DEVNULL, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def imported():
    """What ``import phalanx`` adds."""
    return observed("import phalanx")


def test_importing_loads_nothing_heavy(imported):
    """Importing phalanx loads none of the optional packages, beyond what torch loads by itself."""
    assert not HEAVY.intersection(imported["tops"])


def test_importing_has_no_effects(imported):
    """Importing phalanx opens no socket and starts no process."""
    assert not imported["seen"]


def test_what_is_not_light_is_seen():
    """The observation notices a socket, a process, and a package that torch does not load."""
    heavy = observed("import socket, subprocess, typer; socket.socket().close(); subprocess.run(['true'])")
    assert "typer" in heavy["tops"]
    assert {"socket.__new__", "subprocess.Popen"} <= set(heavy["seen"])
