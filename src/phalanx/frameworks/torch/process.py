"""What torch needs to work in another process: its numeric environment copied, tensors sent by their memory."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from torch.utils import deterministic

FILLING: Any = deterministic  # its settings are attributes of the module
BACKENDS = (
    (torch.backends.cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
    (torch.backends.cuda.matmul, ("allow_tf32",)),
    (torch.backends.mkldnn, ("enabled", "deterministic", "allow_tf32")),
)


def numeric_environment() -> dict[str, Any]:
    """Settings of this process that change bits or decide what a model is made of."""
    return {
        "default_dtype": torch.get_default_dtype(),
        "default_device": str(torch.get_default_device()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "flush_denormal": _flushes_denormals(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "fill_uninitialized": FILLING.fill_uninitialized_memory,
        "backends": [[getattr(place, name, None) for name in names] for place, names in BACKENDS],
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "encoder_fastpath": torch.backends.mha.get_fastpath_enabled(),
        "einsum": (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    }


def recorded_environment() -> dict[str, Any]:
    """What a snapshot says of the numeric environment, as text; with it, torch and the processor's abilities."""
    settings = numeric_environment()
    found = {name: repr(value) for name, value in settings.items() if name not in ("default_device", "anomaly")}
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), **found}


def adopt(settings: dict[str, Any]) -> None:
    """Set this process to another one's numeric environment."""
    torch.set_default_dtype(settings["default_dtype"])
    if settings["default_device"] != str(torch.get_default_device()):
        torch.set_default_device(settings["default_device"])
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    torch.set_flush_denormal(settings["flush_denormal"])
    enabled, warn_only = settings["deterministic"]
    if (enabled, warn_only) != numeric_environment()["deterministic"]:  # setting it imports the compiler
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    FILLING.fill_uninitialized_memory = settings["fill_uninitialized"]
    for (place, names), values in zip(BACKENDS, settings["backends"], strict=True):
        for name, value in zip(names, values, strict=True):
            if value is not None and getattr(place, name) != value:
                setattr(place, name, value)
    flash, efficient, plain = settings["attention"]
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_math_sdp(plain)
    torch.backends.mha.set_fastpath_enabled(settings["encoder_fastpath"])
    torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy = settings["einsum"]
    anomaly, check_nan = settings["anomaly"]
    torch.autograd.set_detect_anomaly(anomaly, check_nan)


def reduced(thing: Any) -> Any:
    """How a parcel takes a storage along: as its memory, once for all tensors in it. NotImplemented for all else."""
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


def _memory_of(storage: torch.UntypedStorage) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _untyped(buffer: Any) -> torch.UntypedStorage:
    return torch.from_numpy(np.frombuffer(buffer, dtype=np.uint8)).untyped_storage()


def _flushes_denormals() -> bool:
    return not bool(torch.tensor([1e-310], dtype=torch.float64, device="cpu").mul(1.0).item())
