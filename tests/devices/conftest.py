import pytest

from tests import accelerator


@pytest.fixture
def fake():
    """The device module, as after loading."""
    return accelerator.accelerator()
