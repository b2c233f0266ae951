"""What of the user's process a run has to respect: Ctrl-C, forks, other threads, the code that it imported."""
