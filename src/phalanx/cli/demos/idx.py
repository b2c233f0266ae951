"""The IDX files of MNIST and its relatives: four per data set, plain or gzip, read from a folder or fetched once.

Format: http://yann.lecun.com/exdb/mnist. Checksums of Fashion-MNIST: torchvision.datasets.FashionMNIST.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import pathlib
import urllib.request
import zlib

import numpy as np

from phalanx.errors import UsageError

UNSIGNED_BYTES = 8  # the type code of IDX
ADDRESS = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"
CHECKSUMS = {  # MD5 of the compressed files
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
SECONDS = 20
Split = tuple[np.ndarray, np.ndarray]


def load(folder: pathlib.Path) -> tuple[Split, Split]:
    """Images (uint8, samples x rows x columns) and labels (uint8) to train on, and to test with.

    Parameters
    ----------
    folder : pathlib.Path
        Where the four files are, with or without ``.gz``; what is missing is downloaded there and verified.

    Raises
    ------
    UsageError
        A file is missing and cannot be fetched, or is not what it should be; says which and what to do.
    """
    arrays = [read(_present(folder, name)) for name in CHECKSUMS]
    for kind, images, labels in (("train", *arrays[:2]), ("t10k", *arrays[2:])):
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise UsageError(
                f"{folder} has {kind} images of shape {images.shape} and labels of shape {labels.shape}; "
                "files of two data sets are mixed up: give a folder with the four files of one"
            )
    return (arrays[0], arrays[1]), (arrays[2], arrays[3])


def read(path: pathlib.Path) -> np.ndarray:
    """The array in one IDX file of unsigned bytes.

    Raises
    ------
    UsageError
        It is not such a file, or is cut off.
    """
    content = path.read_bytes()
    try:
        data = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} is damaged ({error}); delete it, and get it anew") from error
    axes = data[3] if len(data) > 3 else 0
    shape = (
        tuple(int(size) for size in np.frombuffer(data[4 : 4 + 4 * axes], ">u4")) if len(data) >= 4 + 4 * axes else ()
    )
    whole = data[:3] == bytes([0, 0, UNSIGNED_BYTES]) and len(shape) == axes > 0
    if not whole or len(data) != 4 + 4 * axes + math.prod(shape):
        raise UsageError(f"{path} is not a whole IDX file of unsigned bytes; delete it, and get it anew")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _present(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The file of this name, fetched if there is none."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    target = folder / f"{name}.gz"
    address = f"{ADDRESS}{name}.gz"
    try:
        with urllib.request.urlopen(address, timeout=SECONDS) as answer:
            content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise UsageError(
            f"{folder} has no {name} or {name}.gz, and {address} cannot be reached ({error}); put the four files "
            "there, give another folder with --data DIR, or use --digits, which needs no network"
        ) from error
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != CHECKSUMS[name]:
        raise UsageError(f"{address} has the MD5 {digest} instead of {CHECKSUMS[name]}; get the file from elsewhere")
    folder.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return target
