"""Messages about models, losses and optimizers name the cause and a way out that works."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
SGD = functools.partial(torch.optim.SGD, lr=0.1)
ENGINES = {"inline": {"engine": "inline"}, "workers": {"workers": 2, "engine": "processes"}}
anywhere = pytest.mark.parametrize("engine", ["inline", pytest.param("workers", marks=pytest.mark.long)])


def linear():
    return nn.Linear(4, 2)


def recipe(make_model=linear, data=(X, Y), **changes):
    given = {"replicas": 2, "batch_size": 8, "steps": 6, "optimizer": SGD}
    return phalanx.Recipe(make_model, data, changes.pop("loss_fn", F.cross_entropy), **(given | changes))


def observed():
    """A model as torch prepares it for quantization: observers have no size before the first forward pass."""
    quantization = pytest.importorskip("torch.ao.quantization")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train())


@pytest.mark.longest
@pytest.mark.filterwarnings("ignore")
@anywhere
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_buffer_that_forward_resizes(replicas, engine):
    """It is refused by name, the error has the state before the step, and a model that has met a batch is taken."""
    with pytest.raises(
        phalanx.UsageError, match=r"buffer '.*' went from torch.float32 \(1,\) to .* in forward"
    ) as told:
        recipe(observed, replicas=replicas).train(**ENGINES[engine])
    assert told.value.result.steps == 0

    def warmed():
        model = observed()
        model(X)
        return model

    recipe(warmed, replicas=replicas).train(**ENGINES[engine])


class Small(nn.Module):
    """A statistic in a float of a byte, which torch cannot add."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(2).to(torch.float8_e4m3fn))

    def forward(self, x):
        output = self.last(x)
        self.seen.copy_((self.seen.float() * 0.5 + output.detach().mean(0)).to(self.seen.dtype))
        return output


@pytest.mark.parametrize("options", [*ENGINES.values(), {"devices": ["cpu"] * 2}])
def test_a_buffer_of_eight_bits(options):
    """The first replica's is kept, as of other numbers that have no mean, in every engine."""
    result = recipe(Small).train(**options)
    assert result.digest == recipe(Small).train(engine="inline").digest
    assert result.model.seen.float().abs().sum() > 0


@anywhere
def test_classes_in_32_bits(engine):
    """The way is in the error."""
    with pytest.raises(phalanx.UsageError, match=r"classes are numbered in int64.*\.long\(\)"):
        recipe(data=(X, Y.int())).train(**ENGINES[engine])
    recipe(data=(X, Y.int().long())).train(**ENGINES[engine])


class Sharp(torch.optim.Optimizer):
    """As implementations of SAM are: the closure is asked for in the step."""

    def __init__(self, named, lr=0.1):
        super().__init__(named, {"lr": lr})

    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


@anywhere
def test_an_optimizer_that_needs_a_closure(engine):
    """It is told as LBFGS is."""
    with pytest.raises(phalanx.UsageError, match="Sharp, which evaluates the loss several times a step"):
        recipe(optimizer=Sharp).train(**ENGINES[engine])


class Typed(torch.optim.SGD):
    """Keeps its momentum in a dtype that is an option."""

    def __init__(self, named, lr=0.1, dtype=torch.bfloat16):
        super().__init__(named, lr)
        for group in self.param_groups:
            group["momentum_dtype"] = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                before = state.setdefault("momentum", torch.zeros_like(parameter, dtype=group["momentum_dtype"]))
                state["momentum"] = (before.float() * 0.9 + parameter.grad).to(group["momentum_dtype"])
                parameter -= group["lr"] * state["momentum"].float()


@pytest.mark.filterwarnings("ignore:the optimizer is not one of torch's own")
@anywhere
def test_an_option_that_is_a_dtype(tmp_path, engine):
    """Snapshots hold it, and a run that goes on from one has the bits of a whole one; another dtype has others."""
    whole = recipe(optimizer=Typed).train(**ENGINES[engine]).digest
    with recipe(optimizer=Typed).start(run_dir=tmp_path, snapshot_every=2, **ENGINES[engine]) as run:
        for report in run:
            if report.step == 3:
                break
    assert recipe(optimizer=Typed).train(run_dir=tmp_path, **ENGINES[engine]).digest == whole
    wide = functools.partial(Typed, dtype=torch.float32)
    assert recipe(optimizer=wide).train(engine="inline").digest != whole


@anywhere
@pytest.mark.parametrize("collate", [None, torch.utils.data.default_collate])
def test_a_sample_that_is_none(engine, collate):
    """The error names it."""
    samples = [None if number == 11 else (X[number], Y[number]) for number in range(32)]
    with pytest.raises(phalanx.WorkerError, match="while phalanx was reading sample 11, it was given None"):
        recipe(data=samples, collate_fn=collate).train(**ENGINES[engine])


def test_none_is_fine_where_collate_fn_leaves_it_out():
    """A common idiom: samples that cannot be read are None, and the collate_fn drops them."""
    samples = [None if number % 8 == 3 else (X[number], Y[number]) for number in range(32)]

    def present(given):
        return torch.utils.data.default_collate([sample for sample in given if sample is not None])

    recipe(data=samples, collate_fn=present).train(engine="inline")


class TestJax:
    """Trees and optimizers of libraries."""

    @pytest.fixture(autouse=True)
    def needed(self):
        self.jax, self.optax = pytest.importorskip("jax"), pytest.importorskip("optax")

    def recipe(self, make_model, optimizer):
        def loss(output, target):
            return self.optax.softmax_cross_entropy_with_integer_labels(output, target).mean()

        return phalanx.Recipe(
            make_model, (np.asarray(X), np.asarray(Y)), loss, forward_fn=lambda params, x: x @ params["w"],
            replicas=2, batch_size=8, steps=4, optimizer=optimizer,
        )  # fmt: skip

    def params(self, key):
        return {"w": self.jax.random.normal(key, (4, 2))}

    def test_a_tree_with_functions(self):
        """As modules of equinox have them: nothing is to be made a float."""
        made = self.recipe(lambda key: {**self.params(key), "act": self.jax.nn.relu}, self.optax.sgd(0.1))
        with pytest.raises(phalanx.UsageError, match=r"'act' is a .* nnx\.split\(model, .* eqx\.filter\(model"):
            made.train(engine="inline")

    @pytest.mark.longest
    @pytest.mark.parametrize("given", [lambda steps: steps, lambda steps: lambda: steps])
    def test_accumulating_optimizers(self, given):
        """optax.MultiSteps is told how to become what is taken, and that works."""
        steps = self.optax.MultiSteps(self.optax.sgd(0.1), every_k_schedule=2)
        with pytest.raises(phalanx.UsageError, match=r"optax\.MultiSteps\(\.\.\.\)\.gradient_transformation\(\)"):
            self.recipe(self.params, given(steps)).train(engine="inline")
        wanted, result = (
            self.recipe(self.params, given(steps.gradient_transformation())).train(**options)
            for options in ENGINES.values()
        )
        assert result.digest == wanted.digest
