"""What a run sets in this process while it uses accelerators, and what it says if one of them fails.

Knows no vendor: what torch has for every kind of device (``torch.accelerator``, ``torch.get_device_module``) is asked,
and what a kind does not have is left out. CUDA alone needs a variable of the environment for deterministic kernels.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from phalanx.errors import RunError, UsageError

WORKSPACE, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def prepare(names: Sequence[str], *, allow: bool) -> None:
    """Do what has to be done before the first of these devices is used.

    Raises
    ------
    UsageError
        It was used before, and that is too late.
    """
    if not allow and any(name.startswith("cuda") for name in names):
        set_workspace()


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make a device the one that user code gets where it names its kind only."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "set_device"):
        yield
        return
    before = module.current_device()
    module.set_device(device.index)
    try:
        yield
    finally:
        module.set_device(before)


class Surroundings(contextlib.AbstractContextManager[None]):
    """Inside, kernels are deterministic; outside, all is as the caller has it.

    Parameters
    ----------
    devices : sequence of torch.device
        Of one kind.
    allow : bool
        Whether operations without a deterministic kernel are allowed.
    """

    def __init__(self, devices: Sequence[torch.device], *, allow: bool) -> None:
        kind = devices[0].type
        self._accelerated = kind != "cpu"
        self._allow = allow
        self._exits = contextlib.ExitStack()
        if kind == "cuda" and not allow:
            set_workspace()

    def __enter__(self) -> None:
        if self._accelerated:
            self._exits.enter_context(_deterministic(allow=self._allow))

    def __exit__(self, *_: object) -> None:
        self._exits.close()


@contextlib.contextmanager
def _deterministic(*, allow: bool) -> Iterator[None]:
    """What torch offers: refuse kernels that are not deterministic, and choose among those that are by no clock."""
    cudnn: Any = torch.backends.cudnn
    filling: Any = torch.utils.deterministic
    flags = (cudnn.benchmark, cudnn.deterministic, filling.fill_uninitialized_memory)
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn.benchmark, cudnn.deterministic = False, True
    if not enabled:
        filling.fill_uninitialized_memory = False  # a check of torch's own, which costs a pass over all that is made
    torch.use_deterministic_algorithms(not allow)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        cudnn.benchmark, cudnn.deterministic, filling.fill_uninitialized_memory = flags


def set_workspace() -> None:
    """Set the variable that makes CUDA's matrix products deterministic; it is read once, when CUDA is started.

    Raises
    ------
    UsageError
        CUDA was started without it.
    """
    if os.environ.get(WORKSPACE) in WORKSPACES or torch.version.cuda is None:
        return
    if torch.cuda.is_initialized():
        raise UsageError(
            f"CUDA was started in this process before {WORKSPACE} was set, so its matrix products may differ from run "
            f"to run; write this before anything uses CUDA: import os; os.environ[{WORKSPACE!r}] = {WORKSPACES[0]!r} "
            '(or give the promise up: nondeterministic="allow")'
        )
    os.environ[WORKSPACE] = WORKSPACES[0]


@contextlib.contextmanager
def watched(devices: Sequence[torch.device]) -> Iterator[None]:
    """Say which device it was if one fails while it is waited for.

    Raises
    ------
    RunError
        A device failed: what it computed, and what lies in its memory, is lost.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        names = ", ".join(map(str, dict.fromkeys(devices)))
        raise RunError(
            f"out of memory on {names} ({error}); use more devices, which share the optimizer's state, or a larger "
            "replicas= (part of the answer), which makes each share smaller"
        ) from error
    except RuntimeError as error:
        lost = [str(device) for device in dict.fromkeys(devices) if device.type != "cpu" and not _answers(device)]
        if not lost:
            raise
        raise RunError(
            f"{', '.join(lost)} failed ({error}); what lies in its memory is lost, so this process cannot go on with "
            "it: start again, with a run_dir from the newest snapshot there, on other devices if it stays broken"
        ) from error


def _answers(device: torch.device) -> bool:
    try:
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError:
        return False
    return True
