"""What torch.distributed hands out for a collective: something to wait for."""

# torch's stubs name parameters that it never names.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from phalanx.backend.progress import Operation, finish, poll


class Work(dist.Work):
    """A collective under way, as torch.distributed hands it out.

    Parameters
    ----------
    operation : Operation
    seconds : float
        How long to wait for others.
    outputs : list of torch.Tensor
    sources : list of int
        Where a message came from, once it is here.
    """

    def __init__(self, operation: Operation, seconds: float, outputs: Any, sources: list[int] | None = None) -> None:
        super().__init__()
        self._operation = operation
        self._seconds = seconds
        self._outputs = outputs
        self._sources = sources

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Until it is done."""
        given = 0.0 if timeout is None else timeout.total_seconds()
        finish(self._operation, given if given > 0 else self._seconds)
        return True

    def get_future(self) -> Any:
        """Waits: nothing goes on in the background."""
        future = torch.futures.Future()
        self.wait()
        future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        """Whether it is done; lets it go on as far as it can."""
        return poll(self._operation)

    def is_success(self) -> bool:
        """Whether it is done, and went well."""
        return self._operation.done and self._operation.error is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._operation.error

    def result(self) -> Any:
        """The tensors that were written."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Where a message came from."""
        self.wait()
        return self._sources[0] if self._sources else -1

    _source_rank = source_rank
