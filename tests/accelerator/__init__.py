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
* devices that a process uses: ``opened()``;
* a host that waits for a collective whose peer is gone (``ccl.py``): it never ends, nor does what is behind it;
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

import importlib

import torch

from phalanx.frameworks.torch import accelerators
from tests.accelerator.building import Unavailable

NAME = "fake"


def load():
    """Build and register the accelerator, once per process; return ``torch.fake``."""
    importlib.import_module("tests.accelerator.device")
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
