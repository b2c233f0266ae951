"""What ranks do in the tests of failures."""

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.backend import PeerError

SOON = 50.0  # seconds within which a death must be an error everywhere, on a busy machine


def dies(rank, size, count, how):
    """One rank is killed in the middle of many all-reduces; the others end with an error that names it, and soon."""
    tensor, victim = torch.ones(count), size - 1
    for _ in range(20):
        dist.all_reduce(tensor)
        tensor.fill_(1)
    if rank == victim:
        if how == "between":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leaves":
            os._exit(0)
        import threading

        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGKILL]).start()
    began = time.monotonic()
    with pytest.raises(PeerError, match=rf"rank {victim} \(process \d+\) has ended.*start all ranks again") as caught:
        reduce_for(tensor, 20)
    assert isinstance(caught.value, RuntimeError)
    assert time.monotonic() - began < 0.2 + SOON
    with pytest.raises(PeerError, match="has ended"):
        dist.barrier()


def reduce_for(tensor, seconds):
    """All-reduce until something happens."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        dist.all_reduce(tensor)
        tensor.fill_(1)


def one_after_another(*calls):
    """What the first call does not notice, the second must."""
    for call in calls:
        call()


def sender_dies(rank, size):
    """Of a message's two ends one is killed: the other ends with an error."""
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError, match=r"recv from rank 0, tag 0: rank 0 .* has ended"):
        dist.recv(torch.empty(3), 0)


def differing(rank, size, kind):
    """Ranks that call different things are told so, on at least one of them; nothing hangs."""
    calls = {
        "size": lambda: dist.all_reduce(torch.ones(3 + rank)),
        "kind": lambda: dist.all_reduce(torch.ones(3)) if rank else dist.broadcast(torch.ones(3), 0),
        "op": lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
        "dtype": lambda: dist.all_reduce(torch.ones(2, dtype=torch.float64) if rank else torch.ones(4)),
        "moved dtype": lambda: dist.broadcast(torch.ones(4, dtype=torch.int32) if rank else torch.ones(4), 0),
        "root": lambda: dist.broadcast(torch.ones(3), rank % 2),
    }
    with pytest.raises(PeerError, match=r"rank \d does .* while rank \d does|has ended|did not come"):
        one_after_another(calls[kind], dist.barrier)


def differing_sparse(rank, size):
    """Sparse tensors of different shapes, and a sparse tensor beside a dense one, are told on every rank."""
    group = dist.new_group(list(range(size)))
    with pytest.raises(phalanx.UsageError, match=r"shapes .* \(3, 1\), \(4, 2, 2\)"):
        dist.all_reduce((torch.ones(4, 2) if rank == 1 else torch.ones(3)).to_sparse(), group=group)
    with pytest.raises(PeerError, match=r"does (sparse )?all_reduce .* while rank \d does|has ended"):
        one_after_another(lambda: dist.all_reduce(torch.ones(3) if rank else torch.ones(3).to_sparse()), dist.barrier)


def late(rank, size):
    """One rank does not come: the others give up after the time that the group was given, naming it."""
    import datetime

    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=0.5))
    if rank == 1:
        wait_for("gave up")
        return
    with pytest.raises(PeerError, match=r"all_reduce: rank 1 did not come within the timeout of 0\.5 s"):
        dist.all_reduce(torch.ones(3), group=group)
    tell("gave up")


def tell(event):
    """Let other ranks know that something has happened."""
    dist.distributed_c10d._get_default_store().set(event, "1")


def wait_for(event):
    """Until another rank has told of it."""
    dist.distributed_c10d._get_default_store().wait([event])


def refused(rank, size):
    """Wrong calls are refused on the rank that makes them, and the group goes on."""
    wrong = [
        (lambda: dist.broadcast(torch.ones(3).to_sparse(), 0), "sparse"),
        (lambda: dist.all_reduce(torch.ones(3).to_sparse(), op=dist.ReduceOp.MAX), "MAX of a sparse tensor"),
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.complex64).to_sparse()), "SUM of real numbers"),
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), op=dist.ReduceOp.AVG), "AVG cannot be done"),
        (lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND), "BAND cannot be done"),
        (lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e5m2)), "convert the tensor"),
        (lambda: dist.all_gather_into_tensor(torch.ones(size * 3 + 1), torch.ones(3)), "cannot be cut"),
        (lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(size * 3 + 1)), "pad it"),
        (lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1] * size, [9] * size), "add up"),
        (lambda: dist.all_reduce(torch.ones(3, device="meta")), "meta"),
        (lambda: dist.all_gather([torch.ones(5)] * size, torch.ones(2)), "each with 2 of torch.float32"),
        (lambda: dist.all_gather_into_tensor(torch.ones(3 * size).double(), torch.ones(3)), "of torch.float64"),
        (lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(3 * size).double()), "of torch.float64"),
        (lambda: dist.all_to_all([torch.ones(3)], [torch.ones(3)]), f"must be {size} of each"),
        (lambda: dist.all_to_all_single(torch.ones(3, 2), torch.ones(3, 2)), "for 3 rows"),
    ]
    for call, words in wrong:
        with pytest.raises(phalanx.UsageError, match=words):
            call()
    mine = torch.ones(3)
    dist.all_reduce(mine)
    assert mine.tolist() == [size] * 3


def wrong_length(rank, size):
    """A message of another size than the tensor for it."""
    if rank == 0:
        dist.send(torch.ones(3), 1)
    elif rank == 1:
        with pytest.raises(phalanx.UsageError, match=r"sent 12 bytes.*has 16"):
            dist.recv(torch.ones(4), 0)


class Interrupting:
    """A reduction that Ctrl-C breaks off."""

    def __init__(self, original):
        self.original = original
        self.number = original.number

    def into(self, parts, out):
        raise KeyboardInterrupt


def broken_off(rank, size):
    """Ctrl-C in the middle of an all-reduce comes through, and afterwards nothing is reduced wrongly."""
    from phalanx.backend import collectives

    original = collectives.reduction
    collectives.reduction = lambda *given: Interrupting(original(*given)) if rank == 0 else original(*given)
    with pytest.raises(KeyboardInterrupt if rank == 0 else PeerError):
        one_after_another(lambda: dist.all_reduce(torch.ones(collectives.SLOT)), dist.barrier)
    collectives.reduction = original
    with pytest.raises(PeerError, match="broke off in the middle" if rank == 0 else "has ended|does"):
        dist.all_reduce(torch.ones(3))


def queued(rank, size, how):
    """A dead rank is noticed by whoever waits for an operation behind the one that needs it, or only polls."""
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    if how == "queue":
        dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(PeerError, match="has ended"):
            dist.all_reduce(torch.ones(3))
    elif how == "send":
        dist.isend(torch.ones(100_000), size - 1)
        with pytest.raises(PeerError, match="has ended"):
            dist.isend(torch.ones(1), size - 1).wait()
    elif how == "poll":
        work = dist.all_reduce(torch.ones(3), async_op=True)
        while not work.is_completed():
            assert time.monotonic() - began < SOON
            time.sleep(0.01)
        assert "has ended" in str(work.exception())
        assert not work.is_success()
    assert time.monotonic() - began < SOON


def slow_and_dead(rank, size):
    """One rank is dead and another busy: it does not take the busy one to notice."""
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        wait_for("noticed")
        return
    with pytest.raises(PeerError, match=r"rank 2 .* has ended"):
        dist.all_reduce(torch.ones(3))
    tell("noticed")


def from_who_is_left(rank, size):
    """Who receives from anybody gets what one rank sent before it left, and then what another sends."""
    if rank == 1:
        dist.send(torch.tensor([1]), 0)
        return
    if rank == 2:
        wait_for("rank 1 is done")
        dist.send(torch.tensor([2]), 0)
        return
    found = torch.zeros(1, dtype=torch.int64)
    for source in (1, 2):
        assert dist.recv(found) == source
        assert found.item() == source
        tell(f"rank {source} is done")
    with pytest.raises(PeerError, match=r"recv from any rank, tag 0: rank 1 .* has ended"):
        dist.recv(found)


def destroyed(rank, size):
    """Groups come and go, with messages that nobody took: descriptors and what is under way go with them."""
    from phalanx.backend import progress

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    def come_and_go():
        group = dist.new_group(list(range(size)))
        work = dist.isend(torch.ones(100_000), 1 - rank, group=group)
        dist.barrier(group)
        dist.destroy_process_group(group)
        with pytest.raises(PeerError, match="the group was destroyed"):
            work.wait()

    before = descriptors()
    for _ in range(5):
        come_and_go()
    gc.collect()
    assert descriptors() == before
    assert progress.QUEUES == []
