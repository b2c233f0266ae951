"""What replicas compute in a step: loss, gradient and buffers of each share.

All devices have their work before one is waited for. One thread gives it to them, replica by replica: that takes far
less time than the work, and what user code draws from generators of the process does not depend on how many devices
there are, as it would in a thread per device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import default_collate

from phalanx.definition.fields import Definition
from phalanx.errors import NonFiniteError, PhalanxError, WorkerError, spell_samples
from phalanx.frameworks.torch import arithmetic
from phalanx.frameworks.torch.devices import accelerators
from phalanx.frameworks.torch.devices.exchange import DeviceArithmetic
from phalanx.frameworks.torch.environment import plain_autograd
from phalanx.frameworks.torch.replica.buffers import Buffers, Left
from phalanx.frameworks.torch.replica.forward import Forward, Unread
from phalanx.manual.gradients import check_dense
from phalanx.manual.moving import Sender
from phalanx.manual.shards import is_samples


@dataclass(slots=True)
class ReplicaStep:
    """One replica with its share of the batch, and what it computed: loss, returned weight, buffers as it left them.

    Until all have their work, the loss and a weight are what lies on the device.
    """

    replica: int
    model: torch.nn.Module
    buffers: Buffers
    samples: range
    share: Any
    loss: Any = 0.0
    weight: Any = None
    left: Left = field(default_factory=list[torch.Tensor])

    @property
    def device(self) -> torch.device:
        """Where the replica is."""
        return next(self.model.parameters()).device


def compute(definition: Definition, works: Sequence[ReplicaStep]) -> None:
    """Compute all works, in order; the devices are waited for when each has all of its own."""
    torch.clear_autocast_cache()  # it may hold casts of weights from before the last update
    sender, norms = Sender(), list[torch.Tensor]()
    with accelerators.watched([work.device for work in works]), plain_autograd():
        batches = [_sent(sender, work) for work in works]  # first: a copy may wait for what its device was given before
        try:
            for work, batch in zip(works, batches, strict=True):
                with _addressed(work), accelerators.current(work.device):
                    norms.append(_differentiate(definition, work, batch))
        except Exception:
            _read(works[: len(norms)], norms)  # a replica that is not finite comes before one that raised later
            raise
        _read(works, norms)


def _sent(sender: Sender, work: ReplicaStep) -> Any:
    with _addressed(work):
        if is_samples(work.share):
            work.share = default_collate(work.share)
        return sender.sent(work.share, work.device)


@contextlib.contextmanager
def _addressed(work: ReplicaStep) -> Iterator[None]:
    """Say of an error which replica and samples it is about."""
    try:
        yield
    except PhalanxError as error:
        error.add_note(f"at {_where(work)}")
        raise
    except Exception as error:
        raise WorkerError(
            f"{type(error).__name__} in user code at {_where(work)}: {error}",
            replica=work.replica,
            samples=work.samples,
        ) from error


def _where(work: ReplicaStep) -> str:
    return f"replica {work.replica} on {work.device}, samples {spell_samples(work.samples)} of the batch"


def _differentiate(definition: Definition, work: ReplicaStep, batch: Any) -> torch.Tensor:
    """Begin loss, gradient, its norm and buffers of one share; at a weight known to be 0 there is no gradient."""
    work.buffers.begin()
    loss, work.weight = Forward(definition, work.model, work.device, later=True).loss(batch, "batch")
    if work.weight != 0:
        loss.backward()
        check_dense(list(work.model.named_parameters()))
    work.loss = loss.detach().reshape(())
    work.left = work.buffers.left()
    return torch.nn.utils.get_total_norm([grad for grad in _gradient(work) if grad is not None])


def _gradient(work: ReplicaStep) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in work.model.parameters()]


def _read(works: Sequence[ReplicaStep], norms: Sequence[torch.Tensor]) -> None:
    """Wait for the devices and take the numbers from them, one copy each; weights come by themselves."""
    numbers = DeviceArithmetic().read([*(work.loss for work in works), *norms])
    for number, work in enumerate(works):
        work.loss = numbers[number]
        if isinstance(work.weight, Unread):
            with _addressed(work):
                work.weight = work.weight.read()
        _check_finite(work, numbers[len(works) + number])


def _check_finite(work: ReplicaStep, norm: float) -> None:
    """The norm screens; elements are looked at only where it is not finite, since it may merely overflow."""
    if work.weight == 0:
        return
    if not math.isfinite(work.loss):
        what = f"the loss is {work.loss}"
    elif not math.isfinite(norm) and not arithmetic.finite(_gradient(work)):
        what = "the gradient has values that are not finite"
    else:
        return
    raise NonFiniteError(
        f"{what} at {_where(work)}; nothing was updated. Look at these samples, lower the learning rate or set "
        "max_norm",
        replica=work.replica,
        samples=work.samples,
    )
