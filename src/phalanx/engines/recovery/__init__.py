"""What is done when workers die: ``failures`` notices and counts it, ``supervisor`` replaces them.

The decisions are made in ``plan.lifecycle``.
"""
