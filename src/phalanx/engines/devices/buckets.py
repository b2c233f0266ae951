"""How gradients on devices are cut: into buckets of whole parameters, each of which is sent as soon as it is full."""

from __future__ import annotations

from phalanx.engines.flat import Cut

BUCKET = 25 << 20  # bytes
ALIGNED = 512  # bytes: kernels may compute otherwise at addresses that a gradient of torch's own would not have


def in_buckets(sizes: dict[int, int], itemsize: int, slices: int) -> Cut:
    """Where parameters begin, each aligned, and buckets of at most 25 MB, or one parameter."""
    step = max(1, ALIGNED // itemsize)
    places, cuts = dict[int, int](), list[tuple[int, int]]()
    pending, begin, size = list(sizes.items()), 0, 0
    for at, (index, count) in enumerate(pending):
        places[index] = begin + size
        size += -(-count // step) * step
        if at + 1 == len(pending) or (size + pending[at + 1][1]) * itemsize > BUCKET:
            width = -(-size // (slices * step)) * step
            cuts.append((begin, width))
            begin, size = begin + slices * width, 0
    return places, cuts
