"""Models, optimizers and data that do what nobody expects: either the bits stay right, or the call is refused."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (24,), generator=torch.Generator().manual_seed(1))


def recipe(make_model, **changes):
    arguments = {"data": (X, Y), "loss_fn": F.cross_entropy, "replicas": 3, "batch_size": 8, "steps": 4}
    return phalanx.Recipe(make_model, **(arguments | changes))


class Net(nn.Module):
    """The smallest network."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)


class AliasedBuffer(Net):
    """Registers a view of a parameter as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", self.linear.weight.detach())


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_buffer_in_the_memory_of_a_parameter_does_not_undo_training(replicas):
    """The weights end where they would without the buffer."""
    aliased, plain = (
        recipe(model, replicas=replicas).train().params["linear.weight"] for model in (AliasedBuffer, Net)
    )
    assert torch.equal(aliased, plain)


class Drawing(list):
    """A list whose samples are augmented when read."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(4), y


def test_a_list_that_draws_is_seeded_like_a_dataset():
    """Reading it runs user code, so the answer does not depend on the caller's generator."""
    made = recipe(Net, data=Drawing(zip(X, Y, strict=True)))
    torch.manual_seed(1)
    first = made.train().digest
    torch.manual_seed(2)
    assert made.train().digest == first


def test_an_optimizer_factory_that_draws_is_seeded_for_a_ready_model_too():
    """A model that is passed in is copied after seeding, as a factory is called after it."""

    def noisy(named):
        with torch.no_grad():
            for _, parameter in named:
                parameter.add_(torch.randn_like(parameter))
        return torch.optim.SGD(named, lr=0.1)

    made = recipe(Net(), optimizer=noisy)
    assert made.train().digest == made.train().digest


class Merging(Net):
    """Does more than set a flag when its mode changes, as adapters that merge do."""

    def train(self, mode=True):
        if not mode:
            with torch.no_grad():
                self.linear.weight.mul_(2)
        return super().train(mode)


def test_an_evaluation_leaves_models_that_override_train_alone():
    """Modes are set and restored by attribute; nothing else happens to the model."""
    with recipe(Merging).start() as run:
        before = run.result().digest
        run.evaluate(F.cross_entropy, (X, Y))
        assert run.result().digest == before


class Writing(Net):
    """Writes a parameter in forward, but only when evaluated."""

    def forward(self, x):
        if not self.training:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        return super().forward(x)


def test_an_evaluation_that_writes_parameters_is_refused():
    """The next step would start from other weights: the error names the parameter."""
    with recipe(Writing).start() as run, pytest.raises(phalanx.UsageError, match=r"linear\.weight.*in an evaluation"):
        run.evaluate(F.cross_entropy, (X, Y))


def test_an_optimizer_in_backward_is_refused():
    """Hooks that update weights while gradients are computed would feed one replica's update to the next."""

    def make_model():
        net = Net()
        optimizer = torch.optim.SGD([net.linear.weight], lr=0.1)

        def apply(_):
            optimizer.step()
            optimizer.zero_grad()

        net.linear.weight.register_post_accumulate_grad_hook(apply)
        return net

    with pytest.raises(phalanx.UsageError, match=r"linear\.weight.*hook"):
        recipe(make_model).train()


class Late(Net):
    """Registers a buffer on its first forward."""

    def forward(self, x):
        if "count" not in self._buffers:
            self.register_buffer("count", torch.zeros(()))
        self.count += 1
        return super().forward(x)


def test_a_buffer_that_appears_in_forward_is_refused():
    """It would pass from replica to replica; the error names it and where to register it."""
    with pytest.raises(phalanx.UsageError, match=r"'count' appeared in forward.*__init__"):
        recipe(Late).train()


class HalfShared(Net):
    """Shares a buffer between two modules, and assigns it in one of them only."""

    def __init__(self):
        super().__init__()
        self.other = nn.Module()
        self.register_buffer("count", torch.zeros(()))
        self.other.register_buffer("count", self.count)

    def forward(self, x):
        self.count = self.count + 1
        return super().forward(x)


def test_a_shared_buffer_assigned_in_one_module_is_refused():
    """After it the two are no longer one, and no state could say so."""
    with pytest.raises(phalanx.UsageError, match=r"shared by modules"):
        recipe(HalfShared).train()


def test_an_expanded_constant_buffer_is_fine():
    """A buffer that cannot be written, because its elements share memory, need not be."""

    class Expanded(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(1).expand(3))

        def forward(self, x):
            return super().forward(x) * self.scale

    assert torch.equal(recipe(Expanded).train().params["linear.weight"], recipe(Net).train().params["linear.weight"])


class Langevin(torch.optim.Optimizer):
    """SGD with noise: draws random numbers in its step."""

    def __init__(self, named, lr=0.1):
        super().__init__(named, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad + torch.randn_like(parameter) * 0.01, alpha=-group["lr"])


def test_an_optimizer_that_draws_has_a_key_of_its_own():
    """A loop written by hand follows it with plan.seeded_update(step); without that it ends elsewhere."""
    made = recipe(Net, replicas=1, optimizer=Langevin)

    def by_hand(seeded):
        torch.manual_seed(0)
        model = Net()
        optimizer = Langevin(list(model.named_parameters()))
        for step in range(4):
            indices = made.plan.indices(step)
            with made.plan.seeded(step, 0):
                optimizer.zero_grad()
                F.cross_entropy(model(X[indices]), Y[indices]).backward()
            if seeded:
                with made.plan.seeded_update(step):
                    optimizer.step()
            else:
                optimizer.step()
        return phalanx.digest(model, optimizer, 4)

    assert made.train().digest == by_hand(seeded=True)
    assert made.train().digest != by_hand(seeded=False)


def one_model():
    net = Net()
    return lambda: net


class Same(Net):
    """Copies of it are itself."""

    def __deepcopy__(self, memo):
        return self


class Learnt(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.cross_entropy(output * self.scale, target)


def trained_twice(made):
    made.train()
    made.train()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: trained_twice(recipe(one_model())), ["make_model", "returned before", "make_model=model"]),
        (lambda: recipe(Same()).train(), ["make_model", "Same", "not independent"]),
        (lambda: recipe(Net, loss_fn=Learnt()).train(), ["loss_fn", "Learnt", "would not be trained"]),
        (lambda: recipe(Net, loss_fn=nn.CrossEntropyLoss(reduction="sum")), ["loss_fn", "sum", "reduction='mean'"]),
        (
            lambda: recipe(Net, loss_fn=functools.partial(F.cross_entropy, reduction="sum")),
            ["loss_fn", "sum", "reduction='mean'"],
        ),
        (
            lambda: recipe(Net, loss_fn=lambda o, t: (F.cross_entropy(o, t), o.sum())).train(),
            ["weight", "no part of the graph"],
        ),
    ],
)
def test_what_would_train_something_else_is_refused(call, words):
    """Models trained twice or in place, losses that learn or sum, logits taken for a weight: each has its message."""
    with pytest.raises(phalanx.UsageError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_tensor_learning_rate_is_the_recipe_s_own():
    """Schedulers write into a tensor lr; the recipe's tensor stays, so a second run starts where the first did."""
    lr = torch.tensor(0.1)
    made = recipe(
        Net,
        optimizer=functools.partial(torch.optim.SGD, lr=lr),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1),
    )
    assert made.train().digest == made.train().digest
    assert lr.item() == pytest.approx(0.1)


@pytest.mark.filterwarnings("ignore:the last batch of an epoch has")
def test_a_usage_error_in_the_middle_carries_the_state():
    """A last share of one sample, which BatchNorm cannot take, does not cost the steps before it."""
    made = recipe(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), data=(X[:19], Y[:19]), replicas=3, steps=9, seed=2
    )
    with pytest.raises(phalanx.UsageError, match=r"BatchNorm.*1 sample") as caught:
        made.train()
    assert caught.value.result.steps == 2
    with made.start() as run:
        run.step()
        run.step()
        assert caught.value.result.digest == run.result().digest


def test_a_conjugate_buffer_has_a_digest():
    """Lazily conjugated and negated tensors are resolved before their bytes are read."""

    class Conjugate(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 1j]).conj())

    made = recipe(Conjugate)
    assert made.train().digest == made.train().digest


def test_fields_of_records_are_columns():
    """Columns with odd strides are copied, as torch cannot hold them."""
    records = np.zeros(24, dtype=[("x", "f4", 4), ("flag", "i1"), ("y", "i8")])
    records["x"], records["y"] = X.numpy(), Y.numpy()
    assert recipe(Net, data=(records["x"], records["y"])).train().digest == recipe(Net).train().digest


class Labelled(np.ndarray):
    """An array whose single rows are asked for by labels, as a column of pandas is."""

    def __getitem__(self, key):
        if isinstance(key, int):
            raise KeyError(key)
        return super().__getitem__(key)


@pytest.mark.long
def test_a_column_with_labels():
    """Rows of a large column are looked at by position, when it is seen whether the data was changed."""
    x = np.random.default_rng(0).random((9000, 8), dtype=np.float32)
    y = np.arange(9000) % 2
    made = functools.partial(phalanx.Recipe, lambda: torch.nn.Linear(8, 2), loss_fn=F.cross_entropy, steps=3)
    assert made((x.view(Labelled), y)).train().digest == made((x, y)).train().digest
    assert made((x + 1, y)).train().digest != made((x, y)).train().digest


def test_a_list_of_columns_is_not_taken_for_samples():
    """[x, y] would be two samples that cannot be collated; the error shows the tuple."""
    with pytest.raises(phalanx.UsageError, match=r"list of 2 arrays.*pass a tuple: \(x, y\)"):
        recipe(Net, data=[X, Y])


def test_a_rate_that_is_not_finite_is_refused_before_it_does_harm():
    """One step with lr=nan would leave no weights to go back to."""
    with pytest.raises(phalanx.UsageError, match=r"lr=nan"):
        recipe(Net, optimizer=functools.partial(torch.optim.SGD, lr=float("nan"))).train()


def test_plans_take_numpy_integers():
    """plan.indices() gives numpy integers; seeding with them equals seeding with Python's."""
    plan = recipe(Net).plan

    def drawn(step, index):
        with plan.seeded_sample(step, index):
            sample = torch.rand(1).item()
        with plan.seeded(step, index), plan.seeded_update(step):
            return sample, torch.rand(1).item()

    assert drawn(np.int64(3), np.int64(2)) == drawn(3, 2)


def test_notes_say_which_call():
    """The user's exception says how phalanx called the model."""
    with pytest.raises(phalanx.WorkerError) as caught:
        recipe(Net, data={"image": X, "label": Y}).train()
    assert "pass forward_fn" in "".join(caught.value.__cause__.__notes__)


def test_shares_that_nothing_goes_into_are_warned_of():
    """Replicas without samples, and more parts than a share has samples, are told of once, at the caller's line."""
    wrong = [
        ({"batch_size": 3, "replicas": 4}, "batch_size is 3 and replicas is 4, so 1 of them never get a sample"),
        (
            {"batch_size": 8, "replicas": 2, "micro_batches": 5},
            "micro_batches is 5, but a share has at most 4 of the 8",
        ),
    ]
    for changes, words in wrong:
        with pytest.warns(UserWarning, match=words) as caught:
            made = recipe(Net, **changes)
        assert [item.filename for item in caught] == [__file__]
        assert made.train().digest == made.train(workers=2).digest
    recipe(Net, batch_size=4, replicas=4)
    recipe(Net, batch_size=8, replicas=2, micro_batches=4)


def test_a_warning_of_a_mean_shows_the_callers_line():
    """It is shown with the line that trains, not with one of phalanx's own, if it comes from a worker, too."""
    masked = torch.tensor([-100, 1, 0, 1])
    for options in ({"engine": "inline"}, {"workers": 2}):
        with pytest.warns(UserWarning, match="targets of -100") as caught:
            recipe(Net, data=(X[:4], masked), replicas=2, steps=1).train(**options)
        assert [item.filename for item in caught] == [__file__]
