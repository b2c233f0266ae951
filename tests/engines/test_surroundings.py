"""What workers take over from the caller's process, and what nobody else takes over from them."""
