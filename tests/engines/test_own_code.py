"""Code of phalanx itself is nobody's: workers have it already, and it is not searched for what users own."""

import sys

import phalanx
from phalanx.definition.reachable import reachable
from phalanx.surroundings.sources import SOURCES


def test_modules_of_phalanx_do_not_travel():
    """The sources that workers are given are the user's alone, wherever phalanx is installed: here from its tree."""
    assert "phalanx.recipe" in sys.modules
    assert [name for name in SOURCES.noted() if name.partition(".")[0] == "phalanx"] == []


def test_what_functions_of_phalanx_read_is_not_searched():
    """Of a function of phalanx its arguments are followed, and none of the globals that it reads."""
    given = [object()]
    loss = phalanx.weighted(lambda output, target: given, lambda output, target: 1.0)
    paths = dict(reachable({"loss_fn": loss}))
    assert any(value is given[0] for value in paths.values())
    assert not [path for path in paths if path.startswith("loss_fn.func (its global")]
