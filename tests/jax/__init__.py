"""Recipes whose parameters are trees of jax arrays."""
