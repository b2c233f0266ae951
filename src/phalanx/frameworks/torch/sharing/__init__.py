"""How a torch state is shared with worker processes: gradients, optimizer state, and what lies where."""
