"""Memory layout is part of the data: convolutions may have other bits where pixels lie before channels."""

import functools
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.engines.alike import feed, same, two_or_three
from tests.families import FEATURES, SAMPLES, Circumstances, normal
from tests.sampling import sample

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

PIXELS = normal(SAMPLES, 16, 16, 3).numpy()
LAYOUTS = {
    "channels_last_view": PIXELS[:, :12, :12].copy().transpose(0, 3, 1, 2),
    "cropped_channels_last_view": PIXELS[:, 2:14, 2:14].transpose(0, 3, 1, 2),
    "every_other_sample": np.repeat(PIXELS, 2, 0)[::2, :12, :12].transpose(0, 3, 1, 2),
    "mirrored_channels_last_view": PIXELS[:, :12, 11::-1].transpose(0, 3, 1, 2),
    "fortran": np.asfortranarray(PIXELS[:, :12, :12].transpose(0, 3, 1, 2)),
    "broadcast": np.broadcast_to(PIXELS[:1, :12, :12].transpose(0, 3, 1, 2), (SAMPLES, 3, 12, 12)),
    "tensor": torch.from_numpy(PIXELS)[:, 2:14, 2:14].permute(0, 3, 1, 2),
    "expanded_tensor": torch.from_numpy(PIXELS)[:1, 2:14, 2:14].permute(0, 3, 1, 2).expand(SAMPLES, -1, -1, -1),
}


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(512, 3))


def images(data, make_model=convolutions, **changes):
    return phalanx.Recipe(make_model, data, F.cross_entropy, replicas=2, batch_size=8, **changes)


@pytest.mark.parametrize("layout", sample("layouts of columns", LAYOUTS, 1))
def test_memory_layouts_of_columns(layout):
    """Views of arrays reach workers with the strides that they have here."""
    same(images((LAYOUTS[layout], FEATURES[1]), steps=3), 2)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    "layout", sample("layouts of samples", [name for name in LAYOUTS if "mirrored" not in name], 1)
)
def test_memory_layouts_of_samples(layout):
    """So do the arrays in a list of samples, as far as torch can read them: it reads no negative strides."""
    same(images(list(zip(LAYOUTS[layout], FEATURES[1].tolist(), strict=True)), steps=3), 2)


@pytest.mark.parametrize("layout", sample("layouts of batches", LAYOUTS, 1))
def test_memory_layouts_of_brought_batches(layout):
    """So do views in batches that the caller brings."""
    x, y = LAYOUTS[layout], FEATURES[1]
    feed(images(None), [(x[:8], y[:8]), (x[7:], y[7:])], 2)


def lone_channel():
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(512, 3))


@pytest.mark.long
@pytest.mark.parametrize("form", ["array", "map", "class", "tensor"])
def test_memory_layouts_of_a_lone_channel(form, tmp_path):
    """Gray pictures stored channels last: numpy forgets the stride of an axis of length 1, and convolutions look."""
    np.save(tmp_path / "gray.npy", PIXELS[:, :12, :12, :1])
    gray = np.load(tmp_path / "gray.npy", mmap_mode="r" if form == "map" else None)
    x = np.moveaxis(gray.view(Marked) if form == "class" else gray, -1, 1)
    data = (torch.from_numpy(x) if form == "tensor" else x, FEATURES[1])
    same(phalanx.Recipe(lone_channel, data, F.cross_entropy, replicas=2, batch_size=8, steps=3), 2)


class Marked(np.ndarray):
    """Arrays of a library's own."""


@pytest.mark.parametrize("cut", [slice(None), slice(2, 14)], ids=["whole", "cut"])
def test_memory_layouts_of_mapped_files(cut, tmp_path):
    """Pictures in a file that is mapped, channels last, as views: they reach workers with their strides."""
    np.save(tmp_path / "pixels.npy", PIXELS)
    x = np.load(tmp_path / "pixels.npy", mmap_mode="r")[:, cut, cut][:, :12, :12].transpose(0, 3, 1, 2)
    same(images((x, FEATURES[1]), steps=3), 2)


def test_memory_layout_is_part_of_the_answer():
    """A model that looks at strides, as convolutions do, finds those of the data, in workers too."""
    view, make = LAYOUTS["cropped_channels_last_view"], lambda: Circumstances(432, 3)
    one, other = (images((x, FEATURES[1]), make, steps=3) for x in (view, np.ascontiguousarray(view)))
    assert same(one, 2)[0] != same(other, 2)[0]


@two_or_three("memory maps")
@pytest.mark.parametrize("kind", sample("memory maps", [np.float32, np.float64], 1))
def test_memory_maps_as_data(tmp_path, kind, workers):
    """Data in files, mapped, in rows or in columns: workers map the same files."""
    columns = []
    for number, order in enumerate("CF"):
        mapped = np.memmap(tmp_path / f"{number}", dtype=kind, mode="w+", shape=(SAMPLES, 5), order=order)
        mapped[:] = normal(SAMPLES, 5, seed=number).numpy()
        mapped.flush()
        columns.append(np.memmap(tmp_path / f"{number}", dtype=kind, mode="r", shape=(SAMPLES, 5), order=order))
    model = functools.partial(nn.Linear, 5, 5, dtype=torch.float32 if kind is np.float32 else torch.float64)
    same(phalanx.Recipe(model, tuple(columns), F.mse_loss, replicas=5, batch_size=7, steps=4), workers)
