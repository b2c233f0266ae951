"""What other libraries' users bring, as recipes: one module for each library, each with an extra of its name."""
