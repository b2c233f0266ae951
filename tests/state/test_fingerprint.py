"""A recipe is told from any other by what it is made of, and from itself by nothing: comments, addresses, seeds."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from phalanx.definition.fingerprint import Comparison
from tests.state.changes import Change, Made, between, recipe_of, written


@pytest.fixture
def make(tmp_path):
    """See ``Made``."""
    made = Made(tmp_path)
    yield made
    made.forget()


REFUSED = {
    "code of a loss": Change("", "return smooth(F.mse_loss", "return 2 * smooth(F.mse_loss", "loss_fn is another"),
    "code of a function it calls": Change(
        "", "loss * (1 - SMOOTHING)", "loss * (2 - SMOOTHING)", "loss_fn: global `smooth` is another"
    ),
    "global of a function it calls": Change(
        "", "SMOOTHING = 0.1", "SMOOTHING = 0.2", "loss_fn: global `smooth`, global `SMOOTHING` is 0.2 here, and 0.1 th"
    ),
    "closure": Change(
        "loss_fn=enclosed_loss",
        "wrapped(plain_loss, 0.5)",
        "wrapped(plain_loss, 0.6)",
        "loss_fn: closure variable `alpha` is 0.6 here, and 0.5 there",
    ),
    "nested loss": Change(
        "loss_fn=enclosed_loss", "return smooth(F", "return -smooth(F", "loss_fn: closure variable `inner` is another"
    ),
    "default": Change("loss_fn=default_loss", "power=2, *", "power=3, *", "default `power` is 3 here, and 2 there"),
    "default by name": Change("loss_fn=default_loss", "scale=1.5", "scale=1.6", "default `scale` is 1.6 here"),
    "function of another module": Change(
        "loss_fn=helped_loss", helpers=("x / 2", "x / 3"), told="global `halved` is another"
    ),
    "number of another module": Change(
        "loss_fn=helped_loss", helpers=("SCALE = 2.0", "SCALE = 3.0"), told="`helpers.SCALE` is 3.0 here, and 2.0"
    ),
    "import inside": Change("loss_fn=late_loss", helpers=("SCALE = 2.0", "SCALE = 3.0"), told="SCALE` is 3.0 here"),
    "module inside": Change("loss_fn=late_loss", helpers=("x / 2", "x / 3"), told="halved` is another"),
    "item of a global": Change("loss_fn=table_loss", '"scale": 1.0', '"scale": 1.1', r"`TABLE\['scale'\]` is 1.1 here"),
    "set of a global": Change(
        "loss_fn=named_loss", '"c"}', '"d"}', r"loss_fn: global `KINDS` is set\('a', 'b', 'd'\) here"
    ),
    "constants of a set": Change("loss_fn=named_loss", "{1, 2, 3}", "{1, 2, 4}", "loss_fn is another"),
    "annotated code": Change("loss_fn=typed_loss", "= x / 2", "= x / 3", "loss_fn is another"),
    "attribute of an object": Change("loss_fn=object_loss", "Loss(0.5)", "Loss(0.6)", "attribute `scale` is 0.6 here"),
    "attribute of a class": Change("loss_fn=object_loss", "    power = 2", "    power = 3", "class, `power` is 3 here"),
    "method of an object": Change("loss_fn=object_loss", "x.mean() *", "x.sum() *", "loss_fn: class, `weigh` is anot"),
    "what a method sets": Change("loss_fn=object_loss", "self.names = names", "self.names = 1", "`names` is 1 here"),
    "bound object": Change(
        "loss_fn=Loss(0.5).bound",
        "self.scale = scale\n        self.n",
        "self.scale = 1\n        self.n",
        "loss_fn: object, attribute `scale` is 1 here",
    ),
    "dataclass": Change(
        "loss_fn=functools.partial(options_loss, Options())",
        "rate: float = 0.5",
        "rate: float = 0.6",
        "loss_fn: argument 0, attribute `rate` is 0.6 here, and 0.5 there",
    ),
    "method of a dataclass": Change(
        "loss_fn=functools.partial(options_loss, Options())", "x * self.rate", "x / self.rate", "class, `apply` is anot"
    ),
    "field of a dataclass": Change(
        "loss_fn=functools.partial(options_loss, Options())", "lambda: [1, 2]", "lambda: [1, 3]", "`extra`.*3 here"
    ),
    "slots": Change(
        "loss_fn=Slots(1.0)",
        after="loss_fn=Slots(2.0)",
        told="attribute `scale` is 2.0 here, and 1.0 there",
    ),
    "enumeration": Change(
        "loss_fn=functools.partial(mode_loss, Mode.MEAN, Pair(0, 1))",
        'MEAN = "mean"',
        'MEAN = "sum"',
        "`MEAN` is 'sum'",
    ),
    "named tuple": Change(
        "loss_fn=functools.partial(mode_loss, Mode.MEAN, Pair(0, 1))",
        after="loss_fn=functools.partial(mode_loss, Mode.MEAN, Pair(0, 2))",
        told="`high` is 2 here",
    ),
    "functions that call each other": Change(
        "loss_fn=circular_loss", "n != 0 and", "n != 1 and", "global `odd` is anoth"
    ),
    "the first of two lambdas": Change("loss_fn=first", "target) * 2)", "target) * 4)", "loss_fn is another function"),
    "the second of two lambdas": Change("loss_fn=second", "(o, t) * 3)", "(o, t) * 4)", "loss_fn is another function"),
    "below a decorator": Change("loss_fn=decorated_loss", "* 0.25", "* 0.75", "`decorated`, closure variable `func`"),
    "below a cache": Change("loss_fn=cached_loss", "n * 0.5", "n * 0.6", "`factor`, wrapped is another function"),
    "weight of a loss": Change(
        "loss_fn=phalanx.weighted(plain_loss, lambda o, t: len(o) * SMOOTHING)",
        "SMOOTHING = 0.1",
        "SMOOTHING = 0.2",
        "loss_fn: argument 1, global `SMOOTHING` is 0.2 here",
    ),
    "source in a weighted loss": Change(
        "loss_fn=phalanx.weighted(first, second)", "F.l1_loss(o", "F.mse_loss(o", "loss_fn: argument 1 is another"
    ),
    "options of a loss": Change(
        "loss_fn=nn.HuberLoss()", after="loss_fn=nn.HuberLoss(delta=2.0)", told="`delta` is 2.0 here"
    ),
    "code of a model": Change("", "self.body(x) *", "self.body(x) /", "make_model: global `Net`, `forward` is another"),
    "default of a model": Change("", "hidden=8", "hidden=9", "`Net`, `__init__`, default `hidden` is 9 here"),
    "activation of a model's code": Change(
        "", "act=nn.ReLU):\n        super", "act=nn.Tanh):\n        super", "`act` is t"
    ),
    "arguments of the program": Change(
        "make_model=make_by_arguments", "hidden=8", "hidden=9", "`ARGS.hidden` is 9 here"
    ),
    "dict in a partial": Change(
        "make_model=functools.partial(make_of, {'hidden': 16})",
        after="make_model=functools.partial(make_of, {'hidden': 32})",
        told=r"make_model: argument 0, \['hidden'\] is 32 here, and 16 there",
    ),
    "activation": Change(
        "make_model=made()", after="make_model=made(nn.Tanh)", told="`1` is a Tanh here, and a ReLU there"
    ),
    "dropout": Change("make_model=made()", after="make_model=made(dropout=0.5)", told="`2`, attribute `p` is 0.5 here"),
    "weights": Change(
        "make_model=made()", after="make_model=made(seed=1)", told="make_model: `0`, `weight` is another fl"
    ),
    "buffer": Change(
        "make_model=made()", after="make_model=made(scale=2.0)", told=r"make_model: `scale` is float32\[\] 2.0 h"
    ),
    "mode of a module": Change(
        "make_model=made()", after="make_model=made().eval()", told="attribute `training` is False here, and True"
    ),
    "frozen parameter": Change(
        "make_model=made()", after="make_model=made().requires_grad_(False)", told="here, and float32.* with a gradient"
    ),
    "columns": Change("", "arange(48.0)", "arange(1, 49.0)", r"data: item 0 is another float32\[12, 4\]"),
    "name of a column": Change(
        "data={'x': X, 'y': Y}", after="data={'input': X, 'y': Y}", told=r"data: \['input'\] is float"
    ),
    "order of rows": Change("", "X, Y = torch.arange(48.0)", "X, Y = torch.arange(47.0, -1, -1)", "data: item 0"),
    "list of samples": Change(
        "data=[(x, y) for x, y in zip(X, Y)]", "arange(48.0)", "arange(1, 49.0)", "data: item 0, i"
    ),
    "long list of samples": Change(
        "data=[(x, y) for x, y in zip(X, Y)] * 5", "/ 48,", "/ 49,", "data is another list of 60"
    ),
    "list of objects": Change(
        "data=[Sample(x, y) for x, y in zip(X, Y)]", "/ 48,", "/ 49,", "data: item 0, attribute `x"
    ),
    "array of a dataset": Change("data=Items(X, Y)", "/ 48,", "/ 49,", "data: attribute `_x` is another float32"),
    "code of a dataset": Change(
        "data=Items(X, Y)", "_x[i] * 1.0", "_x[i] * 2.0", "data: class, `__getitem__` is another"
    ),
    "transform of a dataset": Change(
        "data=Items(X, Y, centred)", "[0.25]", "[0.5]", r"global `MEANS\[0\]|global `MEANS`"
    ),
    "wrapped dataset": Change(
        "data=torch.utils.data.Subset(Items(X, Y), [0, 1, 2, 3])",
        "/ 48,",
        "/ 49,",
        "data: attribute `dataset`, attribu",
    ),
    "indices of a subset": Change(
        "data=torch.utils.data.Subset(Items(X, Y), [0, 1, 2, 4])",
        after="data=torch.utils.data.Subset(Items(X, Y), [0, 1, 2, 8])",
        told="data: attribute `indices`, item 3 is 8",
    ),
    "global that collate reads": Change(
        "collate_fn=collate", "rate=0.5)", "rate=0.6)", "collate_fn: global `ARGS.rate` is"
    ),
    "code of forward": Change(
        "forward_fn=lambda m, b: m(b[0])", after="forward_fn=lambda m, b: m(b[0]) * 2", told="forward_fn is a"
    ),
    "rate of an optimizer": Change(
        "optimizer=functools.partial(torch.optim.SGD, lr=1.0)",
        after="optimizer=functools.partial(torch.optim.SGD, lr=2.0)",
        told="optimizer: argument `lr` is 2.0 here, and 1.0",
    ),
    "class of an optimizer": Change(
        "optimizer=functools.partial(torch.optim.SGD, lr=1)",
        after="optimizer=functools.partial(torch.optim.Adam, lr=1)",
        told="optimizer is partial of Adam here, and partial of S",
    ),
    "global that an optimizer reads": Change(
        "optimizer=make_optimizer", '"scale": 1.0', '"scale": 1.1', r"optimizer: global `TABLE\['scale'\]` is 1.1 here"
    ),
    "function of a schedule": Change(
        "scheduler=make_schedule", "0.9 **", "0.8 **", "scheduler: global `decay` is another"
    ),
    "lambda of a schedule": Change(
        "scheduler=functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda s: SMOOTHING ** s)",
        "SMOOTHING = 0.1",
        "SMOOTHING = 0.2",
        "scheduler: argument `lr_lambda`, global `SMOOTHING` is 0.2 here, and 0.1 th",
    ),
    "what the user sets": Change(
        "loss_fn=object_loss", after="loss_fn=(object_loss.set_scale(0.7), object_loss)[1]", told="`scale` is 0.7 here"
    ),
    "attribute of a function": Change(
        "loss_fn=plain_loss", after="loss_fn=(setattr(plain_loss, 'scale', 2), plain_loss)[1]", told="`scale` is 2 here"
    ),
    "order of a dict": Change(
        "loss_fn=functools.partial(default_loss, {'a': 1, 'b': 2})",
        told="argument 0",
        after="loss_fn=functools.partial(default_loss, {'b': 2, 'a': 1})",
    ),
    "number in a deep container": Change(
        "loss_fn=functools.partial(default_loss, [{'a': ({1}, [2, b'c'])}])",
        told="item 1, item 0 is 3 here, and 2",
        after="loss_fn=functools.partial(default_loss, [{'a': ({1}, [3, b'c'])}])",
    ),
    "item of a long list": Change(
        "loss_fn=functools.partial(default_loss, list(range(99)))",
        told="argument 0 is another list of 99",
        after="loss_fn=functools.partial(default_loss, [*range(98), 0])",
    ),
    "one of a long list of objects": Change(
        "data=[Sample(X[0], n) for n in range(60)]",
        after="data=[Sample(X[0], n % 59) for n in range(60)]",
        told="data is another list of 60|data: item",
    ),
    "one of objects that were equal": Change(
        "loss_fn=functools.partial(default_loss, [wrapped(0, 1), wrapped(0, 1)])",
        after="loss_fn=functools.partial(default_loss, [wrapped(0, 1), wrapped(0, 2)])",
        told="argument 0, item 1, closure variable `alpha` is 2 here, and 1 there",
    ),
    "code without source": Change(
        "loss_fn=lambda o, t: (o - t).mean()",
        after="loss_fn=lambda o, t: (t - o).mean()",
        told="loss_fn is another function <lambda>",
    ),
    "hook of a module": Change(
        "make_model=made()",
        after="make_model=(lambda m: (m.register_forward_hook(print), m)[1])(made())",
        told="make_model: `_forward_hooks`",
    ),
    "seed": Change("seed=1", after="seed=2", told="seed is 2 here, and 1 there"),
}


@pytest.mark.cases(20)
@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_another_recipe_is_told_from_it(make, name):
    """What differs is refused by the name of the field and the path to it; the same made again is the same."""
    found, same = REFUSED[name].compared(make)
    assert re.search(REFUSED[name].told, "; ".join(found.differs)), found.differs
    assert found.doubts == []
    assert same == Comparison()


ACCEPTED = {
    "nothing": Change(""),
    "comment": Change("", "# the mean\n    return", "# the mean,\n    # halved\n    return"),
    "no comment": Change("", "    # the mean\n", ""),
    "comment behind": Change("", "* (1 - SMOOTHING)\n", "* (1 - SMOOTHING)  # smoothed\n"),
    "docstring": Change("loss_fn=typed_loss", "'''The mean.'''", "'''The mean of all.'''"),
    "no docstring": Change("loss_fn=typed_loss", "    '''The mean.'''\n", ""),
    "inner docstring": Change("loss_fn=typed_loss", "        '''Halved.'''\n", ""),
    "docstring of a class": Change("", "    rate = 0.5\n    def", "    '''A net.'''\n    rate = 0.5\n    def"),
    "annotation": Change("loss_fn=typed_loss", "typed_loss(output: torch.Tensor, ", "typed_loss(output, "),
    "returns": Change("loss_fn=typed_loss", "target: torch.Tensor) -> torch.Tensor:", "target: torch.Tensor):"),
    "inner annotation": Change("loss_fn=typed_loss", "inner(x: torch.Tensor", "inner(x"),
    "annotated name": Change("loss_fn=typed_loss", "total: torch.Tensor =", "total ="),
    "future annotations": Change("loss_fn=typed_loss", "\nimport c", "\nfrom __future__ import annotations\nimport c"),
    "annotation of a field": Change(
        "loss_fn=functools.partial(options_loss, Options())", "rate: float = 0.5", "rate: object = 0.5"
    ),
    "lines above": Change("", "SMOOTHING", "\n\n\nOTHER = 1\n\nSMOOTHING"),
    "functions above": Change("loss_fn=enclosed_loss", "# Losses", "def another():\n    return 1\n# Losses"),
    "broken line": Change("", "loss * (1 - SMOOTHING)", "(\n        loss\n        * (1 - SMOOTHING)\n    )"),
    "pass": Change("", "    # the mean\n", "    pass\n"),
    "order of imports": Change(
        "", "import numpy, torch\nfrom torch import nn", "from torch import nn\nimport torch, numpy"
    ),
    "unused import": Change("", "import numpy", "import json\nimport numpy"),
    "unread global": Change("loss_fn=helped_loss", helpers=("UNUSED = 1", "UNUSED = 2")),
    "unread item": Change("loss_fn=table_loss, optimizer=make_optimizer", '"runs/a"', '"runs/b"'),
    "unread argument of the program": Change("make_model=make_by_arguments", "epochs=3", "epochs=30"),
    "order of a set": Change("loss_fn=named_loss", '{"a", "b", "c"}', '{"c", "b", "a"}'),
    "the other lambda of a line": Change("loss_fn=first", "F.l1_loss(o, t) * 3", "F.l1_loss(o, t) * 4"),
    "the lambda before it": Change(
        "loss_fn=second", "F.mse_loss(output, target) * 2", "F.mse_loss(output, target) * 44"
    ),
    "name of a function": Change(
        "loss_fn=default_loss", "def default_loss(", "def mean_loss(", after="loss_fn=mean_loss"
    ),
    "another function": Change("loss_fn=circular_loss", "loss * (1 - SMOOTHING)", "loss"),
    "more steps": Change("steps=2", after="steps=5"),
    "epochs": Change("", after="steps=None, epochs=5"),
    "numpy for torch": Change("", after="data=(X.numpy(), Y.numpy())"),
    "copies": Change("data=(X, Y)", after="data=(X.clone(), Y.clone())"),
    "copies of objects": Change(
        "loss_fn=functools.partial(default_loss, [Slots(1)] * 2)",
        after="loss_fn=functools.partial(default_loss, [Slots(1), Slots(1)])",
    ),
    "copies of functions": Change(
        "loss_fn=functools.partial(default_loss, [wrapped(0, 1)] * 2)",
        after="loss_fn=functools.partial(default_loss, [wrapped(0, 1), wrapped(0, 1)])",
    ),
    "order of named arguments": Change(
        "loss_fn=functools.partial(default_loss, power=1, scale=2)",
        after="loss_fn=functools.partial(default_loss, scale=2, power=1)",
    ),
    "used cache": Change("loss_fn=cached_loss", after="loss_fn=(factor(1), factor(2), cached_loss)[2]"),
    "used property": Change("loss_fn=object_loss", after="loss_fn=(object_loss.expensive, object_loss)[1]"),
    "model that was copied": Change("make_model=made()", after="make_model=__import__('copy').deepcopy(made())"),
    "number of hooks": Change(
        "make_model=(lambda m: (m.register_forward_hook(print), m)[1])(made())",
        after="make_model=[(lambda m: (m.register_forward_hook(print), m)[1])(made()) for _ in range(3)][2]",
    ),
}


@pytest.mark.cases(12)
@pytest.mark.parametrize("name", ACCEPTED)
def test_the_same_recipe_goes_on_without_a_word(make, name):
    """What does not decide the answer is neither refused nor told."""
    found, _ = ACCEPTED[name].compared(make)
    assert found == Comparison()


TOLD = {
    "counter of a loss": Change(
        "loss_fn=object_loss",
        after="loss_fn=(object_loss(X, X), object_loss)[1]",
        told="`_seen` changed.*`calls` changed",
    ),
    "what a bound method notes": Change(
        "loss_fn=object_loss.bound",
        after="loss_fn=(object_loss.bound(X, X), object_loss.bound)[1]",
        told="`noted` chan",
    ),
    "global counter": Change(
        "loss_fn=counting_loss", after="loss_fn=(counting_loss(X, X), counting_loss)[1]", told="`COUNT` changed"
    ),
    "cache of a dataset": Change(
        "data=Items(X, Y)", after="data=(lambda d: (d[0], d)[1])(Items(X, Y))", told="data: attribute `cache` changed"
    ),
    "generator of a dataset": Change(
        "data=Items(X, Y)", after="data=(lambda d: (d.rng.random(), d)[1])(Items(X, Y))", told="`rng`, state changed"
    ),
    "iterator": Change(
        "loss_fn=functools.partial(default_loss, itertools.count())",
        told="argument 0, arguments changed",
        after="loss_fn=functools.partial(default_loss, itertools.count(5))",
    ),
    "what cannot be seen": Change(
        "loss_fn=functools.partial(default_loss, __import__('threading').Lock())",
        told="loss_fn: argument 0 is a lock, whose contents are not compared",
    ),
    "module as a whole": Change(
        "loss_fn=functools.partial(default_loss, helpers)",
        told="argument 0 is the module helpers_of_recipes as a whole",
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_changes_in_use_or_cannot_be_seen_is_told(make, name):
    """It is no other recipe, and a warning names it."""
    found, _ = TOLD[name].compared(make)
    assert found.differs == []
    assert re.search(TOLD[name].told, "; ".join(found.doubts)), found.doubts


def test_another_version_of_a_package_is_told(make):
    """Installed code goes by name; a snapshot of another version is no other recipe, and a warning names both."""
    recipe = recipe_of(make(), "loss_fn=nn.MSELoss()")
    found = written(recipe)
    assert found["packages"]["torch"] == torch.__version__
    found["packages"]["torch"] = "1.0"
    assert between(recipe, found) == Comparison([], [f"torch is {torch.__version__} here, and 1.0 there"])


SEEDED = """
import json, sys
sys.path[:0] = [sys.argv[1]]
if sys.argv[2] == "1":
    import helpers_of_recipes, json, decimal
from importlib import util
from tests.state import changes
spec = util.spec_from_file_location("other", sys.argv[3])
module = util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps([changes.written(changes.recipe_of(module, given)) for given in json.loads(sys.argv[4])]))
"""


@pytest.mark.long
def test_processes_agree(make, tmp_path):
    """Another process, hash seed, folder, working directory, order of imports: the same fingerprints to the letter."""
    given = [
        "loss_fn=named_loss, data=Items(X, Y, centred), collate_fn=collate", "loss_fn=late_loss, make_model=made()",
        "loss_fn=functools.partial(mode_loss, Mode.MEAN, Pair(0, 1)), scheduler=make_schedule",
        "loss_fn=functools.partial(default_loss, [{Mode.MEAN, Mode.MEDIAN}, KINDS, frozenset(map(Slots, KINDS))])",
        "loss_fn=circular_loss, optimizer=functools.partial(options_loss, Options())", "loss_fn=decorated_loss",
    ]  # fmt: skip
    make()
    [place] = tmp_path.iterdir()
    (place / "helpers.py").rename(place / "helpers_of_recipes.py")
    (tmp_path / "elsewhere").mkdir()
    found = []
    for seed in ("1", "2"):
        there = tmp_path / "elsewhere" if seed == "2" else place
        if seed == "2":
            [(there / path.name).write_bytes(path.read_bytes()) for path in place.glob("*.py")]
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", SEEDED, str(there), seed, str(there / "recipe.py"), json.dumps(given)]
        done = subprocess.run(command, cwd=there, env=environment, check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert len({json.dumps(one) for one in found[0]}) == len(given)
