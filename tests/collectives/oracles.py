"""Hand-written reductions and awkward tensors for the tests of the collectives. numpy only, where numpy can."""

import itertools

import numpy as np
import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
ALGORITHMS = ("ordered", "ring", "naive")
OPS = ("sum", "mean", "max", "min")
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 6e-8, -6e-8)


def fits(op, dtype):
    """Whether an operation has a result in a dtype."""
    if dtype.is_complex:
        return op in ("sum", "mean")
    if dtype == torch.bool:
        return op in ("max", "min")
    return dtype.is_floating_point or op != "mean"


CASES = [(op, dtype) for op, dtype in itertools.product(OPS, DTYPES) if fits(op, dtype)]


def wild(count, shape, dtype, seed, special=False):
    """``count`` tensors over many magnitudes; integers over their whole range."""
    random = np.random.default_rng(seed)
    return [_one(random, shape, dtype, special) for _ in range(count)]


def _one(random, shape, dtype, special):
    if dtype == torch.bool:
        return torch.from_numpy(np.asarray(random.random(shape) < 0.5))
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        return torch.tensor(random.integers(limits.min, limits.max, shape, endpoint=True, dtype=np.int64)).to(dtype)
    if dtype.is_complex:
        return torch.complex(*(_one(random, shape, torch.float64, special) for _ in range(2))).to(dtype)
    numbers = random.normal(size=shape) * 10.0 ** random.integers(-3, 4, size=shape)
    if special:
        numbers = np.where(random.random(shape) < 0.2, random.choice(SPECIAL, size=shape), numbers)
    return torch.tensor(numbers).to(dtype)


def bits(tensor):
    """Dtype, shape and bytes; every NaN counts as the same NaN, because hardware chooses its payload."""
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if real.is_floating_point():
        real = real.float() if real.itemsize == 1 else real  # exact; torch 2.6 cannot choose among eighths
        real = torch.where(real.isnan(), torch.full_like(real, torch.nan), real)
    own = real.resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tuple(tensor.shape), bytes(own.untyped_storage().tolist())


def same_values(tensor):
    """Bits, but a zero has no sign."""
    return bits(tensor + 0) if tensor.is_floating_point() else bits(tensor)


def as_array(tensor):
    """A numpy array in which sums are made: float32 for narrower floats, else the dtype itself."""
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    return (tensor.float() if narrow else tensor).numpy().reshape(-1).copy()


def orders(algorithm, count, size):
    """For each part of the flattened data, from start to end: the brackets in which participants are combined."""
    if algorithm == "ring":
        ends = np.cumsum([0, *(len(part) for part in np.array_split(np.arange(size), count))]).tolist()
        for chunk, (start, end) in enumerate(itertools.pairwise(ends)):
            yield start, end, _left_to_right([*range(chunk + 1, count), *range(chunk + 1)])
    else:
        yield 0, size, _left_to_right(range(count)) if algorithm == "naive" else _tree(list(range(count)))


def _left_to_right(members):
    brackets, *others = members
    for other in others:
        brackets = (brackets, other)
    return brackets


def _tree(members):
    """Neighbours pair up, then pairs of pairs; who has no neighbour waits."""
    while len(members) > 1:
        members = [
            pair[0] if len(pair) == 1 else pair
            for pair in (tuple(members[at : at + 2]) for at in range(0, len(members), 2))
        ]
    return members[0]


def combined(brackets, arrays, combine):
    """What a tree of brackets over participants comes to."""
    if isinstance(brackets, int):
        return arrays[brackets]
    left, right = (combined(part, arrays, combine) for part in brackets)
    return combine(left, right)


def reduced(tensors, op, algorithm):
    """The reduction, by numpy, in the order that the algorithm promises."""
    arrays = [as_array(tensor) for tensor in tensors]
    combine = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}[op]
    total = np.empty_like(arrays[0])
    with np.errstate(all="ignore"):
        for start, end, brackets in orders(algorithm, len(arrays), len(total)):
            total[start:end] = combined(brackets, [array[start:end] for array in arrays], combine)
        if op == "mean" and len(arrays) > 1:
            parts = total.view(total.real.dtype)
            parts /= parts.dtype.type(len(arrays))
    return torch.from_numpy(total).to(tensors[0].dtype).reshape(tensors[0].shape)
