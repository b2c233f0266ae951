"""Tensors in a file, in the safetensors format: a length, a JSON header, bytes. Written in one go, read with limits.

``packed`` makes bytes of a whole state in the same way, to travel from one process of a run to the others;
``write_tree`` a file of tuples, lists and dicts of arrays.
"""

from __future__ import annotations

import functools
import io
import json
import math
import pathlib
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from phalanx.checkpoint import files
from phalanx.definition.data import content, is_array
from phalanx.definition.digest import leaf_hash
from phalanx.errors import SnapshotError
from phalanx.seams.records import CODES, Captured, Tensor

LENGTH = struct.Struct("<Q")
LENGTHS = struct.Struct("<3Q")
HEADER_BYTES = 100_000_000
ALIGNMENT = 8
MOST_DIMENSIONS, MOST_BYTES = 64, 1 << 63  # of a tensor, in torch and numpy
METADATA = "__metadata__"
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
    """``state``, and JSON values beside it."""
    files = [io.BytesIO(), io.BytesIO()]
    parts = (state.weights, state.training)
    hashes = [write(file, part) for file, part in zip(files, parts, strict=True)]
    text = json.dumps({"facts": state.facts, "hashes": hashes, "more": more}).encode()
    pieces = [text, *(file.getvalue() for file in files)]
    return LENGTHS.pack(*map(len, pieces)) + b"".join(pieces)


def unpacked(data: bytes) -> tuple[Captured, dict[str, Any]]:
    """What was packed.

    Raises
    ------
    SnapshotError
        It is not what ``packed`` makes, or was damaged on the way.
    """
    try:
        first, second, third = LENGTHS.unpack_from(data)
        start = LENGTHS.size
        if len(data) != start + first + second + third:
            raise ValueError("its length is wrong")
        header = json.loads(data[start : start + first])
        view = memoryview(data)[start + first :]
        weights, training = (
            read(part, hashes) for part, hashes in zip((view[:second], view[second:]), header["hashes"], strict=True)
        )
        return Captured(weights, training, header["facts"]), header["more"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise SnapshotError(f"the state that rank 0 sent cannot be used: {error}") from error


def _described(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, start and end of a tensor, if a tensor can be so.

    Raises
    ------
    ValueError
        It cannot; names the tensor.
    """
    fields = ("dtype", "shape", "data_offsets")
    if not isinstance(entry, dict) or set(entry) != set(fields):
        raise ValueError(f"tensor {name!r} is not described by {', '.join(fields)}")
    code, shape, offsets = (entry[field] for field in fields)
    if not isinstance(code, str) or code not in NAMES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {code!r:.80}")
    if not _sizes(shape) or not _sizes(offsets) or len(shape) > MOST_DIMENSIONS or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has the shape {shape!r:.80} at {offsets!r:.80}, which no tensor can have")
    dtype, size = NAMES[code]
    if size * math.prod(length or 1 for length in shape) >= MOST_BYTES:  # also where another length is 0
        raise ValueError(f"tensor {name!r} has the shape {shape!r:.80}, which no tensor can have")
    start, end = offsets
    if end - start != size * math.prod(shape):
        raise ValueError(f"tensor {name!r} has the shape {shape!r:.80} and {end - start} bytes, which do not fit")
    return dtype, tuple(shape), start, end


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def leaf(tensor: Tensor) -> str:
    """The hash of a tensor, as ``write`` returns it."""
    return leaf_hash(CODES[tensor.dtype][0], tensor.shape, memoryview(tensor.content).cast("B"))


def write_tree(path: pathlib.Path, tree: Any) -> Any:
    """Write the arrays of a tree; returns its structure as JSON values, None where it consists of other things.

    Raises
    ------
    OSError
        It cannot be written.
    """
    arrays: dict[str, Tensor] = {}
    structure = _structure(tree, arrays)
    if structure is None or not arrays:
        return None
    files.replace(path, functools.partial(write, tensors=arrays))
    return structure


def read_tree(path: pathlib.Path, structure: Any) -> Any:
    """The tree with this structure, in arrays of numpy.

    Raises
    ------
    SnapshotError
        It is not there, or damaged.
    """
    try:
        return _built(structure, read(memoryview(files.read(path, MOST_BYTES - 1)), None))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{path} cannot be used: {error}") from error


def _structure(tree: Any, arrays: dict[str, Tensor]) -> Any:
    """Of a tree; its leaves go to ``arrays``. None where a leaf is no array that a file can hold."""
    if isinstance(tree, Mapping):
        found = {key: _structure(value, arrays) for key, value in tree.items() if isinstance(key, str)}
        return None if len(found) != len(tree) or None in found.values() else {"dict": found}
    if isinstance(tree, (tuple, list)):
        items = [_structure(value, arrays) for value in tree]
        return None if None in items else {type(tree).__name__ if type(tree) is list else "tuple": items}
    if not is_array(tree):
        return None
    dtype, shape, data = content(tree.detach() if hasattr(tree, "detach") else tree)
    if dtype not in CODES or dtype not in np.sctypeDict:
        return None
    name = str(len(arrays))
    arrays[name] = Tensor(dtype, shape, data)
    return name


def _built(structure: Any, arrays: Mapping[str, Tensor]) -> Any:
    if isinstance(structure, str):
        dtype, shape, data = (getattr(arrays[structure], name) for name in ("dtype", "shape", "content"))
        return np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)
    ((kind, items),) = structure.items()
    if kind == "dict":
        return {key: _built(value, arrays) for key, value in items.items()}
    made = [_built(value, arrays) for value in items]
    return made if kind == "list" else tuple(made)
