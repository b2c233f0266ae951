"""The fake accelerator's collectives, as a package of an accelerator registers its own: on a stream of their own.

What is sent waits for the stream that made it; what has come must be waited for, which makes a stream wait and not the
host. Bytes travel by Gloo. A wait that is missing is a race, which the accelerator finds.

They fail as NCCL does. Once a peer is gone, a collective neither ends nor says so: its stream hangs, and all that waits
for it, until ``abort``. Who aborts one of several that hang waits until the others are being aborted, too.
The first collective meets the others, and waits for ever for a peer that never comes, in the thread of whoever calls.
The host waits here where NCCL's would run ahead: while all peers live.
"""

import contextlib
import datetime
import os
import time

import torch
from torch import distributed as dist

COUNTS = {"all_to_all": 0, "all_gather": 0, "all_reduce": 0, "bytes": 0, "hangs": 0, "aborted": 0}
PEERS = set()  # processes that this one has met
ABORTING = set()  # what hangs and somebody is about to end
NAP_SECONDS = 0.0001


def gone(peer):
    """Whether a process has ended, though perhaps nobody has fetched its status yet."""
    try:
        with open(f"/proc/{peer}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


class Work:
    """What was begun; ``wait`` makes the current stream wait for it."""

    def __init__(self, device, event):
        self.device, self.event = device, event

    def wait(self):
        torch.fake.current_stream(self.device).wait_event(self.event)

    def is_completed(self):
        return self.event.query()


class Collectives:
    """The group of all workers, with the methods that phalanx asks for."""

    def __init__(self, store, rank, size, timeout):
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.gloo, self.streams, self.peers, self.hung, self.aborted = None, {}, set(), set(), False

    def alltoall_base(self, received, sent, comes, goes):
        COUNTS["all_to_all"] += 1
        COUNTS["bytes"] += sum(goes) - goes[self.rank]
        return self._moved(received, sent, lambda there, here: self.gloo.alltoall_base(there, here, comes, goes))

    def _allgather_base(self, whole, mine):
        COUNTS["all_gather"] += 1
        COUNTS["bytes"] += mine.nbytes * (self.size - 1)
        return self._moved(whole, mine, lambda there, here: self.gloo._allgather_base(there, here))

    def allreduce(self, tensors):
        """The one that adds, which no run may call."""
        COUNTS["all_reduce"] += 1
        return self._moved(*tensors * 2, lambda there, here: self.gloo.allreduce([there.copy_(here)]))

    def abort(self):
        """End what hangs, once all else that hangs is being aborted, too."""
        COUNTS["aborted"] += 1
        self.aborted = True
        if not self.hung:
            self.gloo = None  # for all to see
        PEERS.difference_update(self.peers)
        ABORTING.update(self.hung)
        while torch.fake.hanging() - ABORTING:
            time.sleep(NAP_SECONDS)
        torch.fake.end_hangs(self.hung)

    def _meet(self):
        """Wait for all others, without a limit, as NCCL does when it makes a communicator."""
        self.store.set(f"process {self.rank}", str(os.getpid()))
        names = [f"process {other}" for other in range(self.size)]
        while not self.store.check(names):
            if self.aborted:
                raise RuntimeError("the communicator was aborted while it was made")
            time.sleep(NAP_SECONDS)
        self.peers = {int(self.store.get(name)) for name in names}
        PEERS.update(self.peers)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = datetime.timedelta(seconds=30)
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        self.gloo = dist.ProcessGroupGloo(self.store, self.rank, self.size, options)

    def _moved(self, target, source, move):
        if self.aborted:
            raise RuntimeError("the communicator was aborted")
        if self.gloo is None:
            self._meet()
        device = source.device
        stream = self.streams.setdefault(device.index, torch.Stream(device))
        stream.wait_stream(torch.fake.current_stream(device))
        with torch.fake.stream(stream):
            if not torch.fake.stuck(device):  # else it waits behind something that never ends
                there = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
                if self._arrives(move(there, source.cpu())):
                    target.copy_(there, non_blocking=True)  # else the host would have waited: no race could be found
                else:
                    COUNTS["hangs"] += 1
                    self.hung.add(torch.fake.hang(device))
            event = torch.Event(device)
            event.record(stream)
        for tensor in (target, source):
            tensor.record_stream(stream)
        return Work(device, event)

    def _arrives(self, work):
        """Wait until bytes have come; False if they never will."""
        while not work.is_completed():
            if any(map(gone, PEERS)):
                LEFT.append(work)  # torch's destructor would wait for it
                return False
            time.sleep(NAP_SECONDS)
        with contextlib.suppress(RuntimeError):
            work.wait()
            return True
        return False


LEFT = []


def create(options, _):
    return Collectives(options.store, options.group_rank, options.group_size, options.timeout)


def register():
    """Make torch take these for the fake accelerator."""
    if "FAKECCL" not in dist.Backend._plugins:
        dist.Backend.register_backend("fakeccl", create, extended_api=True, devices=["fake"])
