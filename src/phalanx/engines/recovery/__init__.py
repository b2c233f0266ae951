"""What is done when workers fall: noticed (``deadline``), counted (``failures``), made good (``supervisor``).

What is decided is in ``plan.lifecycle`` and ``plan.tally``; ``state_record`` has what a replacement has to be told.
"""
