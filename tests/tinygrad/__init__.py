"""What is said of tinygrad alone."""
