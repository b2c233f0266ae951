"""What the processes of a campaign train."""

from tests.families import FAMILIES


def recipe(steps=60):
    return FAMILIES["conv_norm"].recipe(4, steps=steps)
