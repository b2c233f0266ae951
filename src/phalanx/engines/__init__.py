"""Where workers live. ``inline``: this process; ``processes``: this host; ``hosts``: several; ``auto`` measures.

``recovery`` is what ``processes`` does when workers fall.
"""
