"""All demos by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from phalanx.demos.digits import digits
from phalanx.demos.iris import iris
from phalanx.demos.parts import Demo

DEMOS: Final[dict[str, Callable[[], Demo]]] = {"digits": digits, "iris": iris}
