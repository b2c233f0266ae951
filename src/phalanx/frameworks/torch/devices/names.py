"""The devices of a torch run by their names: those that torch has, one by one or all of a kind."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from phalanx.definition import checks
from phalanx.errors import UsageError
from phalanx.frameworks.torch.model import named_device

MENTIONED: set[str] = set()  # topics of what was said once in this process


def found(names: Sequence[str], replicas: int, home: torch.device) -> list[torch.device]:
    """The devices with these names, in use from here on; for no names ``home``, where the model was made.

    Raises
    ------
    UsageError
        torch cannot use one here, they are of several kinds, one comes twice, or there are more than replicas.
    """
    if not names:
        if home.type == "cpu":
            _mention_idle()
        return [home]
    devices = [device for name in spelled(names, replicas) if (device := named_device(name)) is not None]
    kinds = sorted({device.type for device in devices})
    if len(kinds) > 1:
        raise UsageError(f"devices is {list(names)}, which are of several kinds, whose bits differ: {', '.join(kinds)}")
    if kinds != ["cpu"] and len(set(devices)) < len(devices):
        raise UsageError(
            f"devices is {list(names)}, which names a device more than once, and that computes one replica at a time; "
            "name each once"
        )
    if len(devices) > replicas:
        raise UsageError(
            f"devices names {len(devices)} devices, but {checks.counted(replicas, 'replica')} to compute; name at most "
            f"{replicas}, or raise replicas= (which is part of the answer)"
        )
    return devices


def spelled(names: Sequence[str], replicas: int) -> list[str]:
    """The names of devices one by one: a kind alone is all of its devices, "local" the one that torchrun means."""
    listed = [_local() if name == "local" else name for name in names]
    if len(listed) == 1 and torch.device(_known(listed[0])).index is None and listed[0] != "cpu":
        return _all_of(listed[0], replicas)
    return listed


def available() -> list[tuple[str, str, str]]:
    """Each device that torch can use here: name, what it is, "". Without an accelerator: what that needs."""
    rows = [("cpu", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads", "")]
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        build = f"no accelerator that torch {torch.__version__} can use; builds for CUDA, ROCm and XPU: see pytorch.org"
        return [*rows, ("cuda", "", build)]
    names = [f"{kind.type}:{number}" for number in range(torch.accelerator.device_count())]
    return rows + [(name, facts([name]).get("names", kind.type), "") for name in names]


def facts(names: Sequence[str]) -> dict[str, str]:
    """What torch says of these devices."""
    devices = [torch.device(name) for name in names]
    kind = torch.get_device_module(devices[0])
    told = {"devices": ", ".join(names)}
    if hasattr(kind, "get_device_name"):
        told["names"] = ", ".join(sorted({kind.get_device_name(device) for device in devices}))
    return told


def _known(name: str) -> str:
    try:
        torch.device(name)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"devices names {name!r}, which torch cannot use here ({reason}); use ['cpu'], or leave it out"
        ) from error
    return name


def _all_of(kind: str, replicas: int) -> list[str]:
    """All visible devices of a kind, at most one per replica."""
    named_device(kind)  # says why it cannot be used
    count = getattr(torch.get_device_module(kind), "device_count", lambda: 1)()
    if count > replicas:
        _mention(
            "more than replicas",
            f"devices is {kind!r}: {replicas} of {count} devices are used, as replicas is {replicas}; raise it "
            "(which is part of the answer) to use more",
        )
    return [f"{kind}:{number}" for number in range(min(count, replicas))]


def _local() -> str:
    """The accelerator that torchrun means for this process."""
    rank = os.environ.get("LOCAL_RANK", "")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or not rank.isdigit():
        missing = "torch has no accelerator here" if kind is None else "LOCAL_RANK is not set, as torchrun sets it"
        raise UsageError(f"devices names 'local', but {missing}; name the device, as in devices=['cuda:0']")
    return f"{kind.type}:{rank}"


def _mention_idle() -> None:
    """Say once that there are accelerators, if a run leaves them alone because nobody named them."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None:
        count = torch.accelerator.device_count()
        _mention(
            "idle",
            f"{count} {kind.type} devices are idle, as make_model makes the model elsewhere; devices={kind.type!r} "
            "uses them",
        )


def _mention(topic: str, text: str) -> None:
    if topic not in MENTIONED:
        MENTIONED.add(topic)
        checks.warn(text)
