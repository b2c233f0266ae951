"""Code of phalanx itself is nobody's: workers have it already, and it is not searched for what users own."""

import sys

from phalanx import step
from phalanx.definition.reachable import reachable
from phalanx.surroundings import sources

OWNED = [object()]


def test_modules_of_phalanx_do_not_travel():
    """The sources that workers are given are the user's alone, wherever phalanx is installed: here from its tree."""
    assert "phalanx.recipe" in sys.modules
    assert [name for name in sources.note() if name.partition(".")[0] == "phalanx"] == []


def test_what_functions_of_phalanx_read_is_not_searched():
    """Of a function of phalanx none of the globals that it reads is followed; of a user's function all are."""
    assert not [path for path, _ in reachable({"hook": step.propose}) if "its global" in path]
    assert any(value is OWNED for _, value in reachable({"hook": test_what_functions_of_phalanx_read_is_not_searched}))
