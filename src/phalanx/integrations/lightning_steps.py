"""What a LightningModule's steps find and leave: a trainer that tells the truth, and what they log, kept.

A module that is trained has two things beside its own: ``FACTS``, the stand-in for the trainer, and ``PROGRESS``, a
buffer of the epoch, the steps that are done and the epoch's first step. Each call of a step attaches the stand-in, and
takes it off again. So nothing is left that would follow from who computes which share.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils.data import TensorDataset, default_collate

import phalanx
from phalanx.definition import checks
from phalanx.errors import UsageError

FACTS, PROGRESS = "phalanx_facts", "phalanx_progress"


class UntoldError(UsageError, AttributeError):
    """The stand-in does not have this: ``hasattr``, and ``getattr`` with a default, work as with any object."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """What the module finds as its trainer: one process that computes whole batches, whatever workers do.

    ``modules`` and ``metrics`` are paths of modules that log, and of objects of torchmetrics; ``logged`` the names that
    ``validation_step`` logs. ``epoch`` and ``steps`` are those of an evaluation; in a step these are asked for anew.
    """

    modules: Sequence[str]
    metrics: Sequence[str]
    max_epochs: int
    max_steps: int
    datamodule: Any
    logged: frozenset[str] | None = None
    num_training_batches: float = math.inf  # until data are there, as Lightning has it
    num_val_batches: Sequence[int] = ()
    estimated_stepping_batches: float = math.inf
    training: bool = False
    validating: bool = False
    epoch: int = 0
    steps: int = 0

    sanity_checking = testing = predicting = fast_dev_run = False
    world_size = num_devices = num_nodes = accumulate_grad_batches = 1
    global_rank = local_rank = node_rank = 0
    is_global_zero = True
    logger = progress_bar_callback = None
    loggers = ()

    current_epoch = property(lambda self: _now(phalanx.current_epoch, self.epoch))
    global_step = property(lambda self: _now(phalanx.current_step, self.steps))

    def __getattr__(self, name: str) -> NoReturn:
        raise UntoldError(
            f"self.trainer.{name} was read, but phalanx trains here, not Lightning's Trainer, and this one knows only "
            "epochs, steps, numbers of batches, stage and datamodule; leave it out, or do it in a callback of "
            "recipe.train(callbacks=[...]), where report.lr, report.losses and report.metric are"
        )

    def __deepcopy__(self, memo: object) -> Trainer:
        return self  # copies of a module share it, and the data that it leads to


def prepared(module: Any, epochs: int | None, steps: int | None, datamodule: Any) -> Any:
    """A copy of a module that is to be trained gets what its steps need."""
    module.register_buffer(PROGRESS, torch.zeros(3, dtype=torch.int64), persistent=False)
    most_epochs, most_steps = (-1 if most is None else most for most in (epochs, steps))  # as Lightning has it
    setattr(module, FACTS, Trainer([""], [], most_epochs, most_steps, datamodule))
    tell(module)
    return module


def tell(module: Any, **more: Any) -> None:
    """Complete what the steps know; a datamodule finds it, too."""
    setattr(module, FACTS, facts := dataclasses.replace(getattr(module, FACTS), **more))
    if facts.datamodule is not None:
        facts.datamodule.trainer = facts
    for path in facts.metrics:  # each sees a share, so in a world of several processes it has nobody to ask
        module.get_submodule(path).sync_on_compute = False


def _now(asked: Callable[[], int], otherwise: int) -> int:
    """A number of the step that is computed, in whichever process; ``otherwise`` outside of steps."""
    try:
        return asked()
    except UsageError:
        return otherwise


@contextlib.contextmanager
def attached(model: Any, **now: Any) -> Iterator[dict[str, Any]]:
    """Inside, modules find a trainer, and in a stage what they log comes into the dict.

    Objects of torchmetrics begin and end as new, or what they keep would follow from who computes which share.
    """
    facts, logged = getattr(model, FACTS), dict[str, Any]()
    modules, metrics = (list(map(model.get_submodule, paths)) for paths in (facts.modules, facts.metrics))
    trainer = dataclasses.replace(facts, **now)
    try:
        for metric in metrics:
            metric.reset()
        for module in modules:
            module.trainer = trainer
            if now:
                module.log = functools.partial(_log, logged)
        yield logged
    finally:
        for module in modules:
            module.trainer = None
            vars(module).pop("log", None)
        for metric in metrics:
            metric.reset()


def _log(
    logged: dict[str, Any], name: str, value: Any, prog_bar: bool = False, logger: Any = None, on_step: Any = None,
    on_epoch: Any = None, reduce_fx: Any = "mean", *, batch_size: int | None = None, **shown: Any,
) -> None:  # fmt: skip
    """In place of ``self.log``; where and how often values would be shown makes no difference to them."""
    if reduce_fx not in ("mean", torch.mean):
        raise UsageError(f"self.log({name!r}) has reduce_fx={reduce_fx!r}, but values are averaged; leave it out")
    if name in logged:
        raise UsageError(f"self.log({name!r}) was called twice in a step; give each value a name of its own")
    if not is_metric(value):
        value = _number(name, value) if batch_size is None else (_number(name, value), batch_size)
    logged[name] = value


def _number(name: str, value: Any) -> torch.Tensor:
    try:
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
        return tensor.reshape(())
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"self.log({name!r}) got {type(value).__name__}; log one number under each name") from None


def is_metric(value: Any) -> bool:
    """Whether it is an object of torchmetrics, with a state of its own."""
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(value).__mro__)


def _called(model: Any, step: Callable[..., Any], batch: Any, index: int) -> Any:
    """Call a step with the batch, and its number if it takes that."""
    batch = model.on_before_batch_transfer(batch, 0)
    batch = model.on_after_batch_transfer(model.transfer_batch_to_device(batch, model.device, 0), 0)
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    return step(batch, index) if len(kinds) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds else step(batch)


def loss_of(model: Any, batch: Any) -> Any:
    """``training_step`` as a loss; what it logs are named losses."""
    facts, progress = getattr(model, FACTS), getattr(model, PROGRESS)
    before, steps, first = progress.tolist()
    step = _now(phalanx.current_step, -1)
    if step < 0:  # an evaluation of the loss, with the numbers of the last step
        epoch, step = before, max(first, steps - 1)
    else:
        epoch, length = phalanx.current_epoch(), facts.num_training_batches
        first = epoch * length if math.isfinite(length) else first if epoch == before else step
        if step >= facts.estimated_stepping_batches or not first <= step < first + length:
            raise UsageError(
                f"step {step} in epoch {epoch} is none of those that the module was told of ({length} in an epoch, "
                f"{facts.estimated_stepping_batches} in all), as the recipe was changed since; call lightning.recipe "
                "again, with epochs=, steps=, batch_size= or data="
            )
        progress.copy_(torch.tensor([epoch, step + 1, first]))  # a buffer, as evaluations belong to no step
    with attached(model, training=True, epoch=epoch, steps=step) as logged:
        returned = _called(model, model.training_step, batch, step - first)
        named = {name: _number(name, value.compute()) if is_metric(value) else value for name, value in logged.items()}
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if not isinstance(loss, torch.Tensor):
        got = checks.outline(returned)
        raise UsageError(
            f"training_step returned {got}; it must return the loss, or a dict with 'loss', for each batch"
        )
    if "loss" in named and not _same(named.pop("loss"), loss.detach()):
        raise UsageError("training_step logged another 'loss' than it returned; log it under another name")
    return {**named, "loss": loss} if named else loss


def _same(logged: Any, loss: torch.Tensor) -> bool:
    """Whether what was logged, with a weight or without, is the loss; perhaps both are not finite."""
    value = logged[0] if isinstance(logged, tuple) else logged
    return torch.equal(value.double().nan_to_num(), loss.double().reshape(()).nan_to_num())


def validated(model: Any, numbered: Any) -> dict[str, Any]:
    """``validation_step`` as an output: all that it logs."""
    epoch, steps, _ = getattr(model, PROGRESS).tolist()
    index, batch = numbered
    with attached(model, validating=True, epoch=epoch, steps=steps) as logged:
        _called(model, model.validation_step, batch, index)
        values = {name: copy.deepcopy(value) if is_metric(value) else value for name, value in logged.items()}
    if (names := getattr(model, FACTS).logged) is not None and names != values.keys():
        raise UsageError(
            f"validation_step logged {sorted(values)} for batch {index}, and {sorted(names)} for the first; log the "
            "same names for each"
        )
    return values


def reading(name: str) -> Callable[[Mapping[str, Any], object], Any]:
    """A metric: the value that was logged under this name."""
    return lambda logged, target: logged[name]


class Merged:
    """A metric: the merged states of the object of torchmetrics that was logged under this name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.reset()

    def reset(self) -> None:
        """Nothing was seen."""
        self._state: Any = None

    def update(self, logged: Mapping[str, Any], target: object) -> None:
        """See a batch."""
        self._state = logged[self._name]

    def merge_state(self, other: Merged) -> None:
        """Add what another saw after this one."""
        self._state.merge_state(other._state)

    def compute(self) -> Any:
        """The value of all that was seen."""
        return self._state.compute()


class Numbered:
    """A dataset with numbers of samples, as ``validation_step`` is told that of the batch."""

    def __init__(self, data: Any, size: int, collate_fn: Any, *, drop_last: bool) -> None:
        self._data = TensorDataset(*data) if isinstance(data, tuple) else data
        self._size, self._collate = size, collate_fn or default_collate
        self._length = len(self._data) - drop_last * (len(self._data) % size)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._data[index]

    def collate(self, samples: Sequence[tuple[int, Any]]) -> tuple[int, Any]:
        """The number of the batch, and the batch."""
        return samples[0][0] // self._size, self._collate([sample for _, sample in samples])
