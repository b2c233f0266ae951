"""What reads samples away from the model: how batches are made there, in what surroundings, and how they travel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from phalanx.definition.fields import Definition


def reduced_sample(thing: Any) -> Any:
    """The same for the samples of a step."""
    from phalanx.frameworks.torch import process

    return process.reduced_sample(thing)


def collating(framework: str, definition: Definition) -> Callable[[Any], Any] | None:
    """What makes a batch of samples, where that can be done away from the model; None where samples stay samples."""
    if definition.batch_size is None or definition.micro_batches > 1 or framework == "tinygrad":
        return None
    if definition.collate_fn is not None:
        return definition.collate_fn
    if framework == "jax":
        from phalanx.frameworks.jax import forward

        return forward.collate
    from torch.utils.data import default_collate

    return default_collate


def reading_surroundings(framework: str, definition: Definition) -> contextlib.AbstractContextManager[Any]:
    """What samples are read in, where no model is: generators and threads are the run's."""
    if framework == "jax":
        from phalanx.frameworks.jax import environment

        return environment.Environment(definition.generators)
    from phalanx.frameworks.torch.environment import Environment

    return Environment(definition.threads, definition.generators)
