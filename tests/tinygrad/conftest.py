"""tinygrad computes on the CPU, whatever else it finds; without it, or without clang, all is skipped."""

import importlib.util
import os
import shutil

import pytest

NAMES = ("clang", *(f"clang-{number}" for number in range(30, 12, -1)))  # Debian's has a number where pocl brought it
CLANG = next(filter(shutil.which, [name for name in (os.environ.get("CC", ""), *NAMES) if "clang" in name]), None)
PACKAGE = importlib.util.find_spec("tinygrad") is not None
MISSING = "" if PACKAGE and CLANG else (
    "clang is not installed, with which tinygrad compiles for the CPU: apt-get install clang"
    if PACKAGE
    else "tinygrad is not installed: pip install 'phalanx[tinygrad]'"
)  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def _on_the_cpu():
    """The first compiler that there is, and the CPU where no device is named."""
    if not MISSING:
        from tinygrad import helpers

        with pytest.MonkeyPatch.context() as patch:  # tinygrad looks there once
            patch.setenv("CC", CLANG or "")
            helpers.getenv.cache_clear()  # another test may have had it look before
            helpers.getenv("CC", "clang")
        helpers.DEV.value = "CPU"


class Skipped(pytest.Module):
    """A file of tests that cannot be imported."""

    def collect(self):
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip every file here, with the reason, where what it needs is missing."""
    return Skipped.from_parent(parent, path=module_path) if MISSING else None
