"""What torch needs to work in another process: its numeric environment copied, tensors sent by their memory."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.backends import opt_einsum
from torch.utils import deterministic

Setting = tuple[Callable[[], Any], Callable[[Any], object]]  # what reads it, and what sets it
# Where torch (since 2.9) keeps a precision of float32, wider places first: what is set there changes those inside.
# The attribute ``mkldnn.fp32_precision`` sets more than it reads, so they are addressed as torch's own code does.
PRECISIONS = [(backend, operation) for operation in ("all", "matmul", "conv", "rnn") for backend in ("cuda", "mkldnn")]
PRECISIONS.insert(0, ("generic", "all"))
LEGACY = {("cuda", "matmul"), ("mkldnn", "matmul"), ("cuda", "conv"), ("cuda", "rnn")}  # older flags say these, too
SMALL_BYTES = 4096  # of memory beside a tensor that are carried along


def _attribute(holder: Any, name: str) -> Setting:
    return functools.partial(getattr, holder, name, None), functools.partial(setattr, holder, name)


def _precisions() -> list[str]:
    """The precision of float32 in each of ``PRECISIONS``; none where torch has no such thing."""
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    return [] if get is None else [get(*place) for place in PRECISIONS]


def _set_precisions(wanted: list[str]) -> None:
    """Set those that are not as ``wanted`` already, because a wider one was set or an older flag."""
    core: Any = torch._C
    for place, value in zip(PRECISIONS, wanted, strict=False):
        if core._get_fp32_precision_getter(*place) != value:
            core._set_fp32_precision_setter(*place, value)


def _set_deterministic(mode: int) -> None:
    """torch.set_deterministic_debug_mode leaves torch's compiler out."""
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


def _flushes_denormals() -> bool:
    """Whether this thread takes denormal numbers for 0."""
    return not bool(torch.tensor([1e-310], dtype=torch.float64, device="cpu").mul(1.0).item())


cuda, cudnn, mkldnn, mha = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn, torch.backends.mha
SETTINGS: dict[str, Setting] = {  # of this process, that change bits or decide what a model is made of
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default_device": (lambda: str(torch.get_default_device()), torch.set_default_device),
    "flush_denormal": (_flushes_denormals, torch.set_flush_denormal),
    "deterministic": (torch.get_deterministic_debug_mode, _set_deterministic),
    "fill_uninitialized": _attribute(deterministic, "fill_uninitialized_memory"),
    "matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **{f"cudnn.{name}": _attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")},
    "cuda.matmul.allow_tf32": _attribute(cuda.matmul, "allow_tf32"),
    **{f"mkldnn.{name}": _attribute(mkldnn, name) for name in ("enabled", "deterministic", "allow_tf32")},
    "precisions": (_precisions, _set_precisions),
    "flash_attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "efficient_attention": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "plain_attention": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "encoder_fastpath": (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    "einsum": _attribute(opt_einsum, "enabled"),
    "einsum_strategy": _attribute(opt_einsum, "strategy"),
    "anomaly": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda wanted: torch.autograd.set_detect_anomaly(*wanted),
    ),
}


def numeric_environment() -> dict[str, Any]:
    """All settings."""
    return {name: _unless_mixed(read) for name, (read, _) in SETTINGS.items()}


def recorded_environment() -> dict[str, Any]:
    """What a snapshot says of the numeric environment, as text; with it, torch and the processor's abilities."""
    settings = numeric_environment()
    mixed = None in (settings["matmul_precision"], settings["cuda.matmul.allow_tf32"])
    # Reading or setting an older flag may turn "none" into a name for the same, so what such flags say counts once.
    settings["precisions"] = {
        f"{backend} {operation}": value
        for (backend, operation), value in zip(PRECISIONS, settings["precisions"], strict=False)
        if value != "none" and (mixed or (backend, operation) not in LEGACY)
    }
    recorded = {name: repr(value) for name, value in settings.items() if name not in ("default_device", "anomaly")}
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), **recorded}


def adopt(settings: dict[str, Any]) -> None:
    """Set this process to another one's numeric environment; what is so already stays untouched.

    Setting some of them imports torch's compiler.
    """
    for _ in range(2):  # older and newer settings of one thing change each other
        for name, (read, write) in SETTINGS.items():
            if settings[name] is not None and _unless_mixed(read) != settings[name]:
                write(settings[name])


def reduced(thing: Any, *, alone: bool) -> Any:
    """How a parcel takes a storage along: as its memory, once for all tensors in it. NotImplemented for all else.

    ``alone``, for what a step alone needs: a tensor that is a small part of its memory goes without the rest.
    """
    if alone and type(thing) is torch.Tensor and thing.device.type == "cpu" and thing.layout is torch.strided:
        if thing.untyped_storage().nbytes() > 2 * thing.nbytes + SMALL_BYTES:
            own = thing.detach().clone(memory_format=torch.preserve_format)
            return own.requires_grad_(thing.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented
    if isinstance(thing, torch.storage.TypedStorage):
        return _typed, (thing._untyped_storage, thing.dtype)
    if isinstance(thing, torch.UntypedStorage) and thing.device.type == "cpu":
        if not thing.nbytes():
            return torch.UntypedStorage, (0,)
        return _untyped, (pickle.PickleBuffer(_memory_of(thing)),)
    return NotImplemented


def without_compiler() -> None:
    """Spare a process that will never compile an optimizer the import of torch's compiler (0.7 s).

    torch imports it to exempt ``add_param_group`` from compilation when that is called first; this marks the method as
    exempted. If torch should look for another mark one day, it imports the compiler as before.
    """
    for method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
        plain: Any = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain


def _unless_mixed(read: Callable[[], Any]) -> Any:
    """A flag; None where torch refuses to say, because its newer settings cannot be told in terms of the flag."""
    try:
        return read()
    except RuntimeError:
        return None


def _memory_of(storage: torch.UntypedStorage) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _untyped(buffer: Any) -> torch.UntypedStorage:
    return torch.from_numpy(np.frombuffer(buffer, dtype=np.uint8)).untyped_storage()
