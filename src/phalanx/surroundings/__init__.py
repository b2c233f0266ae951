"""What a run has to respect of the process that it runs in: Ctrl-C, forks, threads, the code it imported."""
