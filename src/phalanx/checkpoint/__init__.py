"""Snapshots on disk: their format, their directory, when they are written, and how a run goes on from one."""
