"""Collectives on CUDA that behave as NCCL's and need no second GPU: Gloo moves the bytes, the stream waits for a flag.

NCCL refuses two ranks on one GPU. Here a stream copies what is sent to pinned memory, and then waits for a word of
pinned memory (``cuStreamWaitValue32``). A thread of the host waits for that copy, has Gloo move the bytes, and sets the
word. So the host runs ahead, what is enqueued behind a collective waits on the device, and a collective whose peer is
gone never ends, until ``abort`` sets the word. It needs cuda-bindings. It cannot run without CUDA, and was never run.
"""

import contextlib
import datetime
import os
import queue
import threading
from typing import Any

import torch
from torch import distributed as dist

NAME = "cudaccl"
FOREVER = 1 << 30  # of a word: more than any number that is waited for
GLOO: Any = dist.ProcessGroupGloo


class Work:
    """What was begun; ``wait`` makes the current stream wait for it, and not the host."""

    def __init__(self, done: Any) -> None:
        self.done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)

    def is_completed(self) -> bool:
        return self.done.query()


class Collectives:
    """The group of all workers, with the methods that phalanx asks for."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        options = GLOO._Options()
        options._timeout = datetime.timedelta(days=1)
        options._devices = [GLOO.create_device(interface="lo")]
        self.gloo = GLOO(store, rank, size, options)
        self.device, self.number = device, 0
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.word = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.begun: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._move, daemon=True).start()

    def alltoall_base(self, received: torch.Tensor, sent: torch.Tensor, comes: list[int], goes: list[int]) -> Work:
        return self._enqueued(received, sent, lambda there, here: self.gloo.alltoall_base(there, here, comes, goes))

    def _allgather_base(self, whole: torch.Tensor, mine: torch.Tensor) -> Work:
        return self._enqueued(whole, mine, self.gloo._allgather_base)

    def abort(self) -> None:
        """End what hangs: the stream goes on with whatever is in memory."""
        self.word[0] = FOREVER
        self.begun.put(None)
        self.gloo.abort()

    def _enqueued(self, target: torch.Tensor, source: torch.Tensor, move: Any) -> Work:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]  which only such machines have

        self.number += 1
        here, there = (
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in (source, target)
        )  # fmt: skip
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            here.copy_(source, non_blocking=True)
            copied = self.stream.record_event()
            (status,) = driver.cuStreamWaitValue32(
                driver.CUstream(self.stream.cuda_stream), driver.CUdeviceptr(self.word.data_ptr()), self.number,
                driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ,
            )  # fmt: skip
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"cuStreamWaitValue32 said {status}")
            target.copy_(there, non_blocking=True)
            done = self.stream.record_event()
        for tensor in (target, source):
            tensor.record_stream(self.stream)
        self.begun.put((self.number, copied, move, there, here))
        return Work(done)

    def _move(self) -> None:
        """Move bytes, one collective after another. An error leaves the stream waiting, as a lost peer does."""
        while (begun := self.begun.get()) is not None:
            number, copied, move, there, here = begun
            copied.synchronize()
            with contextlib.suppress(RuntimeError):
                move(there, here).wait()
                if int(self.word[0]) < FOREVER:
                    self.word[0] = number


def create(options: Any, _: Any) -> Collectives:
    return Collectives(options.store, options.group_rank, options.group_size, torch.device("cuda", 0))


def register() -> None:
    """Have phalanx use it for CUDA in this process, also for workers that share a device."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cuda"])
    dist.Backend.default_device_backend_map["cuda"] = NAME
