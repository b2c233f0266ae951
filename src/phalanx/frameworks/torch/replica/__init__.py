"""What computes one replica: its batch, the forward and backward pass, and the buffers that these leave."""
