"""Data parallelism by hand, in one process: a list of models, one per device, and what keeps them one model.

Each function is a step that a loop can also do by itself; ``data_parallel_step`` does all of them in turn.
"""

from __future__ import annotations

from phalanx.manual.replicas import broadcast_parameters, replicate, sync_gradients
from phalanx.manual.step import data_parallel_step, shard_batch

__all__ = ["broadcast_parameters", "data_parallel_step", "replicate", "shard_batch", "sync_gradients"]
