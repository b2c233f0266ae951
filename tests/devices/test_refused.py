"""What to write instead of operations that deterministic mode refuses on CUDA: it computes the same, and is found."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from phalanx.frameworks.torch.device import INSTEAD

# What torch raises on CUDA, by the key that has the way out. From ``alertNotDeterministic`` in ATen/native/cuda, and
# from ``test_nondeterministic_alert_*`` in torch's own test/test_torch.py.
REFUSED = {
    "adaptive_avg_pool2d": ["adaptive_avg_pool2d_backward_cuda"],
    "adaptive_max_pool2d": ["adaptive_max_pool2d_backward_cuda"],
    "pool3d": [
        "avg_pool3d_backward_cuda",
        "adaptive_avg_pool3d_backward_cuda",
        "max_pool3d_with_indices_backward_cuda",
    ],
    "nll_loss2d": ["nll_loss2d_forward_out_cuda_template"],
    "upsample": [
        "upsample_linear1d_backward_out_cuda",
        "upsample_bilinear2d_backward_out_cuda",
        "upsample_bicubic2d_backward_out_cuda",
        "upsample_trilinear3d_backward_out_cuda",
    ],
    "reflection_pad": [
        "reflection_pad1d_backward_out_cuda",
        "reflection_pad2d_backward_cuda",
        "reflection_pad3d_backward_out_cuda",
    ],
    "grid_sampler": ["grid_sampler_2d_backward_cuda", "grid_sampler_3d_backward_cuda"],
    "ctc_loss": ["ctc_loss_backward_gpu"],
    "embedding_bag": ["embedding_bag_backward_cuda_max"],
    "cumsum": ["cumsum_cuda_kernel"],
    "max_unpooling": ["max_unpooling2d_forward_out", "max_unpooling3d_forward_out"],
    "median": ["median CUDA with indices output"],
}


def drawn(*shape):
    """Numbers, with a gradient."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def whole(size, count):
    """Indices of ``count`` classes."""
    return torch.randint(0, count, size, generator=torch.Generator().manual_seed(1))


def flattened(output, target):
    """cross_entropy over [N, C, ...]."""
    return F.cross_entropy(output.movedim(1, -1).flatten(0, -2), target.flatten())


def apart(x, layer, plane, line, **how):
    """A pool over depth, height and width: the last two first, then the first."""
    depth, height, width = layer
    x = plane(x.flatten(1, 2), (height, width), **how).unflatten(1, x.shape[1:3])
    return line(x.movedim(2, -1).flatten(1, -2), depth, **how).unflatten(1, (x.shape[1], *x.shape[3:])).movedim(-1, 2)


def matrix(size, new):
    """What bicubic interpolation does along one side, as a matrix; its own gradient is not asked for."""
    rows = torch.eye(size)[:, None, :, None].expand(size, 1, size, 1)
    return F.interpolate(rows, size=(new, 1), mode="bicubic")[:, 0, :, 0].T


def reflected(x, pad):
    """ReflectionPad along the last side."""
    return torch.cat([x[..., 1 : pad + 1].flip(-1), x, x[..., -pad - 1 : -1].flip(-1)], -1)


def sampled(image, grid):
    """grid_sample: bilinear, zeros outside, corners not aligned."""
    height, width = image.shape[-2:]
    x, y = (((grid + 1) * torch.tensor([width, height]) - 1) / 2).unbind(-1)
    sample, total = torch.arange(len(image)).view(-1, 1, 1), torch.zeros(())
    for j, i in [(x.floor() + right, y.floor() + below) for right in (0, 1) for below in (0, 1)]:
        inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
        weight = (1 - (y - i).abs()) * (1 - (x - j).abs()) * inside
        at = sample, slice(None), i.clamp(0, height - 1).long(), j.clamp(0, width - 1).long()
        total = total + weight[..., None] * image[at]
    return total.movedim(-1, 1)


def cells(linear):
    """Places in a row of ``linear`` numbers that occur once each."""
    return torch.randperm(linear, generator=torch.Generator().manual_seed(2))[: linear // 4].view(1, 1, -1)


CLASSES, LENGTHS = whole((2, 5, 4), 3), (torch.tensor([9, 9]), torch.tensor([3, 2]))
LABELS, WORDS, GRID = 1 + whole((2, 3), 4), whole((3, 4), 7), 1.2 * torch.tanh(drawn(2, 5, 6, 2).detach())
INDICES = cells(36).view(1, 1, 3, 3)

# The operation, and what docs/devices.md says to write.
WAYS = {
    "adaptive_avg_pool2d": (
        drawn(2, 3, 14, 21),
        lambda x: F.adaptive_avg_pool2d(x, 7),
        lambda x: F.avg_pool2d(x, (2, 3)),
    ),
    "adaptive_avg_pool2d to one": (
        drawn(2, 3, 5, 6),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: x.mean((-2, -1), keepdim=True),
    ),
    "adaptive_max_pool2d": (
        drawn(2, 3, 14, 21),
        lambda x: F.adaptive_max_pool2d(x, 7),
        lambda x: F.max_pool2d(x, (2, 3)),
    ),
    "pool3d": (
        drawn(2, 3, 4, 6, 9),
        lambda x: F.avg_pool3d(x, (2, 3, 3)),
        lambda x: apart(x, (2, 3, 3), F.avg_pool2d, F.avg_pool1d),
    ),
    "pool3d, padded": (
        drawn(2, 3, 4, 6, 9),
        lambda x: F.avg_pool3d(x, (3, 3, 3), stride=2, padding=1),
        lambda x: apart(x, (3, 3, 3), F.avg_pool2d, F.avg_pool1d, stride=2, padding=1),
    ),
    "pool3d, maximum": (
        drawn(2, 3, 4, 6, 9),
        lambda x: F.max_pool3d(x, (2, 3, 3)),
        lambda x: apart(x, (2, 3, 3), F.max_pool2d, F.max_pool1d),
    ),
    "nll_loss2d": (
        drawn(2, 3, 5, 4),
        lambda x: F.cross_entropy(x, CLASSES),
        lambda x: flattened(x, CLASSES),
    ),
    "upsample": (
        drawn(2, 3, 8, 12),
        lambda x: F.interpolate(x, size=(20, 30), mode="bicubic"),
        lambda x: matrix(8, 20) @ x @ matrix(12, 30).T,
    ),
    "reflection_pad": (
        drawn(2, 3, 8, 9),
        lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"),
        lambda x: reflected(reflected(x, 2).mT, 2).mT,
    ),
    "grid_sampler": (
        drawn(2, 3, 7, 8),
        lambda x: F.grid_sample(x, GRID, align_corners=False),
        lambda x: sampled(x, GRID),
    ),
    "ctc_loss": (
        drawn(9, 2, 5),
        lambda x: F.ctc_loss(x.log_softmax(-1), LABELS, *LENGTHS),
        lambda x: F.ctc_loss(x.log_softmax(-1).cpu(), LABELS.cpu(), *LENGTHS).to(x.device),
    ),
    "embedding_bag": (
        drawn(7, 5),
        lambda x: F.embedding_bag(WORDS, x, mode="max"),
        lambda x: F.embedding(WORDS, x).max(1).values,
    ),
    "cumsum": (
        drawn(3, 6),
        lambda x: x.cumsum(-1),
        lambda x: x @ torch.ones(6, 6).triu(),
    ),
    "max_unpooling": (
        drawn(1, 1, 3, 3),
        lambda x: nn.MaxUnpool2d(2)(x, INDICES),
        lambda x: torch.zeros(1, 1, 36).scatter(-1, INDICES.flatten(2), x.flatten(2)).view(1, 1, 6, 6),
    ),
    "median": (
        drawn(3, 6),
        lambda x: x.median(-1).values,
        lambda x: x.sort(-1).values[..., 2],
    ),
}


@pytest.mark.parametrize("key", INSTEAD)
def test_a_refusal_finds_its_way_out(key):
    """Each name that torch raises finds the entry that is meant for it, and each entry is for one."""
    for name in REFUSED[key]:
        assert next(part for part in INSTEAD if part in name) == key


@pytest.mark.parametrize("name", WAYS)
def test_a_way_out_computes_the_same(name):
    """Values and gradients are those of the operation that is refused, but for rounding."""
    x, refused, instead = WAYS[name]
    wanted, given = refused(x), instead(x)
    up = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(given, wanted)
    gradients = [torch.autograd.grad(value, x, up)[0] for value in (given, wanted)]
    torch.testing.assert_close(*gradients)


def test_every_way_out_was_tried():
    """No entry is without a computation that shows it."""
    assert {name.split(" ")[0].rstrip(",") for name in WAYS} == set(INSTEAD) == set(REFUSED)
