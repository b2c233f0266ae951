"""Shared by all tests: one thread for whatever runs beside phalanx, and a clean set of generators."""

import os

import pytest
import torch

os.environ["NPROC"] = "1"  # jax computes with one thread; read when it makes its first array in a process


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests compute with one thread, as replicas do, so that hand-written loops have their bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
