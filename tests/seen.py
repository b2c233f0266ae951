"""All that somebody who looks on at a run can see, step by step, as checksums: an oracle that compares two runs.

Pass ``Seen()`` as the last callback of both. ``compare(one, other)`` names what differs, and is empty if nothing does.
"""

import csv
import pathlib
import zlib
from collections.abc import Mapping

import numpy as np
import torch

HOW = ("seconds",)  # how a run was done; all else is the answer
END = "end"


class Seen:
    """A callback that notes what can be seen after each step, in each evaluation and at the end.

    Parameters
    ----------
    *beside : callbacks
        Their states are noted, too; pass them before this one: ``callbacks=[average, best, Seen(average, best)]``.
    predict : array or tensor, optional
        What outputs are computed for after each step.

    Attributes
    ----------
    rows : dict of int or "end" to dict
        For each step the checksum of all that was seen, by name.
    """

    everywhere = True

    def __init__(self, *beside, predict=None):
        self.rows, self._beside, self._predict = {}, beside, predict

    def begin(self, run):
        """Take the run."""
        self._run = run

    def step(self, report):
        """After each step, before it is evaluated."""
        facts = {name: value for name, value in report._asdict().items() if name not in HOW}
        seen = {"report": facts, **self._state(), "steps": self._run.steps, "epoch": self._run.epoch}
        if self._predict is not None:
            seen["predict"] = self._run.predict(self._predict)
        self._note(report.step, seen)

    def evaluated(self, values):
        """Metrics, and what they were computed from."""
        self._note(self._run.steps - 1, {"metrics": dict(values), **self._state()}, "evaluated.")

    def end(self, result):
        """What is left."""
        seen = {"result": result is not None}
        if result is not None:
            best = result.best
            seen |= {name: getattr(result, name) for name in ("params", "averaged", "digest", "loss_history", "steps")}
            history = [(each.steps, each.name, each.value) for each in result.metric_history]
            seen |= {"model": of_model(result.model), "metric_history": history}
            seen |= {"best": best and [best.metric, best.value, best.steps, best.weights]}
        self._note(END, seen)

    def _state(self):
        run = self._run
        states = {type(each).__name__: each.state() for each in self._beside}
        return {"params": run.params, "model": of_model(run.model), "averaged": run.averaged, "beside": states}

    def _note(self, step, seen, prefix=""):
        flat = self.rows.setdefault(step, {})
        for name, value in seen.items():
            _flatten(prefix + name, value, flat)


def of_model(model):
    """Tensors, modes and what is trained, by name; also tensors in plain attributes, as views of weights are."""
    if not isinstance(model, torch.nn.Module):
        return model
    facts = {f"{name}.requires_grad": each.requires_grad for name, each in model.named_parameters()}
    for path, module in model.named_modules():
        facts[f"{path}.training"] = module.training
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, torch.Tensor):
                facts[f"{path}.{name}"] = value
    return facts


def _flatten(name, value, into):
    if isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(f"{name}.{key}", item, into)
    elif isinstance(value, (list, tuple)):
        into[f"{name}.length"] = len(value)
        for number, item in enumerate(value):
            _flatten(f"{name}.{number}", item, into)
    else:
        into[name] = checksum(value)


def checksum(value):
    """Of the bits of an array, with dtype and shape; what is plain is text, with the bits of a float."""
    if isinstance(value, float):
        return "nan" if value != value else value.hex()
    if not hasattr(value, "dtype"):
        return repr(value)
    told = f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return f"{told} {zlib.crc32(np.ascontiguousarray(value).tobytes())}"


def compare(one, other, since=0):
    """What two runs showed unlike, as text; ``one`` and ``other``: a Seen, or its rows. Empty if there is nothing.

    ``since``: the first step that is compared. A run that was resumed has seen those from there on.
    """
    rows, others = (_rows(each, since) for each in (one, other))
    found = []
    for step in sorted({*rows, *others}, key=lambda step: (step == END, step)):
        mine, theirs = rows.get(step), others.get(step)
        if mine is None or theirs is None:
            found.append(f"step {step} was seen by {'the other' if mine is None else 'one'} alone")
            continue
        found += [
            f"step {step}: {name} is {mine.get(name)} and {theirs.get(name)}"
            for name in {**mine, **theirs}
            if mine.get(name) != theirs.get(name)
        ]
    return found


def _rows(seen, since):
    rows = seen.rows if isinstance(seen, Seen) else seen
    keyed = {step if step == END else int(step): row for step, row in rows.items()}  # JSON has text for keys
    return {step: row for step, row in keyed.items() if step == END or step >= since}


def logged(run_dir):
    """The rows of a run's log.csv without times: the last of each step, as a step may be done again."""
    with (pathlib.Path(run_dir) / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {int(row["step"]): {name: value for name, value in row.items() if name not in HOW} for row in rows}
