"""Shards of a stream over hosts: each is read where its replica lives, and moves with it."""

import os
import pathlib
import signal

import pytest

from tests.hosts.network import strike
from tests.hosts.test_falls import STEPS, Hosts, OneHost, kinds, wanted


def read_by(folder):
    """How many samples each process has read, by rank."""
    return [os.path.getsize(path) for path in sorted(pathlib.Path(folder).glob("read-*"))]


@pytest.mark.long
@pytest.mark.parametrize(("size", "readers"), [(1, 0), (2, 0), (2, 3), (3, 0), (3, 1)])
def test_each_host_reads_its_part(tmp_path, size, readers):
    """The same bits on 1, 2 and 3 hosts, and each reads its part of the data and nothing else."""
    with OneHost() as here:
        hosts = Hosts(here, tmp_path, pause=0, size=size, shards=True, readers=readers)
        hosts.ended(*range(size))
    assert wanted("shards")[0] != wanted("stream")[0]
    counts = read_by(tmp_path)
    whole = sum(counts)
    assert len(counts) == size
    assert whole > 5 * STEPS
    ahead = (12 // size) * (2 + 64 * (readers > 0))  # what waits when the last step is done
    assert all(abs(count - whole / size) <= 0.05 * whole / size + ahead for count in counts), counts


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("readers", [0, 2])
def test_shards_move_with_their_replicas(tmp_path, victim, readers):
    """A host falls in the middle of an epoch: its shards are read on by others. It comes back: it takes some over."""
    watcher = (victim + 1) % 3
    with OneHost() as here:
        hosts = Hosts(here, tmp_path, pause=0.2, size=3, shards=True, readers=readers)
        hosts.at(10, watcher)
        strike(hosts.processes[victim], signal.SIGKILL)
        hosts.at(hosts.step(watcher) + 10, watcher)
        hosts.again(victim)
        hosts.at(1, victim)
        found = hosts.ended(0, 1, 2)
    assert kinds(found[watcher]) == ["lost", "joined"], found
