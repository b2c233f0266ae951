"""The framework that a test is about; without jax, its half is skipped."""

import pytest

from tests.jax.conftest import MISSING, _compiled_once

__all__ = ["_compiled_once"]


@pytest.fixture(params=["torch", "jax"])
def kit(request):
    """Each framework in turn."""
    if request.param == "jax" and MISSING:
        pytest.skip(f"{' and '.join(MISSING)} not installed: pip install 'phalanx[jax]'")
    from tests.contract.kits import KITS

    return KITS[request.param]
