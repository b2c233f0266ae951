"""``python -m phalanx`` is the command ``phalanx``."""

from phalanx.cli import main

main()
