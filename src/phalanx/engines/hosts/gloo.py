"""Bytes between processes of several hosts, by Gloo: a group of our own, which user code does not see.

Nothing of ``torch.distributed``'s default group is used or made, so code that asks whether there is one gets the same
answer as in a run on one host.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from phalanx.errors import SeveredError

INTERFACE = "GLOO_SOCKET_IFNAME"
GROUP: Any = dist.ProcessGroupGloo
TCP: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


class Gloo:
    """Connections between the processes that come with the same store.

    Parameters
    ----------
    store : torch.distributed.Store
        Where they find each other.
    rank, size : int
    seconds : float
        How long to wait for another one.
    interface : str
        The network interface to use, unless the environment names one; "" leaves the choice to torch.
    """

    def __init__(self, store: Any, rank: int, size: int, seconds: float, interface: str) -> None:
        self.size = size
        named = os.environ.get(INTERFACE, interface).partition(",")[0]
        options = GROUP._Options()
        options._timeout = datetime.timedelta(seconds=seconds)
        options._devices = [GROUP.create_device(interface=named) if named else GROUP.create_default_device()]
        self._group: Any = None
        self._group = self._call(GROUP, store, rank, size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """The first process's tensor for everybody."""
        self._call(self._group.broadcast, tensor, 0).wait()

    def gather(self, found: torch.Tensor, mine: torch.Tensor) -> None:
        """Everybody's bytes, in the order of ranks."""
        self.wait(self.begin_gather(found, mine))

    def begin_gather(self, found: torch.Tensor, mine: torch.Tensor) -> Any:
        """The same, to be waited for."""
        return self._call(self._group._allgather_base, found.view(torch.uint8), mine.view(torch.uint8))

    def begin_exchange(
        self, received: torch.Tensor, sent: torch.Tensor, came: Sequence[int], went: Sequence[int]
    ) -> Any:
        """Send so many bytes to everyone, get so many from everyone; to be waited for."""
        tensors = received.view(torch.uint8), sent.view(torch.uint8)
        return self._call(self._group.alltoall_base, *tensors, list(came), list(went))

    def wait(self, work: Any) -> None:
        """Until something that was begun is done."""
        self._call(work.wait)

    def close(self) -> None:
        """Close all connections, for all to see."""
        self._group = None

    def _call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """What torch raises means that somebody is gone, and nothing can be sent any more."""
        try:
            return operation(*arguments)
        except Exception as error:
            self.close()
            raise SeveredError(f"another process cannot be reached: {_short(error)}") from error


def _short(error: Exception) -> str:
    """What torch says, without where in its source, and without advice."""
    return re.sub(r"\[[^\]]*\.cc:\d+\] ?", "", str(error)).partition(". This is typically")[0].strip()
