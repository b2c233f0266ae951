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

FILLING: Any = deterministic  # its settings are attributes of the module
BACKENDS = (
    (torch.backends.cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
    (torch.backends.cuda.matmul, ("allow_tf32",)),
    (torch.backends.mkldnn, ("enabled", "deterministic", "allow_tf32")),
)
# Where torch (since 2.9) keeps a precision of float32, wider places first: what is set there changes those inside.
# The attribute ``mkldnn.fp32_precision`` sets more than it reads, so they are addressed as torch's own code does.
PRECISIONS = [(backend, operation) for operation in ("all", "matmul", "conv", "rnn") for backend in ("cuda", "mkldnn")]
PRECISIONS.insert(0, ("generic", "all"))
LEGACY = {("cuda", "matmul"), ("mkldnn", "matmul"), ("cuda", "conv"), ("cuda", "rnn")}  # older flags say these, too
SMALL_BYTES = 4096  # of memory beside a tensor that are carried along


def numeric_environment() -> dict[str, Any]:
    """Settings of this process that change bits or decide what a model is made of."""
    return {
        "default_dtype": torch.get_default_dtype(),
        "default_device": str(torch.get_default_device()),
        "matmul_precision": _unless_mixed(torch.get_float32_matmul_precision),
        "precisions": _precisions(),
        "flush_denormal": _flushes_denormals(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "fill_uninitialized": FILLING.fill_uninitialized_memory,
        "backends": [
            [_unless_mixed(functools.partial(getattr, place, name, None)) for name in names]
            for place, names in BACKENDS
        ],
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "encoder_fastpath": torch.backends.mha.get_fastpath_enabled(),
        "einsum": (opt_einsum.enabled, opt_einsum.strategy),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    }


def recorded_environment() -> dict[str, Any]:
    """What a snapshot says of the numeric environment, as text; with it, torch and the processor's abilities."""
    settings = numeric_environment()
    left_out = ("default_device", "anomaly", "precisions")
    found = {name: repr(value) for name, value in settings.items() if name not in left_out}
    mixed = settings["matmul_precision"] is None or settings["backends"][0][-1] is None
    told = {
        f"{backend} {operation}": value
        for (backend, operation), value in zip(PRECISIONS, settings["precisions"], strict=False)
        if value != "none" and (mixed or (backend, operation) not in LEGACY)
    }
    if told:  # older versions of torch, and of snapshots, know nothing of it
        found["precisions"] = repr(told)
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), **found}


def adopt(settings: dict[str, Any]) -> None:
    """Set this process to another one's numeric environment."""
    torch.set_default_dtype(settings["default_dtype"])
    if settings["default_device"] != str(torch.get_default_device()):
        torch.set_default_device(settings["default_device"])
    torch.set_flush_denormal(settings["flush_denormal"])
    enabled, warn_only = settings["deterministic"]
    if (enabled, warn_only) != numeric_environment()["deterministic"]:  # setting it imports the compiler
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    FILLING.fill_uninitialized_memory = settings["fill_uninitialized"]
    for _ in range(2):  # older and newer settings of one thing change each other
        _set_flags(settings)
        _set_precisions(settings["precisions"])
    flash, efficient, plain = settings["attention"]
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_math_sdp(plain)
    torch.backends.mha.set_fastpath_enabled(settings["encoder_fastpath"])
    opt_einsum.enabled, opt_einsum.strategy = settings["einsum"]
    anomaly, check_nan = settings["anomaly"]
    torch.autograd.set_detect_anomaly(anomaly, check_nan)


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


def _set_flags(settings: dict[str, Any]) -> None:
    if settings["matmul_precision"] not in (None, _unless_mixed(torch.get_float32_matmul_precision)):
        torch.set_float32_matmul_precision(settings["matmul_precision"])
    for (place, names), values in zip(BACKENDS, settings["backends"], strict=True):
        for name, value in zip(names, values, strict=True):
            if value is not None and _unless_mixed(functools.partial(getattr, place, name)) != value:
                setattr(place, name, value)


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


def _flushes_denormals() -> bool:
    """Whether this thread takes denormal numbers for 0."""
    return not bool(torch.tensor([1e-310], dtype=torch.float64, device="cpu").mul(1.0).item())
