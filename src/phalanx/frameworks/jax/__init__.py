"""The jax framework: parameters in a pytree, gradients by ``jax.value_and_grad``, updates by optax."""
