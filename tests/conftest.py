"""Shared by all tests: one thread for whatever runs beside phalanx, and a clean set of generators."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests compute with one thread, as replicas do, so that hand-written loops have their bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
