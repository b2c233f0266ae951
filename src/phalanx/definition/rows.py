"""Outputs and targets of all replicas, for a loss over the whole batch: how they travel, and how they are joined.

They travel as text that says how a tree is built, and then the bytes of its arrays. Nothing is unpickled, as it may
come from another host. A tree comes as plain tuples, lists and dicts, and gets its types back where it is joined.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from phalanx.definition import checks
from phalanx.definition.data import is_array, like
from phalanx.definition.joining import concatenated
from phalanx.errors import UsageError

Packed = tuple[str, Sequence[int], bytes | memoryview]  # dtype, shape, bytes
PLAIN = (bool, int, float, str, type(None))
ALIGNED = 64  # bytes: where each array begins
OF_ROWS = (
    "{} is {}, and loss_over='batch' joins rows: it needs a tensor with one row for each sample ({} here), of the same "
    "shape and dtype on all replicas; {}"
)
TWO_WAYS = (
    "{} is a list with as many entries as each share has samples, and each entry has a row for each of them: it may be "
    "an entry for each sample, or for each column; return columns as a tuple or dict, as target_fn=lambda batch: "
    "tuple(batch) does, or take another batch_size"
)
WAYS = {
    "output": "return such ones from forward_fn: several as a tuple, two views of a sample as two of them; what "
    "belongs to no sample, as a scale, stays in the model, where loss_takes='model' finds it; pad to one length",
    "target": "pass target_fn=lambda batch: ..., which returns what the loss needs, in tensors, or a list with an item "
    "for each sample",
}


class Rows:
    """What one framework's replicas say, and what comes of it.

    Parameters
    ----------
    pack : callable
        ``pack(array)``: its dtype, shape and bytes.
    unpack : callable
        ``unpack(dtype, shape, bytes)``: such an array again.

    Attributes
    ----------
    ran : list of int
        The replicas that said something.
    samples : list of int
        How many each of those has.
    """

    def __init__(self, pack: Callable[[Any], Packed], unpack: Callable[[str, Sequence[int], memoryview], Any]) -> None:
        self._pack, self._unpack = pack, unpack
        self._forms: tuple[Any, Any] = None, None  # an output and a target, as user code made them
        self.ran, self.samples = list[int](), list[int]()

    def said(self, outputs: Sequence[Any], targets: Sequence[Any], samples: Sequence[int], beside: Any = ()) -> bytes:
        """What a replica says of its parts; ``beside``: a tree that the others get as it is."""
        self._forms = outputs[0], targets[0]
        output, target = self._stacked(outputs, targets, samples)
        trees = {"samples": sum(samples), "output": output, "target": target, "buffers": beside}
        return encoded(trees, self._pack)

    def heard(self, said: Sequence[bytes]) -> tuple[Any, Any, list[Any]]:
        """Output and target of the whole batch, and what was said ``beside`` them; from the texts of all R."""
        self.ran = [replica for replica, text in enumerate(said) if text]
        columns = zip(*(decoded(said[replica], self._unpack) for replica in self.ran), strict=True)
        self.samples, outputs, targets, beside = map(list, columns)
        return *self._stacked(outputs, targets, self.samples), beside

    def dealt(self, parts: Sequence[Any]) -> dict[int, list[Any]]:
        """By replica its part of each; ``parts``: for each array that of each replica that ran, or None."""
        return {replica: [None if each is None else each[at] for each in parts] for at, replica in enumerate(self.ran)}

    def _stacked(self, outputs: Sequence[Any], targets: Sequence[Any], samples: Sequence[int]) -> tuple[Any, Any]:
        # Over hosts a process may never have computed a replica: all of its shards had ended before it began. Then
        # what came is joined in the plain containers in which it travelled.
        output, target = (outputs[0], targets[0]) if self._forms[0] is None else self._forms
        return stacked(outputs, samples, "output", output), stacked(targets, samples, "target", target)


def encoded(trees: Mapping[str, Any], pack: Callable[[Any], Packed]) -> bytes:
    """Trees as bytes, each with its name for messages; ``pack`` says what an array is.

    Raises
    ------
    UsageError
        A leaf is neither an array, a number, a string nor None.
    """
    content: list[bytes | memoryview] = []
    forms = [_form(tree, name, content, pack) for name, tree in trees.items()]
    text = json.dumps(forms).encode()
    head = len(text).to_bytes(8, "little") + text
    return b"".join([head, bytes(-len(head) % ALIGNED), *content])


def _form(tree: Any, name: str, content: list[bytes | memoryview], pack: Callable[[Any], Packed]) -> Any:
    """How a tree is built, as JSON; the bytes of its arrays are added to ``content``."""
    if isinstance(tree, Mapping) and all(isinstance(key, PLAIN) for key in tree):
        items = tree.items()
        return {"of": [[key, _form(value, f"{name}[{key!r}]", content, pack)] for key, value in items]}
    if isinstance(tree, (tuple, list)):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [_form(value, f"{name}[{at}]", content, pack) for at, value in enumerate(tree)]}
    if is_array(tree) and not getattr(getattr(tree, "dtype", None), "hasobject", False):
        dtype, shape, memory = pack(tree)
        content += [memory, bytes(-len(memory) % ALIGNED)]
        return [dtype, list(shape), len(memory)]
    if isinstance(tree, PLAIN):
        return {"plain": tree}
    raise UsageError(
        f"{name} is {checks.outline(tree)}, which does not travel between replicas, as loss_over='batch' needs it; "
        f"{WAYS[name.partition('[')[0]]}"
    )


def decoded(content: bytes, unpack: Callable[[str, Sequence[int], memoryview], Any]) -> list[Any]:
    """Trees that were encoded, in plain containers; ``unpack`` makes an array of what ``pack`` said."""
    size = int.from_bytes(content[:8], "little")
    at = 8 + size + -(8 + size) % ALIGNED
    memory = memoryview(content)

    def built(form: Any) -> Any:
        nonlocal at
        if isinstance(form, list):
            dtype, shape, length = form
            begin, at = at, at + length + -length % ALIGNED
            return unpack(dtype, shape, memory[begin : begin + length])
        ((kind, value),) = form.items()
        if kind == "of":
            return {key: built(each) for key, each in value}
        if kind == "plain":
            return value
        return (tuple if kind == "tuple" else list)([built(each) for each in value])

    return [built(form) for form in json.loads(content[8 : 8 + size])]


def stacked(trees: Sequence[Any], samples: Sequence[int], name: str, like_this: Any) -> Any:
    """Join the trees of all shares into that of the batch: rows below rows, lists of items behind lists.

    Parameters
    ----------
    trees : sequence of Any
        In the order of the batch.
    samples : sequence of int
        Of each share.
    name : str
        "output" or "target", for messages.
    like_this : Any
        Such a tree as user code made it: its containers' types are those of the result.

    Raises
    ------
    UsageError
        A leaf has no row for each sample, or other sizes in some shares.
    """
    return _stacked(trees, samples, name, like_this, WAYS[name])


def _stacked(trees: Sequence[Any], samples: Sequence[int], name: str, form: Any, ways: str) -> Any:
    first = trees[0]
    if isinstance(first, Mapping):
        if any(not isinstance(tree, Mapping) or [*tree] != [*first] for tree in trees):  # in one order
            _refuse(trees, samples, name, ways)
        columns = {key: [tree[key] for tree in trees] for key in first}
        items = columns.items()
        return like(form, {key: _stacked(of, samples, f"{name}[{key!r}]", form[key], ways) for key, of in items})
    if isinstance(first, (tuple, list)):
        if any(not isinstance(tree, (tuple, list)) for tree in trees):
            _refuse(trees, samples, name, ways)
        alike = len({len(tree) for tree in trees}) == 1
        in_columns = alike and all(
            _has_rows(part, count) for tree, count in zip(trees, samples, strict=True) for part in tree
        )
        if ways != WAYS["output"] and all(map(_is_each, trees, samples)):
            # A list of columns, as torch's collate makes it, may have as many as all shares have samples. Sizes must
            # not decide then: they differ from R to R, and from step to step. One list alone is the same either way.
            if in_columns and len(trees) > 1:
                raise UsageError(TWO_WAYS.format(name))
            return list(itertools.chain(*trees))
        if not alike:
            _refuse(trees, samples, name, ways)
        columns = [
            _stacked(column, samples, f"{name}[{at}]", form[at], ways)
            for at, column in enumerate(zip(*trees, strict=True))
        ]
        made = getattr(form, "_make", None)
        return made(columns) if made else type(form)(columns)
    if is_array(first):
        specs = {(tuple(tree.shape[1:]), tree.dtype) if is_array(tree) else None for tree in trees}
        if len(specs) > 1 or any(tuple(tree.shape[:1]) != (count,) for tree, count in zip(trees, samples, strict=True)):
            _refuse(trees, samples, name, ways)
        return concatenated(trees)
    if not isinstance(first, PLAIN) or any(tree != first for tree in trees):
        _refuse(trees, samples, name, ways)
    return first


def _is_each(value: Any, samples: int) -> bool:
    """Whether it is a list with an item for each sample."""
    return isinstance(value, list) and len(value) == samples


def _has_rows(tree: Any, samples: int) -> bool:
    arrays = leaves_of(tree)
    return bool(arrays) and all(tuple(array.shape[:1]) == (samples,) for array in arrays)


def _refuse(trees: Sequence[Any], samples: Sequence[int], name: str, ways: str) -> NoReturn:
    shown = " and ".join(list(dict.fromkeys(map(checks.outline, trees)))[:3])
    counts = " and ".join(map(str, dict.fromkeys(samples)))
    raise UsageError(OF_ROWS.format(name, shown, counts, ways))


def leaves_of(tree: Any) -> list[Any]:
    """All arrays of a tree, in order."""
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves_of(value)]
    if isinstance(tree, (tuple, list)):
        return [leaf for value in tree for leaf in leaves_of(value)]
    return [tree] if is_array(tree) else []


def numpy_unpacked(dtype: str, shape: Sequence[int], memory: memoryview) -> Any:
    """Such an array, in memory of its own."""
    return np.frombuffer(bytearray(memory), dtype).reshape(shape)


def numpy_packed(array: Any) -> Packed:
    """What a numpy array is, or another that numpy can read."""
    own = np.ascontiguousarray(array)
    kind = own.dtype.name if own.dtype.kind == "V" else own.dtype.str  # bfloat16 has no other
    return kind, own.shape, own.reshape(-1).view(np.uint8).data if own.size else b""
