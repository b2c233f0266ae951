"""The surroundings of a run in this process: generators, threads and autograd modes.

Inside, they are the run's; outside, the caller's, exactly as they were found. Code that torch.compile makes in a run
depends on the sizes at hand, not on which ones the process has seen before. Settings of torch that decide bits are
copied from the caller's process to its workers, and a snapshot records them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.backends import opt_einsum
from torch.utils import deterministic
from torch.utils._device import DeviceContext

from phalanx.definition import generators
from phalanx.definition.reachable import reachable
from phalanx.errors import UsageError
from phalanx.frameworks.torch import accelerators

AUTOGRAD: Any = torch._C._autograd  # type: ignore[attr-defined]
CORE: Any = torch._C  # autograd.set_multithreading_enabled does the same in five times the time
AUTOCAST_DTYPES: Final = {"cpu": torch.bfloat16, "cuda": torch.float16}
Setting = tuple[Callable[[], Any], Callable[[Any], object]]  # what reads it, and what sets it
# Addresses of torch's float32 precisions (since 2.9), wider ones first: setting one changes those inside it.
# The attribute ``mkldnn.fp32_precision`` sets more than it reads, so they are addressed as torch's own code does.
PRECISIONS = [(backend, operation) for operation in ("all", "matmul", "conv", "rnn") for backend in ("cuda", "mkldnn")]
PRECISIONS.insert(0, ("generic", "all"))
LEGACY = {("cuda", "matmul"), ("mkldnn", "matmul"), ("cuda", "conv"), ("cuda", "rnn")}  # older flags say these, too


@contextlib.contextmanager
def surrounded(threads: int, owned: Mapping[str, Any] | None = None) -> Iterator[None]:
    """A run's surroundings inside the block.

    Parameters
    ----------
    threads : int
        Intra-op threads of every replica; they are part of the answer, because they change bits.
    owned : mapping, optional
        Random generators of user code, to be restored as the global ones are.
    """
    check_no_modes()
    with generators.kept(owned), intra_op_threads(threads), no_autocast(), plain_autograd():
        yield


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
    """Gradients on and inference mode off, whatever the caller's modes are."""
    threaded = CORE._is_multithreading_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        CORE._set_multithreading_enabled(True)
        try:
            yield
        finally:
            CORE._set_multithreading_enabled(threaded)


def check_no_modes() -> None:
    """Refuse the caller's torch modes and hooks on saved tensors, which workers do not have.

    A default device is a mode, too; it stays, as workers have that. torch 2.6 does not show hooks: they stay.
    """
    modes = [CORE._get_dispatch_stack_at(at) for at in range(CORE._len_torch_dispatch_stack())]
    modes += [CORE._get_function_stack_at(at) for at in range(CORE._len_torch_function_stack())]
    names = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    if getattr(AUTOGRAD, "_top_saved_tensors_default_hooks", bool)(False):
        names.append("saved_tensors_hooks")
    if not AUTOGRAD._saved_tensors_hooks_is_enabled():
        names.append("disable_saved_tensors_hooks")
    if names:
        raise UsageError(
            f"a run is used inside {', '.join(names)} of torch, which its workers do not have, so that bits could "
            "differ; leave the with block before, or enter it in forward_fn, where it acts in every worker"
        )


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Autocast off and at its defaults, as if no ``torch.autocast`` were around.

    Inside the caller's autocast an inner one would keep its cache of cast weights when it ends, and the next step would
    compute with the weights of this one; so the nesting count starts at 0 here.
    """
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST_DTYPES]
    cached, depth = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    _set_autocast([(kind, False, dtype) for kind, dtype in AUTOCAST_DTYPES.items()], cached=True)
    try:
        yield
    finally:
        _set_autocast(before, cached=cached)
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()


def _set_autocast(settings: Sequence[tuple[str, bool, torch.dtype]], *, cached: bool) -> None:
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(cached)
    for kind, enabled, dtype in settings:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def autocast(device: torch.device, precision: str | None) -> contextlib.AbstractContextManager[object]:
    """The recipe's ``precision`` as a context around forward and loss."""
    if precision is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


LIMITS: Final = {"recompile_limit": 64, "accumulated_recompile_limit": 1024}  # sizes of shares and chunks are few
STATIC: Final = {
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "automatic_dynamic_local_pgo": False,  # what earlier processes saw
    "automatic_dynamic_remote_pgo": False,
    "fail_on_recompile_limit_hit": True,
}
OLDER: Final = {  # what torch 2.6 calls them
    "recompile_limit": "cache_size_limit",
    "accumulated_recompile_limit": "accumulated_cache_size_limit",
    "fail_on_recompile_limit_hit": "fail_on_cache_limit_hit",
}


class StaticShapes(contextlib.AbstractContextManager[None]):
    """A context, entered once at a time: inside, what is compiled is compiled for the sizes at hand.

    Attributes
    ----------
    known : bool
        Whether compiled code is known of; if not, ``settle`` waits until some is compiled.
    """

    def __init__(self) -> None:
        self.known = False
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        self.settle()

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            setattr(sys.modules["torch._dynamo.config"], name, value)
        self._before = {}

    def settle(self) -> None:
        """Apply the settings, if they are not applied yet and compiled code is known of."""
        frames = sys.modules.get("torch._dynamo.convert_frame")
        if self._before or frames is None or not (self.known or frames.FRAME_COUNTER):
            return
        config: Any = sys.modules["torch._dynamo.config"]
        for name, wanted in {**STATIC, **LIMITS}.items():
            setting = name if hasattr(config, name) else OLDER[name]
            before = self._before[setting] = getattr(config, setting)
            setattr(config, setting, max(before, wanted) if name in LIMITS else wanted)


def compiled(roots: Mapping[str, Any]) -> dict[str, Any]:
    """What ``torch.compile`` made and ``roots`` lead to: contexts of the compiler by path."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return {}
    return {path: thing for path, thing in reachable(roots) if isinstance(thing, frames._TorchDynamoContext)}


def check_static(contexts: Mapping[str, Any]) -> None:
    """Refuse ``dynamic=True``: such kernels are made with the first size that a process meets.

    Raises
    ------
    UsageError
        Names what was compiled so.
    """
    for path, context in contexts.items():
        if context._dynamic:
            raise UsageError(
                f"{path.partition('.')[0]} was compiled with dynamic=True: kernels would depend on which size of share "
                "a process meets first; leave dynamic out, so that there are kernels for each size"
            )


def explain(error: Exception) -> None:
    """Raise a clearer error where the compiler met its limit of recompilations."""
    errors = sys.modules.get("torch._dynamo.exc")
    if errors is not None and isinstance(error, errors.FailOnRecompileLimitHit):
        raise UsageError(
            f"torch.compile met its limit of recompilations ({error.__cause__ or error}); it would go on without "
            "compiling, and the answer would depend on what each process compiled before; compile what meets fewer "
            "sizes and values, or raise torch._dynamo.config.recompile_limit"
        ) from error


def _attribute(holder: Any, name: str) -> Setting:
    return functools.partial(getattr, holder, name, None), functools.partial(setattr, holder, name)


def _precisions() -> list[str]:
    """The precision of float32 in each of ``PRECISIONS``; none where torch has no such thing."""
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    return [] if get is None else [get(*address) for address in PRECISIONS]


def _set_precisions(wanted: list[str]) -> None:
    """Set those that differ from ``wanted``; a wider one or an older flag has set some already."""
    core: Any = torch._C
    for address, value in zip(PRECISIONS, wanted, strict=False):
        if core._get_fp32_precision_getter(*address) != value:
            core._set_fp32_precision_setter(*address, value)


def _set_deterministic(mode: int) -> None:
    """Set the mode for torch's compiler, too, which torch.set_deterministic_debug_mode leaves out."""
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


def _flushes_denormals() -> bool:
    """Whether this thread takes denormal numbers for 0."""
    return not bool(torch.tensor([1e-310], dtype=torch.float64, device="cpu").mul(1.0).item())


cuda, cudnn, mkldnn, mha = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn, torch.backends.mha
SETTINGS: dict[str, Setting] = {  # of this process, that change bits or decide what a model is made of
    "registered": (accelerators.registered, accelerators.expect),
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


UNRECORDED = "registered", "default_device", "anomaly"


def numeric_environment() -> dict[str, Any]:
    """The values of all settings."""
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
    recorded = {name: repr(value) for name, value in settings.items() if name not in UNRECORDED}
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), **recorded}


def adopt(settings: dict[str, Any]) -> None:
    """Set this process to another one's numeric environment; equal settings stay untouched.

    Setting some of them imports torch's compiler.
    """
    for _ in range(2):  # older and newer settings of one thing change each other
        for name, (read, write) in SETTINGS.items():
            if settings[name] is not None and _unless_mixed(read) != settings[name]:
                write(settings[name])


def _unless_mixed(read: Callable[[], Any]) -> Any:
    """A flag; None where torch refuses to say, because the flag cannot express its newer settings."""
    try:
        return read()
    except RuntimeError:
        return None
