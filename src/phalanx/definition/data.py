"""Where samples come from (columns, a dataset, a list, a stream, batches of the caller's), and how they are read.

Knows arrays only by ``shape`` and ``__getitem__``, so it serves every framework. Which samples a share has is decided
in ``batches``.

Samples are copied as they are read (``own``). A dataset or a stream may fill one buffer for all of its samples. A
``collate_fn`` may write to samples, and so may a model that is handed them as they are. A share that is read again, in
the next phase of a step or after a worker's death, must be the same. Arrays keep their strides, which may decide bits:
kernels are chosen by them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from phalanx.definition import checks, generators
from phalanx.definition.checks import check_numpy
from phalanx.errors import UsageError, safe_str
from phalanx.plan.orders import Indices

READING = "while phalanx was reading sample"
FORMS = "pass a tuple or dict of arrays, a list of samples or a map-style dataset"
UNCHANGING = frozenset({bool, int, float, complex, str, bytes, type(None)})  # kinds of values that cannot be written to
BRINGING = ", or None and bring batches yourself: Recipe(make_model, None, loss_fn).start(), then run.step(batch)"


class Reader(Protocol):
    """Reads samples by their indices."""

    @property
    def collated(self) -> bool:
        """Whether ``read`` gives a batch, or a list of samples that is still to be collated."""
        ...

    def read(self, indices: Indices) -> Any:
        """Samples in this order, or their batch; may run the user's dataset code."""


@dataclass(frozen=True, slots=True)
class Collated:
    """A share whose samples were collated where they were read; no random numbers were drawn for that."""

    batch: Any


@dataclass(slots=True)
class Share:
    """One replica's share of a batch.

    Attributes
    ----------
    samples : numpy.ndarray
        Sample indices, for weights and error messages; positions in the batch if the caller brought it.
    reader : Reader
        Reads them.
    origin : str
        What error messages call it: "data", "batch" or "evaluation data".
    collate : callable, optional
        Collates them in place of the recipe's.
    epoch : int, optional
        The pass over the data; None where the caller brought the batch.
    """

    samples: Indices
    reader: Reader
    origin: str
    collate: Callable[[list[Any]], Any] | None = None
    epoch: int | None = None

    def read(self) -> Any:
        """What the reader gives for its samples."""
        return self.reader.read(self.samples)

    def batch(self, samples: Any, collate: Callable[[Any], Any]) -> Any:
        """What ``read`` returned, as a batch; ``collate`` is the recipe's."""
        if isinstance(samples, Collated):
            return samples.batch
        try:
            return samples if self.reader.collated else (self.collate or collate)(samples)
        except Exception as error:
            for number, sample in zip(self.samples, samples, strict=False):
                if sample is None:
                    error.add_note(f"{READING} {number}, it was given None")
            raise


def _rows(arrays: Sequence[Any], indices: Indices) -> list[Any]:
    return [array[indices] for array in arrays]


@dataclass(frozen=True)
class Columns:
    """A tree (tuples, dicts) of arrays of equal length; a share is the same tree of rows.

    ``rebuild(rows)`` makes the tree again out of one item per array; ``rows(arrays, indices)`` copies the rows of each,
    as the framework does it best.
    """

    arrays: tuple[Any, ...]
    rebuild: Callable[[Iterable[Any]], Any]
    rows: Callable[[Sequence[Any], Indices], list[Any]] = _rows
    collated: bool = True
    random: bool = False

    def __len__(self) -> int:
        return int(self.arrays[0].shape[0])

    def read(self, indices: Indices) -> Any:
        """Their rows, as a batch."""
        return self.rebuild(self.rows(self.arrays, indices))

    def sample(self, index: int) -> Any:
        """One row, with no added axis, copied as the rows of a batch are."""
        return self.rebuild([row[0] for row in self.rows(self.arrays, np.array([index]))])


@dataclass(frozen=True)
class Samples:
    """A list of samples or a map-style dataset; a share is a list of samples, still to be collated.

    ``random`` says that reading a sample runs user code, which may draw random numbers (augmentation): the generators
    are seeded before each.
    """

    items: Any
    random: bool

    def __len__(self) -> int:
        return len(self.items)

    def sample(self, index: int) -> Any:
        """One sample, as it is."""
        try:
            return self.items[index]
        except Exception as error:
            error.add_note(f"{READING} {index}")
            raise


Source = Columns | Samples


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Reads a source sample by sample.

    Attributes
    ----------
    source : Columns or Samples
    copies : bool
        Whether samples are copied as they are read, see ``own``.
    collated : bool
        Whether one sample is read, and is handed over as it is.
    first : FirstReadings, optional
        Where reading runs user code: has the generators that are seeded before each sample, and looks at the first.
    key_of : callable
        The key that they are seeded with, by the index of the sample.
    """

    source: Source
    copies: bool
    collated: bool = False
    first: generators.FirstReadings | None = None
    key_of: Callable[[int], int] = int

    def read(self, indices: Indices) -> Any:
        """A list of samples, or the only one."""
        read = self._samples
        if self.first is not None and self.first.left:
            read = functools.partial(self.first.read, read)
        return read(indices[:1])[0] if self.collated else read(indices)

    def _samples(self, indices: Indices) -> list[Any]:
        samples: list[Any] = []
        for index in indices.tolist():
            if self.first is not None:
                generators.seed(self.key_of(index), self.first.owned)
            sample = self.source.sample(index)
            samples.append(own(sample) if self.copies else sample)
        return samples


def own(sample: Any) -> Any:
    """A sample with copies of its arrays, containers and dataclasses; strides stay. Other objects are not copied."""
    kind: Any = type(sample)
    if kind is tuple or kind is list:
        parts = []
        for part in sample:
            # Most parts are of the first two kinds, and this runs for each sample: a call for each part is slow.
            if type(part) in UNCHANGING:
                parts.append(part)
            elif type(part) is np.ndarray and (copied := part.copy("K")).strides == part.strides:
                parts.append(copied)
            else:
                parts.append(own(part))
        return kind(parts)
    if hasattr(kind, "new_empty_strided") and not vars(sample):
        if sample.requires_grad:
            if sample.is_leaf:  # a copy would be another one
                return sample
            sample = sample.detach()  # workers and readers do not have the graph, and a backward pass may use it up
        copied = sample.clone()
        try:
            same = copied.stride() == sample.stride()
            return copied if same else sample.new_empty_strided(sample.shape, sample.stride()).copy_(sample)
        except RuntimeError:  # sparse, or with elements that share memory, as an expanded one
            return copied
    if kind is np.ndarray or kind is np.memmap:
        return _array(sample)
    if isinstance(sample, tuple) and callable(getattr(sample, "_make", None)):
        return kind._make(map(own, sample))
    if isinstance(sample, (dict, UserDict)):
        copied: Any = copy.copy(sample)
        for key, value in sample.items():
            copied[key] = own(value)
        return copied
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        copied = copy.copy(sample)
        for field in dataclasses.fields(sample):
            object.__setattr__(copied, field.name, own(getattr(sample, field.name)))
        return copied
    return sample


def bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Addresses of the first byte of an array and of the one after its last."""
    steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    address = array.__array_interface__["data"][0]
    return address + sum(min(step, 0) for step in steps), address + sum(max(step, 0) for step in steps) + array.itemsize


def _array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    copied = array.copy(order="K")
    if copied.strides == array.strides or array.dtype.hasobject or not array.size:
        return copied
    low, high = bounds(array)
    below = array.__array_interface__["data"][0] - low
    copied = np.ndarray(array.shape, array.dtype, np.empty(high - low, np.uint8), below, array.strides)
    copied[...] = array
    return copied


def spelled(error: Exception) -> str:
    """What an error says, and which sample was being read, or what output and target were."""
    notes: list[str] = getattr(error, "__notes__", [])
    return f"{safe_str(error)}{next((f' ({note})' for note in notes if note.startswith((READING, *checks.NOTES))), '')}"


def unframed(data: Any, argument: str = "data") -> Any:
    """Data whose columns of data frames, as pandas and polars have them, are arrays.

    Raises
    ------
    UsageError
        It is a data frame as a whole, which does not say what is an input and what a target.
    """
    if _is_frame(data) and len(getattr(data, "shape", ())) == 2:
        raise UsageError(
            f"{argument} is a {type(data).__name__}, which does not say what the model sees and what the target is; "
            "pass columns: (frame[['a', 'b']], frame['y'])"
        )
    if not isinstance(data, (tuple, Mapping)) or not any(_is_frame(leaf) for _, leaf in leaves(data, argument)):
        return data
    return map_tree(lambda leaf: leaf.to_numpy() if _is_frame(leaf) else leaf, data)


def _is_frame(value: Any) -> bool:
    return callable(getattr(value, "to_numpy", None)) and callable(getattr(value, "__len__", None))


def open_data(data: Any, argument: str = "data") -> Columns | Samples:
    """Recognise what the user passed as ``data``.

    Raises
    ------
    UsageError
        Empty data, columns of unequal length, iterators and loaders.
    """
    for path, leaf in leaves(data[:1] if type(data) is list else data, argument, lists=True):
        # Its first backward pass uses up a graph, and workers do not have it. Evaluations need none.
        if argument == "data" and getattr(leaf, "requires_grad", False):
            raise UsageError(
                f"{path} requires a gradient, and data must not hang on a graph; pass {path}.detach(). If a loss needs "
                "gradients of its inputs, call x.requires_grad_() in forward_fn"
            )
    if is_array(data) or isinstance(data, (tuple, Mapping)):
        return open_columns(data, argument)
    text = isinstance(data, (str, bytes, bytearray))
    indexed = all(callable(getattr(data, name, None)) for name in ("__getitem__", "__len__"))
    if not (text or indexed) and argument == "data" and _is_readable(data):
        raise UsageError(
            f"data is a {type(data).__name__}, which cannot be read by index{_loader_hint(data)}; what is read in its "
            "own order is passed as phalanx.Stream(make_iterable), with a function that returns it anew in each call; "
            f"or {_way_out(argument)}"
        )
    if text or isinstance(data, Iterator) or not callable(getattr(data, "__getitem__", None)):
        kind, way_out = type(data).__name__, _way_out(argument) + _loader_hint(data)
        raise UsageError(f"{argument} is a {kind}, which cannot be read by index; {way_out}")
    if not callable(getattr(data, "__len__", None)):
        raise UsageError(
            f"{argument} is a {type(data).__name__} without a length; define __len__, or {_way_out(argument)}"
        )
    if isinstance(data, list) and _looks_like_columns(data):
        raise UsageError(
            f"{argument} is a list of {len(data)} arrays of equal length and unlike shapes, and a list is taken for "
            "samples; for columns pass a tuple: (x, y)"
        )
    if len(data) == 0:
        raise UsageError(f"{argument} is empty (a {type(data).__name__} of length 0); it needs at least one sample")
    return Samples(data, random=type(data) is not list)


def open_columns(data: Any, argument: str) -> Columns:
    """Columns of equal length out of a tuple or dict of arrays (nested ones too), or a single array."""
    columns = list(leaves(data, argument))
    if not columns:
        raise UsageError(f"{argument} is an empty {type(data).__name__}; {_way_out(argument)}")
    for name, column in columns:
        if not is_array(column) or len(column.shape) == 0:
            raise UsageError(
                f"{name} is a {type(column).__name__}, but columns must be arrays or tensors with a first axis; "
                "convert it with numpy.asarray or torch.tensor, or pass a list of samples"
            )
        if not hasattr(type(column), "__array__"):
            raise UsageError(
                f"{name} is a {type(column).__module__}.{type(column).__name__}, which numpy cannot read, and shares "
                "are cut and compared in host memory; pass a numpy array: .numpy()"
            )
        check_numpy(name, column)
    lengths = {name: int(column.shape[0]) for name, column in columns}
    if len(set(lengths.values())) > 1:
        spelled = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UsageError(f"{argument} has columns of unequal length: {spelled}; cut them to the same number of samples")
    if not all(lengths.values()):
        raise UsageError(f"{argument} is empty (columns of length 0); it needs at least one sample")
    plain = type(data) is tuple and all(map(is_array, data))
    return Columns(tuple(column for _, column in columns), tuple if plain else functools.partial(_rebuilt, data))


def _looks_like_columns(data: list[Any]) -> bool:
    """Arrays that differ in shape but not in length could not be collated as samples."""
    arrays = len(data) > 1 and all(is_array(item) and len(item.shape) > 0 for item in data)
    return arrays and len({item.shape for item in data}) > 1 and len({item.shape[0] for item in data}) == 1


def _rebuilt(tree: Any, rows: Iterable[Any]) -> Any:
    """A tree with other leaves, in the same order."""
    remaining = iter(rows)
    return map_tree(lambda _: next(remaining), tree)


def open_batch(batch: Any) -> Columns | Samples:
    """A batch that the caller brings; a list of arrays is what a DataLoader yields for tuples, so: columns."""
    if isinstance(batch, list) and batch and all(is_array(item) for item in batch):
        batch = tuple(batch)
    if not (is_array(batch) or isinstance(batch, (tuple, list, Mapping))):
        raise UsageError(
            f"batch is a {type(batch).__name__}; it must be a tuple or dict of arrays, an array, or a list of samples"
        )
    return open_data(batch, "batch")


def is_array(value: Any) -> bool:
    """Whether ``value`` is an array or tensor of any framework."""
    return getattr(value, "shape", None) is not None and getattr(value, "dtype", None) is not None


def leaves(tree: Any, name: str, *, lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Every leaf of a tree of tuples and dicts, with its path as a user would write it.

    ``lists``: whether lists are trees, too; else they are leaves.
    """
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{name}[{key!r}]", lists=lists)
    elif isinstance(tree, tuple) or (lists and isinstance(tree, list)):
        for position, value in enumerate(tree):
            yield from leaves(value, f"{name}[{position}]", lists=lists)
    else:
        yield name, tree


def map_tree(function: Callable[[Any], Any], tree: Any, whole: type | tuple[type, ...] = ()) -> Any:
    """Apply ``function`` to every leaf of a tree of tuples, named tuples, lists and mappings, whose types stay.

    What is ``whole`` is a leaf, too.
    """
    if isinstance(tree, whole):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        mapped = [map_tree(function, value, whole) for value in tree]
        if isinstance(tree, list):
            return mapped
        named = getattr(tree, "_make", None)
        return tuple(mapped) if named is None else named(mapped)
    if isinstance(tree, Mapping):
        return like(tree, {key: map_tree(function, value, whole) for key, value in tree.items()})
    return function(tree)


def like(mapping: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A mapping of the same type with other entries; a dict where the type cannot be made of ``**entries``."""
    kind: Any = type(mapping)
    if kind is dict:
        return entries
    try:
        rebuilt = kind(**entries)
        return rebuilt if rebuilt.keys() == entries.keys() else entries
    except (TypeError, ValueError, AttributeError):
        return entries


def is_pair(batch: Any) -> bool:
    """Whether a batch is ``(x, y)``."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def target_of(batch: Any) -> Any:
    """The target of a batch where no ``target_fn`` tells it."""
    if is_pair(batch):
        return batch[1]
    return batch["labels"] if isinstance(batch, Mapping) and "labels" in batch else batch


def _way_out(argument: str) -> str:
    return FORMS + (BRINGING if argument == "data" else "")


def _is_readable(data: Any) -> bool:
    """Whether it is an iterable, or a function that may return one."""
    return hasattr(type(data), "__iter__") or callable(data)


def _loader_hint(data: Any) -> str:
    if getattr(data, "dataset", None) is None:
        return ""
    if hasattr(getattr(data, "sampler", None), "weights"):
        return "; a loader's dataset and weights can be passed: data=loader.dataset, weights=loader.sampler.weights"
    return "; a loader's dataset can be passed as it is: data=loader.dataset, batch_size=loader.batch_size"
