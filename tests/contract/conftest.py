"""The framework that a test is about; without jax or tinygrad, their part is skipped."""

import pytest

from tests.jax.conftest import MISSING, _compiled_once
from tests.tinygrad.conftest import MISSING as MISSING_FOR_TINYGRAD
from tests.tinygrad.conftest import _on_the_cpu

__all__ = ["_compiled_once", "_on_the_cpu"]


@pytest.fixture(params=["torch", "jax", "tinygrad"])
def kit(request):
    """Each framework in turn."""
    if request.param == "jax" and MISSING:
        pytest.skip(f"{' and '.join(MISSING)} not installed: pip install 'phalanx[jax]'")
    if request.param == "tinygrad" and MISSING_FOR_TINYGRAD:
        pytest.skip(MISSING_FOR_TINYGRAD)
    from tests.contract.kits import kit_of

    return kit_of(request.param)
