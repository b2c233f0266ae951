"""What replicas compute in a step: loss, gradient and buffers of each share, each device in a lane of its own."""

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
from phalanx.frameworks.torch.environment import plain_autograd
from phalanx.frameworks.torch.replica.buffers import Buffers, Left
from phalanx.frameworks.torch.replica.forward import Forward
from phalanx.manual.gradients import check_dense
from phalanx.manual.shards import is_samples
from phalanx.surroundings import lanes


@dataclass(slots=True)
class ReplicaStep:
    """One replica with its share of the batch, and what it computed: loss, returned weight, buffers as it left them."""

    replica: int
    model: torch.nn.Module
    buffers: Buffers
    samples: range
    share: Any
    loss: float = 0.0
    weight: float | None = None
    left: Left = field(default_factory=list[torch.Tensor])

    @property
    def device(self) -> torch.device:
        """Where the replica is."""
        return next(self.model.parameters()).device


def compute(definition: Definition, works: Sequence[ReplicaStep]) -> None:
    """Compute all works, each device in a lane; autocast is a thread's own, so it is handed on to theirs."""
    torch.clear_autocast_cache()  # it may hold casts of weights from before the last update
    lanes.run(
        lanes.dealt([work.device for work in works]),
        lambda lane: _run(definition, lane.device, [works[replica] for replica in lane.replicas]),
        lambda lane: _autocast(lane.device.type),
    )


def _autocast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast as this thread has it; nothing where it is off, since models may open it themselves."""
    enabled = torch.is_autocast_enabled(kind)
    return _handed_on(kind, torch.get_autocast_dtype(kind)) if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _handed_on(kind: str, dtype: torch.dtype) -> Iterator[None]:
    with torch.autocast(kind, dtype=dtype):
        torch.autocast_increment_nesting()  # or its end would clear the casts that other threads still use
        yield


def _run(definition: Definition, device: torch.device, works: Sequence[ReplicaStep]) -> None:
    with plain_autograd(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for work in works:
            where = f"replica {work.replica} on {device}, samples {spell_samples(work.samples)} of the batch"
            try:
                _differentiate(definition, work)
            except PhalanxError as error:
                error.add_note(f"at {where}")
                raise
            except Exception as error:
                raise WorkerError(
                    f"{type(error).__name__} in user code at {where}: {error}",
                    replica=work.replica,
                    samples=work.samples,
                ) from error
            _check_finite(work, where)


def _differentiate(definition: Definition, work: ReplicaStep) -> None:
    """Loss, gradient and buffers of one share; at weight 0 the gradient is not computed."""
    if is_samples(work.share):
        work.share = default_collate(work.share)
    forward = Forward(definition, work.model, work.device)
    work.buffers.begin()
    loss, work.weight = forward.loss(forward.to_device(work.share), "batch")
    if work.weight != 0:
        loss.backward()
        check_dense(list(work.model.named_parameters()))
    work.loss = loss.item()
    work.left = work.buffers.left()


def _check_finite(work: ReplicaStep, where: str) -> None:
    """The norm screens; elements are looked at only where it is not finite, since it may merely overflow."""
    if work.weight == 0:
        return
    gradient = [parameter.grad for parameter in work.model.parameters()]
    norm = torch.nn.utils.get_total_norm([grad for grad in gradient if grad is not None])
    if not math.isfinite(work.loss):
        what = f"the loss is {work.loss}"
    elif not math.isfinite(norm.item()) and not arithmetic.finite(gradient):
        what = "the gradient has values that are not finite"
    else:
        return
    raise NonFiniteError(
        f"{what} at {where}; nothing was updated. Look at these samples, lower the learning rate or set max_norm",
        replica=work.replica,
        samples=work.samples,
    )
