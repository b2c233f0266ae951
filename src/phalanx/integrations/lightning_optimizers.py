"""What ``configure_optimizers`` returns, in any of its forms: one optimizer, and a scheduler with its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from phalanx.errors import UsageError
from phalanx.integrations.lightning_steps import attached

SCHEDULED = {"interval": "epoch", "frequency": 1, "monitor": None, "strict": True, "name": None}


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """The optimizer, which keeps its scheduler until ``scheduler_of`` asks for that."""
    with attached(model):
        optimizer, options = configured(model.configure_optimizers())
    vars(optimizer)["_scheduler"] = options.get("scheduler")
    return optimizer


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler that was made with this optimizer."""
    return vars(optimizer).pop("_scheduler")


def configured(returned: Any) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """The optimizer, and the options of its scheduler, if there is one."""
    pair = isinstance(returned, (list, tuple)) and len(returned) == 2 and isinstance(returned[0], (list, tuple))
    optimizers, schedulers = map(_listed, returned) if pair else (_listed(returned), [])
    common: dict[str, Any] = {}  # Lightning's dict may have a monitor beside the two
    if len(optimizers) == 1 and isinstance(optimizers[0], Mapping):
        common = dict(optimizers[0])
        optimizers, schedulers = [common.pop("optimizer", None)], _listed(common.pop("lr_scheduler", []))
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer) or common.keys() - {"monitor"}:
        kinds = ", ".join([type(each).__name__ for each in optimizers] + [*common])
        raise UsageError(
            f"configure_optimizers returned {kinds}; return one optimizer, ([it], [scheduler]) or {{'optimizer': it, "
            "'lr_scheduler': scheduler}. Several, as for GANs, are phases of a recipe: docs/steps.md"
        )
    if not schedulers:
        return optimizers[0], {}
    given = schedulers[0] if isinstance(schedulers[0], Mapping) else {"scheduler": schedulers[0]}
    options = {**SCHEDULED, **common, **given}
    plateau = isinstance(options.get("scheduler"), ReduceLROnPlateau)
    wrong = {
        "of several (join them: SequentialLR, ChainedScheduler)": len(schedulers) > 1,
        "with unknown keys": not {*options} <= {*SCHEDULED, "scheduler", "reduce_on_plateau"},
        "with a frequency that is not 1 (stretch the schedule)": options["frequency"] != 1,
        "with an interval that is neither 'step' nor 'epoch'": options["interval"] not in ("step", "epoch"),
        "ReduceLROnPlateau without a monitor": plateau and options["monitor"] is None,
        "of metrics with interval 'step' (they are known after epochs)": plateau and options["interval"] == "step",
        "with reduce_on_plateau that is no ReduceLROnPlateau": options.get("reduce_on_plateau", plateau) != plateau,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise UsageError(f"configure_optimizers returned a lr_scheduler {what}: {given}")
    return optimizers[0], options


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
