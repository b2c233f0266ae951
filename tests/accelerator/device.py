"""Registers the fake accelerator when it is imported, as packages of accelerators do: workers import it by its name."""

import types

import torch

from tests.accelerator import ccl
from tests.accelerator.building import compiled

NAME = "fake"


class Module(types.ModuleType):
    """What ``torch.get_device_module("fake")`` returns. A device is an index, a string, a ``torch.device`` or None."""

    Stream, Event = torch.Stream, torch.Event

    def __init__(self, native):
        super().__init__(f"torch.{NAME}")
        self._native = native
        self.default_generators = tuple(map(native.default_generator, range(native.device_count())))
        for name in ("reset", "counts", "reset_counts", "races", "raise_races", "set_virtual_time", "now", "trace"):
            setattr(self, name, getattr(native, name))
        self.opened = native.opened
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
        return "fake accelerator"

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

    def hang(self, device):
        """Let the device's current stream wait for something that never ends; returns its number, for ``end_hangs``.

        All that is enqueued behind it waits, too, on other streams that wait for this one as well. So does the host as
        soon as it asks for any of that. (Kernels compute at once nevertheless, with whatever is there.)
        """
        return self._native.hang(self._index(device))

    def end_hangs(self, numbers):
        self._native.end_hangs(set(numbers))

    def hanging(self):
        """The numbers of what has not been ended."""
        return self._native.hanging()

    def stuck(self, device):
        """Whether the current stream waits for something that never ends."""
        return self._native.stuck(self._index(device))

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


if not hasattr(torch, NAME):
    NATIVE = compiled()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module(NATIVE))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


ccl.register()
