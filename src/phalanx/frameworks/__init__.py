"""What computes a replica's gradient and applies the mean. Each framework is imported only when a recipe needs it."""
