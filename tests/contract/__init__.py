"""What holds for every framework."""
