"""What shows that a run keeps its promise, and what it costs."""
