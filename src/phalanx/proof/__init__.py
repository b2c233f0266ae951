"""What shows that a run keeps its promise."""
