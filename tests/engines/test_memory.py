"""Shared memory: where things lie in it, how much of it there may be, and what is used where there is no memfd."""

import mmap
import os
import pathlib
import platform
import random
import subprocess
import sys
import types

import pytest
import torch

import phalanx
from phalanx.engines.processes import driver as processes
from phalanx.errors import UsageError
from phalanx.frameworks.registry import open_framework
from phalanx.plan.fold import place
from phalanx.shared import memory
from phalanx.shared.layout import ArenaPlan
from phalanx.shared.memory import ALIGNMENT, UNLIMITED, Carver, Memory, available_bytes
from phalanx.surroundings import presence
from tests.families import FAMILIES

MLP = FAMILIES["mlp"]
GB = 10**9


def test_places_are_aligned_and_do_not_overlap():
    """Every place starts at a multiple of 64 bytes, after the one before, with less than 64 between."""
    draw, carver, end = random.Random(0), Carver(), 0
    for _ in range(1000):
        size = draw.choice([0, 1, 7, 63, 64, 65, 1000, draw.randrange(10**6)])
        offset = carver.take(size)
        assert offset % ALIGNMENT == 0
        assert end <= offset < end + ALIGNMENT
        end = offset + size
        assert end <= carver.size < end + ALIGNMENT
    assert carver.size % ALIGNMENT == 0


def test_nothing_takes_no_room():
    """Empty things get a place too, and share it."""
    carver = Carver()
    assert [carver.take(0), carver.take(0), carver.take(1), carver.take(0), carver.take(2)] == [0, 0, 0, 64, 64]


def test_memory_grows_and_is_shared_through_its_descriptor():
    """Maps of one descriptor see one another's writes; a private map keeps its own to itself; fresh pages are zero."""
    mine = Memory(10)
    assert mine.size == mmap.PAGESIZE
    one, other = mine.map(), Memory(0, os.dup(mine.fd))
    assert other.size == mine.size
    two, private = other.map(), other.map(private=True)
    one[3] = 7
    private[4] = 8
    assert (two[3], two[4], private[3], private[4]) == (7, 0, 7, 8)
    mine.grow(5)
    assert mine.size == mmap.PAGESIZE
    mine.grow(3 * mmap.PAGESIZE + 1)
    three = other.map()  # made by who did not know that it grew
    assert (len(one), len(three), other.size) == (mmap.PAGESIZE, 4 * mmap.PAGESIZE, 4 * mmap.PAGESIZE)
    assert (three[3], three[-1]) == (7, 0)
    mine.close()
    mine.close()
    other.close()
    assert two[3] == 7


def test_memory_is_inherited_only_on_purpose():
    """A program that the caller starts does not get the descriptor along."""
    made = Memory(1)
    assert not os.get_inheritable(made.fd)
    made.close()


def test_big_memory_costs_nothing_until_it_is_written():
    """An arena has room that is never touched."""
    made = Memory(64 << 30)
    assert os.fstat(made.fd).st_blocks == 0
    made.close()


def test_memory_that_cannot_be_mapped_is_a_usage_error(monkeypatch):
    """A limit on address space is named, with the way out."""

    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    made = Memory(1)
    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    with pytest.raises(UsageError, match=r"cannot be mapped .*ulimit -v.*engine='inline'"):
        made.map()
    made.close()


# Without a memfd.


def refused(*_, **__):
    raise OSError(38, "Function not implemented")


@pytest.fixture(params=["missing", "refused"])
def no_memfd(request, monkeypatch, tmp_path):
    """A system without memfd, or a sandbox that forbids it; temporary files lie in a folder of the test's own."""
    if request.param == "missing":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr(memory.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_a_memfd_memory_is_a_file_without_a_name(no_memfd):
    """It works like the other, lies in the folder for temporary files, and leaves nothing there."""
    made = Memory(100)
    assert list(no_memfd.iterdir()) == []
    assert pathlib.Path(os.readlink(f"/proc/self/fd/{made.fd}")).parent == no_memfd
    assert os.fstat(made.fd).st_nlink == 0
    made.map()[0] = 5
    assert Memory(0, os.dup(made.fd)).map()[0] == 5
    made.close()


@pytest.mark.long
def test_without_a_memfd_training_gives_the_same_bits(no_memfd):
    """Workers share an unlinked file instead."""
    expected = MLP.recipe(3).train(engine="inline")
    assert MLP.recipe(3).train(engine="processes", workers=2).digest == expected.digest
    phalanx.close()  # what is kept warm for jax has a folder
    assert [path.name for path in no_memfd.iterdir() if not path.name.startswith("torchinductor")] == []  # torch's own


# How much there is.


@pytest.fixture
def system(monkeypatch, tmp_path):
    """A made-up /proc and cgroup tree; write files by their absolute path."""

    def write(**files):
        for path, text in files.items():
            place = tmp_path / path.replace("__", "/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)

    for module in (memory, presence):
        monkeypatch.setattr(module, "pathlib", types.SimpleNamespace(Path=lambda path: tmp_path / path.lstrip("/")))
    monkeypatch.setattr(presence, "MOUNTED", tmp_path / "groups")
    return write


def group(path, limit, used, cached=0):
    """The files of one control group."""
    place = f"groups__{path}__" if path else "groups__"
    names = ("memory.max", "memory.current", "memory.stat")
    texts = (f"{limit}\n", f"{used}\n", f"anon 5\ninactive_file {cached}\nactive_file 7\n")
    return {f"{place}{name}": text for name, text in zip(names, texts, strict=True)}


MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\nBuffers: 3 kB\n"


ROOM = {  # what the system says, and how much memory there is
    "the machine": ({"proc__meminfo": MEMINFO}, 8_000_000 * 1024),
    "no /proc": ({}, UNLIMITED),
    "a kernel that does not say": ({"proc__meminfo": "MemTotal: 16000000 kB\n"}, UNLIMITED),
    "a group, whose caches count as free": (
        {"proc__self__cgroup": "0::/docker/abc\n", **group("docker__abc", 4 * GB, 3 * GB, GB // 2)},
        1.5 * GB,
    ),
    "the tightest of nested groups": (
        {
            "proc__self__cgroup": "12:cpu:/elsewhere\n0::/a/b/c\n",
            **group("a__b__c", "max", 1),
            **group("a__b", 6 * GB, 4 * GB),
            **group("a", 5 * GB, 4 * GB),
            **group("", "max", 9 * GB),
        },
        GB,
    ),
    "a group larger than the machine": (
        {"proc__self__cgroup": "0::/\n", **group("", 100 * GB, GB)},
        8_000_000 * 1024,
    ),
    "a group and a root without files": ({"proc__self__cgroup": "0::/a/b\n", **group("a", 2 * GB, GB)}, GB),
    "version 1, without a unified line": ({"proc__self__cgroup": "5:memory:/a\n"}, 8_000_000 * 1024),
}


@pytest.mark.parametrize("name", ROOM)
def test_how_much_there_is(system, name):
    """The least of what the kernel calls available and what control groups leave; what nobody knows is no limit."""
    files, wanted = ROOM[name]
    system(**({"proc__meminfo": MEMINFO} if wanted != UNLIMITED else {}) | files)
    assert available_bytes() == wanted


CORES = {  # what control groups say, and for how many of 8 processors that is time
    "no group": ({}, 8),
    "no limit": ({"proc__self__cgroup": "0::/\n", "groups__cpu.max": "max 100000\n"}, 8),
    "one and a half": ({"proc__self__cgroup": "0::/\n", "groups__cpu.max": "150000 100000\n"}, 1),
    "a half": ({"proc__self__cgroup": "0::/a\n", "groups__a__cpu.max": "50000 100000\n"}, 1),
    "more than there are": ({"proc__self__cgroup": "0::/\n", "groups__cpu.max": "6400000 100000\n"}, 8),
    "a parent": (
        {
            "proc__self__cgroup": "0::/a/b\n",
            "groups__a__b__cpu.max": "max 100000\n",
            "groups__a__cpu.max": "300000 100000",
        },
        3,
    ),
    "a path of the host": ({"proc__self__cgroup": "0::/kubepods/x\n", "groups__cpu.max": "200000 100000\n"}, 2),
    "version 1": (
        {
            "proc__self__cgroup": "3:cpu,cpuacct:/a\n2:memory:/b\n",
            "groups__cpu__a__cpu.cfs_quota_us": "250000\n",
            "groups__cpu__a__cpu.cfs_period_us": "100000\n",
        },
        2,
    ),
    "version 1, no limit": (
        {
            "proc__self__cgroup": "3:cpu:/a\n",
            "groups__cpu__a__cpu.cfs_quota_us": "-1\n",
            "groups__cpu__a__cpu.cfs_period_us": "100000\n",
        },
        8,
    ),
}


@pytest.mark.parametrize("name", CORES)
def test_a_quota_of_time_leaves_fewer_cores(system, monkeypatch, name):
    """Of 8 processors a container may keep as many busy as its quota has whole ones, and at least one."""
    files, cores = CORES[name]
    monkeypatch.setattr(presence, "processors", lambda: list(range(8)))
    system(**files)
    assert presence.usable_cores() == cores


def test_this_machine_has_some():
    """The real files are read too."""
    assert 0 < available_bytes() < UNLIMITED


# Too much.


def test_an_arena_that_is_too_large_is_refused_before_anything_starts(monkeypatch):
    """The error names the workers, what they take and what there is; no worker is started and no memory taken."""
    recipe = phalanx.Recipe(lambda: torch.nn.Linear(1000, 1000), None, torch.nn.functional.mse_loss, replicas=4)
    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000_000)

    def never(*_, **__):
        raise AssertionError("something was started")

    for name in ("Memory", "Output", "WorkerPool", "WorkerHandle"):
        monkeypatch.setattr(processes, name, never, raising=False)
    with pytest.raises(UsageError) as error:
        recipe.start(engine="processes", workers=4)
    text = str(error.value)
    assert text.startswith(
        "workers is 4, which takes about 0.0 GB of memory for weights, optimizer state and gradients"
    )
    assert "use fewer workers, or engine='inline' (same answer)" in text


def touched(recipe, workers):
    """Bytes that the check compares."""
    return ArenaPlan(open_framework(recipe).sharing, place(recipe.replicas, workers)).layout.touched


@pytest.mark.long
def test_fewer_workers_take_less(monkeypatch):
    """The way out that the error names exists: where 8 workers do not fit, 2 may, and train to the same bits."""
    recipe = MLP.recipe(8, make_model=lambda: torch.nn.Sequential(torch.nn.Linear(5, 3000), torch.nn.Linear(3000, 3)))
    few, many = touched(recipe, 2), touched(recipe, 8)
    assert few < 0.8 * many
    monkeypatch.setattr(memory, "available_bytes", lambda: (few + many) // 2)
    with pytest.raises(UsageError, match="workers is 8"):
        recipe.start(engine="processes", workers=8)
    digest = recipe.train(engine="processes", workers=2).digest
    assert digest == recipe.train(engine="inline").digest


def test_what_is_compared_counts_what_is_written():
    """Weights, gradients of every worker, Adam's two states, a snapshot of all but gradients: what an arena takes."""
    weights = 4 * (512 * 512 + 512)
    recipe = phalanx.Recipe(lambda: torch.nn.Linear(512, 512), None, torch.nn.functional.mse_loss, replicas=4)
    for workers, sets in ((1, 0), (2, 2), (4, 3)):  # what others own is published; two vectors for two replicas
        least = (1 + 3 + 3 + sets) * weights
        assert least <= touched(recipe, workers) <= 1.2 * least + 100_000, workers


STEPS = """
import itertools, resource, torch, phalanx
def model():
    return torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(4)])
data = torch.randn(16, 700), torch.randn(16, 700)
recipe = phalanx.Recipe(model, data, torch.nn.functional.mse_loss, replicas=4, batch_size=16, steps=30)
with recipe.start(workers=1, engine="inline") as run:
    list(itertools.islice(run, 10))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run.finish()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.long
def test_steps_in_this_process_use_their_memory_again(tmp_path):
    """Gradients of 8 MB are not faulted in again in each step, unless the environment tunes glibc itself."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("only glibc gives memory back and can be told not to")
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    mapped = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    kept, faulted = (
        int(subprocess.run([sys.executable, script], env=env, capture_output=True, check=True, timeout=300).stdout)
        for env in (os.environ, mapped)
    )
    assert kept < 20 * 200  # pages of 4 kB; a step's gradients have 2,000
    assert faulted > 20 * 1000
