"""Records that user code writes while it is used, and modules of torch with parametrizations."""

import json
import re
import warnings

import pytest
import torch
from torch.nn.utils import parametrizations

import phalanx
from phalanx.definition.fingerprint import Comparison
from tests.state.changes import RECIPE, Made, between, recipe_of, written
from tests.state.runs import norm_recipe

MORE = """
@dataclasses.dataclass
class Stats:
    losses: list = dataclasses.field(default_factory=list)
    best: float = 9.0
    scale: float = 1.0
    def scaled(self, x):
        return x * self.scale

class Slotted:
    __slots__ = ("best", "scale")
    def __init__(self):
        self.best, self.scale = 9.0, 1.0

class Record:
    best = 9.0
    scale = 1.0

class Table(dict):
    scale = 1.0

ST, SLOTTED, SPACE, BARE, TABLED = Stats(), Slotted(), types.SimpleNamespace(best=9.0, scale=1.0), Record(), Table()

def noting_loss(output, target):
    value = F.mse_loss(output, target) * ST.scale
    ST.losses.append(float(value))
    ST.best = min(ST.best, ST.losses[-1])
    return value

def adding_loss(output, target):
    ST.best += 1
    return ST.scaled(F.mse_loss(output, target))

def slotted_loss(output, target):
    SLOTTED.best -= 1
    return F.mse_loss(output, target) * SLOTTED.scale

def passing_loss(output, target):
    SPACE.best = 1.0
    return F.mse_loss(output, target) * times(SPACE)

def times(record):
    return record.scale

def class_loss(output, target):
    Record.best = 1.0
    return F.mse_loss(output, target) * Record.scale

def new_loss(output, target):
    BARE.best = min(BARE.best, 1.0)
    BARE.seen = True
    return F.mse_loss(output, target)

def table_of_loss(output, target):
    TABLED.best = 1.0
    return F.mse_loss(output, target) * times(TABLED)

def alias_loss(output, target):
    stats = ST
    losses = stats.losses
    losses.append(1.0)
    return F.mse_loss(output, target) * ST.scale

def enclosing():
    stats = Stats()
    def loss(output, target):
        stats.best = 1.0
        return F.mse_loss(output, target) * stats.scale
    return loss
closed_loss = enclosing()

class Cached(Items):
    def __getitem__(self, i):
        return self.x_of(i), self.y[i]
    def x_of(self, i):
        cache = self.cache
        if i not in cache:
            cache[i] = self._x[i] * 1.0
        return cache[i]

class Copying(Items):
    def __getitem__(self, i):
        x = self._x
        x = x[i].clone()
        x[0] = 0.0
        return x, self.y[i]

class Ops:
    @staticmethod
    def scale_(x):
        x.mul_(2.0)

def ops_loss(output, target):
    output = output.clone()
    Ops.scale_(output)
    return F.mse_loss(output, target)

class Halved(nn.Module):
    factor = 0.5
    def forward(self, x):
        return x * self.factor

class Mine(nn.Linear):
    power = 2
    def forward(self, x):
        return super().forward(x) ** self.power

def halved_model(seed=0):
    torch.manual_seed(seed)
    layer = Mine(4, 1)
    nn.utils.parametrize.register_parametrization(layer, "weight", Halved())
    return nn.Sequential(layer)
"""
TEXT = RECIPE + MORE
USED = "loss_fn=({0}(X, X), {0})[1]"


@pytest.fixture
def make(tmp_path):
    """See ``Made``."""
    made = Made(tmp_path)
    yield made
    made.forget()


def said(make, given, after=None, old="", new=""):
    """What is said where ``old`` became ``new``, and the recipe is made of ``after``."""
    assert old in TEXT
    found = written(recipe_of(make(TEXT), given))
    return between(recipe_of(make(TEXT.replace(old, new, 1)), after or given), found)


NOTED = {
    "noting_loss": "`ST.best` changed.*`ST.losses` changed",
    "adding_loss": "global `ST`, attribute `best` changed",
    "slotted_loss": "`best` changed",
    "passing_loss": "state changed",
    "class_loss": "`best` changed",
    "new_loss": "`BARE.best` changed.*`BARE.seen` changed",
    "table_of_loss": "`TABLED` changed",
    "alias_loss": "global `ST`, attribute `losses` changed",
    "closed_loss": "closure variable `stats.best` changed",
}


@pytest.mark.long
@pytest.mark.parametrize("name", NOTED)
def test_written_attributes_of_a_record_are_told(make, name):
    """A loss that writes attributes of a record outside of it is the same recipe after use, and a warning names it."""
    found = said(make, f"loss_fn={name}", USED.format(name))
    assert found.differs == []
    assert re.search(NOTED[name], "; ".join(found.doubts)), found.doubts
    assert said(make, f"loss_fn={name}") == Comparison()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("noting_loss", "scale: float = 1.0", "scale: float = 2.0"),
        ("adding_loss", "scale: float = 1.0", "scale: float = 2.0"),
        ("adding_loss", "x * self.scale", "x / self.scale"),
        ("slotted_loss", "best, self.scale = 9.0, 1.0", "best, self.scale = 9.0, 2.0"),
        ("class_loss", "best = 9.0\n    scale = 1.0", "best = 9.0\n    scale = 2.0"),
        ("alias_loss", "scale: float = 1.0", "scale: float = 2.0"),
        ("closed_loss", "scale: float = 1.0", "scale: float = 2.0"),
    ],
)
def test_what_is_only_read_of_a_written_record_is_refused(make, name, old, new):
    """Another attribute of a record is another recipe, also where the loss writes others of it."""
    assert said(make, f"loss_fn={name}", USED.format(name), old, new).differs != []


def test_written_through_another_name(make):
    """A cache that is written by a local name is told; an array is refused whose copy is written by that name."""
    found = said(make, "data=Cached(X, Y)", "data=(lambda d: (d[0], d)[1])(Cached(X, Y))")
    assert (found.differs, found.doubts) == ([], ["data: attribute `cache` changed, which is written while it is used"])
    for name in ("Cached", "Copying"):
        assert "`_x`" in said(make, f"data={name}(X, Y)", old="/ 48,", new="/ 49,").differs[0]


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_modules(kind):
    """A parametrized module is compared by its class, parametrizations and original tensors, and all of it is seen."""

    def made(seed=0, name=kind, **given):
        torch.manual_seed(seed)
        layer = getattr(parametrizations, name)(torch.nn.Linear(4, 4), **given)
        return norm_recipe(2, make_model=torch.nn.Sequential(layer))

    found = written(made())
    assert between(made(), found) == Comparison()
    told = between(made(seed=1), found)
    path = "`0`, `base`" if kind == "orthogonal" else "`original"  # which is the identity, and a factor
    assert f"make_model: `0`, `parametrizations`, `weight`, {path}" in "; ".join(told.differs)
    assert told.doubts == []
    torch.manual_seed(0)
    plain = norm_recipe(2, make_model=torch.nn.Sequential(torch.nn.Linear(4, 4)))
    others = [made(name=name) for name in ("weight_norm", "spectral_norm", "orthogonal")]
    assert len({json.dumps(written(one)) for one in (*others, plain)}) == 4


def test_code_of_parametrized_modules(make):
    """The user's class below a parametrization counts, and the user's parametrization; what is the same is silent."""
    given = "make_model=halved_model()"
    assert said(make, given) == Comparison()
    assert (
        "`power` is 3 here, and 2"
        in said(make, given, old="power = 2\n    def forward", new="power = 3\n    def forward").differs[0]
    )
    assert "`factor` is 0.6 here, and 0.5" in said(make, given, old="factor = 0.5", new="factor = 0.6").differs[0]
    assert "original" in "; ".join(said(make, given, "make_model=halved_model(seed=1)").differs)


def test_a_parametrized_run_goes_on(tmp_path):
    """A run of a parametrized module goes on without a warning; that the model is trained leaves it what it was."""
    model = torch.nn.Sequential(parametrizations.spectral_norm(torch.nn.Linear(4, 1)))
    data, loss = (torch.arange(48.0).reshape(12, 4) / 48, torch.ones(12, 1)), torch.nn.functional.mse_loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in (2, 4):
            recipe = phalanx.Recipe(model, data, loss, replicas=2, steps=steps)
            recipe.train(engine="inline", run_dir=tmp_path / "run")


def test_code_that_is_called_for_its_effect_is_no_counter(make):
    """A function of a class or a module, called as a statement, is compared as any other: what it does may decide."""
    found = said(make, "loss_fn=ops_loss", old="x.mul_(2.0)", new="x.mul_(3.0)")
    assert [text for text in found.differs if "Ops" in text]
    assert not said(make, "loss_fn=ops_loss").differs
