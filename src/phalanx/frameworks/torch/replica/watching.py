"""Tells somebody what modules and operations compute within a replica-step. Nothing of it changes a bit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from phalanx.seams import Watch


@contextlib.contextmanager
def watching(model: torch.nn.Module, watch: Watch) -> Iterator[None]:
    """Inside, ``watch`` is told the output of every module, and all operations where it asks for them."""
    told = functools.partial(_module_done, watch)
    hooks = [
        module.register_forward_hook(functools.partial(told, path), always_call=False)
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        with Operations(watch) if watch.operations else contextlib.nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _module_done(watch: Watch, path: str, module: torch.nn.Module, _: Any, output: Any) -> None:
    watch.told("module", path, output)


class Operations(TorchDispatchMode):
    """Tells of every operation that torch dispatches: its inputs, as they were before it, and its outputs."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and tell."""
        given = [leaf for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, torch.Tensor)]
        before = tuple(tensor.detach().clone() for tensor in given)
        output = func(*args, **(kwargs or {}))
        if "empty" in str(func):  # whatever was in that memory
            return output
        kind = "operation" if torch._C._current_autograd_node() is None else "backward"
        self._watch.told(kind, str(func), (before, output))
        return output
