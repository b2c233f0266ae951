"""Packs what a caller hands to its workers in shared memory: functions by cloudpickle, arrays as raw memory.

A recipe travels with settings of the process and the source of modules as the caller imported it, so that user code
finds the same surroundings in a worker. Only children that inherited its descriptor read that memory; nothing is ever
unpickled from disk or network. Arrays travel beside the pickle (protocol 5, out of band), so all workers map one copy.
"""

from __future__ import annotations

import abc
import contextlib
import copyreg
import ctypes
import dataclasses
import functools
import importlib
import io
import mmap
import multiprocessing
import os
import pickle
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np

from phalanx.definition import checks
from phalanx.definition.data import bounds
from phalanx.definition.fields import Definition
from phalanx.definition.reachable import module_of, parts_of
from phalanx.errors import UsageError, safe_str
from phalanx.frameworks.registry import adopt_numeric_environment, harmless_warnings, numeric_environment
from phalanx.frameworks.registry import reduced as reduced_by_frameworks
from phalanx.shared.layout import row_major
from phalanx.shared.memory import ALIGNMENT, Carver, Memory, available_bytes
from phalanx.surroundings import sources
from phalanx.surroundings.interrupts import of_handler

Reducer = Callable[[Any], Any]
_DEFINED: weakref.WeakSet[type] = weakref.WeakSet()  # in a worker, classes that came by value
DEPTH = 6
NAMELESS = "<dynamic-code>"  # what stands in place of a file's name
WORTH_CHECKING = 1 << 26  # bytes
ROOT_FACTOR = 4  # a view's base that is at most so many times as large travels whole, once for all its views


class Packer(cloudpickle.Pickler):
    """Pickles with arrays out of band, and code by value where a worker could not import it."""

    def __init__(
        self, file: io.BytesIO, reducer: Reducer, buffers: list[pickle.PickleBuffer], *, by_file: bool = True
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._reducer = reducer
        self._arrays = ArrayReducer(by_file=by_file)
        self.by_value: dict[str, ModuleType | None] = {}  # None: whoever unpickles imports it

    def dump(self, obj: Any) -> None:
        """Pickle ``obj``."""
        try:
            super().dump(obj)
        finally:
            for module in filter(None, self.by_value.values()):
                cloudpickle.unregister_pickle_by_value(module)

    def reducer_override(self, obj: Any) -> Any:
        """Arrays and tensors by their memory, all else as cloudpickle does."""
        if isinstance(obj, np.ndarray):
            return self._arrays.reduced(obj)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and _found_again(obj):
            self.by_value.setdefault(obj.__name__)
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, functools._lru_cache_wrapper):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, functools.cached_property):
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if isinstance(obj, weakref.WeakKeyDictionary):  # as functools.singledispatch has one
            return weakref.WeakKeyDictionary, (dict(obj),)
        if isinstance(obj, CodeType):
            plain: Any = self.dispatch_table[CodeType](obj)
            make, arguments = plain
            # cloudpickle 3.1.3 leaves out the file's name, which errors and warnings in workers have to show.
            return make, tuple(obj.co_filename if item == NAMELESS else item for item in arguments)
        if isinstance(obj, (type, FunctionType)) and obj.__module__:  # exec makes functions that have none
            self._consider(obj.__module__)
        elif isinstance(obj, ModuleType):
            self._consider(obj.__name__)
        reduced = self._reducer(obj)
        if reduced is NotImplemented:
            reduced = super().reducer_override(obj)
            if isinstance(obj, FunctionType) and isinstance(reduced, tuple) and module_of(obj):
                reduced = self._of_library(obj, reduced)
            elif isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == 6:  # by value, with a setter
                reduced = (*reduced[:5], _define)
            elif not isinstance(obj, type) and isinstance(type(obj).__new__, FunctionType):
                reduced = NotImplemented if type(obj) in self.dispatch_table else _unasked(obj)
        return reduced

    def _of_library(self, function: FunctionType, reduced: Any) -> Any:
        """A library's inner function goes by value, as a wrapper of the user's function does, but not its globals."""
        name = function.__globals__["__name__"]
        self._consider(name)
        if self.by_value[name] or getattr(sys.modules.get(name), "__dict__", None) is not function.__globals__:
            return reduced
        _, (code, _, *rest), (attributes, slots), *more = reduced
        kept = {**slots, "__globals__": {}, "_cloudpickle_submodules": []}
        return _in_library, (name, code, *rest), (attributes, kept), *more

    def _consider(self, name: str) -> None:
        """Send a module's code by value if a worker could not import it."""
        if name not in self.by_value:
            module = sys.modules.get(name)
            hidden = module is not None and name != "__main__" and not _importable(module)
            self.by_value[name] = module if hidden else None
            if hidden:
                cloudpickle.register_pickle_by_value(module)


def pack(thing: Any, memory: Memory, reducer: Reducer) -> int:
    """Write ``thing`` into ``memory``, which grows as needed; returns how many bytes that took.

    Raises
    ------
    UsageError
        Something in it cannot be pickled; names the path to it.
    """
    return _write(pieces_of(thing, reducer, by_file=True), memory)


def pack_each(things: Sequence[Any], memory: Memory, reducer: Reducer) -> None:
    """Write several things so that each can be unpacked alone; an array that several have is written once.

    Raises
    ------
    UsageError
        Something in one cannot be pickled; names the path to it.
    """
    pool, places, table = list[memoryview](), dict[tuple[int, int], int](), list[list[int]]()
    for thing in things:
        buffers: list[pickle.PickleBuffer] = []
        body = _pickled(thing, reducer, buffers, by_file=True)
        numbers = list[int]()
        for raw in (memoryview(body), *(buffer.raw() for buffer in buffers)):
            address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
            numbers.append(places.setdefault((address, raw.nbytes), len(pool)))
            if numbers[-1] == len(pool):
                pool.append(raw)
        table.append(numbers)
    _write(_laid_out([memoryview(pickle.dumps(table)), *pool]), memory)


def unpack_one(memory: Memory, number: int) -> Any:
    """One of the things that ``pack_each`` wrote."""
    table, *pool = _pieces(memory.map(private=True))
    body, *buffers = (pool[place] for place in pickle.loads(table)[number])  # noqa: S301  packed by this process's parent
    return pickle.loads(body, buffers=buffers)  # noqa: S301


def _write(pieces: Sequence[memoryview | bytes], memory: Memory) -> int:
    _fit(memory, sum(map(len, pieces)))
    offset = 0
    with memory.map() as mapped:
        for piece in pieces:
            mapped[offset : offset + len(piece)] = piece
            offset += len(piece)
    return offset


def pieces_of(thing: Any, reducer: Reducer, *, by_file: bool = False) -> list[memoryview | bytes]:
    """``thing`` as bytes, to be written one after another: sizes, the pickle, arrays at multiples of 64 bytes.

    ``by_file``: the files of memory maps do not change until it is unpacked, so their names suffice.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = _pickled(thing, reducer, buffers, by_file=by_file)
    return _laid_out([memoryview(body), *(buffer.raw() for buffer in buffers)])


def _laid_out(parts: Sequence[memoryview]) -> list[memoryview | bytes]:
    """Parts behind a header with their sizes, each at a multiple of 64 bytes."""
    header = np.array([len(parts), *(part.nbytes for part in parts)], np.int64).tobytes()
    pieces = [memoryview(header), *parts]
    return [part for piece in pieces for part in (piece, bytes(-piece.nbytes % ALIGNMENT))]


def needed(thing: Any, reducer: Reducer) -> list[str]:
    """The modules that unpacking ``thing`` imports; where it cannot be packed, those that were found until then."""
    packer = Packer(io.BytesIO(), reducer, [])
    try:
        packer.dump(thing)
    except Exception as error:
        if of_handler(error):
            raise
    return [name for name, module in packer.by_value.items() if module is None]


def _fit(memory: Memory, size: int) -> None:
    if size - memory.size > WORTH_CHECKING and size - memory.size > available_bytes():
        raise UsageError(
            f"the data that workers are to share takes {size / 1e9:.1f} GB, but {available_bytes() / 1e9:.1f} GB "
            "of memory are available; read samples from files in a dataset, or use engine='inline' (same answer)"
        )
    memory.grow(size)


def unpack(memory: Memory) -> Any:
    """What was packed. Arrays lie in the memory; what a worker writes to them stays its own."""
    return unpack_bytes(memory.map(private=True))


def unpack_bytes(content: Any) -> Any:
    """Unpack a buffer that holds the pieces of ``pieces_of``. Arrays lie in it."""
    pieces = _pieces(content)
    return pickle.loads(pieces[0], buffers=pieces[1:])  # noqa: S301  packed by this process's parent


def _pieces(content: Any) -> list[memoryview]:
    view = memoryview(content)
    numbers, carver = view.cast("q"), Carver()
    sizes = numbers[1 : 1 + numbers[0]]
    carver.take(numbers.itemsize + sizes.nbytes)
    return [view[carver.take(size) :][:size] for size in sizes]


def _pickled(thing: Any, reducer: Reducer, buffers: list[pickle.PickleBuffer], *, by_file: bool) -> bytes:
    file = io.BytesIO()
    try:
        Packer(file, reducer, buffers, by_file=by_file).dump(thing)
    except Exception as error:
        if of_handler(error):
            raise
        path, culprit = _culprit(thing, reducer)
        path = path.removeprefix("fields.")
        raise UsageError(
            f"{path} ({checks.shown(culprit)}) cannot be sent to a worker process: {safe_str(error)}; make it where it "
            "is used, in the worker, for instance at the first __getitem__ or forward. If this process has done so, "
            "let its class leave it out: def __getstate__(self): return {**vars(self), 'file': None}. Or use "
            "engine='inline' (same answer)"
        ) from error
    return file.getvalue()


def pack_recipe(
    definition: Definition, framework: str, environment: Memory, recipe_memory: Memory, facts: Mapping[str, Any]
) -> None:
    """Write this process's surroundings, and a recipe with other facts, for processes that start from here."""
    pack({**described(framework), "threads": definition.threads}, environment, reduced_by_frameworks)
    fields = {item.name: getattr(definition, item.name) for item in dataclasses.fields(Definition)}
    known = [] if definition.batches is None else definition.batches.known
    pack({**facts, "fields": fields, "epochs": known}, recipe_memory, reduced_by_frameworks)


def described(framework: str) -> dict[str, Any]:
    """What surrounds this process: environment, folder, import path, arguments, warning filters, numeric settings."""
    try:
        folder = os.getcwd()
    except OSError:  # it may be gone
        folder = None
    return {
        "environment": dict(os.environ),
        "folder": folder,
        "path": list(sys.path),
        "sources": sources.proven(),
        "arguments": list(sys.argv),
        "key": bytes(multiprocessing.current_process().authkey),  # of its managers: who may call them
        "depth": sys.getrecursionlimit(),
        "filters": [item for item in warnings.filters if item[2].__module__ == "builtins"],  # others may take long
        "framework": framework,
        "numeric": numeric_environment(framework),
    }


def adopt_environment(environment: dict[str, Any]) -> None:
    """Make this process like the described one."""
    os.environ.clear()
    os.environ.update(environment["environment"])
    if environment["folder"] is not None:
        with contextlib.suppress(OSError):
            os.chdir(environment["folder"])
    sys.path[:] = environment["path"]
    sys.meta_path.insert(0, sources.Finder(environment["sources"]))
    sys.argv[:] = environment["arguments"]
    multiprocessing.current_process().authkey = environment["key"]
    sys.setrecursionlimit(environment["depth"])
    adopt_numeric_environment(environment["numeric"])
    filters: Any = warnings.filters  # last: imports above may insert their own
    filters[:] = environment["filters"]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    for message in harmless_warnings(environment["numeric"]):
        warnings.filterwarnings("ignore", message=message)


def remarked(error: Exception) -> Exception:
    """In a worker, an error that may come from how classes travel, with a remark on that."""
    names = sorted(kind.__name__ for kind in _DEFINED if type(kind) not in (type, abc.ABCMeta))
    if names and isinstance(error, UsageError):
        error.args = (
            f"{error}. {', '.join(names)} {'was' if len(names) == 1 else 'were'} made again in a worker process, as "
            "__main__ cannot be imported there; libraries that note their classes when these are defined, as equinox "
            "does, do not know the copies: put them into a module of their own, or use engine='inline' (same answer)",
        )
    return error


def _define(kind: type, state: Any) -> type:
    """Fill a class that travels by value, once: what is packed later has it again, with other copies of its globals."""
    if kind not in _DEFINED:
        _DEFINED.add(kind)
        cloudpickle.cloudpickle._class_setstate(kind, state)
    return kind


def _unasked(thing: Any) -> Any:
    """How to pickle an object whose class has a ``__new__`` of its own, for which pickle may have no arguments."""
    way, *rest = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    plain = way is copyreg.__newobj__ and len(rest[0]) == 1  # type: ignore[attr-defined]
    return (_made, *rest) if plain else NotImplemented


def _made(kind: Any) -> Any:
    try:
        return kind.__new__(kind)
    except TypeError:  # it needs arguments; the state that follows holds what came of them
        known = [vars(each).get("__new__") for each in kind.__mro__]
        return next(new for new in known if isinstance(new, BuiltinFunctionType))(kind)


def _in_library(name: str, code: CodeType, *rest: Any) -> FunctionType:
    return FunctionType(code, vars(importlib.import_module(name)), *rest)


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _importable(module: ModuleType) -> bool:
    """Whether a new interpreter with the same path finds the module; import hooks of this process do not count."""
    return _importable_by(module, tuple(sys.path))


@functools.lru_cache(maxsize=4096)  # samples that travel ask again and again, and finders look at files
def _importable_by(module: ModuleType, _: tuple[str, ...]) -> bool:
    name, spec = module.__name__, module.__spec__
    if spec is None:  # part of an extension module, or made by hand
        above = sys.modules.get(name.rpartition(".")[0])
        return above is not None and _native(above) and _importable(above)
    if spec.origin in ("built-in", "frozen"):
        return True
    parent = sys.modules.get(name.rpartition(".")[0])
    below = getattr(parent, "__path__", None)
    return any(finder.find_spec(name, below) is not None for finder in sources.finders())


def _found_again(module: ModuleType) -> bool:
    """Whether importing its name gives a module of a library's own kind, as ``torch.classes`` is, also in a worker."""
    name = module.__name__
    above = sys.modules.get(name.partition(".")[0])
    return sys.modules.get(name) is module and above is not None and _importable(above)


def _native(module: ModuleType) -> bool:
    origin = getattr(module.__spec__, "origin", None)
    return origin is not None and origin.endswith(tuple(EXTENSION_SUFFIXES))


def _culprit(thing: Any, reducer: Reducer, path: str = "", depth: int = 0) -> tuple[str, Any]:
    """The innermost part of ``thing`` that cannot be pickled, and how to get there."""
    for step, part in _parts(thing) if depth < DEPTH else ():
        where = f"{path}{step}" if path else step.lstrip(".")
        if not _travels(part, reducer):
            return _culprit(part, reducer, where, depth + 1)
    return path or "it", thing


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    for step, part in parts_of(thing):  # its user does not know private names
        yield "" if step.startswith("._") else re.sub(r"\['([^\W\d]\w*)'\]", r".\1", step), part


def _travels(thing: Any, reducer: Reducer) -> bool:
    try:
        Packer(io.BytesIO(), reducer, []).dump(thing)
    except Exception as error:
        if of_handler(error):
            raise
        return False
    return True


def keeps_strides(array: np.ndarray[Any, Any]) -> bool:
    """Whether numpy's own pickle keeps the strides. It makes those of a dense array anew, also of axes of length 1."""
    if not array.size or not array.flags.forc:
        return not array.size
    dense = row_major(array.shape) if array.flags.c_contiguous else row_major(array.shape[::-1])[::-1]
    return array.strides == tuple(step * array.itemsize for step in dense)


class ArrayReducer:
    """How the arrays of one pickle are pickled.

    Parameters
    ----------
    by_file : bool
        Whether memory maps travel by their file, which is mapped when they are unpickled: it has to stay as it is.
    """

    def __init__(self, *, by_file: bool) -> None:
        self._by_file = by_file
        self._bytes: dict[int, tuple[Any, np.ndarray[Any, Any]]] = {}

    def reduced(self, array: np.ndarray[Any, Any]) -> Any:
        """What a pickler needs; NotImplemented where numpy's own way, or that of the array's class, suffices."""
        if self._by_file and _mapped(array):
            return np.memmap, _map_of(array)
        # Strides decide bits: torch's convolutions choose kernels by them, also by those of axes of length 1. numpy's
        # own pickle keeps C or Fortran order and makes strides anew. So gray pictures that were moved from
        # (N, H, W, 1) to (N, 1, H, W) had other bits with two workers than with one. Turned views of memory maps did
        # so, too, as only arrays of the class `numpy.ndarray` were looked after. No error comes of it. Only a
        # comparison of digests shows it. Not covered: arrays of objects, and classes with a pickle of their own. A
        # file that is replaced by another of its name after it was mapped is mapped anew by workers.
        if keeps_strides(array) or array.dtype.hasobject or not _as_numpy(type(array)):
            return NotImplemented
        return _strided, (type(array), *self._memory_under(array))

    def _memory_under(self, array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
        """The memory, offset, shape, strides and dtype of an array that numpy would lay out anew.

        Views of one array share its memory, unless they need little of it. Views of a memory map share its file.
        """
        low, high = bounds(array)
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        start, dense = bounds(root)[0], root.flags.forc and not root.dtype.hasobject
        if self._by_file and _mapped(root):
            memory = root
        elif dense and root.nbytes <= ROOT_FACTOR * (high - low):
            memory = self._bytes_of(root)
        else:
            start, size = low, high - low
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(low)).copy()
        offset = array.__array_interface__["data"][0] - start
        return memory, offset, array.shape, array.strides, array.dtype

    def _bytes_of(self, root: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A dense array, or its bytes if it is not a plain one. It is one object for all views, so it travels once."""
        if type(root) is np.ndarray and keeps_strides(root):
            return root
        if id(root) not in self._bytes:
            self._bytes[id(root)] = root, np.asarray(root).reshape(-1, order="A").view(np.uint8)
        return self._bytes[id(root)][1]


def _mapped(array: Any) -> bool:
    """Whether it is a whole memory map of a file that exists, with the content of the file."""
    whole = type(array) is np.memmap and isinstance(array.base, mmap.mmap) and array.mode != "c"
    return whole and array.filename is not None and os.path.exists(array.filename)


def _map_of(mapped: Any) -> tuple[Any, ...]:
    order = "F" if mapped.flags.f_contiguous and not mapped.flags.c_contiguous else "C"
    return mapped.filename, mapped.dtype, "c", mapped.offset, mapped.shape, order


def _as_numpy(kind: type[np.ndarray[Any, Any]]) -> bool:
    """Whether a class of arrays is pickled as numpy's own is, with nothing beside the values."""
    names = ("__reduce__", "__reduce_ex__", "__setstate__")
    return kind not in copyreg.dispatch_table and all(
        getattr(kind, name) is getattr(np.ndarray, name) for name in names
    )


def _strided(
    kind: type[np.ndarray[Any, Any]],
    memory: np.ndarray[Any, Any],
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
) -> np.ndarray[Any, Any]:
    flat: Any = memory.reshape(-1, order="A").view(np.uint8)
    return np.ndarray.__new__(kind, shape, dtype, flat, offset, strides)
