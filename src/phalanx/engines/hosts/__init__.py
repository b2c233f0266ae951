"""Runs over several hosts: each has worker processes of its own, which exchange sums with those of others."""
