"""The tinygrad framework: programs captured per device and shape, updates by its own optimizers."""
