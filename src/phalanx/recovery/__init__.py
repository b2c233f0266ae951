"""What to do when a worker falls: pure decisions. Knows no process, clock or memory; engines act."""
