"""What a caller hands to its workers arrives as it was, or is refused with the path to it."""

import contextlib
import copyreg
import ctypes
import functools
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
import warnings

import cloudpickle
import numpy as np
import pytest
import torch

import phalanx
from phalanx.engines.processes.serialization import pack, pieces_of, unpack, unpack_bytes
from phalanx.errors import UsageError
from phalanx.frameworks.registry import reduced, reduced_sample
from phalanx.shared.memory import ALIGNMENT, Memory
from tests.families import FAMILIES

MLP = FAMILIES["mlp"]
READER = """
import sys
sys.path[:] = {path!r}
from phalanx.shared.memory import Memory
from phalanx.engines.processes.serialization import unpack
print(unpack(Memory(0, {fd}))())
"""


@pytest.fixture
def memory():
    made = Memory(0)
    yield made
    made.close()


@pytest.fixture
def sent(memory):
    """Sends a thing through shared memory, and reads it in this process."""

    def through(thing):
        pack(thing, memory, reduced)
        return unpack(memory)

    return through


@pytest.fixture
def called(memory):
    """Sends a function to a new interpreter, which calls it; what that printed."""

    def there(function):
        pack(function, memory, reduced)
        code = READER.format(path=[entry for entry in sys.path if entry], fd=memory.fd)
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, pass_fds=[memory.fd], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return there


def module_of(name, source):
    """A module that lives in this interpreter alone."""
    module = types.ModuleType(name)
    exec(textwrap.dedent(source), vars(module))
    return module


# Functions and classes.


@pytest.mark.long
def test_functions_and_classes_of_any_kind_arrive(called):
    """Closures, partials, local classes with all that they have, and functions that call each other."""
    base = 10

    class Base:
        def __init__(self, start=2):
            self.start = start

        @property
        def double(self):
            return 2 * self.start

        def add(self, more=lambda: base):
            return self.start + more()

    class Derived(Base):
        def __init__(self):
            super().__init__()
            self.start += 1

        @classmethod
        def make(cls):
            return cls()

    def outer(factor):
        def inner(value):
            return value * factor + base

        return inner

    def even(number):
        return number == 0 or odd(number - 1)

    def odd(number):
        return number != 0 and even(number - 1)

    def classes():
        return Derived.make().double, isinstance(Derived(), Base)

    parts = Base(1).add, lambda: outer(3)(4), lambda: (even(10), odd(10)), classes
    function = functools.partial(lambda *parts: [part() for part in parts], *parts)
    assert called(function) == str(function()) == "[11, 22, (True, False), (6, True)]"


class Asking:
    """Asks for arguments where it is made, which pickle has none of."""

    def __new__(cls, value, *, doubled=False):
        made = super().__new__(cls)
        made.value = 2 * value if doubled else value
        return made


class AskingRow(Asking, list):
    """So does a list of its own."""

    def __init__(self, *_, **__):
        super().__init__()


class Given(Asking):
    """An object that has some."""

    def __getnewargs__(self):
        return (self.value + 1,)

    def __getstate__(self):
        return None


@pytest.mark.long
def test_objects_that_ask_for_arguments_arrive(called, sent):
    """An object whose class has no arguments for pickle is made without them; one that has some is made with them."""
    row = AskingRow(3, doubled=True)
    row += [1, 2]
    one = Asking(5)
    assert called(lambda: (one.value, row.value, list(row), type(row).__name__)) == "(5, 6, [1, 2], 'AskingRow')"
    assert sent(Given(7)).value == 8


@pytest.mark.long
def test_a_module_that_a_new_interpreter_finds_travels_by_name(sent, called):
    """Its functions are imported there, and are the very same here."""
    assert sent(textwrap.dedent) is textwrap.dedent
    assert sent({"model": MLP.make_model})["model"] is MLP.make_model
    assert called(functools.partial(textwrap.dedent, "  a")) == "a"


@pytest.mark.long
def test_a_module_that_a_new_interpreter_does_not_find_travels_by_value(called, monkeypatch):
    """Functions and classes of a module made at run time, with what they use of it; so does the module as such."""
    module = module_of(
        "made_at_run_time",
        """
        import math
        OFFSET = 3
        class Shape:
            def area(self): return offset(math.floor(2.5))
        class Square(Shape):
            def area(self): return super().area() ** 2
        def offset(value): return value + OFFSET
        """,
    )
    monkeypatch.setitem(sys.modules, "made_at_run_time", module)
    square, offset = module.Square, module.offset
    assert called(lambda: (square().area(), offset(1), module.offset(2))) == "(25, 4, 5)"


@pytest.mark.long
def test_a_module_whose_folder_has_left_the_path_travels_by_value(called, monkeypatch, tmp_path):
    """A module that was imported from a folder which is no longer on the path."""
    (tmp_path / "left_behind.py").write_text("FACTOR = 7\ndef times(value):\n    return value * FACTOR\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        import left_behind
    try:
        assert str(tmp_path) not in sys.path
        assert called(functools.partial(left_behind.times, 6)) == "42"
    finally:
        del sys.modules["left_behind"]


def test_packing_leaves_no_trace_in_the_pickler(sent, monkeypatch):
    """Modules that travelled by value once are not registered for the caller's own use of cloudpickle."""
    before = set(cloudpickle.list_registry_pickle_by_value())
    module = module_of("passing_by", "def one(): return 1")
    monkeypatch.setitem(sys.modules, "passing_by", module)
    assert sent(module.one)() == 1
    with pytest.raises(UsageError):
        sent([module.one, threading.Lock()])
    assert set(cloudpickle.list_registry_pickle_by_value()) == before


SCRIPT = """
import sys, threading, torch, phalanx

class Squares:
    def __init__(self, offset): self.offset = offset
    def __len__(self): return 20
    def __getitem__(self, index):
        x = torch.arange(5.0) * index + self.offset + torch.rand(())
        return x / 100, helper(x)

def helper(x):
    return x.sum()[None] / CONSTANT

class Net(torch.nn.Linear):
    def __init__(self): super().__init__(5, 1)

CONSTANT = 1e3
data = Squares(0.5)
recipe = phalanx.Recipe(Net, data, lambda o, t: torch.nn.functional.mse_loss(o, t), replicas=3, batch_size=6, steps=3)
inline = recipe.train(engine="inline").digest
assert recipe.train(engine="processes", workers=2).digest == inline
CONSTANT = 1e4  # what workers get is what is here now
data.offset = 2.0
changed = recipe.train(engine="processes", workers=2).digest
assert changed == recipe.train(engine="inline").digest != inline
print("same", __name__)
"""


@pytest.mark.long
@pytest.mark.parametrize("by", ["file", pytest.param("stdin", marks=pytest.mark.campaign)])
def test_a_script_without_a_guard(by, tmp_path):
    """Classes and functions of ``__main__``, without ``if __name__``, from a file or typed in, train in workers."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command, text = ([sys.executable, str(path)], None) if by == "file" else ([sys.executable, "-"], SCRIPT)
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "same __main__\n"), done.stderr


# Arrays.


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_arrive_as_they_were(sent, dtype):
    """Values, dtype and strides of contiguous, turned, sliced, expanded, empty and scalar tensors."""
    base = torch.arange(-12, 12).to(dtype).reshape(4, 6)
    tensors = [base, base.t(), base[1:, ::2], base[:1].expand(3, 6), base[:0], base[2, 3], base[:, :0], base.flip(0)]
    tensors += [torch.empty(0, dtype=dtype), torch.empty(3, 0, 2, dtype=dtype)]
    for before, after in zip(tensors, sent(tensors), strict=True):
        assert (after.dtype, after.shape, after.stride()) == (before.dtype, before.shape, before.stride())
        assert torch.equal(after, before)


def test_tensors_that_share_memory_go_on_sharing_it(sent):
    """A write to one is seen in the other, however they are nested; others are not touched."""
    base = torch.zeros(6)
    thing = {"all": base, "deep": [(base[2:4],), {"turned": base.view(2, 3).t()}], "other": torch.zeros(6)}
    got = sent(thing)
    got["all"][:] = torch.arange(6.0)
    assert got["deep"][0][0].tolist() == [2, 3]
    assert got["deep"][1]["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert got["other"].tolist() == base.tolist() == [0] * 6


def test_one_object_stays_one_object(sent):
    """Identity within what is packed is kept: lists, tensors, arrays, parameters, cycles."""
    array, tensor, inner = np.arange(3), torch.arange(3), [1]
    inner.append(inner)
    got = sent([array, array, tensor, tensor, inner])
    assert got[0] is got[1]
    assert got[2] is got[3]
    assert got[4][1] is got[4]


def test_what_is_read_is_written_to_by_nobody_else(memory):
    """Two readers have memory of their own once they write; the sender's arrays stay as they were."""
    tensor, array = torch.zeros(5), np.zeros(5)
    pack([tensor, array], memory, reduced)
    one, other = unpack(memory), unpack(memory)
    one[0].fill_(1)
    one[1][:] = 2
    assert not any(value.any() for value in (tensor, array, *other))


def test_arrays_lie_in_the_shared_memory_and_are_aligned(sent):
    """They are mapped, not copied into the pickle, at multiples of 64 bytes, whatever lies before them."""
    got = sent([b"x" * 3, torch.zeros(7), np.zeros(3, np.uint8), torch.zeros(1, dtype=torch.uint8), np.ones(9)])
    tensors, arrays = [got[1], got[3]], [got[2], got[4]]
    addresses = [tensor.data_ptr() for tensor in tensors] + [array.ctypes.data for array in arrays]
    assert all(address % ALIGNMENT == 0 for address in addresses)
    assert max(addresses) - min(addresses) < 4096


class Marked(np.ndarray):
    """Arrays of a library's own, with nothing but values."""


STRIDED = {
    "contiguous": np.arange(24.0).reshape(4, 6),
    "turned": np.arange(24.0).reshape(4, 6).T,
    "reversed": np.arange(24.0).reshape(4, 6)[::-1, ::-2],
    "every_third": np.arange(24.0)[::3],
    "broadcast": np.broadcast_to(np.arange(3.0), (4, 3)),
    "permuted": np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0),
    "cropped_and_permuted": np.arange(48.0).reshape(4, 3, 4)[1:3].transpose(1, 2, 0)[:2],
    "axis_of_one": np.moveaxis(np.arange(24.0).reshape(4, 6, 1), -1, 1),
    "axis_of_one_by_itself": np.ndarray((4, 1, 6), np.float64, bytearray(192), strides=(48, 8, 8)),
    "axis_of_one_in_front": np.ndarray((1, 6), np.float64, bytearray(48), strides=(8, 8)),
    "class_of_its_own": np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0).view(Marked),
    "one_element": np.arange(24.0)[5:6].reshape(1, 1),
    "scalar": np.array(2.5),
    "empty": np.empty((0, 3)),
    "empty_rows": np.empty((3, 0)),
    "field": np.zeros(5, dtype=[("a", np.float32), ("b", np.int8)])["b"],
    "field beside objects": np.zeros(5, dtype=[("number", np.float32), ("thing", object)])["number"],
    "read only": np.frombuffer(b"\x01\x02\x03", dtype=np.uint8),
    "records": np.array([(1.5, 2)], dtype=[("a", np.float32), ("b", np.int8)]),
    "text": np.array(["a", "bcd"]),
    "objects": np.array([1, "two", None], dtype=object),
    "half": np.arange(5, dtype=np.float16),
    "other_byte_order": np.arange(5, dtype=">f8"),
}


@pytest.mark.parametrize("name", STRIDED)
def test_numpy_arrays_arrive_as_they_were(sent, name):
    """Values, dtype and shape of arrays with any strides."""
    array = STRIDED[name]
    got = sent({"x": array})["x"]
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(got, array)


KEPT = ["turned", "permuted", "cropped_and_permuted", "broadcast", "every_third", "reversed", "axis_of_one"]


@pytest.mark.parametrize("name", [*KEPT, "axis_of_one_by_itself", "axis_of_one_in_front", "class_of_its_own"])
def test_numpy_arrays_keep_their_order_in_memory(sent, name):
    """Which axis lies closest in memory is part of the answer: batches cut from the array have the same layout."""
    array = STRIDED[name]
    got = sent(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        columns = [torch.from_numpy(np.array(item) if min(item.strides) < 0 else item) for item in (array, got)]
    before, after = (column[torch.zeros(2, dtype=torch.int64)] for column in columns)
    assert after.stride() == before.stride()
    assert type(got) is type(array)


def test_views_of_a_memory_map_keep_their_order_in_memory(sent, memory, tmp_path):
    """Pictures that lie channels last in a file, turned and cut: they travel by the file, with their strides."""
    mapped = np.memmap(tmp_path / "data", dtype=np.float32, mode="w+", shape=(50, 8, 8, 3), offset=64)
    mapped[:] = np.arange(mapped.size).reshape(mapped.shape)
    whole, cut, gray = mapped.transpose(0, 3, 1, 2), mapped[3:, 1:7].transpose(0, 3, 1, 2), mapped[..., :1, 0]
    got = sent([whole, cut, gray])
    assert os.fstat(memory.fd).st_size < mapped.nbytes
    for before, after in zip((whole, cut, gray), got, strict=True):
        assert (after.strides, after.dtype, type(after)) == (before.strides, before.dtype, np.memmap)
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("view", ["whole", "turned", "turned by numpy"])
def test_samples_travel_with_what_a_map_has_now(view, tmp_path):
    """A dataset may write each sample into one mapped file: what a reader passes on is not looked up there later."""
    mapped = np.memmap(tmp_path / "scratch", dtype=np.float32, mode="w+", shape=(4, 3))
    mapped[:] = 1
    array = {"whole": mapped, "turned": mapped.T[:, ::2], "turned by numpy": np.asarray(mapped).T[:, ::2]}[view]
    content = b"".join(pieces_of(array, reduced_sample))
    mapped[:] = 2
    got = unpack_bytes(bytearray(content))
    assert (got == 1).all()
    assert got.strides == array.strides


@pytest.mark.parametrize("view", ["whole", "turned"])
@pytest.mark.parametrize("gone", ["deleted", "never named", "pickled before"])
def test_maps_whose_file_is_not_there_travel_by_value(sent, gone, view, tmp_path):
    """A deleted file, one without a name, and a map that came out of a pickle and is none any more."""
    with tempfile.TemporaryFile() as nameless:
        place = nameless if gone == "never named" else tmp_path / "data"
        mapped = np.memmap(place, dtype=np.float32, mode="w+", shape=(4, 3))
        mapped[:] = np.arange(12).reshape(4, 3)
        if gone == "deleted":
            (tmp_path / "data").unlink()
        if gone == "pickled before":
            mapped = pickle.loads(pickle.dumps(mapped))  # noqa: S301  in one line
        array = mapped if view == "whole" else mapped.T[::2]
        got = sent({"x": array})["x"]
        assert got.strides == array.strides
        np.testing.assert_array_equal(got, array)


def test_views_of_any_array_share_its_memory(sent, memory, tmp_path):
    """Columns cut from one private map, matrix or oddly strided array take its memory once, not once each."""
    (tmp_path / "data").write_bytes(bytes(4 * 100 * 300))
    private = np.memmap(tmp_path / "data", dtype=np.float32, mode="c", shape=(100, 300))
    odd = np.ndarray((100, 1, 300), np.float32, bytearray(4 * 100 * 300), strides=(1200, 4, 4))
    for root in (private, np.zeros((100, 300), np.float32).view(np.matrix), odd):
        root[:] = np.arange(root.size).reshape(root.shape)
        views = [root[:, ..., column] for column in range(100)]
        got = sent(views)
        assert os.fstat(memory.fd).st_size < 3 * root.nbytes
        assert [(one.strides, type(one)) for one in got] == [(one.strides, type(one)) for one in views]
        assert all(np.array_equal(one, other) for one, other in zip(got, views, strict=True))


class Unit(np.ndarray):
    """Arrays that take their unit from the array that they come from, and have to have one."""

    def __array_finalize__(self, other):
        if other is not None:
            self.unit = other.unit


class Tagged(np.ndarray):
    """Arrays whose pickle is registered elsewhere, and has their tag."""

    tag = None


class Restored(np.ndarray):
    """Arrays that do something when they are unpickled."""

    restored = False

    def __setstate__(self, state):
        super().__setstate__(state)
        self.restored = True


def tagged(array, tag):
    made = np.asarray(array).view(Tagged)
    made.tag = tag
    return made


copyreg.pickle(Tagged, lambda array: (tagged, (np.asarray(array), array.tag)))


def test_classes_of_arrays_are_pickled_as_they_want_to_be(sent):
    """Classes with attributes, with a pickle registered elsewhere, and with a state of their own: strided ones, too."""
    values = np.arange(24.0).reshape(2, 3, 4)
    unit = Unit((2, 3, 4))
    unit.unit = "metre"
    unit[:] = values
    turned = values.transpose(1, 2, 0)
    got = sent([unit.transpose(1, 2, 0), tagged(turned, 7), turned.view(Restored)])
    assert [type(one) for one in got] == [Unit, Tagged, Restored]
    assert (got[1].tag, got[2].restored) == (7, True)
    for one in got:
        np.testing.assert_array_equal(np.asarray(one), turned)


@pytest.mark.parametrize("view", [lambda m: m, lambda m: m.transpose(0, 2, 1)], ids=["whole", "turned"])
def test_a_private_map_travels_with_what_was_written(sent, tmp_path, view):
    """What the caller wrote into a map that is copied on write is not in the file, and travels by value."""
    (tmp_path / "data").write_bytes(bytes(4 * 2 * 3 * 5))
    mapped = np.memmap(tmp_path / "data", dtype=np.float32, mode="c", shape=(2, 3, 5))
    mapped[:] = np.arange(30).reshape(2, 3, 5)
    got = sent(view(mapped))
    assert got.strides == view(mapped).strides
    np.testing.assert_array_equal(got, view(mapped))


def test_a_parameter_arrives_with_its_gradient_settings(sent):
    """Parameters, buffers and modules keep dtype, ``requires_grad`` and ties."""
    model = FAMILIES["tied"].make_model()
    model.embedding.weight.requires_grad_(False)
    got = sent(model)
    assert got.head.weight is got.embedding.weight
    assert not got.head.weight.requires_grad
    assert phalanx.digest(got) == phalanx.digest(model)


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_memory_map_travels_by_its_file(sent, memory, tmp_path, order):
    """What is packed holds the name of the file, not what is in it; writes by the reader do not reach the file."""
    path, shape = tmp_path / "data", (1000, 7)
    mapped = np.memmap(path, dtype=np.float32, mode="w+", shape=shape, offset=128, order=order)
    mapped[:] = np.arange(7000).reshape(shape)
    got = sent({"deep": [mapped]})["deep"][0]
    assert os.fstat(memory.fd).st_size < mapped.nbytes
    assert os.fspath(got.filename) == str(path)
    assert got.strides == mapped.strides
    np.testing.assert_array_equal(got, mapped)
    mapped[3, 3] = -1  # seen at once: it is the same file
    assert got[3, 3] == -1
    got[5, 5] = -2
    assert mapped[5, 5] == 40


@pytest.mark.parametrize(
    "view", [lambda m: m[10:20], lambda m: m.T, lambda m: m[::-1], lambda m: np.asarray(m), lambda m: m + 1]
)
def test_views_of_a_memory_map_arrive_by_value(sent, tmp_path, view):
    """A part of a map is not the file: it is sent as the numbers that it has."""
    mapped = np.memmap(tmp_path / "data", dtype=np.int64, mode="w+", shape=(100, 3))
    mapped[:] = np.arange(300).reshape(100, 3)
    part = view(mapped)
    np.testing.assert_array_equal(sent(part), part)


def test_what_is_packed_grows_and_shrinks_in_one_memory(memory):
    """A mailbox is used again and again: small after big leaves nothing of the big one."""
    for size in (3, 100_000, 1, 0, 300_000, 5):
        pack({"x": torch.full((size,), float(size)), "n": size}, memory, reduced)
        got = unpack(memory)
        assert got["n"] == size
        assert torch.equal(got["x"], torch.full((size,), float(size)))


# What cannot travel.


class Guarded:
    """A dataset that holds a lock."""

    def __init__(self, lock):
        self.lock = lock

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return MLP.data[0][index], MLP.data[1][index]


def guarded_loss():
    lock = threading.Lock()

    def loss(output, target):
        with lock:
            return torch.nn.functional.cross_entropy(output, target)

    return loss


LOCK = threading.Lock()


def loss_with_a_global(output, target):
    with LOCK:
        return torch.nn.functional.cross_entropy(output, target)


loss_with_a_global.__module__ = "__main__"  # by value, as in a script
UNSENDABLE = {
    "data.lock": {"data": Guarded(threading.Lock())},
    "data.lock.inner[1][0]": {"data": Guarded(types.SimpleNamespace(inner=[0, (threading.Lock(), 1)]))},
    "data.lock['a key']": {"data": Guarded({"a key": threading.Lock()})},
    "data.lock.key": {"data": Guarded({"key": threading.Lock()})},
    "data[1][0].lock": {"data": [MLP.data[0][0], (Guarded(threading.Lock()), 2)]},
    "loss_fn (its variable lock)": {"loss_fn": guarded_loss()},
    "optimizer (its variable loss) (its variable lock)": {
        "optimizer": (lambda loss: lambda named: torch.optim.SGD(named, lr=0.1 if loss else 0.2))(guarded_loss())
    },
}


@pytest.mark.parametrize("path", UNSENDABLE)
def test_what_cannot_travel_is_named(path):
    """A lock, wherever it hides, is refused with the way to it and the way out, before a step is done; that works."""
    with pytest.raises(UsageError) as error:
        MLP.recipe(2, **UNSENDABLE[path]).start(engine="processes", workers=2)
    text = str(error.value)
    assert text.startswith(f"{path} (<unlocked _thread.lock")
    assert "cannot be sent to a worker process: cannot pickle '_thread.lock' object" in text
    assert "engine='inline' (same answer)" in text
    MLP.recipe(2, **UNSENDABLE[path]).start(engine="inline").close()


@pytest.mark.parametrize(
    ("thing", "path"),
    [
        ({"a": threading.Lock()}, "a"),
        ({"a b": [threading.Lock()]}, "['a b'][0]"),
        ([1, (2, {"k": threading.Lock()})], "[1][1].k"),
        (threading.Lock(), "it"),
        (loss_with_a_global, "(its global LOCK)"),
        (sys._getframe(), "it"),
        ((number for number in range(3)), "it"),
        ({"pointer": ctypes.pointer(ctypes.c_int(1))}, "pointer"),
    ],
)
def test_paths(memory, thing, path):
    """The path is written as the caller would write it."""
    with pytest.raises(UsageError) as error:
        pack(thing, memory, reduced)
    assert str(error.value).strip().startswith(f"{path} (")


def test_what_was_refused_is_no_harm(memory):
    """After an error the same memory takes something else; a run goes on after a refused batch or metric."""
    with pytest.raises(UsageError):
        pack([threading.Lock()], memory, reduced)
    pack("fine", memory, reduced)
    assert unpack(memory) == "fine"
    lock = threading.Lock()
    with MLP.recipe(2).start(engine="processes", workers=2) as run:
        first = run.step()
        with pytest.raises(UsageError, match=r"^metric_fn\.metric \(its variable lock\)"):
            run.evaluate(lambda output, target: 0.0 if lock else 1.0, MLP.data)
        with pytest.raises(UsageError, match=r"^batch\[1\]\[0\]"):
            run.step([(1, 2), (lock, 2)])
        run.finish()
        losses = run.result().loss_history
    assert losses == MLP.recipe(2).train(engine="inline").loss_history
    assert losses[0] == first


class Opening:
    """Opens its file in the first reading, and leaves it open."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if self.file is None:
            self.file = self.path.open("rb")
        return MLP.data[0][index], MLP.data[1][index]


class Closing(Opening):
    """Leaves it out of what is sent."""

    def __getstate__(self):
        return {**vars(self), "file": None}


@pytest.mark.parametrize("look", [lambda data: data[0], lambda data: MLP.recipe(2, data=data).train(engine="inline")])
def test_what_a_first_reading_left(look, tmp_path):
    """A file that was opened here is no harm if the class leaves it out; else the message says how it does."""
    (tmp_path / "file").touch()
    expected = MLP.recipe(2, data=Opening(tmp_path / "file")).train(engine="processes", workers=2)
    for kind in (Closing, Opening):
        data = kind(tmp_path / "file")
        look(data)
        with contextlib.ExitStack() as stack:
            if kind is Opening:
                told = r"data\.file .* def __getstate__\(self\): return {\*\*vars\(self\), 'file': None}"
                stack.enter_context(pytest.raises(UsageError, match=told))
            assert MLP.recipe(2, data=data).train(engine="processes", workers=2).digest == expected.digest
        data.file.close()


def test_a_module_with_a_lock_says_so():
    """A model that is passed as it is, with something in it that cannot be copied or sent, is refused by name."""
    model = MLP.make_model()
    model.guard = threading.Lock()
    with pytest.raises(UsageError, match="make_model"):
        MLP.recipe(2, make_model=model).start(engine="processes", workers=2)


def test_a_name_that_is_also_a_submodule_of_torch_travels():
    """Code that says ``torch`` and has an attribute ``classes`` or ``ops`` travels: both name submodules of torch."""

    class Photos:
        classes, ops = ("dark", "light"), 3

        def __getitem__(self, index):
            return torch.full((3,), float(len(self.classes) + self.ops))

        def __len__(self):
            return 8

    Photos.__module__ = "__main__"  # by value, as in a script
    recipe = phalanx.Recipe(
        lambda: torch.nn.Linear(3, 3), Photos(), torch.nn.functional.mse_loss, replicas=2, batch_size=4, steps=2
    )
    assert recipe.train(workers=2, engine="processes").digest == recipe.train(engine="inline").digest


def test_functions_keep_the_names_of_their_files(sent):
    """What a worker raises or warns of is to show its file and line, also in a function within a function."""

    def outer():
        return lambda: None

    arrived = sent(outer)
    assert arrived.__code__.co_filename == __file__
    assert arrived().__code__.co_filename == __file__


# What is broken off on the way.

BROKEN_OFF = """
import gc, io, sys, torch
from phalanx.engines.processes.serialization import Packer
from phalanx.frameworks.registry import reduced
buffers = []
gc.disable()
Packer(io.BytesIO(), reduced, buffers).dump([torch.arange(100.0), torch.arange(6)])
seen = [*buffers]
seen += [seen]  # as a traceback is held by what it passes through
assert len(seen) == 3
del buffers, seen
gc.collect()
"""


@pytest.mark.long
def test_what_was_packed_when_ctrl_c_came_is_collected():
    """A run whose start or evaluation Ctrl-C broke off ended the process when Python collected what that had packed."""
    command = [sys.executable, "-c", BROKEN_OFF]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
