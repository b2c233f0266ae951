"""Numbers whose sum tells in which order they were added, on any processor."""

import itertools


def triples(count, large=1e8):
    """Rows to add: in each column ``large``, 1 and ``-large`` in three of them, for any three and whichever is the 1.

    Of any three rows, two meet first in any order of additions: in float32 a column comes to 1 if those are ``large``
    and ``-large``, else to 0. So other brackets are other sums on any processor; but as many columns come to 1.
    """
    columns = [
        [1.0 if row == alone else large if row == big else -large if row in three else 0.0 for row in range(count)]
        for three in itertools.combinations(range(count), 3)
        for alone in three
        for big in [next(row for row in three if row != alone)]
    ]
    return [list(row) for row in zip(*columns, strict=True)]
