"""Shared by all tests: one thread for whatever runs beside phalanx, and a clean set of generators."""

import importlib.util
import os
import pathlib
import re
import signal
import sys

import pytest
import torch

from tests.sampling import draw, leave_out

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background of a shell: nobody could press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


os.environ["NPROC"] = "1"  # jax computes with one thread; read when it makes its first array in a process


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules of tests are compiled once for all processes, also where the environment says that Python keeps none."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before


CORE = importlib.util.find_spec("phalanx.lab") is None  # make core
SATELLITES = re.compile(
    r"phalanx\.(lab|manual|collectives|backend|tune)\b|phalanx import .*\b(lab|manual|collectives|tune)\b|tinygrad|"
    r"hosts\.network import|import fuzz|test_named_losses import|find_lr|(backend|group)\W+phalanx\b|"
    r"phalanx\W+(chaos|check|report|runs|demo)\b"
)


def pytest_ignore_collect(collection_path):
    """Where phalanx has no satellites, their folders and files that name one are left out."""
    if not CORE or collection_path == pathlib.Path(__file__).parent / "conftest.py":
        return None
    if collection_path.is_dir():
        return collection_path.name in ("backend", "collectives", "integrations", "manual", "tinygrad") or None
    return (collection_path.suffix == ".py" and bool(SATELLITES.search(collection_path.read_text()))) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out most of what takes long, unless files were asked for by name."""
    if any(".py" in argument for argument in config.args):
        return
    leave_out(items)
    cases = os.environ.get("PHALANX_CASES", "all")  # of ``make test-all``
    if cases != "all":
        kept = draw(items, int(cases), os.environ.get("PHALANX_DRAW", "0"))
        there = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in there])
        items[:] = kept


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests compute with one thread, as replicas do, so that hand-written loops have their bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def computed_once(monkeypatch):
    """No replica is computed twice in this process: for tests that count calls of user code."""
    monkeypatch.setattr("phalanx.engines.twice.Twice.begin", lambda *_: None)
