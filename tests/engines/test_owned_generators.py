"""Random generators that user code owns are keyed as the global ones are, wherever they can be found."""

import functools
import random
import sys
import warnings

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.definition import generators

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAMPLES = 20
GLOBAL = np.random.default_rng(5)


class Noisy:
    """A dataset whose samples get noise from ``noise``, which takes nothing and returns a number."""

    def __init__(self, *noise):
        self.noise = noise

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.arange(4.0).add(index).sin()
        return x + sum(float(noise()) for noise in self.noise), x.sum()


class Holding(Noisy):
    """Keeps ``generator`` in an attribute of an item of a list."""

    def __init__(self, generator, draw):
        self.transforms = [{"inner": Inner(generator)}]
        self.draw = draw
        super().__init__(self.drawn)

    def drawn(self):
        return getattr(self.transforms[0]["inner"].generator, self.draw)()


class Inner:
    """An object that keeps a generator in a slot."""

    __slots__ = ("generator",)

    def __init__(self, generator):
        self.generator = generator


class OnFirstUse(Noisy):
    """Makes its generator when it is first used."""

    rng = None

    def __init__(self):
        super().__init__(self.drawn)

    def drawn(self):
        if self.rng is None:
            self.rng = np.random.default_rng(3)
        return self.rng.normal()


def closure(rng):
    return lambda: rng.normal()


def drawn_from_global():
    return GLOBAL.normal()


def drawn(generator):
    return torch.rand((), generator=generator)


def drawn_by_default(rng=np.random.default_rng(11)):  # noqa: B008  a generator in a default
    return rng.normal()


CASES = {
    "numpy": lambda: Holding(np.random.default_rng(1), "normal"),
    "philox": lambda: Holding(np.random.Generator(np.random.Philox(1)), "normal"),
    "legacy numpy": lambda: Holding(np.random.RandomState(1), "normal"),
    "random": lambda: Holding(random.Random(1), "random"),
    "closure": lambda: Noisy(closure(np.random.default_rng(2))),
    "partial": lambda: Noisy(functools.partial(drawn, torch.Generator().manual_seed(3))),
    "bound": lambda: Noisy(np.random.default_rng(4).normal),
    "global": lambda: Noisy(drawn_from_global),
    "default": lambda: Noisy(drawn_by_default),
    "first use": OnFirstUse,
    "two": lambda: Noisy(closure(np.random.default_rng(2)), closure(np.random.default_rng(2))),
}


def regression(data, make_model=lambda: nn.Linear(4, 1), **changes):
    given = {"replicas": 3, "batch_size": 7, "steps": 6, "loss_fn": loss} | changes
    return phalanx.Recipe(make_model, data, **given)


def loss(output, target):
    return F.mse_loss(output[:, 0], target)


def ends(make_recipe):
    """Digest and evaluation inline, and with 2 and 3 workers, each from a recipe of its own."""
    found = []
    for options in ({"engine": "inline"}, *({"engine": "processes", "workers": count} for count in (2, 3))):
        recipe = make_recipe()
        data = recipe.data if isinstance(recipe.data, Noisy) else Noisy()
        with recipe.start(**options) as run:
            run.finish()
            value = run.evaluate(loss, data, batch_size=4)
            found.append((run.result().digest, value))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_workers_change_nothing(name):
    """A dataset with a generator of its own ends in one digest, and one metric, for any number of workers."""
    inline, *others = ends(lambda: regression(CASES[name]()))
    assert others == [inline, inline]
    assert inline != ends(lambda: regression(Noisy()))[0]


def test_generators_have_streams_of_their_own():
    """Two generators that were made alike do not draw alike: each is found under its own path."""
    first, second = np.random.default_rng(1), np.random.default_rng(1)
    owned = generators.find({"data": [first, second]})
    generators.seed(7, owned)
    drawn = first.normal(), second.normal()
    assert drawn[0] != drawn[1]
    generators.seed(7, owned)
    assert (first.normal(), second.normal()) == drawn


class Sprinkling(nn.Module):
    """A model that adds noise out of its own generator."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        return self.linear(x + torch.rand(x.shape, generator=self.generator))


def sprinkled(rng, output, target):
    return loss(output + rng.normal(), target)


def collated(rng, samples):
    x, y = torch.utils.data.default_collate(samples)
    return x + rng.normal(), y


PARTS = {
    "model": lambda: {"make_model": Sprinkling},
    "loss_fn": lambda: {"loss_fn": functools.partial(sprinkled, np.random.default_rng(1))},
    "collate_fn": lambda: {"collate_fn": functools.partial(collated, np.random.default_rng(1))},
}


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_generators_of_other_parts(part):
    """Generators of the model, the loss and the collating function are keyed in each replica-step."""
    inline, *others = ends(lambda: regression(Noisy(), **PARTS[part]()))
    assert others == [inline, inline]
    assert inline[0] != ends(lambda: regression(Noisy()))[0][0]


def test_the_callers_generators_stay():
    """A generator in a dataset is after a run and an evaluation as it was before."""
    data, other = Holding(np.random.default_rng(1), "normal"), Holding(random.Random(1), "random")
    with regression(data).start(engine="inline") as run:
        next(run)
        run.evaluate(loss, other)
        next(run)
    assert data.drawn() == np.random.default_rng(1).normal()
    assert other.drawn() == random.Random(1).random()


def test_a_loop_by_hand_reads_the_same():
    """``plan.seeded_sample`` seeds the generators that the dataset owns, as a run does."""
    seen = []

    def watched(samples):
        seen.append(torch.utils.data.default_collate(samples))
        return seen[-1]

    data = Holding(np.random.default_rng(1), "normal")
    recipe = regression(data, replicas=1, steps=1, collate_fn=watched)
    recipe.train(engine="inline")
    mine = []
    for index in recipe.plan.indices(0):
        with recipe.plan.seeded_sample(0, index):
            mine.append(data[int(index)])
    assert torch.equal(seen[0][0], torch.utils.data.default_collate(mine)[0])


def counting():
    count = iter(range(1000))
    return lambda: next(count)


@pytest.mark.parametrize("options", [{"engine": "inline"}, {"engine": "processes", "workers": 2}], ids=["inline", "2"])
def test_what_is_not_found_is_told(options):
    """A dataset that gives another sample under the same seeds, for a reason that nobody finds, is told of once."""
    with (
        pytest.warns(UserWarning, match=r"of data was another when it was read again.*attribute") as told,
        pytest.raises(phalanx.StateError, match="when it was computed again"),
    ):
        regression(Noisy(counting())).train(**options)
    assert len([item for item in told if "read again" in str(item.message)]) <= 2


def test_global_generators_are_nobodys():
    """The generators of the process are not taken for somebody's own: their keys stay as they are."""
    data = Noisy(np.random.normal, random.random, functools.partial(drawn, torch.default_generator))
    assert generators.find({"data": data}) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regression(data).train(engine="inline")


class GlobalNoise(nn.Module):
    """A model that draws from a global of this module, which travels by value."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x):
        return self.body(x + float(GLOBAL.normal())).squeeze(1)


def test_an_evaluation_does_not_bring_other_globals():
    """A class that an evaluation packs again stays as it is in workers, with the globals that the run seeds."""

    def ended(evaluates, **options):
        data = Noisy(GLOBAL.normal)
        made = phalanx.Recipe(GlobalNoise, data, F.mse_loss, replicas=2, batch_size=4, epochs=1)
        with made.start(**options) as run:
            for report in run:
                if evaluates and report.step == 1:
                    run.evaluate(F.mse_loss, made.data)
            return run.result().digest

    due = ended(False, engine="inline")
    assert ended(True, engine="inline") == due
    assert ended(True, engine="processes", workers=2) == due
