"""Every form in which samples, models and losses may come gives the digest of the plainest one, and stays untouched."""

import functools
import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

import phalanx
from phalanx.definition.batches import BatchShares
from phalanx.frameworks.registry import open_framework

SAMPLES = 24
X = np.random.default_rng(0).standard_normal((SAMPLES, 3)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 2, SAMPLES)
TX, TY = torch.tensor(X), torch.tensor(Y)
Pair = namedtuple("Pair", ["x", "y"])


class Net(nn.Linear):
    """A linear layer with dropout on its input, so that the random keys matter too."""

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        return super().forward(F.dropout(x, 0.2, self.training))


def recipe(**changes):
    fields = {
        "make_model": Net,
        "data": (X, Y),
        "loss_fn": F.cross_entropy,
        "replicas": 4,
        "batch_size": 8,
        "steps": 5,
        "lr": 0.01,
    }
    return phalanx.Recipe(**{**fields, **changes})


def digest(**changes):
    return recipe(**changes).train().digest


@functools.cache
def reference():
    """The digest of the plainest recipe: two columns of numpy arrays."""
    return digest()


def read_only(array):
    copied = array.copy()
    copied.setflags(write=False)
    return copied


class Rows:
    """A map-style dataset of tuples."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return TX[index], int(Y[index])


def backwards():
    """The data in reverse order, behind a Subset that puts it right again."""
    return Subset(TensorDataset(TX.flip(0), TY.flip(0)), list(range(SAMPLES))[::-1])


BY_NAME = {"forward_fn": lambda model, batch: model(batch["x"]), "target_fn": lambda batch: batch["y"]}
NESTED = {"forward_fn": lambda model, batch: model(batch[0][0]), "target_fn": lambda batch: batch[1]["y"]}
BARE = {
    "forward_fn": lambda model, batch: model(batch[:, :3].contiguous()),
    "target_fn": lambda batch: batch[:, 3].long(),
}
FORMS = {
    "torch": ((TX, TY), {}),
    "mixed": ((X, TY), {}),
    "named-tuple": (Pair(X, Y), {}),
    "read-only": ((read_only(X), read_only(Y)), {}),
    "strided": ((np.asfortranarray(X), np.repeat(Y, 2)[::2]), {}),
    "int32-target": ((X, Y.astype(np.int32)), {"target_fn": lambda batch: batch[1].long()}),
    "dict": ({"x": X, "y": Y}, BY_NAME),
    "dict-torch": ({"x": TX, "y": TY}, BY_NAME),
    "ordered-dict": (OrderedDict(x=X, y=TY), BY_NAME),
    "nested": (((X,), {"y": Y}), NESTED),
    "nested-torch": (((TX,), {"y": TY}), NESTED),
    "bare-array": (np.hstack([X, Y[:, None]]).astype(np.float32), BARE),
    "bare-tensor": (torch.tensor(np.hstack([X, Y[:, None]]).astype(np.float32)), BARE),
    "tensor-dataset": (TensorDataset(TX, TY), {}),
    "subset": (backwards(), {}),
    "subset-of-rows": (Subset(Rows(), range(SAMPLES)), {}),
    "map-style": (Rows(), {}),
    "tuples": (list(zip(X, Y, strict=True)), {}),
    "tuples-torch": (list(zip(TX, TY, strict=True)), {}),
    "tuples-int": ([(x, int(y)) for x, y in zip(X, Y, strict=True)], {}),
    "lists": ([[x, int(y)] for x, y in zip(X, Y, strict=True)], {}),
    "named-tuples": ([Pair(x, int(y)) for x, y in zip(TX, Y, strict=True)], {}),
    "dicts": ([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], BY_NAME),
    "dicts-int": ([{"x": x, "y": int(y)} for x, y in zip(TX, Y, strict=True)], BY_NAME),
    "collate-columns": ((X, Y), {"collate_fn": default_collate}),
    "collate-list": (list(zip(X, Y, strict=True)), {"collate_fn": default_collate}),
}


@pytest.mark.parametrize("changes", [{}, {"batch_size": 11, "replicas": 5}], ids=["even", "ragged"])
@pytest.mark.parametrize("form", FORMS)
def test_equal_samples_in_any_form_give_equal_digests(form, changes):
    """However the same samples are packed, the run ends in the same bits, with shares of unequal size and none, too."""
    data, functions = FORMS[form]
    assert digest(data=data, **functions, **changes) == digest(**changes)


@pytest.mark.usefixtures("computed_once")
def test_a_custom_collate_fn_gets_lists_of_samples():
    """collate_fn is given the samples of one share in the plan's order, without a batch axis, columns or not."""
    seen = []

    def collate(samples):
        seen.append([int(index) for index, _, _ in samples])
        assert isinstance(samples, list)
        assert all(x.shape == (3,) for _, x, _ in samples)
        return default_collate([(x, y) for _, x, y in samples])

    numbers = np.arange(SAMPLES)
    made = recipe(data=(numbers, X, Y), collate_fn=collate)
    assert made.train().digest == reference()
    shares = [share.tolist() for t in range(5) for share in made.plan.shares(t)]
    assert seen == shares
    seen.clear()
    assert recipe(data=list(zip(numbers, X, Y, strict=True)), collate_fn=collate).train().digest == reference()
    assert seen == shares


def test_padding_in_collate_fn_works_on_samples_of_unequal_length():
    """A list of sequences of different lengths trains with a collate_fn that pads each share."""
    sequences = [np.ones((1 + index % 4, 3), dtype=np.float32) * index for index in range(SAMPLES)]

    def pad(samples):
        longest = max(len(sequence) for sequence, _ in samples)
        padded = torch.zeros(len(samples), longest, 3)
        for row, (sequence, _) in zip(padded, samples, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        return padded.sum(1), torch.tensor([label for _, label in samples])

    samples = list(zip(sequences, Y.tolist(), strict=True))
    sums = np.stack([sequence.sum(0) for sequence in sequences])
    assert digest(data=samples, collate_fn=pad) == digest(data=(sums, Y))


def test_python_numbers_become_tensors():
    """Samples of plain floats and ints are collated as torch does: float64 and int64."""
    changes = {
        "make_model": lambda: nn.Linear(1, 1).double(),
        "forward_fn": lambda model, batch: model(batch[0][:, None])[:, 0],
        "loss_fn": F.mse_loss,
    }
    floats = X[:, 0].tolist()
    ints = {"target_fn": lambda batch: batch[1].double()}
    doubles = np.asarray(floats)
    pairs = [(x, 2.0 * x) for x in floats]
    assert digest(data=pairs, **changes) == digest(data=(doubles, 2.0 * doubles), **changes)
    pairs = [(x, index) for index, x in enumerate(floats)]
    expected = digest(data=(doubles, np.arange(SAMPLES)), **changes, **ints)
    assert digest(data=pairs, **changes, **ints) == expected


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.uint8, np.int32, np.int64, np.bool_])
def test_columns_of_any_dtype_reach_forward_fn_as_they_are(dtype):
    """No dtype is changed: what the data has is what forward_fn sees, and it may convert it itself."""
    column = (np.abs(X) * 2).astype(dtype)
    seen = set()

    def forward(model, batch):
        seen.add(batch[0].dtype)
        return model(batch[0].float())

    assert digest(data=(column, Y), forward_fn=forward) == digest(data=(column.astype(np.float32), Y))
    assert seen == {torch.tensor(column).dtype}


def test_a_complex_column_is_a_column_too():
    """Complex arrays pass through like any other."""
    spectrum = (X + 1j * X).astype(np.complex64)
    assert digest(data=(spectrum, Y), forward_fn=lambda model, batch: model(batch[0].real.contiguous())) == reference()


def test_a_reversed_view_is_an_array_too():
    """Views with negative strides are ordinary numpy arrays to their owner."""
    assert digest(data=(X[::-1].copy()[::-1], Y)) == reference()


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_integers(integer):
    """Numbers that come out of numpy are taken as Python's."""
    numbers = {"replicas": 4, "batch_size": 8, "steps": 5, "seed": 0, "threads": 1}
    made = recipe(**{name: integer(value) for name, value in numbers.items()}, max_norm=np.float32(1e30))
    assert made.train(workers=integer(1)).digest == digest(max_norm=float(np.float32(1e30)))
    assert {type(getattr(made, name)) for name in numbers} == {int}


class Augmented(Rows):
    """Adds noise from all three global generators to each sample it reads."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(3) + torch.tensor(np.random.rand(3)).float() + random.random(), y


@pytest.mark.parametrize("batch_size", [8, None])
def test_a_dataset_that_draws_gets_its_noise_from_epoch_and_sample(batch_size):
    """Augmentation follows from (seed, epoch, sample index): the plan's seeded_sample gives the same noise."""
    made = recipe(data=Augmented(), batch_size=batch_size)
    with recipe(data=None, steps=None, batch_size=batch_size).start() as run:
        for t in range(made.steps):
            samples = []
            for index in made.plan.indices(t):
                with made.plan.seeded_sample(t, int(index)):
                    samples.append(Augmented()[index])
            run.step(samples)
        assert run.result().digest == made.train().digest


def test_more_replicas_than_samples_leave_the_rest_empty():
    """Replicas without a sample change nothing: the fold skips them."""
    plain = {"make_model": lambda: nn.Linear(3, 2), "batch_size": 24}
    assert digest(replicas=30, **plain) == digest(replicas=24, **plain)
    assert digest(replicas=64, **plain) == digest(replicas=24, **plain)


def test_one_sample_is_enough():
    """Data of a single sample trains, whatever the batch size and replicas."""
    assert digest(data=(X[:1], Y[:1])) == digest(data=[(X[0], Y[0])])


# One sample at a time


SINGLE_FORMS = {
    "torch": ((TX, TY), {}),
    "dict": ({"x": X, "y": Y}, BY_NAME),
    "nested": (((X,), {"y": Y}), NESTED),
    "tensor-dataset": (TensorDataset(TX, TY), {}),
    "tuples": (list(zip(TX, TY, strict=True)), {}),
    "numpy-tuples": (list(zip(X, Y, strict=True)), {}),
    "int-tuples": ([(x, int(y)) for x, y in zip(X, Y, strict=True)], {}),
    "read-only": (list(zip(read_only(X), read_only(Y), strict=True)), {}),
    "map-style": (Rows(), {}),
}


@pytest.mark.parametrize("form", SINGLE_FORMS)
def test_single_samples_in_any_form_give_equal_digests(form):
    """With batch_size=None, too, the packing does not matter where the default forward is used."""
    data, changes = SINGLE_FORMS[form]
    assert digest(data=data, batch_size=None, **changes) == digest(batch_size=None)


@pytest.mark.usefixtures("computed_once")
@pytest.mark.parametrize("form", ["columns", "dataset", "list"])
def test_batch_size_none_hands_over_samples_as_they_are(form):
    """One sample per replica per step, with no added axis, in the plan's order."""
    data = {"columns": (TX, TY), "dataset": TensorDataset(TX, TY), "list": list(zip(TX, TY, strict=True))}[form]
    seen = []

    def forward(model, sample):
        x, y = sample
        assert (x.shape, y.shape) == ((3,), ())
        seen.append(x.tolist())
        return model(x)

    made = recipe(data=data, batch_size=None, forward_fn=forward)
    result = made.train()
    assert seen == [X[index].tolist() for t in range(5) for index in made.plan.indices(t)]
    assert (result.samples, result.steps_per_epoch) == (20, 6)


@pytest.mark.parametrize("form", ["columns", "list"])
def test_batch_size_none_hands_over_dicts(form):
    """A dict sample keeps its keys and shapes; the default forward passes it as keyword arguments."""
    columns = {"x": TX, "y": TY}
    data = columns if form == "columns" else [{"x": x, "y": y} for x, y in zip(TX, TY, strict=True)]
    shapes = set()

    class Losing(Net):
        """Takes input and label, returns the loss."""

        def forward(self, x, y):
            shapes.add((tuple(x.shape), tuple(y.shape)))
            return F.cross_entropy(super().forward(x), y)

    assert digest(data=data, batch_size=None, make_model=Losing, loss_fn=None) == digest(batch_size=None)
    assert shapes == {((3,), ())}


def test_an_object_of_the_users_own_is_a_sample_too():
    """With batch_size=None a sample may be anything that forward_fn and target_fn understand."""

    @dataclass
    class Graph:
        nodes: Any
        label: Any

    graphs = [Graph(x, y) for x, y in zip(TX, TY, strict=True)]
    changes = {"forward_fn": lambda model, graph: model(graph.nodes), "target_fn": lambda graph: graph.label}
    assert digest(data=graphs, batch_size=None, **changes) == digest(batch_size=None)


# Where the loss comes from


@dataclass
class ModelOutput:
    """What models of Hugging Face return, in small."""

    loss: Any
    logits: Any


class Losing(Net):
    """Takes input and label by name and returns its loss, packed by ``pack(loss, logits)``."""

    def __init__(self, pack=lambda loss, logits: loss):
        super().__init__()
        self.pack = pack

    def forward(self, x, y):
        logits = super().forward(x)
        return self.pack(F.cross_entropy(logits, y), logits)


PACKED = {
    "bare": lambda loss, logits: loss,
    "weighted": lambda loss, logits: (loss, 1.0),
    "weighted-by-tensor": lambda loss, logits: (loss, torch.tensor(1)),
    "object": ModelOutput,
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "ordered-dict": lambda loss, logits: OrderedDict(logits=logits, loss=loss),
    "one-element": lambda loss, logits: loss.reshape(1),
}


@pytest.mark.parametrize("pack", PACKED)
def test_a_model_that_returns_its_loss_needs_no_loss_fn(pack):
    """With loss_fn=None the model returns the loss, (loss, weight), or something that carries it."""
    made = recipe(make_model=lambda: Losing(PACKED[pack]), data={"x": X, "y": Y}, loss_fn=None)
    assert made.train().digest == reference()


@pytest.mark.parametrize("pack", PACKED)
def test_a_forward_fn_that_returns_the_loss_needs_no_loss_fn(pack):
    """With loss_fn=None forward_fn may do the same."""

    def forward(model, batch):
        logits = model(batch[0])
        return PACKED[pack](F.cross_entropy(logits, batch[1]), logits)

    assert digest(loss_fn=None, forward_fn=forward) == reference()


def test_a_weight_of_the_share_size_is_what_the_plan_would_have_used():
    """Returning the number of samples as weight changes nothing where shares are equal, up to the division."""
    counted = phalanx.weighted(F.cross_entropy, lambda output, target: len(target))
    result, plain = recipe(loss_fn=counted).train(), recipe().train()
    for name, parameter in result.params.items():
        torch.testing.assert_close(parameter, plain.params[name])
    with_power_of_two = recipe(loss_fn=phalanx.weighted(F.cross_entropy, lambda output, target: 2.0)).train()
    assert with_power_of_two.digest == plain.digest


def test_a_loss_module_is_a_loss():
    """An instance of a loss module does what the function does."""
    assert digest(loss_fn=nn.CrossEntropyLoss()) == reference()
    assert digest(loss_fn=functools.partial(F.cross_entropy, reduction="mean")) == reference()


def test_the_target_is_the_batch_where_there_is_no_pair():
    """A bare array is input and target at once, as an autoencoder wants it."""

    def train(data, **changes):
        return digest(make_model=lambda: nn.Linear(3, 3), data=data, loss_fn=F.mse_loss, **changes)

    assert train(X) == train((X, X))
    assert train(list(X)) == train((X, X))
    assert train(X, batch_size=None) == train((X, X), batch_size=None)


# Models


def test_a_module_is_copied_and_never_trained_in_place():
    """A model that is passed in keeps its weights, gradients and modes; the result has a copy of it."""
    torch.manual_seed(0)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.weight.grad = torch.full_like(model.weight, 7.0)
    grad = model.weight.grad
    made = recipe(make_model=model)
    first, second = made.train(), made.train()
    assert first.digest == second.digest == reference()
    assert first.model is not model
    assert first.model is not second.model
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model.weight.grad is grad
    assert (grad == 7.0).all()
    assert model.bias.grad is None
    assert all(parameter.grad is None for parameter in first.model.parameters())


def test_a_modules_gradient_does_not_enter_the_answer():
    """A gradient left in a model that is passed in, for a parameter that gets none in training, is not used."""

    class Half(Net):
        """Has a parameter that forward does not use."""

        def __init__(self):
            super().__init__()
            self.idle = nn.Parameter(torch.ones(2))

    torch.manual_seed(0)
    clean, dirty = Half(), Half()
    dirty.load_state_dict(clean.state_dict())
    dirty.idle.grad = torch.ones(2)
    assert digest(make_model=clean) == digest(make_model=dirty)
    assert torch.equal(recipe(make_model=dirty).train().params["idle"], torch.ones(2))


def test_a_bare_module_can_be_trained_in_one_call():
    """phalanx.train takes an nn.Module, and arguments of recipe and run side by side."""
    torch.manual_seed(0)
    arguments = {"replicas": 4, "batch_size": 8, "steps": 5, "lr": 0.01, "workers": 1, "progress": False}
    assert phalanx.train(Net(), (X, Y), F.cross_entropy, **arguments).digest == reference()
    assert phalanx.train(Net, (X, Y), F.cross_entropy, **arguments).digest == reference()


def test_the_factory_is_called_once_a_run_right_after_seeding():
    """make_model draws from generators that are seeded with the recipe's seed, in torch, numpy and random."""
    drawn = []

    def make_model():
        drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
        return Net()

    made = recipe(make_model=make_model, seed=7)
    made.train()
    made.train()
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    assert drawn == [(torch.rand(1).item(), np.random.rand(), random.random())] * 2


# Batches that the caller brings


def planned_batches(made, pack):
    return [pack(made.plan.indices(t)) for t in range(made.steps)]


BROUGHT = {
    "tuple": (lambda rows: (X[rows], Y[rows]), {}),
    "tensors": (lambda rows: (TX[rows], TY[rows]), {}),
    "list": (lambda rows: [TX[rows], TY[rows]], {}),
    "dict": (lambda rows: {"x": X[rows], "y": Y[rows]}, BY_NAME),
    "nested": (lambda rows: ((X[rows],), {"y": Y[rows]}), NESTED),
    "array": (lambda rows: np.hstack([X[rows], Y[rows, None]]).astype(np.float32), BARE),
    "tensor": (lambda rows: torch.tensor(np.hstack([X[rows], Y[rows, None]]).astype(np.float32)), BARE),
    "samples": (lambda rows: [(TX[row], int(Y[row])) for row in rows], {}),
    "dict-samples": (lambda rows: [{"x": X[row], "y": Y[row]} for row in rows], BY_NAME),
    "read-only": (lambda rows: (read_only(X[rows]), read_only(Y[rows])), {}),
    "collated": (lambda rows: (X[rows], Y[rows]), {"collate_fn": default_collate}),
}


@pytest.mark.parametrize("form", BROUGHT)
def test_brought_batches_give_the_digest_of_the_planned_run(form):
    """Bringing the plan's own batches, in any form, ends where the planned run ends."""
    pack, changes = BROUGHT[form]
    losses = []
    with recipe(data=None, steps=None, **changes).start() as run:
        for batch in planned_batches(recipe(), pack):
            losses.append(run.step(batch))
        result = run.result()
    assert result.digest == reference()
    assert result.loss_history == losses == recipe().train().loss_history
    assert (result.steps, result.samples, result.steps_per_epoch) == (5, 40, None)


@pytest.mark.parametrize("form", ["tuple", "samples", "dict"])
def test_brought_single_samples_give_the_digest_of_the_planned_run(form):
    """With batch_size=None a brought batch of R samples hands one to each replica."""
    pack, changes = BROUGHT[form]
    made = recipe(batch_size=None)
    with recipe(data=None, steps=None, batch_size=None, **changes).start() as run:
        for batch in planned_batches(made, pack):
            run.step(batch)
        assert run.result().digest == made.train().digest


def test_the_batches_of_a_loader_can_be_brought():
    """What a DataLoader yields, for tuples a list of tensors and for dicts a dict, is a batch."""
    expected = digest(shuffle=False, steps=3)
    tuples = DataLoader(TensorDataset(TX, TY), batch_size=8)
    dicts = DataLoader([{"x": x, "y": y} for x, y in zip(TX, TY, strict=True)], batch_size=8)
    for loader, changes in ((tuples, {}), (dicts, BY_NAME)):
        with recipe(data=None, steps=None, **changes).start() as run:
            for batch in loader:
                run.step(batch)
            assert run.result().digest == expected


def test_planned_and_brought_steps_may_be_mixed():
    """A run with data takes a brought batch instead of the planned one; the plan then goes on after it."""
    made = recipe()
    rows = made.plan.indices(1)
    with made.start() as run:
        run.step()
        run.step((X[rows], Y[rows]))
        for _ in run:
            pass
        assert run.result().digest == reference()


@pytest.mark.usefixtures("computed_once")
def test_a_short_brought_batch_is_split_like_a_planned_one():
    """A batch of any size is cut as numpy.array_split cuts it; replicas without a share are skipped."""
    sizes = []

    def forward(model, batch):
        sizes.append(len(batch[0]))
        return model(batch[0])

    with recipe(data=None, steps=None, forward_fn=forward).start() as run:
        for size in (1, 3, 6, 9):
            run.step((X[:size], Y[:size]))
    expected = [len(part) for size in (1, 3, 6, 9) for part in np.array_split(np.arange(size), 4)]
    assert sizes == [size for size in expected if size]


# Data is the caller's


class Trampling(Net):
    """Writes into its input, as an in-place activation on the first layer does."""

    def forward(self, x):
        return super().forward(x.mul_(2.0))


def data_in(form):
    """Fresh data in one form, and the arrays that must not change."""
    x, y = X.copy(), Y.copy()
    tx, ty = torch.tensor(X), torch.tensor(Y)
    return {
        "numpy": ((x, y), x),
        "torch": ((tx, ty), tx),
        "tensor-dataset": (TensorDataset(tx, ty), tx),
        "tuples": (list(zip(tx, ty, strict=True)), tx),
    }[form]


@pytest.mark.parametrize(
    ("form", "batch_size"),
    [*((form, 8) for form in ("numpy", "torch", "tensor-dataset", "tuples")), ("numpy", None), ("torch", None)],
)
def test_a_model_that_writes_into_its_batch_does_not_change_the_data(form, batch_size):
    """Training twice on the same arrays starts twice from the same bits, even if forward works in place.

    With batch_size=None a row of the columns is handed over; writing into it must not reach the data either.
    """
    data, array = data_in(form)
    made = recipe(make_model=Trampling, data=data, batch_size=batch_size)
    first = made.train().digest
    assert np.array_equal(np.asarray(array), X)
    assert made.train().digest == first


@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_brought_and_evaluated_data_are_not_changed(form):
    """A batch that is brought and samples that are evaluated stay as they were, even if forward works in place."""
    data, array = data_in(form)
    with recipe(make_model=Trampling, data=None, steps=None).start() as run:
        run.step(data)
        first = run.evaluate(F.cross_entropy, data)
        assert run.evaluate(F.cross_entropy, data) == first
    assert np.array_equal(np.asarray(array), X)


def test_arrays_changed_between_runs_are_seen():
    """Columns are shared with the caller, not copied: a second run sees what the caller wrote in between."""
    x = X.copy()
    made = recipe(data=(x, Y))
    assert made.train().digest == reference()
    x *= 2
    assert made.train().digest == digest(data=(2 * X, Y))


class Endless:
    """More samples than fit into memory as numbers."""

    def __len__(self):
        return 10**15

    def __getitem__(self, index):
        return torch.tensor([float(index % 7)]), torch.tensor([float(index % 3)])


def test_a_dataset_that_is_longer_than_memory():
    """Without shuffle nothing of the data's length is made: not for training, and not to cut an evaluation."""
    recipe = phalanx.Recipe(
        lambda: torch.nn.Linear(1, 1), Endless(), torch.nn.functional.mse_loss,
        replicas=2, batch_size=4, steps=3, shuffle=False,
    )  # fmt: skip
    assert recipe.train(engine="inline").steps == 3
    assert [recipe.plan.indices(step).tolist() for step in (0, 10**12)] == [
        [0, 1, 2, 3], [4 * 10**12 + n for n in range(4)]
    ]  # fmt: skip
    chunks = BatchShares(recipe, open_framework(recipe).opened).chunks(Endless(), 256)
    assert len(chunks) == 10**15 // 256
    assert chunks[len(chunks) - 1].samples.tolist() == list(range(10**15 - 256, 10**15))
    assert chunks[1].samples.tolist() == list(range(256, 512))
