"""How gradients on devices are cut: into buckets of whole parameters, each of which is sent as soon as it is full."""

from __future__ import annotations

from phalanx.engines.flat import Cut

BUCKET = 25 << 20  # bytes
ALIGNED = 512  # bytes: kernels may compute otherwise at addresses that a gradient of torch's own would not have


def in_buckets(sizes: dict[int, int], itemsize: int, slices: int) -> Cut:
    """A row for each bucket: parameters of at most 25 MB, or one, each of them aligned."""
    step = max(1, ALIGNED // itemsize)
    rows: Cut = []
    places, size = dict[int, int](), 0
    pending = list(sizes.items())
    for at, (index, count) in enumerate(pending):
        places[index] = size
        size += -(-count // step) * step
        last = at + 1 == len(pending)
        if size and (last or (size + pending[at + 1][1]) * itemsize > BUCKET):
            rows.append((places, [(0, -(-size // (slices * step)) * step)]))
            places, size = {}, 0
    if places and rows:  # parameters without elements, behind all others
        rows[-1][0].update(places)
    return rows or [(places, [])]
