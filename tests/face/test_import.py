"""``import phalanx`` changes nothing in the interpreter, and a run gives the allocator back."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

SNAPSHOT = """
import atexit, ctypes, gc, json, os, re, signal, sys, threading, warnings

def shown(*things):
    return [re.sub(" at 0x[0-9a-f]+", "", repr(thing)) for thing in things]

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

def mapped(size=64 << 20):
    \"\"\"Whether glibc maps a big block for itself, as it does unless it was told otherwise.\"\"\"
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return True
    libc.mallinfo2.restype, libc.malloc.restype = Info, ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    before = libc.mallinfo2().hblks
    block = libc.malloc(size)
    after = libc.mallinfo2().hblks
    libc.free(block)
    return after > before

def snapshot():
    import torch
    return {
        "sys.meta_path": shown(*sys.meta_path),
        "sys.path_hooks": shown(*sys.path_hooks),
        "sys.path": list(sys.path),
        "os.environ": dict(os.environ),
        "signal handlers": shown(*map(signal.getsignal, sorted(signal.valid_signals()))),
        "signal wakeup": signal.set_wakeup_fd(-1),
        "threads": [each.name for each in threading.enumerate()],
        "all threads": len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 1,
        "exits": atexit._ncallbacks(),
        "excepthooks": shown(sys.excepthook, threading.excepthook, sys.unraisablehook),
        "warnings": shown(warnings.showwarning, *warnings.filters),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)],
        "recursion": sys.getrecursionlimit(),
        "switches": sys.getswitchinterval(),
        "tracing": shown(sys.gettrace(), sys.getprofile()),
        "torch's threads": torch.get_num_threads(),
        "torch's dtype": str(torch.get_default_dtype()),
        "torch's modes": [torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()],
        "torch's generator": torch.random.initial_seed(),
        "allocator": mapped(),
    }
"""
FIRST = "import torch\nbefore = snapshot()\n{statement}\nprint(json.dumps([before, snapshot()], default=str))\n"
ALONE = "{statement}\nprint(json.dumps(snapshot(), default=str))\n"


def told(program):
    """What a fresh interpreter prints at its end."""
    command = [sys.executable, "-c", SNAPSHOT + textwrap.dedent(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def changed(statement):
    """The names of what a statement changes in an interpreter that has imported torch."""
    before, after = told(FIRST.format(statement=statement))
    return {name for name in before if before[name] != after[name]}


@pytest.mark.longest
def test_importing_changes_nothing():
    """Neither hooks, handlers, threads, the environment nor settings differ after it, torch being there before."""
    assert changed("import phalanx") == set()


@pytest.mark.longest
def test_importing_changes_what_importing_torch_does():
    """Where phalanx is imported first, all is as where torch alone is."""
    ours, theirs = (told(ALONE.format(statement=f"import {name}")) for name in ("phalanx", "torch"))
    theirs["torch's generator"] = ours["torch's generator"]  # a number from the system, as long as nobody seeds
    assert {name: value for name, value in ours.items() if theirs[name] != value} == {}


CHANGES = """
import atexit, ctypes, gc, os, signal, sys, threading, time, warnings
class Finder:
    def find_spec(self, name, path=None, target=None):
        return None
def refuse(path):
    raise ImportError
sys.meta_path.insert(0, Finder())
sys.path_hooks.append(refuse)
sys.path.append("/no/such/folder")
os.environ["PHALANX"] = "1"
signal.signal(signal.SIGINT, lambda *_: None)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
atexit.register(str)
sys.excepthook = threading.excepthook = print
warnings.simplefilter("ignore")
gc.set_threshold(1)
sys.setrecursionlimit(5000)
sys.setswitchinterval(1.0)
sys.setprofile(lambda *_: None)
torch.set_num_threads(2)
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
torch.manual_seed(3)
ctypes.CDLL(None).mallopt(-4, 0) if hasattr(ctypes.CDLL(None), "mallopt") else None
"""


@pytest.mark.longest
def test_changes_are_seen():
    """Whatever is watched, a change of it is seen, but for where there is no glibc, the allocator's."""
    before, after = told(FIRST.format(statement=CHANGES))
    same = {name for name in before if before[name] == after[name]}
    assert same - {"allocator"} == {"signal wakeup"}


RUN = """
import phalanx
from phalanx.shared import memory as heap
{planted}
x = torch.randn(8, 3)
recipe = phalanx.Recipe(lambda: torch.nn.Linear(3, 1), (x, x[:, :1]), torch.nn.functional.mse_loss, replicas=1, steps=2)
with recipe.start(engine="inline") as run:
    run.step()
    within = mapped()
print(json.dumps([within, mapped()]))
"""


@pytest.mark.longest
@pytest.mark.parametrize("kept", [False, True])
def test_the_allocator_is_given_back(kept):
    """A run keeps big blocks that are freed, and gives them back at its end; one that kept them would be seen."""
    planted = "heap.FreedMemory.end = lambda self: None" if kept else ""
    assert told("import torch" + RUN.format(planted=planted)) in ([False, not kept], [True, True])
