"""What is done when workers fall: noticed and counted (``failures``), made good (``supervisor``).

What is decided is in ``plan.lifecycle``.
"""
