"""Snapshots on disk: what is in one, how it is written so that it is whole or not there, and how it is read."""
