"""A run that users hold: options, progress, result."""
