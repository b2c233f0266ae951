"""jax computes with one thread, so that hand-written loops have the bits of replicas; without jax all is skipped."""

import importlib.util

import pytest

MISSING = [name for name in ("jax", "optax") if importlib.util.find_spec(name) is None]


@pytest.fixture(autouse=True, scope="session")
def _compiled_once(tmp_path_factory):
    """What two tests compile alike is compiled once."""
    if not MISSING:
        import jax

        jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.devices()  # starts with one thread, before a test asks for two


class Skipped(pytest.Module):
    """A file of tests that cannot be imported."""

    def collect(self):
        pytest.skip(f"{' and '.join(MISSING)} not installed: pip install 'phalanx[jax]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip every file here, with the reason, where what it imports is missing."""
    return Skipped.from_parent(parent, path=module_path) if MISSING else None
