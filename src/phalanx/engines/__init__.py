"""Where workers live. ``inline``: this process; ``processes``: this host; ``auto`` measures the two."""
