"""The chain of a loop written by hand, which ``phalanx.diff`` compares with that of a run or of another loop."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from phalanx.checkpoint.chain import ChainFile
from phalanx.checkpoint.chained import dealt_as
from phalanx.checkpoint.files import make_folder
from phalanx.definition import checks
from phalanx.errors import UsageError
from phalanx.frameworks.registry import recorded_environment
from phalanx.frameworks.states import leaves
from phalanx.surroundings.presence import rank

MOST_REPLICAS = 64


class Chain:
    """Writes a link for every step of your own loop, in the file format of a run's chain.

    Of several processes of a torch.distributed world, the first writes.

    Parameters
    ----------
    path : path-like
        The file, as in ``"loop/chain.jsonl"``; a chain that is there is written anew from ``begin`` on.
    begin : int, default 0
        How many steps are done already: their links stay.
    every : int, default 1
        Steps from one digest of model and optimizer to the next.

    Raises
    ------
    UsageError
        The file cannot be written.
    """

    def __init__(self, path: Any, *, begin: int = 0, every: int = 1) -> None:
        target = checks.path("path", path, hint="give the name of a file, as in 'loop/chain.jsonl'")
        self._every = checks.integer("every", every, least=1)
        self._step = checks.integer("begin", begin, least=0)
        self._file: ChainFile | None = None
        if rank() == 0:
            self._file = _opened(target, self._step)
            self._file.record("run", step=self._step, origin=None, environment=recorded_environment())

    def step(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        loss: Any = None,
        norm: Any = None,
        lr: float | None = None,
        samples: Any = None,
        losses: Sequence[Any] | None = None,
        weights: Sequence[Any] | None = None,
    ) -> str | None:
        """Add the link of a step that was just done, after ``optimizer.step()``; what is left out is not compared.

        Parameters
        ----------
        model : torch.nn.Module, pytree of jax arrays, or model of tinygrad's
            One that is wrapped for several processes is looked into.
        optimizer : optional
            As ``phalanx.digest`` takes it.
        loss, norm : number or scalar tensor, optional
            The step's mean loss, and the norm of its gradient before clipping.
        lr : float, optional
            The learning rate that the step was done with.
        samples : sequence of int, optional
            Indices of its samples, in order.
        losses, weights : sequence of numbers, optional
            Of the replicas.

        Returns
        -------
        str or None
            The link; None in all processes but the first.
        """
        if self._file is None:
            return None
        given = {"loss": loss, "norm": norm, "lr": lr}
        fields: dict[str, Any] = {"step": self._step}
        fields |= {name: float(value) for name, value in given.items() if value is not None}
        if samples is not None:
            fields["samples"] = dealt_as(samples)
        for name, values in (("losses", losses), ("weights", weights)):
            if values is not None:
                fields[name] = [float(value) for value in values]
        link = self._file.add(fields)
        self._step += 1
        if self._step % self._every == 0:
            self._file.record("state", step=self._step, leaves=leaves(model, optimizer))
        return link

    @property
    def root(self) -> str | None:
        """The newest link; None in all processes but the first."""
        return None if self._file is None else self._file.root

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            self._file.close()


def _opened(target: pathlib.Path, begin: int) -> ChainFile:
    try:
        make_folder(target.parent.resolve())
        return ChainFile(target, begin, MOST_REPLICAS)
    except OSError as error:
        raise UsageError(f"path is {str(target)!r}, which cannot be written: {error}; give another") from error
