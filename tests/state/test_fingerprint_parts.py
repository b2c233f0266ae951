"""Of what fingerprints are made: code that runs, arrays, odd objects, bounds; and what processes of a run share."""

import copy
import functools
import json
import os
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from phalanx.definition.fingerprint import Comparison, arrays, bytecode, graph, objects, shared
from phalanx.definition.fingerprint.graph import CODE, TREE, Graph
from phalanx.definition.fingerprint.look import Look
from phalanx.definition.packages import installed
from tests.families import FAMILIES
from tests.state.changes import Made, between, recipe_of, written
from tests.state.runs import norm_recipe


@pytest.fixture
def make(tmp_path):
    """See ``Made``."""
    made = Made(tmp_path)
    yield made
    made.forget()


def seen(value):
    """A value as a graph."""
    return Graph(value, Look())


def hash_of(value):
    return seen(value).hash(TREE)


def test_packages_of_another_environment_on_the_path_are_installed():
    """Code in any site-packages goes by name and version, also where this interpreter's own are elsewhere."""
    assert installed("abcdef", "/opt/base/lib/python3.11/site-packages/abcdef/core.py") == "abcdef"
    assert installed("abcdef", "/home/me/project/abcdef/core.py") is None


def test_code_that_runs_counts_not_the_file(make):
    """A file that was edited after it was imported, as in notebooks, changes nothing until it is imported anew."""
    module = make()
    found = written(recipe_of(module, "loss_fn=decorated_loss"))
    path = module.__file__
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(text.replace("* 0.25", "* 0.75"))
    os.utime(path, (1, 1))
    assert between(recipe_of(module, "loss_fn=decorated_loss"), found) == Comparison()
    stale = written(recipe_of(module, "loss_fn=decorated_loss"))
    fresh = make(text.replace("* 0.25", "* 0.75"))
    for earlier in (found, stale):
        assert "`decorated`" in between(recipe_of(fresh, "loss_fn=decorated_loss"), earlier).differs[0]


def test_code_of_another_python(make, monkeypatch):
    """Between versions of Python, code with source is compared by it; of code without, a warning tells."""
    module = make()
    given = ["loss_fn=plain_loss", "loss_fn=lambda output, target: (output - target).mean()"]
    sourced, sourceless = (written(recipe_of(module, text)) for text in given)
    monkeypatch.setattr(objects, "VERSION", "3.99")
    monkeypatch.setattr("phalanx.definition.fingerprint.VERSION", "3.99")
    original = bytecode.spelled
    monkeypatch.setattr(bytecode, "spelled", lambda code: original(code) + " other instructions")
    assert between(recipe_of(module, given[0]), sourced) == Comparison()
    found = between(recipe_of(module, given[1]), sourceless)
    assert found.differs == []
    assert "loss_fn cannot be compared: its code has no source" in found.doubts[0]
    assert between(recipe_of(module, given[1] + ", seed=1"), sourceless).differs == ["seed is 1 here, and 0 there"]


def test_code_without_source():
    """Code of ``exec`` goes by its instructions: lines, comments and docstrings aside, and sets in any order."""

    def made(text):
        names = {}
        exec(text, names)
        return names["f"]

    base = "def f(x):\n    return x in {'a', 'b', 'c'} and x + 1"
    same = ["\n\n" + base, base.replace("\n", "\n    # a comment\n"), base.replace("\n", "\n    'A docstring.'\n"),
            base.replace("'a', 'b', 'c'", "'c', 'a', 'b'")]  # fmt: skip
    others = [base.replace("1", "2"), base.replace("+", "-"), base.replace("'c'", "'d'"), base.replace("1", "1.0")]
    assert {hash_of(made(text)) for text in same} == {hash_of(made(base))}
    assert len({hash_of(made(text)) for text in [base, *others]}) == 5


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool", "complex64", "bfloat16", "float16"])
def test_every_byte_of_an_array_counts(kind, dtype):
    """Up to the stated size arrays are compared whole, negative zero and NaN too; of every dtype."""
    if kind == "numpy" and dtype == "bfloat16":
        pytest.skip("numpy has none")
    array = torch.zeros(40, 30, dtype=getattr(torch, dtype))
    hashes = {hash_of(array if kind == "torch" else array.numpy())}
    assert hashes == {hash_of(array.clone())}
    for place in [(0, 0), (17, 3), (39, 29)]:
        other = array.clone()
        other[place] = True
        hashes.add(hash_of(other if kind == "torch" else other.numpy()))
    assert len(hashes) == 4


def test_how_an_array_lies_in_memory():
    """The order of its axes counts, as bits may depend on it; gaps between rows and copies do not."""
    images = torch.arange(48.0).reshape(2, 2, 3, 4)
    assert hash_of(images.to(memory_format=torch.channels_last)) != hash_of(images)
    assert hash_of(images[:, :, ::2]) == hash_of(images[:, :, ::2].clone())
    assert hash_of(images.double()) != hash_of(images)
    assert hash_of(torch.complex(images, images).conj()) == hash_of(torch.complex(images, -images))
    assert hash_of(images.reshape(4, 12)) != hash_of(images)
    assert hash_of(nn.Parameter(images)) != hash_of(images)
    assert hash_of(images.clone().requires_grad_().detach()) == hash_of(images)


@pytest.mark.parametrize("wide", [False, True])
def test_large_arrays_are_sampled(monkeypatch, wide):
    """Beyond the stated size rows are sampled, evenly, the first and the last too; the text says so."""
    monkeypatch.setattr(arrays, "WHOLE_BYTES", 1 << 12)
    monkeypatch.setattr(arrays, "SAMPLED_BYTES", 1 << 10)
    array = np.zeros((3, 4096) if wide else (4096, 3), np.float32)
    assert seen(array).named(TREE)[""][0].endswith("sampled")
    hashes = {hash_of(array)}
    for row in (0, -1):
        other = array.copy()
        other[row] = 1
        hashes.add(hash_of(other))
    assert len(hashes) == 3
    assert not seen(array[:1, :9]).named(TREE)[""][0].endswith("sampled")


def test_long_lists_are_sampled(monkeypatch):
    """Beyond the stated size items of a list are sampled, the first and the last too."""
    monkeypatch.setattr(arrays, "LIST_BYTES", 1 << 12)
    monkeypatch.setattr(arrays, "SAMPLED_ROWS", 16)
    samples = [(np.zeros(4), number) for number in range(1000)]
    assert "sampled" in seen(samples).named(TREE)[""][0]
    assert len({hash_of(given) for given in (samples, [(np.ones(4), 0), *samples[1:]], [*samples[:-1], 1])}) == 3


def circular():
    found = [1]
    found.append(found)
    return found


def deep(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


class Rude:
    """Raises whatever it is asked."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __reduce_ex__(self, protocol):
        raise ValueError("no")

    def __eq__(self, other):
        raise TypeError("no")

    __hash__ = None


def enclosing(depth):
    found = None
    for number in range(depth):
        found = lambda inner=found: (inner, number)  # noqa: B023, E731
    return found


@pytest.mark.long
def test_circles_and_depth_end():
    """Values that hold themselves, and deep ones, are compared as others are."""
    assert hash_of(circular()) == hash_of(circular())
    assert hash_of(circular()) != hash_of([1, [1]])
    assert hash_of(deep(3000)) == hash_of(deep(3000)) != hash_of(deep(2999))
    assert hash_of(enclosing(200)) == hash_of(enclosing(200)) != hash_of(enclosing(199))
    assert all(len(path) < 1000 for path in seen(deep(3000)).named(TREE))


def test_what_is_cut_is_told(monkeypatch):
    """Beyond so many parts nothing is compared, and that is told by name, once."""
    monkeypatch.setattr(graph, "MOST_PARTS", 10)
    found = seen([[object() for _ in range(20)], 1])
    assert list(found.unseen().values()) == [graph.TOO_MANY]


def test_odd_objects_are_told():
    """What cannot be looked into is told by name and never raises."""
    values = [Rude(), threading.Lock(), (number for number in range(3)), torch.empty(2, device="meta"), os.environ]
    found = seen(values).unseen()
    assert set(found) >= {"item 0", "item 1", "item 2", "item 3"}
    assert "ValueError" in found["item 0"]


class Net(nn.Module):
    """Everything a module may hold."""

    def __init__(self, act=F.relu):
        super().__init__()
        self.rnn = nn.LSTM(4, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, activation=act)
        self.act = act
        self.tied = self.rnn
        self.options = {"scale": (1, 2)}

    def forward(self, x):
        return self.act(self.block(self.rnn(x)[0]))


def test_modules():
    """Modules are compared by their structure, attributes and weights."""

    def made(act=F.relu, seed=0):
        torch.manual_seed(seed)
        return Net(act)

    assert hash_of(made()) == hash_of(made())
    assert len({hash_of(model) for model in (made(), made(F.gelu), made(seed=1), made().half())}) == 4
    assert seen(made()).unseen() == {}


@pytest.mark.campaign  # the compiler takes seconds to import
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules():
    """A compiled module is compared by the one inside and its options; compiled again it is the same."""
    compiled = [
        torch.compile(nn.Linear(2, 2, bias=bias), dynamic=dynamic) for bias in (1, 0) for dynamic in (None, True)
    ]
    for model in compiled:
        model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    again = torch.compile(nn.Linear(2, 2))
    again.load_state_dict(compiled[0].state_dict())
    assert len({hash_of(model) for model in compiled}) == 4
    assert hash_of(again) == hash_of(compiled[0])


def test_recipes_of_jax():
    """Optimizers of optax go by what their functions enclose, compiled functions by those inside, arrays by content."""
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")

    def made(rate=0.1, norm=1.0, steps=10):
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 2, steps)
        return optax.chain(optax.clip_by_global_norm(norm), optax.adamw(schedule, weight_decay=0.1))

    def loss(scale):
        return jax.jit(lambda output, target: ((output - target) ** 2).mean() * scale)

    assert hash_of(made()) == hash_of(made())
    assert len({hash_of(one) for one in (made(), made(0.2), made(norm=2.0), made(steps=11), optax.adam(0.1))}) == 5
    assert hash_of(loss(1.0)) == hash_of(loss(1.0)) != hash_of(loss(2.0))
    trees = [{"w": jax.numpy.full((2, 3), value, dtype)} for value in (1, 2) for dtype in ("float32", "bfloat16")]
    assert len(set(map(hash_of, trees))) == 4
    assert len({hash_of(jax.random.key(seed)) for seed in (0, 0, 1)}) == 2
    assert hash_of(trees[0]) == hash_of({"w": np.ones((2, 3), np.float32)})
    assert "closure variable" in next(path for path in seen(made()).named(CODE) if "max_norm" in path)


@pytest.mark.long
def test_fingerprints_are_small():
    """The usual recipe takes some KB in each snapshot, a model of hundreds of modules not much more."""
    assert len(json.dumps(written(norm_recipe(2)))) < 4000
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(300)])
    assert len(json.dumps(written(norm_recipe(2, make_model=model)))) < 12_000
    torch.manual_seed(0)
    changed = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(300)])
    changed.load_state_dict(model.state_dict())
    changed[299][1] = nn.Tanh()
    found = between(norm_recipe(2, make_model=changed), written(norm_recipe(2, make_model=model)))
    assert found.differs == ["make_model is another a Sequential here than there"]


@pytest.mark.long
def test_every_family_is_seen():
    """The recipes of these tests have nothing that cannot be seen, and each is told from all others."""
    found = [written(family.recipe(3)) for family in FAMILIES.values()]
    assert [field["unseen"] for one in found for field in one["fields"].values() if field["unseen"]] == []
    assert [field["soft"] for one in found for field in one["fields"].values() if field["soft"]] == []
    assert len({json.dumps(one) for one in found}) == len(FAMILIES)


def test_what_processes_share(make, monkeypatch):
    """Processes of a run compare all of a recipe; globals that are plain apart, as one may be the process's rank."""
    module = make()
    must, should = shared(recipe_of(module, "loss_fn=enclosed_loss"))
    assert must["loss_fn: closure variable `alpha`"] == "0.5"
    assert should == {"loss_fn: closure variable `inner`, global `smooth`, global `SMOOTHING`": "0.1"}
    monkeypatch.setattr(module, "SMOOTHING", 0.2)
    again, others = shared(recipe_of(module, "loss_fn=enclosed_loss"))
    assert again == must
    assert others != should
    other, _ = shared(recipe_of(module, "loss_fn=wrapped(plain_loss, 0.6)"))
    assert other != must
    given = functools.partial(F.cross_entropy, label_smoothing=0.1)
    assert shared(norm_recipe(2, loss_fn=given)) == shared(norm_recipe(5, loss_fn=given))


def woven(rng, nodes=8):
    """Lists that hold numbers and each other in all ways; the first leads to all that count."""
    found = [[rng.randrange(3)] for _ in range(nodes)]
    for one in found:
        one.extend(rng.choice(found) for _ in range(rng.randrange(3)))
    return found


def reached(root):
    known, waiting = {}, [root]
    while waiting:
        one = waiting.pop()
        if id(one) not in known:
            known[id(one)] = one
            waiting.extend(one[1:])
    return list(known.values())


@pytest.mark.parametrize("seed", range(100))
def test_woven_values(seed):
    """Copies of values that hold each other in circles have equal hashes; one number changed anywhere shows."""
    rng = random.Random(seed)
    root = woven(rng)[0]
    whole = hash_of(root)
    assert hash_of(copy.deepcopy(root)) == whole
    for number in range(len(reached(root))):
        other = copy.deepcopy(root)
        reached(other)[number][0] = 9
        assert hash_of(other) != whole
    assert hash_of([root, copy.deepcopy(root)]) == hash_of([root, root])
