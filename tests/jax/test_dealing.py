"""The update dealt to workers, in one process: whoever owns a parameter, its bits are those of one update of all."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from phalanx.frameworks import arithmetic
from phalanx.frameworks.jax.optimizer import Update
from phalanx.frameworks.jax.sharing import Sharing, alias
from phalanx.frameworks.jax.state import Trees, plain
from phalanx.plan.fold import place
from tests.jax.families import FAMILIES, OPTIMIZERS, normal
from tests.sampling import sample

STEPS = 3
SHAPES = {
    "alike": [(16, 8), (16, 8), (8,), (8,), (2, 2), (1,), (2,), ()],
    "mixed": [(64, 48), (48,), (48, 2), (2,), (5, 5, 3)],
}


def counted():
    """A step that gets smaller the more numbers are trained."""

    def update(gradient, state, params):
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        return jax.tree.map(lambda g: -g * (10 / count), gradient), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def picky():
    """Adam that wants to see a big array."""
    adam = optax.adam(0.01)

    def init(params):
        if max(leaf.size for leaf in jax.tree.leaves(params)) < 1000:
            raise ValueError("nothing to train")
        return adam.init(params)

    return optax.GradientTransformation(init, adam.update)


def by_size():
    return optax.masked(optax.adam(0.01), lambda tree: jax.tree.map(lambda leaf: leaf.size > 50, tree))


BY_SHAPE = {"counted": counted, "by_size": by_size, "picky": picky}
TOGETHER = {"clipped", "unless_nan", *BY_SHAPE}  # where the first worker updates all
NAMES = ["adam_schedule", "clipped", "multi_steps", "noise", "lion", "adamw", "lamb", "adafactor", "muon", "unless_nan"]


def arrays(name, *, seed=0):
    """Random arrays of these shapes."""
    return [jnp.asarray(normal(*shape, seed=seed + number)) for number, shape in enumerate(SHAPES[name])]


def made(optimizer, shapes, dtype):
    """An update of these parameters, and the state at its start."""
    update = Update(FAMILIES["mlp"].recipe(2, optimizer=optimizer))
    params = [leaf.astype(dtype) for leaf in arrays(shapes)]
    return update, Trees(params, update.begin(params))


def written(leaf):
    """A copy of a leaf in memory that jax uses as it lies."""
    numbers = plain(leaf)
    room = arithmetic.empty(numbers.shape, numbers.dtype)
    room[...] = numbers
    return room


def dealt(optimizer, shapes, gradients, dtype=jnp.float32, workers=3):
    """Parameters and state after the steps, each from the worker that keeps it; and the owners."""
    update, state = made(optimizer, shapes, dtype)
    layout = Sharing(state, update, jax.devices()[0]).lay_out(place(workers, workers), lambda size: 0)
    found = {}
    for worker in range(workers):
        owned, mine = layout.owned(worker), layout.kept(worker)
        update, state = made(optimizer, shapes, dtype)
        leaves = jax.tree.leaves(state.optimizer)
        homes = [written(state.params[index]) for index in owned] + [written(leaves[index]) for index in mine]
        likes = [state.params[index] for index in owned] + [leaves[index] for index in mine]
        lying = [alias(home, like) for home, like in zip(homes, likes, strict=True)]
        update.restrict(owned, mine, lying[: len(owned)], lying[len(owned) :], homes)
        for gradient in gradients:
            update.step(state, gradient)
        if owned:
            names = [("param", index) for index in owned] + [("state", index) for index in mine]
            found |= {name: home.tobytes() for name, home in zip(names, homes, strict=True)}
    return found, set(layout.owners)


def whole(optimizer, shapes, gradients, dtype=jnp.float32):
    """The same by one update of everything."""
    update, state = made(optimizer, shapes, dtype)
    for gradient in gradients:
        update.step(state, gradient)
    leaves = {"param": state.params, "state": jax.tree.leaves(state.optimizer)}
    return {(kind, index): plain(leaf).tobytes() for kind, found in leaves.items() for index, leaf in enumerate(found)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        *sample("dealing", [(name, "alike") for name in NAMES if name not in TOGETHER], 3),
        *sample("dealing of all", [(name, "alike") for name in NAMES if name in TOGETHER], 1),
        *sample("dealing by shape", [(name, "mixed") for name in ("adafactor", *BY_SHAPE)], 2),
    ],
)
def test_every_part_has_the_bits_of_the_whole(name, shapes):
    """Three workers end in the bits of one update; one of them updates all where parameters look at each other."""
    optimizer = (OPTIMIZERS | BY_SHAPE)[name]()
    gradients = [arrays(shapes, seed=10 * step + 10) for step in range(STEPS)]
    found, owners = dealt(optimizer, shapes, gradients)
    assert found == whole(optimizer, shapes, gradients)
    assert owners == ({0} if name in TOGETHER else {0, 1, 2})


@pytest.mark.long
def test_other_gradients_are_other_bits():
    """Equal bits mean something: one element of one gradient changes them."""
    gradients = [arrays("alike", seed=10)]
    changed = [[gradients[0][0].at[0, 0].add(1), *gradients[0][1:]]]
    run = functools.partial(dealt, OPTIMIZERS["adamw"](), "alike")
    assert run(gradients)[0] != run(changed)[0]


@pytest.mark.long
def test_a_state_without_a_dtype_of_its_own():
    """A state that an update makes of Python's numbers has a dtype from then on, here as in workers."""

    def update(gradient, rate, params):
        return jax.tree.map(lambda g: -g * rate, gradient), jnp.asarray(0.3)

    optimizer = optax.GradientTransformation(lambda params: jnp.asarray(0.1), update)
    gradients = [[leaf.astype(jnp.bfloat16) for leaf in arrays("alike", seed=10 * step)] for step in range(STEPS)]
    run = optimizer, "alike", gradients, jnp.bfloat16
    assert dealt(*run, workers=2)[0] == whole(*run)
