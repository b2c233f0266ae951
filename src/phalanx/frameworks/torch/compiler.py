"""What a run asks of torch.compile: code that depends on the sizes at hand, not on which ones a process saw before.

Left alone, the compiler makes sizes symbolic once it has met two of them, and gives up at a limit of recompilations: a
worker that sees one size of share computes with other kernels than a process that sees all. The compiler is never
imported here; settings are made once there is something compiled.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from phalanx.definition import Definition
from phalanx.errors import UsageError
from phalanx.reachable import reachable

LIMITS: Final = {"recompile_limit": 64, "accumulated_recompile_limit": 1024}  # sizes of shares and chunks are few
STATIC: Final = {
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "automatic_dynamic_local_pgo": False,  # what earlier processes saw
    "automatic_dynamic_remote_pgo": False,
    "fail_on_recompile_limit_hit": True,
}


class StaticShapes(contextlib.AbstractContextManager[None]):
    """A context, entered once at a time: inside, what is compiled is compiled for the sizes at hand.

    Parameters
    ----------
    known : bool
        Whether something compiled is known of; otherwise ``settle`` waits until there is.
    """

    def __init__(self, *, known: bool = False) -> None:
        self.known = known
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        self.settle()

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            setattr(sys.modules["torch._dynamo.config"], name, value)
        self._before = {}

    def settle(self) -> None:
        """Make the settings, if they are not made and something was compiled in this process."""
        frames = sys.modules.get("torch._dynamo.convert_frame")
        if self._before or frames is None or not (self.known or frames.FRAME_COUNTER):
            return
        config: Any = sys.modules["torch._dynamo.config"]
        limits = {name: max(least, getattr(config, name)) for name, least in LIMITS.items()}
        for name, value in {**STATIC, **limits}.items():
            self._before[name] = getattr(config, name)
            setattr(config, name, value)


def compiled(roots: Mapping[str, Any]) -> dict[str, Any]:
    """What ``torch.compile`` made, as far as ``roots`` lead there: contexts of the compiler by path."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return {}
    return {path: thing for path, thing in reachable(roots) if isinstance(thing, frames._TorchDynamoContext)}


def check_sizes(found: Mapping[str, Any], definition: Definition) -> None:
    """Refuse ``dynamic=True`` where shares differ in size: its kernels are made with the first size that is met.

    Raises
    ------
    UsageError
        Names the way out.
    """
    dynamic = next((path for path, context in found.items() if context._dynamic), None)
    size, replicas = definition.global_batch, definition.replicas
    samples = None if definition.source is None else len(definition.source)
    short = samples is not None and not definition.drop_last and samples % size
    if dynamic is not None and (size % replicas or short):
        why = (
            f"batch_size={size} is not a multiple of replicas={replicas}"
            if size % replicas
            else (f"the last of {samples} samples make a short batch")
        )
        raise UsageError(
            f"{dynamic.partition('.')[0]} was compiled with dynamic=True, and {why}: kernels would depend on which "
            "size of share a process meets first; leave dynamic out, or make all shares alike with drop_last=True and "
            "a batch_size that replicas divides"
        )


def explain(error: Exception) -> None:
    """Say what it means that the compiler met its limit."""
    errors = sys.modules.get("torch._dynamo.exc")
    if errors is not None and isinstance(error, errors.FailOnRecompileLimitHit):
        raise UsageError(
            f"torch.compile met its limit of recompilations ({error.__cause__ or error}); it would go on without "
            "compiling, and the answer would depend on what each process compiled before; compile what meets fewer "
            "sizes and values, or raise torch._dynamo.config.recompile_limit"
        ) from error
