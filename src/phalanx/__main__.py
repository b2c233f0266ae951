"""``python -m phalanx`` is the command ``phalanx``."""

from phalanx.cli.app import main

main()
