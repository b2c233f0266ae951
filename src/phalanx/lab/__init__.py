"""What measures and breaks things: checks, campaigns of kills, tuning, pages about runs, the demo.

No other part of phalanx needs it. Its names are reached through ``phalanx``, ``phalanx.testing`` and the command.
"""
