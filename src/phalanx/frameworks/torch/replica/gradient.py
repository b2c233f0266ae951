"""A replica's gradient: computed, taken from the parameters, and put where it is wanted."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import _engine_run_backward

from phalanx.errors import InPartsError, UsageError
from phalanx.frameworks.torch.arithmetic import Gradient

Seeds = list[tuple[torch.Tensor, torch.Tensor]]  # outputs, and the gradient of a loss with respect to each
HOT = 1 << 14  # elements from which a gradient is copied as soon as it is there, while it is in cache


class Collector:
    """Runs backward passes and takes the gradients.

    Parameters
    ----------
    named : sequence of (str, torch.nn.Parameter)
    written : bool
        Whether gradients will be written, and so may share no memory.
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], *, written: bool) -> None:
        self._named = named
        self._written = written
        self._homes: Gradient | None = None
        self._listener: Callable[[int, torch.Tensor], None] | None = None
        self._hooked: set[int] = set()  # parameters whose gradients are seen as soon as they are there
        self._onto: Gradient | None = None
        self._collecting = False

    def backward(
        self,
        loss: torch.Tensor | Seeds,
        onto: Gradient | None = None,
        chosen: Sequence[torch.Tensor] | None = None,
    ) -> Gradient:
        """The gradient of all parameters, None where there is none; ``.grad`` is None afterwards.

        ``onto``: another gradient, which autograd adds this one to in place, as soon as each part is there.
        ``chosen``: parameters; others get none.

        Raises
        ------
        InPartsError
            The gradient of a parameter came in parts, so that ``onto`` holds a sum in another order.
        """
        self._onto = onto
        versions = [] if onto is None else self._put(onto)
        self._run(loss, chosen)
        taken = take(self._named)
        if onto is not None:
            _check_once(onto, versions, taken)
        return self._placed(taken, onto)

    def add(self, loss: torch.Tensor | Seeds, chosen: Sequence[torch.Tensor] | None = None, *, first: bool) -> None:
        """Add the gradient of a part of a replica to what is in ``.grad``; ``first``: nothing is there yet.

        torch adds to each parameter's gradient in place, and would add twice where two of them share memory.
        """
        self._run(loss, chosen)
        if first:
            for (_, parameter), grad in zip(self._named, separate([p.grad for _, p in self._named]), strict=True):
                parameter.grad = grad

    def total(self, divisor: float) -> Gradient:
        """What was added up, over ``divisor``; ``.grad`` is None afterwards."""
        taken = separate(take(self._named))
        for grad in taken if divisor != 1 else ():
            if grad is not None:
                grad.div_(divisor)
        return self._placed(taken, None)

    def _run(self, loss: torch.Tensor | Seeds, chosen: Sequence[torch.Tensor] | None) -> None:
        """Run a backward pass into ``.grad`` of the ``chosen``, or of all; ``loss`` is known to be a real scalar.

        So the checks of ``torch.autograd.backward`` are left out: 10 us less in a small step. Subclasses of tensors may
        override it, so it is called for them.
        """
        self._collecting = True
        try:
            if isinstance(loss, list):
                if loss:
                    outputs, seeds = zip(*loss, strict=True)
                    torch.autograd.backward(outputs, seeds, inputs=chosen)
            elif chosen is not None or type(loss) is not torch.Tensor:
                torch.autograd.backward((loss,), inputs=chosen)
            else:
                ones = (torch.ones_like(loss, memory_format=torch.preserve_format),)
                _engine_run_backward((loss,), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)
        finally:
            self._collecting = False
            self._onto = None

    def _placed(self, taken: Gradient, onto: Gradient | None) -> Gradient:
        """The computed gradients, moved to where they are wanted; those in ``onto`` are there already."""
        if self._homes is not None:
            earlier_grads = onto or [None] * len(taken)
            placed = zip(taken, self._homes, earlier_grads, strict=True)
            taken = [
                grad if grad is None or home is None or grad is earlier or grad is home else home.copy_(grad)
                for grad, home, earlier in placed
            ]
        if self._written and (onto is None or any(map(operator.is_not, taken, onto))):
            taken = separate(taken)
        return taken

    @property
    def joins(self) -> bool:
        """Whether no hook looks at a parameter's gradient when it arrives: it would find a sum there."""
        return self._listener is None and all(
            len(parameter._post_accumulate_grad_hooks or ()) == (index in self._hooked)
            for index, (_, parameter) in enumerate(self._named)
        )

    def watch(self, indices: Sequence[int]) -> None:
        """Move big gradients of these parameters to their homes as soon as they are there."""
        self._hook([index for index in indices if self._named[index][1].numel() >= HOT])

    def listen(self, listener: Callable[[int, torch.Tensor], None] | None) -> None:
        """Call ``listener(index, gradient)`` in backward passes as soon as a parameter's gradient is there; None: stop.

        It is called once more with the sum if a gradient comes in parts.
        """
        self._listener = listener
        self._hook(range(len(self._named)) if listener else ())

    def _hook(self, indices: Sequence[int]) -> None:
        for index in indices:
            parameter = self._named[index][1]
            if parameter.requires_grad and index not in self._hooked:
                self._hooked.add(index)
                parameter.register_post_accumulate_grad_hook(functools.partial(self._arrive, index))

    def set_destination(self, homes: Gradient | None) -> None:
        """Put the gradients of the next backward pass into this memory; None: they stay where autograd made them."""
        self._homes = homes

    def _arrive(self, index: int, parameter: torch.Tensor) -> None:
        """Tell of a gradient, and move it to its home; what comes later finds it there, and is added there."""
        grad, home = parameter.grad, None if self._homes is None else self._homes[index]
        if not self._collecting or grad is None or grad.layout != torch.strided:
            return
        if self._listener is not None:
            self._listener(index, grad)
        if self._onto is not None and self._onto[index] is not None:
            return
        if home is not None and grad is not home:
            parameter.grad = home.copy_(grad)

    def _put(self, onto: Gradient) -> list[int]:
        """Set ``.grad`` to what autograd adds to; returns how often each was written."""
        for (_, parameter), earlier in zip(self._named, onto, strict=True):
            parameter.grad = earlier
        return [0 if earlier is None else earlier._version for earlier in onto]


def _check_once(onto: Gradient, versions: Sequence[int], taken: Gradient) -> None:
    """Refuse sums that autograd wrote more than once, or that are elsewhere now."""
    for earlier, version, grad in zip(onto, versions, taken, strict=True):
        if earlier is not None and (grad is not earlier or earlier._version > version + 1):
            raise InPartsError


def take(named: Sequence[tuple[str, torch.nn.Parameter]]) -> Gradient:
    """The gradients of all parameters, None where there is none; ``.grad`` is None afterwards."""
    gradient: Gradient = []
    for name, parameter in named:
        grad = parameter.grad
        if grad is not None:
            if grad.layout != torch.strided:
                raise sparse(name)
            parameter.grad = None
        gradient.append(grad)
    return gradient


def sparse(name: str) -> UsageError:
    """The error for a sparse gradient, whose sum depends on which rows meet."""
    return UsageError(f"parameter {name!r} has a sparse gradient, and those cannot be folded exactly; use sparse=False")


def separate(gradient: Gradient) -> Gradient:
    """``gradient`` with no memory shared between entries, so that each can be written.

    Autograd may give several parameters views of one tensor, as the gradient of ``a.view(n) + b.view(n)`` (torch 2.13).
    """
    there = [grad.untyped_storage().data_ptr() for grad in gradient if grad is not None]
    if len(set(there)) == len(there):
        return gradient
    storages: set[int] = set()
    for position, grad in enumerate(gradient):
        if grad is not None:
            storage = grad.untyped_storage().data_ptr()
            if storage in storages:
                gradient[position] = grad.clone()
            storages.add(storage)
    return gradient


def drop(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Remove all gradients."""
    for parameter in parameters:
        parameter.grad = None
