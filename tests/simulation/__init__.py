"""Simulated processes, time, network and memory: every interleaving replays by its seed."""
