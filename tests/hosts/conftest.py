import pytest

from tests.hosts.worlds import Pair, started


@pytest.fixture(scope="session")
def pair():
    """Runs a program in a world of two processes, the same ones for all tests; see ``Pair``."""
    made = Pair(lambda code, **streams: started(code, 2, {}, **streams))
    yield made
    made.close()
