"""A fake accelerator: devices "fake:0", "fake:1", ... that are real to torch, though their kernels run on the CPU.

``load()`` builds it (see ``building.py``), registers it and returns its device module, ``torch.fake``, which has what
``torch.cuda`` has and what tests need: counts, times, traces, failures. ``accelerator()`` does the same in a test,
sets everything back and skips the test where there is no compiler. A process that has loaded it keeps it: from then
on ``torch.accelerator.current_accelerator()`` is "fake". The environment variable ``FAKE_DEVICES`` says how many (4).

Catches, always and not by luck
-------------------------------
* host access to device memory: its addresses belong to pages that may not be read (SIGSEGV);
* a missing wait between streams or devices: a race by vector clocks, raised where it happens (or only listed, see
  ``raise_races`` and ``races``); so also memory used on a stream that does not wait for the one it was allocated on,
  and memory that is freed while another stream may use it (no ``record_stream``), at the next work or
  synchronisation;
* the host looking before it synchronised: a ``non_blocking`` copy to pinned memory is all ones (NaN, -1) until then;
* pinned memory overwritten before a ``non_blocking`` copy has read it: raised when the host synchronises;
* tensors of different devices in one operator; a generator of another device; memory that was never written (NaN);
* copies nobody wanted: ``counts()``, in number and bytes, for every pair of devices;
* operators without a deterministic kernel, for those that ``set_nondeterministic`` names;
* use in a forked child of a process that has used it.

Cannot catch
------------
* anything that a real kernel computes differently: other bits than the CPU's, sums in an order of their own, TF32,
  cuDNN's choice of algorithms, the cuBLAS workspace, alignment, wrong results for large or strange shapes;
* races between threads of the host: what one has waited for, all are taken to have waited for;
* the host reading or writing pinned memory at the same time as a device, beyond the two cases above;
* a source that is not pinned and overwritten during a ``non_blocking`` copy: it is read at once, as mostly on CUDA;
* limits of hardware: bandwidth that copies share, cores that streams share (here each stream has a device of its
  own), peer access that is missing, fragmentation of memory, the time to launch a kernel, memory that kernels need
  meanwhile;
* what does not ask torch's dispatcher: CUDA graphs, NCCL, CUDA IPC, own kernels, the code of ``torch.compile``.

Differs from CUDA, as torch treats devices that are not its own: ``module.to`` makes new parameters, so that an
optimizer made before keeps the old ones; autocast knows the most common operators only; attention runs by its
formula, GRU and LSTM cells by theirs (equal bits on all fake devices, other bits than the CPU's). Does not run:
sparse and quantized tensors, dlpack, lazy modules moved before their first use, cuDNN's own operators, resizing of
storages.
"""

import types

import torch

from phalanx.frameworks.torch import accelerators
from tests.accelerator.building import Unavailable, compiled

NAME = "fake"


def load():
    """Build and register the accelerator, once per process; return ``torch.fake``."""
    if not hasattr(torch, NAME):
        native = compiled()
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, Module(native))
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return torch.get_device_module(NAME)


def accelerator():
    """``load()`` for a test: everything set back as after loading, or the test skipped with the reason."""
    import pytest

    try:
        module = load()
    except Unavailable as reason:
        pytest.skip(f"no fake accelerator: {reason}")
    accelerators.MENTIONED.add("idle")  # runs on the CPU, of other tests too, would say so in a warning
    module.reset()
    return module


class Module(types.ModuleType):
    """What ``torch.get_device_module("fake")`` returns. A device is an index, a string, a ``torch.device`` or None."""

    Stream, Event = torch.Stream, torch.Event

    def __init__(self, native):
        super().__init__(f"torch.{NAME}")
        self._native = native
        self.default_generators = tuple(map(native.default_generator, range(native.device_count())))
        for name in ("reset", "counts", "reset_counts", "races", "raise_races", "set_virtual_time", "now", "trace"):
            setattr(self, name, getattr(native, name))
        self.device_count, self.current_device = native.device_count, native.current_device
        self.is_initialized, self._is_in_bad_fork = native.used, native.forked
        self.set_copy_seconds_per_byte = native.set_copy_seconds_per_byte

    def _index(self, device):
        if device is None:
            return self.current_device()
        if isinstance(device, int):
            return device
        device = torch.device(device)
        if device.type != NAME:
            raise ValueError(f"expected a {NAME} device, got {device}")
        return self.current_device() if device.index is None else device.index

    # ---- as torch.cuda has them

    def init(self):
        """Nothing: devices are there once the module is."""

    def is_available(self):
        return self.device_count() > 0

    def set_device(self, device):
        self._native.set_device(self._index(device))

    def get_device_name(self, device=None):
        return f"fake accelerator {self._index(device)}"

    def device(self, device):
        """A context with another current device."""
        return _Current(self, self._index(device))

    def synchronize(self, device=None):
        self._native.synchronize(self._index(device))

    def current_stream(self, device=None):
        return torch.accelerator.current_stream(self._index(device))

    def default_stream(self, device=None):
        index = self._index(device)
        return torch.Stream(stream_id=0, device_index=index, device_type=self.current_stream(index).device_type)

    def set_stream(self, stream):
        torch.accelerator.set_stream(stream)

    def stream(self, stream):
        """A context with another current stream, and its device."""
        return _Current(self, stream.device.index, stream)

    def manual_seed(self, seed):
        self.default_generators[self.current_device()].manual_seed(seed)

    def manual_seed_all(self, seed):
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def seed_all(self):
        self.manual_seed_all(torch.seed())

    def initial_seed(self):
        return self.default_generators[self.current_device()].initial_seed()

    def get_rng_state(self, device=NAME):
        return self.default_generators[self._index(device)].get_state()

    def set_rng_state(self, new_state, device=NAME):
        self.default_generators[self._index(device)].set_state(new_state)

    def get_rng_state_all(self):
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state_all(self, new_states):
        for generator, state in zip(self.default_generators, new_states, strict=True):
            generator.set_state(state)

    def memory_allocated(self, device=None):
        return self._native.memory(self._index(device))[0]

    def max_memory_allocated(self, device=None):
        return self._native.memory(self._index(device))[1]

    def memory_reserved(self, device=None):
        return self.memory_allocated(device)

    def max_memory_reserved(self, device=None):
        return self.max_memory_allocated(device)

    def reset_peak_memory_stats(self, device=None):
        self._native.reset_peak(self._index(device))

    def mem_get_info(self, device=None):
        allocated, _, limit = self._native.memory(self._index(device))
        return limit - allocated, limit

    def empty_cache(self):
        """Nothing: memory is given back when it is freed."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation=True):
        return True

    # ---- for tests

    def set_kernel_seconds(self, seconds, name=""):
        """Let every kernel, or those called `name` as in a trace ("aten::mm"), take so long on its stream."""
        self._native.set_kernel_seconds(seconds, name)

    def set_memory_limit(self, device, limit_bytes):
        self._native.set_memory_limit(self._index(device), limit_bytes)

    def fail_allocation(self, device, n=1):
        """Let the `n`-th allocation on `device` from now be out of memory."""
        self._native.fail_allocation(self._index(device), n)

    def lose(self, device):
        """Let everything on `device` fail until ``restore``."""
        self._native.set_lost(self._index(device), True)

    def restore(self, device):
        self._native.set_lost(self._index(device), False)

    def fault(self, device):
        """Let the next synchronisation with `device` report an illegal access; the device is lost then."""
        self._native.fault(self._index(device))

    def set_nondeterministic(self, name, on=True):
        """Let the operator `name` ("aten::index_add_") say that it has no deterministic kernel, as CUDA's do."""
        self._native.set_nondeterministic(name, on)

    def take_trace(self):
        """Return what happened since ``trace(True)`` or the last call, times in seconds.

        Work is (device, stream, name, enqueued_at, starts_at, ends_at), waiting is ("host", "synchronize", from, to).
        """
        return [
            (device, stream, name, *times) if device >= 0 else ("host", name, *times[1:])
            for device, stream, name, *times in self._native.take_trace()
        ]


class _Current:
    """Sets a device, and perhaps one of its streams, for as long as it is entered."""

    def __init__(self, module, index, stream=None):
        self.module, self.index, self.stream = module, index, stream
        self.left = []

    def __enter__(self):
        self.left.append((self.module.current_device(), self.module.current_stream(self.index)))
        self.module.set_device(self.index)
        if self.stream is not None:
            self.module.set_stream(self.stream)
        return self.stream

    def __exit__(self, *_):
        device, stream = self.left.pop()
        if self.stream is not None:
            self.module.set_stream(stream)
        self.module.set_device(device)
