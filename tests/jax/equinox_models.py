"""A model of equinox's with BatchNorm, in a module that workers import: its classes cannot be made again by value."""

import equinox
import jax


class Net(equinox.Module):
    """BatchNorm between two layers; its statistics lie in a ``State``."""

    first: equinox.nn.Linear
    norm: equinox.nn.BatchNorm
    last: equinox.nn.Linear

    def __init__(self, key):
        one, other = jax.random.split(key)
        self.first, self.last = equinox.nn.Linear(5, 16, key=one), equinox.nn.Linear(16, 3, key=other)
        self.norm = equinox.nn.BatchNorm(16, axis_name="batch", mode="batch")

    def __call__(self, x, state, inference):
        h, state = self.norm(self.first(x), state, inference=inference)
        return self.last(jax.nn.relu(h)), state


def make_model(key):
    model, state = equinox.nn.make_with_state(Net)(key)
    return equinox.filter(model, equinox.is_inexact_array), state


def forward(params, x, state, key=None):
    rest = equinox.partition(equinox.nn.make_with_state(Net)(jax.random.key(0))[0], equinox.is_inexact_array)[1]
    model = equinox.combine(params, rest)
    called = jax.vmap(lambda one, state: model(one, state, key is None), (0, None), (0, None), axis_name="batch")
    return called(x, state)
