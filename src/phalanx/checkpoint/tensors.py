"""Tensors in files, in the safetensors format: a length, a JSON header, bytes. Written in one go, read with limits.

``packed`` makes bytes of a whole state in the same way, to travel from one process of a run to the others. The weights
of a model are such a file, and the states of callbacks are tensors and plain values beside them.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import math
import pathlib
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np

from phalanx.checkpoint import files
from phalanx.definition import checks
from phalanx.definition.digest import leaf_hash
from phalanx.definition.plain import check_like, decoded, encoded, taking_over
from phalanx.errors import SnapshotError, UsageError
from phalanx.frameworks.registry import stored, tensor_of, weights_of
from phalanx.seams.records import CODES, Captured, Tensor

LENGTH = struct.Struct("<Q")
HEADER_BYTES = 8 << 20  # enough for 60,000 tensors; less than a second to read
ALIGNMENT = 8
MOST_DIMENSIONS, MOST_BYTES = 64, 1 << 63  # of a tensor, in torch and numpy
METADATA = "__metadata__"
SEAL = 32  # bytes of a checksum
FACTS, PARTS = "told", ("weights/", "training/")  # names in a state that travels, and how those of tensors begin
TREE = "batch"  # begins the names of its arrays
SUFFIX = ".safetensors"
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
CALLBACKS = "callbacks"  # begins the names of their tensors in snapshots, and is their key among a snapshot's facts
NAMES = {code: (name, size) for name, (code, size) in CODES.items()}


def write(file: BinaryIO, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write ``tensors``; returns the SHA-256 of each."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        code, size = CODES[tensor.dtype]
        end = offset + size * math.prod(tensor.shape)
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > HEADER_BYTES:  # nobody could read it again
        raise OSError(errno.EFBIG, f"{len(tensors)} tensors are too many for one file")
    file.write(LENGTH.pack(len(text)) + text)
    hashes: dict[str, str] = {}
    for name, tensor in tensors.items():
        content = memoryview(tensor.content).cast("B")
        hashes[name] = leaf_hash(CODES[tensor.dtype][0], tensor.shape, content)
        file.write(content)
    return hashes


def read(data: memoryview, hashes: Mapping[str, str] | None) -> dict[str, Tensor]:
    """The tensors in ``data``, which is a whole file; ``hashes``: what they must be, where that is known.

    Raises
    ------
    ValueError
        It is no such file, or a tensor is not the one that was written; names it.
    """
    if len(data) < LENGTH.size:
        raise ValueError("it is cut off")
    (length,) = LENGTH.unpack_from(data)
    if length > min(HEADER_BYTES, len(data) - LENGTH.size):
        raise ValueError("its header is cut off or too long")
    header = json.loads(bytes(data[LENGTH.size : LENGTH.size + length]))
    body = data[LENGTH.size + length :]
    if not isinstance(header, dict) or (hashes is not None and set(header) - {METADATA} != set(hashes)):
        raise ValueError("its tensors are not those that were written")
    header.pop(METADATA, None)
    tensors: dict[str, Tensor] = {}
    expected = 0
    described = {name: _described(name, entry) for name, entry in header.items()}
    for name, (dtype, shape, start, end) in sorted(described.items(), key=lambda item: item[1][2:]):
        if start != expected or end > len(body):
            raise ValueError(f"tensor {name!r} is not where it should be, or cut off")
        if hashes is not None and leaf_hash(CODES[dtype][0], shape, body[start:end]) != hashes[name]:
            raise ValueError(f"tensor {name!r} is damaged: its checksum differs")
        tensors[name] = Tensor(dtype, shape, body[start:end])
        expected = end
    if expected != len(body):
        raise ValueError("there is something behind its tensors")
    return tensors


def packed(state: Captured, more: dict[str, Any]) -> bytes:
    """``state`` and JSON values beside it, as bytes."""
    text = json.dumps({"facts": state.facts, "more": more}).encode()
    whole = {FACTS: Tensor("uint8", (len(text),), text)}
    for prefix, part in zip(PARTS, (state.weights, state.training), strict=True):
        whole |= {prefix + name: tensor for name, tensor in part.items()}
    file = io.BytesIO()
    write(file, whole)
    data = file.getvalue()
    return hashlib.sha256(data).digest() + data


def unpacked(data: bytes) -> tuple[Captured, dict[str, Any]]:
    """The state and the JSON values that were packed.

    Raises
    ------
    SnapshotError
        It is not what ``packed`` makes, or was damaged on the way.
    """
    try:
        seal, content = data[:SEAL], memoryview(data)[SEAL:]
        if hashlib.sha256(content).digest() != seal:
            raise ValueError("its checksum differs")
        whole = read(content, None)
        message = json.loads(bytes(whole.pop(FACTS).content))
        weights, training = (
            {name.removeprefix(prefix): tensor for name, tensor in whole.items() if name.startswith(prefix)}
            for prefix in PARTS
        )
        return Captured(weights, training, message["facts"]), message["more"]
    except files.MALFORMED as error:
        raise SnapshotError(f"the state that another process sent cannot be used: {error}") from error


def _described(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, start and end of a tensor, checked.

    Raises
    ------
    ValueError
        No tensor can be so; names it.
    """
    fields = ("dtype", "shape", "data_offsets")
    if not isinstance(entry, dict) or len(entry) != len(fields) or set(entry) != set(fields):
        raise ValueError(f"tensor {name!r} is not described by {', '.join(fields)}")
    code, shape, offsets = (entry[field] for field in fields)
    if not isinstance(code, str) or code not in NAMES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {code!r:.80}")
    if not _sizes(shape, MOST_DIMENSIONS) or not _sizes(offsets, 2) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has a shape or a place that no tensor can have")
    dtype, size = NAMES[code]
    if size * math.prod(length or 1 for length in shape) >= MOST_BYTES:  # also where another length is 0
        raise ValueError(f"tensor {name!r} has the shape {shape!r:.80}, which no tensor can have")
    start, end = offsets
    if end - start != size * math.prod(shape):
        raise ValueError(f"tensor {name!r} has the shape {shape!r:.80} and {end - start} bytes, which do not fit")
    return dtype, tuple(shape), start, end


def _sizes(values: Any, most: int) -> bool:
    known = isinstance(values, list) and len(values) <= most
    return known and all(type(value) is int and 0 <= value < MOST_BYTES for value in values)


def leaf(tensor: Tensor) -> str:
    """The hash of a tensor, as ``write`` returns it."""
    return leaf_hash(CODES[tensor.dtype][0], tensor.shape, memoryview(tensor.content).cast("B"))


def write_tree(path: pathlib.Path, tree: Any) -> Any:
    """Write the arrays of a tree; returns the rest as JSON values, None if it has no arrays or holds other things.

    Raises
    ------
    OSError
        It cannot be written.
    """
    arrays: dict[str, Tensor] = {}
    try:
        rest = encoded(tree, _keeper(arrays), TREE)
    except UsageError:
        return None
    if not arrays or not all(array.dtype in np.sctypeDict for array in arrays.values()):
        return None
    files.replace(path, functools.partial(write, tensors=arrays))
    return rest


def read_tree(path: pathlib.Path, rest: Any) -> Any:
    """The tree again, in arrays of numpy.

    Raises
    ------
    SnapshotError
        It is not there, or damaged.
    """
    arrays = read_file(path)

    def find(name: Any, _: str) -> Any:
        array = arrays[name]
        return np.frombuffer(bytearray(array.content), np.dtype(array.dtype)).reshape(array.shape)

    with files.used(path):
        return decoded(rest, find, TREE)


def _keeper(taken: dict[str, Tensor]) -> Callable[[Any, str], str | None]:
    """Takes tensors and arrays out of a value that is encoded, and leaves their paths there."""

    def keep(leaf: Any, path: str) -> str | None:
        tensor = stored(leaf)
        if tensor is None:
            return None
        taken[path] = tensor
        return path

    return keep


def read_file(path: pathlib.Path) -> dict[str, Tensor]:
    """Tensors by name, of a file in this format, be it of phalanx or not.

    Raises
    ------
    SnapshotError
        It cannot be read, or is damaged.
    """
    with files.used(path):
        return read(memoryview(files.read(path)), None)


def read_weights(path: pathlib.Path) -> dict[str, Any]:
    """Tensors by name, of such a file, as those of their framework."""
    return {name: tensor_of(tensor, {}) for name, tensor in read_file(path).items()}


def copied_weights(model: Any, params: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of ``model`` in memory; ``instead``: values for parameters of these names."""
    return {name: tensor_of(tensor, {}) for name, tensor in weights_of(model, params, instead).items()}


def write_file(path: Any, weights: Mapping[str, Tensor]) -> pathlib.Path:
    """Write tensors as one file, whole and durable or not at all; returns where. One that is there is replaced."""
    target = checks.path("path", path, hint=f"give the name of a file that ends in {SUFFIX}")
    if target.suffix != SUFFIX:
        raise UsageError(
            f"path is {str(path)!r}, and weights are written as {SUFFIX}; end it so, or save the model itself "
            "in another way"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.replace(target, functools.partial(write, tensors=weights))
    except OSError as error:
        raise SnapshotError(f"the weights could not be written to {str(target)!r}: {error}") from error
    return target


def kept(states: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """States of callbacks as JSON values and tensors by name.

    Raises
    ------
    UsageError
        A state holds something else than numbers, text, tensors, arrays, lists and dicts of those; names it.
    """
    taken: dict[str, Tensor] = {}
    keep = _keeper(taken)
    return {name: encoded(state, keep, f"{CALLBACKS}.{name}") for name, state in states.items()}, taken


def states_in(facts: Mapping[str, Any], training: Mapping[str, Tensor]) -> dict[str, Any]:
    """The states of callbacks in a snapshot; arrays come as tensors.

    Raises
    ------
    SnapshotError
        They are no such states.
    """
    unread = {name: tensor for name, tensor in training.items() if name.startswith(f"{CALLBACKS}.")}
    with taking_over("the state of callbacks"):
        states = {
            name: decoded(state, lambda _, path: tensor_of(unread.pop(path), {}), f"{CALLBACKS}.{name}")
            for name, state in facts.get(CALLBACKS, {}).items()
        }
        check_like(list(unread), [], "what no state names")
        return states
