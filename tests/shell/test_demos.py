"""d2l's chapter: the IDX files that it reads, and the job in both frameworks."""

import gzip
import importlib.util
import json
import shutil

import numpy as np
import pytest

import phalanx
from phalanx.cli import demos as chapter
from tests.shell.test_command_line import phalanx_command

JAX = pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="needs jax and optax")
TINYGRAD = pytest.mark.skipif(
    importlib.util.find_spec("tinygrad") is None or shutil.which("clang") is None, reason="needs tinygrad and clang"
)


def encoded(array):
    """An array of bytes as an IDX file has it."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def images(count, seed):
    """Ten classes that are easy to tell: a bright row each."""
    labels = np.random.default_rng(seed).integers(10, size=count).astype(np.uint8)
    pixels = np.random.default_rng(seed + 1).integers(60, size=(count, 28, 28)).astype(np.uint8)
    for image, label in zip(pixels, labels, strict=True):
        image[2 * label + 3 : 2 * label + 5] += 180
    return pixels, labels


@pytest.fixture
def folder(tmp_path):
    """Four files, two of them compressed."""
    for name, array in zip(chapter.FILES, [*images(160, 0), *images(40, 9)], strict=True):
        if "labels" in name:
            (tmp_path / name).write_bytes(encoded(array))
        else:
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(encoded(array)))
    return tmp_path


def test_four_files_are_read(folder):
    """Plain or compressed, images come out as they went in, from 0 to 1, and labels in the dtype that is asked for."""
    job = chapter.images(str(folder), np.int32)
    for (x, y), (pixels, labels) in zip((job.train, job.test), (images(160, 0), images(40, 9)), strict=True):
        assert (x.dtype, y.dtype) == (np.float32, np.int32)
        assert np.array_equal(x[:, 0] * np.float32(255), pixels)
        assert np.array_equal(y, labels)
    assert (job.batch_size, job.steps) == (256, 10)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train-labels-idx1-ubyte", lambda data: data[:-1], "is not a whole IDX file"),
        ("train-labels-idx1-ubyte", lambda data: data + b"\0", "is not a whole IDX file"),
        ("train-labels-idx1-ubyte", lambda data: b"", "is not a whole IDX file"),
        ("train-labels-idx1-ubyte", lambda data: data[:3], "is not a whole IDX file"),
        ("train-labels-idx1-ubyte", lambda data: b"\0\0\x0d" + data[3:], "is not a whole IDX file"),
        ("train-images-idx3-ubyte.gz", lambda data: data[:-9], "is not a whole IDX file"),
        ("t10k-labels-idx1-ubyte", lambda data: encoded(np.zeros(7, np.uint8)), "four files of one data set"),
    ],
)
def test_damaged_files_are_refused(folder, name, change, message):
    """A file that is cut off, too long, of another type, or of another data set is named."""
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    with pytest.raises(phalanx.UsageError, match=message) as caught:
        chapter.images(str(folder), np.int64)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", chapter.FILES)
def test_a_file_that_is_missing_is_named(folder, name):
    """It is named, with where to get it and what needs none; nothing is fetched, and with all four it is read."""
    assert chapter.images(str(folder), np.int64).steps == 10
    for path in folder.glob(f"{name}*"):
        path.unlink()
    with pytest.raises(phalanx.UsageError, match=rf"has no {name} or.*github.com.*--data DIR.*--digits"):
        chapter.images(str(folder), np.int64)


@pytest.mark.longest
def test_the_chapter_on_idx_files(folder):
    """It trains on files in a folder with one worker and with two, prints d2l's line for both, and draws."""
    done = phalanx_command("demo", "fashion-mnist", "--data", str(folder), "--workers", "2", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Fashion-MNIST, in torch" in done.stdout
    assert "examples/sec on [worker 0]\n" in done.stdout
    assert "examples/sec on [worker 0, worker 1]\n" in done.stdout
    assert (folder / "out/demo-fashion-mnist.png").stat().st_size > 10_000


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("framework", "spread"),
    [
        ("torch", "--workers 2"),
        pytest.param("jax", "--workers 2", marks=JAX),
        pytest.param("tinygrad", "--devices CPU,CPU:1", marks=TINYGRAD),
    ],
)
def test_the_chapter_on_digits(tmp_path, framework, spread):
    """Without any file it reaches 97 % on the bundled digits."""
    arguments = ["demo", "fashion-mnist", "--digits", "--framework", framework, *spread.split(), "--quiet", "--json"]
    done = phalanx_command(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["accuracy"] >= 0.97


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fashion-mnist", "--framework", "mxnet"], ["--framework", "mxnet", "torch", "jax", "tinygrad"]),
        (["digits", "--framework", "jax"], ["digits", "--framework", "fashion-mnist"]),
        (["iris", "--framework", "tinygrad"], ["iris", "--framework", "fashion-mnist"]),
    ],
)
def test_wrong_options(here, tmp_path, arguments, words):
    """One sentence that names the value and what there is."""
    done = here("demo", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words)
