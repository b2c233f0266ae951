import sys

import pytest

from tests.backend.ranks import served


def pytest_collection_modifyitems(items):
    """Without Linux there is no such backend."""
    if not sys.platform.startswith("linux"):
        for item in items:
            if "tests/backend" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="backend 'phalanx' needs Linux"))


@pytest.fixture(scope="session")
def ran():
    """Runs a job on so many ranks; returns exit codes and tracebacks."""
    with served() as call:
        yield call


@pytest.fixture(scope="session")
def right(ran):
    """Runs a job on so many ranks, and sees that all of them end well."""

    def call(size, job, *arguments, **options):
        codes, told = ran(size, job, *arguments, **options)
        assert codes == [0] * size, "\n".join(told)

    return call
