"""Tells a watch what modules and operations compute within a replica-step. Watching changes no bit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from phalanx.seams.records import Watch


@contextlib.contextmanager
def watching(model: torch.nn.Module, watch: Watch) -> Iterator[None]:
    """Inside, ``watch`` is told the output of every module, and all operations where it asks for them."""
    report = functools.partial(_module_done, watch)
    hooks = [
        module.register_forward_hook(functools.partial(report, path), always_call=False)
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
    watch.report("module", path, output)


class Operations(TorchDispatchMode):
    """Tells of every operation that torch dispatches: its outputs.

    Memory from ``empty`` is not told until it is written, as by a random fill: it holds anything.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._blank: dict[int, torch.Tensor] = {}  # by address; kept alive, so that no other tensor takes it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and tell."""
        given = [leaf for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, torch.Tensor)]
        output = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
        if "empty" in str(func):
            self._blank |= {_address(leaf): leaf for leaf in outputs}
        elif func._schema.is_mutable:
            for tensor in given:
                self._blank.pop(_address(tensor), None)
        if any(_address(leaf) in self._blank for leaf in outputs):  # a view of it, too
            return output
        kind = "operation" if torch._C._current_autograd_node() is None else "backward"
        self._watch.report(kind, str(func), (output,))
        return output


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
