"""Modules of recipes that differ in one thing, as users change them from one day to the next, and how a run goes on."""

import dataclasses
import importlib.util
import itertools
import sys
import warnings

import phalanx

HELPERS = """
SCALE = 2.0
UNUSED = 1
def halved(x):
    return x / 2
class Clamp:
    limit = 3.0
    def __call__(self, x):
        return x.clamp(max=self.limit)
"""

RECIPE = """
import collections, dataclasses, enum, functools, itertools, argparse, random, types, weakref
import numpy, torch
from torch import nn
from torch.nn import functional as F
import phalanx
import {helpers} as helpers
from {helpers} import halved, Clamp

SMOOTHING = 0.1
TABLE = {"scale": 1.0, "log": "runs/a"}
ARGS = argparse.Namespace(hidden=8, epochs=3, rate=0.5)
CALLS = []
COUNT = 0
NUMBERS = itertools.count()
KINDS = {"a", "b", "c"}

def smooth(loss):
    return loss * (1 - SMOOTHING)

# Losses

def plain_loss(output, target):
    # the mean
    return smooth(F.mse_loss(output, target))

def wrapped(inner, alpha):
    def loss(output, target):
        return alpha * inner(output, target)
    return loss

enclosed_loss = wrapped(plain_loss, 0.5)

def default_loss(output, target, power=2, *, scale=1.5):
    return ((output - target).abs() ** power).mean() * scale

def helped_loss(output, target):
    return halved(F.mse_loss(output, target)) * helpers.SCALE

def late_loss(output, target):
    from {helpers} import SCALE
    import {helpers} as late
    return F.mse_loss(output, target) * SCALE + late.halved(output).mean()

def table_loss(output, target):
    return F.mse_loss(output, target) * TABLE["scale"]

def counting_loss(output, target):
    global COUNT
    COUNT += 1
    CALLS.append(len(output))
    next(NUMBERS)
    return F.mse_loss(output, target)

def named_loss(output, target):
    return F.mse_loss(output, target) if "a" in KINDS and 1 in {1, 2, 3} else None

def typed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    '''The mean.'''
    def inner(x: torch.Tensor, y: "int | None" = None) -> torch.Tensor:
        '''Halved.'''
        total: torch.Tensor = x / 2
        return total
    return inner(F.mse_loss(output, target))

class Loss:
    power = 2
    def __init__(self, scale, names=()):
        self.scale = scale
        self.names = names
        self.calls = 0
        self._seen = {}
    def __call__(self, output, target):
        self.calls += 1
        self._seen[len(output)] = True
        return self.weigh((output - target).abs() ** self.power)
    def weigh(self, x):
        return x.mean() * self.scale
    def bound(self, output, target):
        self.noted = 1
        return self(output, target)
    def set_scale(self, scale):
        self.scale = scale

object_loss = Loss(0.5)

@dataclasses.dataclass
class Options:
    rate: float = 0.5
    names: tuple = ("a", "b")
    extra: list = dataclasses.field(default_factory=lambda: [1, 2])

    def apply(self, x):
        return x * self.rate

def options_loss(options, output, target):
    return options.apply(F.mse_loss(output, target))

class Slots:
    __slots__ = ("scale",)
    def __init__(self, scale):
        self.scale = scale
    def __call__(self, output, target):
        return F.mse_loss(output, target) * self.scale

class Mode(enum.Enum):
    MEAN = "mean"
    MEDIAN = "median"

Pair = collections.namedtuple("Pair", ["low", "high"])

def mode_loss(mode, pair, output, target):
    return getattr((output - target).clamp(*pair) ** 2, mode.value)()

def grouped(epoch, generator, size, growth=0):
    return numpy.array_split(generator.permutation(12), 12 // (size + growth * (epoch // 9)))

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

def circular_loss(output, target):
    return F.mse_loss(output, target) * (1 + even(4))

def kept_loss(kept, output, target):
    return F.mse_loss(output, target)

first, second = (lambda output, target: F.mse_loss(output, target) * 2), (lambda o, t: F.l1_loss(o, t) * 3)

@torch.no_grad()
def decorated(x):
    return x.mean() * 0.25

def decorated_loss(output, target):
    return F.mse_loss(output, target) + decorated(output)

@functools.lru_cache
def factor(n):
    return n * 0.5

def cached_loss(output, target):
    return F.mse_loss(output, target) * factor(3)

# Models

class Net(nn.Module):
    rate = 0.5
    def __init__(self, hidden=ARGS.hidden, act=nn.ReLU):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, hidden), act(), nn.Dropout(0.1), nn.Linear(hidden, 1))
    def forward(self, x):
        return self.body(x) * self.rate

def make():
    return Net()

def make_of(options):
    return Net(options["hidden"])

def make_by_arguments():
    return Net(ARGS.hidden)

def made(act=nn.ReLU, dropout=0.1, seed=0, scale=1.0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), act(), nn.Dropout(dropout), nn.Linear(8, 1))
    model.register_buffer("scale", torch.tensor(scale))
    return model

# Data

class Items:
    def __init__(self, x, y, transform=None, rng=0):
        self._x, self.y, self.transform = x, y, transform
        self.reads = 0
        self.cache = {}
        self.rng = numpy.random.default_rng(rng)
    def __len__(self):
        return len(self._x)
    def __getitem__(self, i):
        self.reads += 1
        if i not in self.cache:
            self.cache[i] = self._x[i] * 1.0
        x = self.cache[i]
        return x if self.transform is None else self.transform(x), self.y[i]

class Jittered(Items):
    def __init__(self, x, y, share):
        super().__init__(x, y)
        self.share = share
    def __getitem__(self, i):
        return self._x[i] + (torch.rand(()) < self.share) * 0.5, self.y[i]

class Sample:
    def __init__(self, x, y):
        self.x, self.y = x, y

X, Y = torch.arange(48.0).reshape(12, 4) / 48, torch.arange(12.0).reshape(12, 1) / 12
MEANS = [0.25]

def centred(x):
    return x - MEANS[0]

def first_of(model, batch):
    return model([*batch.values()][0])

def last_of(batch):
    return [*batch.values()][1]

def steeper(y):
    y.requires_grad and y.register_hook(lambda g: g * 2)
    return y

def collate_objects(samples):
    return torch.stack([item.x for item in samples]), torch.stack([item.y for item in samples])

def collate(samples):
    return torch.stack([x for x, _ in samples]) * ARGS.rate, torch.stack([y for _, y in samples])

# Optimizers and schedules

def decay(step):
    return 0.9 ** step

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=TABLE["scale"])

def make_schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, decay)

recipe = dict(make_model=make, data=(X, Y), loss_fn=plain_loss, steps=2, replicas=2, batch_size=4)
"""

NUMBER = itertools.count()


class Made:
    """Writes modules and imports them, and forgets them at the end."""

    def __init__(self, folder):
        self._folder = folder
        self._names = []

    def __call__(self, recipe=RECIPE, helpers=HELPERS):
        """The module of a recipe, in a folder and of a name of its own; its helpers are those of a name for all."""
        number = next(NUMBER)
        folder = self._folder / f"place{number}"
        folder.mkdir()
        self._load("helpers_of_recipes", folder / "helpers.py", helpers)
        text = recipe.replace("{helpers}", "helpers_of_recipes")
        return self._load(f"recipe{number}", folder / "recipe.py", text)

    def _load(self, name, path, text):
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        self._names.append(name)
        spec.loader.exec_module(module)
        return module

    def forget(self):
        for name in self._names:
            sys.modules.pop(name, None)


def recipe_of(module, given):
    """The module's recipe with what the text ``given`` says, as its own code would."""
    found = dict(module.recipe)
    found.update(eval(f"dict({given})", vars(module)))  # noqa: S307  the tests' own texts
    return phalanx.Recipe(**found)


@dataclasses.dataclass
class Change:
    """A recipe is made of ``given``; then a part of its text becomes another one, or it is made of ``after``.

    ``told`` is what is said of it; ``text`` an old and a new part, ``helpers`` those of the other module.
    """

    told: str = ""
    given: str = ""
    text: tuple = ("", "")
    helpers: tuple = ("", "")
    after: str | None = None

    def before(self, make):
        """The recipe of a run that goes on with another."""
        assert self.text[0] in RECIPE
        assert self.helpers[0] in HELPERS
        return recipe_of(make(), self.given)

    def changed(self, make):
        """The other one, of a module that is made anew."""
        module = make(RECIPE.replace(*self.text, 1), HELPERS.replace(*self.helpers, 1))
        return recipe_of(module, self.given if self.after is None else self.after)


def outcome_of(recipe, **options):
    """What becomes of a run that goes on with a recipe, and what is said: "refused", "warned" or "silent"."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            recipe.train(**options)
        except phalanx.UsageError as error:
            return "refused", str(error)
    return ("warned", str(caught[0].message)) if caught else ("silent", "")
