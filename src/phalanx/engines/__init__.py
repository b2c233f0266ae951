"""Where workers live. ``inline``: this process."""
