"""Models that torch.compile made: kernels follow from the sizes at hand, whatever a process saw before."""

import functools
import shutil
import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.frameworks.torch import environment
from tests.sampling import sample

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 50


def data(rows=ROWS):
    x = torch.linspace(-1, 1, rows * 4).reshape(rows, 4).sin()
    return x, x.sum(1, keepdim=True)


def seeing(graph, inputs):
    """A backend whose code for symbolic sizes computes something else than that for plain ones."""
    symbolic = any(isinstance(size, torch.SymInt) for item in inputs if torch.is_tensor(item) for size in item.shape)
    symbolic = symbolic or any(isinstance(item, torch.SymInt) for item in inputs)

    def run(*arguments):
        found = graph(*arguments)
        return [item * 1.5 for item in found] if symbolic else found

    return run


class Lazy(nn.Module):
    """Compiles its body when it is first called."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.body = None

    def forward(self, x):
        if self.body is None:
            self.body = torch.compile(lambda x: self.linear(x), backend=seeing)
        return self.body(x)


def made(**options):
    torch._dynamo.reset()
    return torch.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), backend=seeing, **options)


def recipe(make_model=made, **changes):
    return phalanx.Recipe(make_model, data(), F.mse_loss, **{"replicas": 3, "batch_size": ROWS, "steps": 3} | changes)


def squared(output, target):
    return (output - target).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("make_model", sample("compiled models", [made, Lazy], 1))
def test_uneven_shares(make_model):
    """With shares of 17, 17 and 16, workers that see one size compute what a process that sees both does."""
    wanted = recipe(make_model).train(engine="inline")
    assert recipe(make_model).train(engine="processes", workers=3).digest == wanted.digest
    assert recipe(make_model, seed=1).train(engine="inline").digest != wanted.digest


@pytest.mark.long
def test_a_resumed_run(tmp_path):
    """A resume that begins with the short batch computes what the uninterrupted run did after a long one."""
    give = functools.partial(recipe, replicas=1, batch_size=20)
    wanted = give(steps=5).train(engine="inline").digest
    give(steps=2).train(engine="inline", run_dir=tmp_path)
    assert give(steps=5).train(engine="inline", run_dir=tmp_path).digest == wanted


@pytest.mark.long
def test_chunks_of_an_evaluation():
    """Chunks of an evaluation, the last one short, are measured alike by one process and by two."""
    found = []
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": 2}):
        with recipe(replicas=2).start(**options) as run:
            found.append(run.evaluate(squared, data(20), batch_size=8))
    assert found[0] == found[1]


@pytest.mark.long
def test_settings_of_the_compiler_are_the_callers_again():
    """Inside a run sizes are never made symbolic; afterwards the compiler's settings are as before."""
    import torch._dynamo.config as config

    def settings():
        names = [*environment.STATIC, *environment.LIMITS, *environment.OLDER.values()]
        return {name: getattr(config, name) for name in names if hasattr(config, name)}

    before = settings()
    with recipe().start(engine="inline") as run:
        next(run)
        with run._engine.environment:
            assert not config.automatic_dynamic_shapes
        assert settings() == before


@pytest.mark.parametrize("options", [{"engine": "inline"}, {"engine": "processes", "workers": 1}])
def test_symbolic_sizes_are_refused(options):
    """A model compiled with dynamic=True is refused, with the way out: its kernels follow from the first size."""
    with pytest.raises(phalanx.UsageError, match=r"make_model was compiled with dynamic=True.*leave dynamic out"):
        recipe(functools.partial(made, dynamic=True)).train(**options)


class Counting(nn.Module):
    """Is compiled anew for each number of calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.calls = 0
        self.body = torch.compile(self.scaled, backend=seeing)

    def scaled(self, x, calls):
        return self.linear(x) * (1 + calls)

    def forward(self, x):
        self.calls += 1
        return self.body(x, self.calls)


@pytest.mark.long
@pytest.mark.usefixtures("computed_once")
def test_the_limit_of_recompilations_is_an_error(monkeypatch):
    """Code that is compiled without end ends the run, instead of going on uncompiled."""
    monkeypatch.setattr(environment, "LIMITS", {"recompile_limit": 1})
    torch._dynamo.reset()
    with pytest.raises(phalanx.UsageError, match="limit of recompilations"):
        recipe(Counting, steps=20, replicas=1).train(engine="inline")


def inductor():
    torch._dynamo.reset()
    return torch.compile(nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1)))


@pytest.mark.campaign
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # of torch's compiler, when imported
def test_real_kernels():
    """Kernels that inductor makes on this machine end in one digest inline and with three workers."""
    wanted = recipe(inductor).train(engine="inline").digest
    assert recipe(inductor).train(engine="processes", workers=3).digest == wanted
