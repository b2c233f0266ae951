"""What this process is doing and what it may use: its step, what it leaves in a fork, its rank, its processors.

A child of ``os.fork`` inherits its parent's descriptors and finalizers, but not its parent's runs. If it keeps a
socket, a process that waits for the socket's end lives on. If it runs the parent's finalizers, it ends the parent's
workers. So an object with descriptors or processes of a run registers here (``own``), and leaves them in a child.
A child that wants to train then begins with nothing, as a new process does.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import sys
import weakref
from collections.abc import Iterator
from typing import Protocol

from torch import distributed as dist

from phalanx.errors import UsageError
from phalanx.surroundings import system

MOUNTED = pathlib.Path("/sys/fs/cgroup")  # control groups: a container may use less than the machine has


class Current:
    """What this process computes, or reads for.

    Attributes
    ----------
    step : int or None
        Counted from 0; None outside of steps.
    epoch : int or None
        The pass over the data that the step belongs to; None where batches are brought.
    """

    step: int | None = None
    epoch: int | None = None


CURRENT = Current()


def current_step() -> int:
    """The step that is computed, counted from 0: in a dataset, ``collate_fn``, ``forward_fn``, the model or a loss.

    It is the same in every worker, so what follows from it needs no state that has to be kept from call to call.

    Raises
    ------
    UsageError
        No step is computed: in an evaluation, say, or in a call of your own.

    Examples
    --------
    >>> def forward(self, x):
    ...     if self.training:
    ...         self.tau.fill_(max(0.1, 1 - phalanx.current_step() / 1000))  # a buffer: evaluations need it, too
    ...     return torch.softmax(self.layer(x) / self.tau, -1)
    """
    return _computed("step", CURRENT.step)


def current_epoch() -> int:
    """The pass over the data that is computed, counted from 0: as ``current_step``, in the same places.

    Of a stream it is the pass that the batch was read in.

    Raises
    ------
    UsageError
        No step is computed, or the caller brings the batches, so that there are no epochs.

    Examples
    --------
    >>> def loss(output, target):
    ...     return reconstruction(output, target) + min(1.0, phalanx.current_epoch() / 10) * divergence(output)
    """
    _computed("epoch", CURRENT.step)
    if CURRENT.epoch is None:
        raise UsageError(
            "phalanx.current_epoch() was called in a step whose batch was brought (run.step(batch)), so there are no "
            "epochs; use phalanx.current_step(), or give the recipe its data"
        )
    return CURRENT.epoch


def _computed(what: str, step: int | None) -> int:
    if step is None:
        raise UsageError(
            f"phalanx.current_{what}() was called where no step is computed: in an evaluation, a call of your own, a "
            "stream, or code that is compiled (where it would be a constant); call it in a step's dataset, collate_fn, "
            "forward_fn, model or loss_fn. What evaluations need, too, keep in a buffer: self.tau.fill_(...) if "
            "self.training"
        )
    return step


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Inside, no step is computed."""
    before, CURRENT.step = (CURRENT.step, CURRENT.epoch), None
    try:
        yield
    finally:
        CURRENT.step, CURRENT.epoch = before


class Owned(Protocol):
    """Something that belongs to the process that made it."""

    def leave(self) -> None:
        """Close the descriptors that this child inherited, and touch nothing that is the parent's; raises nothing."""
        ...


_OWNED: weakref.WeakSet[Owned] = weakref.WeakSet()


def own(owned: Owned) -> None:
    """Have ``owned`` leave in every child that this process forks from here on; in a child's own children it does not.

    What a child goes on using, such as a lock, owns itself anew when it leaves.
    """
    _OWNED.add(owned)


def _leave_all() -> None:
    inherited = list(_OWNED)
    _OWNED.clear()
    for owned in inherited:
        with contextlib.suppress(Exception):
            owned.leave()


system.after_fork(_leave_all)


def several() -> bool:
    """Whether torch.distributed, or what started this process, knows of more than one process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def rank() -> int:
    """Number of this process in its world; 0 if there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0")) if several() else 0


def terminal() -> bool:
    """Whether stderr is a terminal, or the output of a notebook's cell: a bar can be drawn again and again."""
    return sys.stderr is not None and (sys.stderr.isatty() or type(sys.stderr).__module__ == "ipykernel.iostream")


def printable(text: str) -> str:
    r"""A line for a terminal: what it would not show but obey is shown as ``repr`` shows it, as in \x1b.

    Names and texts come from files, from other hosts and from whoever wrote a recipe. Escape sequences in them could
    wipe the screen, a carriage return or a change of direction could make a line say something else.
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def say(text: str) -> None:
    """Write a line on stderr; no run ends because nobody reads it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"phalanx: {printable(text)}\n")
            sys.stderr.flush()


def shows(progress: bool | str) -> bool:
    """Whether progress is to be shown; "auto": if stderr is a terminal, or a notebook's."""
    return sys.stderr is not None and (progress is True or (progress == "auto" and terminal()))


def around(controller: str) -> Iterator[pathlib.Path]:
    """Folders of the groups around this process, the innermost first: of version 2, and of version 1's controller.

    In a container the path that the kernel tells may be one of the host, which is not there. The mount's root then is
    the container's own group, so it comes last in any case.
    """
    try:
        lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, own = line.split(":", 2)
        if not names or controller in names.split(","):
            top = MOUNTED / controller if names else MOUNTED
            group = top / own.lstrip("/")
            yield from (folder for folder in [group, *group.parents] if folder.is_relative_to(top))


def processors() -> list[int]:
    """The processors that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many processors this process may keep busy: those that it may run on, or fewer under a quota of time."""
    return max(1, math.floor(min([len(processors()), *_quotas()])))


def _quotas() -> Iterator[float]:
    """Processors that each group has time for, where it has a limit."""
    for folder in around("cpu"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit, and the root has no file
            share, period = (folder / "cpu.max").read_text().split()
            yield int(share) / int(period)
        with contextlib.suppress(OSError):
            share, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if share > 0:  # -1 is no limit
                yield share / period
