"""The surroundings of a run in this process: generators, threads and autograd modes.

Inside, they are the run's; outside, the caller's, exactly as they were found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from phalanx import generators


class Environment(contextlib.AbstractContextManager[None]):
    """A context, entered once at a time.

    Parameters
    ----------
    threads : int
        Intra-op threads of every replica; they are part of the answer, because they change bits.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as exits:
            exits.enter_context(generators.kept())
            exits.enter_context(intra_op_threads(self._threads))
            exits.enter_context(plain_autograd())
            self._exits = exits.pop_all()

    def __exit__(self, *_: object) -> None:
        self._exits.close()


@contextlib.contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def plain_autograd() -> Iterator[None]:
    """Gradients on, inference mode and autocast off, whatever the caller's modes are."""
    with contextlib.ExitStack() as exits:
        if torch.is_inference_mode_enabled():
            exits.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled("cpu"):
            exits.enter_context(torch.autocast("cpu", enabled=False))
        if torch.is_autocast_enabled("cuda"):
            exits.enter_context(torch.autocast("cuda", enabled=False))
        exits.enter_context(torch.enable_grad())
        yield


def autocast(device: torch.device, precision: str | None) -> contextlib.AbstractContextManager[object]:
    """The recipe's ``precision`` as a context around forward and loss."""
    if precision is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))
