"""The fake accelerator's collectives, as a package of an accelerator registers its own: on a stream of their own.

What is sent waits for the stream that made it; what has come must be waited for, which makes a stream wait and not the
host. Bytes travel by Gloo. A wait that is missing is a race, which the accelerator finds.
"""

import datetime

import torch
from torch import distributed as dist

COUNTS = {"all_to_all": 0, "all_gather": 0, "all_reduce": 0, "bytes": 0}


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
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout or datetime.timedelta(seconds=30)
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        self.rank, self.size = rank, size
        self.gloo = dist.ProcessGroupGloo(store, rank, size, options)
        self.streams = {}

    def alltoall_base(self, received, sent, comes, goes):
        COUNTS["all_to_all"] += 1
        COUNTS["bytes"] += sum(goes) - goes[self.rank]
        return self._moved(received, sent, lambda there, here: self.gloo.alltoall_base(there, here, comes, goes))

    def _allgather_base(self, whole, mine):
        COUNTS["all_gather"] += 1
        COUNTS["bytes"] += mine.nbytes * (self.size - 1)
        return self._moved(whole, mine, self.gloo._allgather_base)

    def allreduce(self, tensors):
        """The one that adds, which no run may call."""
        COUNTS["all_reduce"] += 1
        return self._moved(*tensors * 2, lambda there, here: self.gloo.allreduce([there.copy_(here)]))

    def _moved(self, target, source, move):
        device = source.device
        stream = self.streams.setdefault(device.index, torch.Stream(device))
        stream.wait_stream(torch.fake.current_stream(device))
        with torch.fake.stream(stream):
            there = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
            move(there, source.cpu()).wait()
            target.copy_(there, non_blocking=True)  # else the host would have waited, and no race could be found
            event = torch.Event(device)
            event.record(stream)
        for tensor in (target, source):
            tensor.record_stream(stream)
        return Work(device, event)


def create(options, _):
    return Collectives(options.store, options.group_rank, options.group_size, options.timeout)


def register():
    """Make torch take these for the fake accelerator."""
    if "FAKECCL" not in dist.Backend._plugins:
        dist.Backend.register_backend("fakeccl", create, extended_api=True, devices=["fake"])
