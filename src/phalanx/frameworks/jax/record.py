"""jax as the registry knows it, before it is needed: nothing here imports it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from phalanx.definition import generators
from phalanx.definition.fields import Definition
from phalanx.errors import UsageError
from phalanx.frameworks.record import Collate, Made, OptionalRecord, stored
from phalanx.seams import Framework
from phalanx.seams.records import Tensor
from phalanx.surroundings.turns import Reentrant


class JaxRecord(OptionalRecord):
    """jax as the registry knows it."""

    name = module = "jax"
    packages = "jax and optax"
    returns = "a tree of jax arrays (jnp.asarray makes them; nnx.split, eqx.filter find a module's)"
    argument = "key"
    thread_variables = "PJRT_NPROC", "NPROC"  # what XLA's CPU client asks for before it counts processors

    def recognises(self, model: Any) -> bool:
        """Whether there is a jax array in it, which may be a tree."""
        jax = sys.modules["jax"]
        return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model))

    def open(self, made: Made) -> Framework:
        """On one device, or several of this process."""
        if made.processes > 1 and len(made.devices) > 1:
            raise UsageError(
                f"devices is {list(made.devices)}, but of several processes each drives one jax device in this "
                "version; use one process for all of them, or leave devices out"
            )
        devices = made.devices or (["cpu"] if made.processes > 1 else [])
        return self.adapter.Jax(made.definition, devices, made.model)

    def factory(self, make_model: Callable[..., Any], seed: int) -> Callable[[], Any]:
        """With a key for its random numbers."""
        _ = self.adapter
        from phalanx.frameworks.jax.state import prng_key, words

        return functools.partial(make_model, key=prng_key(words(seed)))

    def reading(self, definition: Definition) -> tuple[AbstractContextManager[Any], Collate] | None:
        """Samples become numpy arrays."""
        from phalanx.frameworks.jax import environment, forward

        return Reentrant(generators.kept(definition.generators), environment.compiling()), forward.collate

    def prepare(self, folder: str) -> None:
        """Workers share what they compile."""
        import phalanx.frameworks.jax.adapter  # noqa: F401
        from phalanx.frameworks.jax.environment import share_programs

        os.makedirs(folder, mode=0o700, exist_ok=True)
        share_programs(folder)

    def settings(self) -> dict[str, Any]:
        """Options of jax."""
        from phalanx.frameworks.jax import environment

        return environment.settings()

    def adopt(self, settings: dict[str, Any]) -> None:
        """Set these options in this process."""
        from phalanx.frameworks.jax import environment

        environment.adopt(settings)

    def weights(self, model: Any, params: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Tensor | None]:
        """The parameters, and what the model keeps beside them."""
        from phalanx.frameworks.jax.state import BESIDE, named

        whole = super().weights(model, params, instead)
        if isinstance(model, tuple) and len(model) == 2 and named(model[0]).keys() == params.keys():
            whole |= {BESIDE + name: stored(np.asarray(leaf)) for name, leaf in named(model[1]).items()}
        return whole

    def harmless(self) -> Sequence[str]:
        """Workers may read a cache entry while another writes it; in a folder of the user's they do warn."""
        return () if "JAX_COMPILATION_CACHE_DIR" in os.environ else ("Error reading persistent compilation cache",)

    def tensor_of(self, stored: Tensor) -> Any:
        """A numpy array; jax is imported for the dtypes that numpy itself does not have."""
        _ = self.adapter
        return super().tensor_of(stored)


RECORD = JaxRecord()
