"""What is done when workers fall: noticed (``deadline``), counted (``failures``), made good (``supervisor``).

What is decided is in ``plan.lifecycle``.
"""
