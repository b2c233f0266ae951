"""One table of wrong calls: each is refused with a message that names the argument, its value and the way out.

``recipe`` cases fail where the recipe is written; ``go`` cases can only fail where it runs.
"""

import functools
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import phalanx

X = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
Y = np.arange(12) % 2
REAL = X[:, :1].copy()


def linear():
    return nn.Linear(3, 2)


def regressor():
    return nn.Linear(3, 1)


def recipe(**changes):
    """A recipe that is right but for the changes."""
    fields = {
        "make_model": linear,
        "data": (X, Y),
        "loss_fn": F.cross_entropy,
        "replicas": 2,
        "batch_size": 4,
        "steps": 2,
    }
    return phalanx.Recipe(**{**fields, **changes})


def brought(**changes):
    """A recipe whose batches the caller brings."""
    return recipe(data=None, steps=None, **changes)


def go(**changes):
    """Train a recipe that is right but for the changes."""
    return recipe(**changes).train(progress=False)


def train(**options):
    """Train a right recipe with these options."""
    return recipe().train(**options)


def step(batch, **changes):
    """Bring one batch to a right recipe without data."""
    with brought(**changes).start() as run:
        run.step(batch)


KERAS = type("Accuracy", (), {"update_state": print, "result": print, "__call__": print})


def evaluate(metric_fn, data=(X, Y), **options):
    """Evaluate a right recipe's untrained model."""
    with recipe().start() as run:
        run.evaluate(metric_fn, data, **options)


def first_column(model, batch):
    return model(batch[0])[:, 0]


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def frozen():
    return nn.Linear(3, 2).requires_grad_(False)


def failing_factory():
    raise KeyError("weights.bin")


def detached(output, target):
    return F.cross_entropy(output.detach(), target)


def sometimes(output, target):
    """A loss that returns a weight only for some shares."""
    loss = F.cross_entropy(output, target)
    return (loss, 1.0) if target.sum() % 2 else loss


def weighing(weight):
    return lambda output, target: (F.cross_entropy(output, target), weight)


class Stream(IterableDataset):
    """A data set that can only be iterated."""

    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Unmeasured:
    """A data set without a length."""

    def __getitem__(self, index):
        return X[index], Y[index]


class Nameless(torch.optim.Optimizer):
    """An optimizer written before parameters had names: its constructor looks at each as a tensor."""

    def __init__(self, params, lr=1e-3):
        params = list(params)
        self.elements = sum(parameter.numel() for parameter in params)
        super().__init__(params, {"lr": lr})


class Typed(torch.optim.Optimizer):
    """An old optimizer that says itself that it wants tensors."""

    def __init__(self, params, lr=1e-3):
        params = list(params)
        if not all(isinstance(parameter, torch.Tensor) for parameter in params):
            raise TypeError("optimizer can only optimize Tensors")
        super().__init__(params, {"lr": lr})


def configured(named):
    """An optimizer with its scheduler, as Lightning takes them."""
    optimizer = torch.optim.SGD(named, lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}


class Closing(torch.optim.SGD):
    """An optimizer whose step must be given a closure."""

    def step(self, closure):
        return super().step(closure)


def foreign_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(linear().parameters(), lr=0.1), 1)


def twice(named):
    return [torch.optim.SGD(named, lr=0.1), torch.optim.SGD(named[:1], lr=0.1)]


class Embedded(nn.Module):
    """Sums over an embedding, which may be sparse."""

    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=sparse)

    def forward(self, x):
        return self.table(x).sum(1)


class SparseCall(nn.Module):
    """Makes a sparse gradient behind a module that does not say so."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 2))

    def forward(self, x):
        return F.embedding(x, self.weight, sparse=True).sum(1)


class Growing(nn.Module):
    """A linear layer with a buffer that forward turns into something else."""

    def __init__(self, start, change):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", start)
        self.change = change

    def forward(self, x):
        self.seen = self.change(self.seen)
        return self.layer(x)


class Writing(nn.Module):
    """A linear layer whose forward writes its own weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        return self.layer(x)


def normed():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def saved():
    with recipe().start() as run:
        run.save("/dev")


def after_close():
    run = recipe().start()
    run.close()
    run.step()


def evaluated_after_close():
    with recipe().start() as run:
        pass
    run.evaluate(accuracy, (X, Y))


def evaluated_later():
    with recipe().start() as run:
        run.step()
        run.evaluate(accuracy, (X.astype(np.float64), Y))


def beyond_plan():
    with recipe().start() as run:
        for _ in range(3):
            run.step()


def iterated_without_data():
    with brought().start() as run:
        next(iter(run))


def step_without_batch():
    with brought().start() as run:
        run.step()


IDS = torch.arange(12).reshape(6, 2) % 5
DATA = [
    ("lengths-tuple", lambda: recipe(data=(X, Y[:5])), "data[0] has 12", "data[1] has 5", "cut"),
    ("lengths-dict", lambda: recipe(data={"x": X, "y": Y[:5]}), "data['x'] has 12", "data['y'] has 5", "cut"),
    ("lengths-nested", lambda: recipe(data=((X, X[:7]), Y)), "data[0][1] has 7", "data[1] has 12"),
    ("empty-tuple", lambda: recipe(data=()), "data", "empty tuple", "pass a tuple or dict of arrays"),
    ("empty-dict", lambda: recipe(data={}), "data", "empty dict", "pass a tuple or dict of arrays"),
    ("empty-list", lambda: recipe(data=[]), "data", "list of length 0", "at least one sample"),
    ("empty-columns", lambda: recipe(data=(X[:0], Y[:0])), "data", "length 0", "at least one sample"),
    ("empty-array", lambda: recipe(data=X[:0]), "data", "length 0", "at least one sample"),
    (
        "empty-dataset",
        lambda: recipe(data=TensorDataset(torch.zeros(0, 3), torch.zeros(0))),
        "data",
        "TensorDataset of length 0",
        "at least one sample",
    ),
    ("generator", lambda: recipe(data=(x for x in X)), "data is", "generator", "list of samples", "run.step(batch)"),
    ("iterator", lambda: recipe(data=iter([X])), "data is", "list_iterator", "list of samples", "run.step(batch)"),
    ("zip", lambda: recipe(data=zip(X, Y, strict=True)), "data is", "zip", "list of samples"),
    (
        "iterable-dataset",
        lambda: recipe(data=Stream()),
        "data",
        "Stream",
        "phalanx.Stream(make_iterable)",
        "map-style",
        "run.step(batch)",
    ),
    (
        "loader",
        lambda: recipe(data=DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), 4)),
        "data is",
        "DataLoader",
        "data=loader.dataset",
        "batch_size=loader.batch_size",
    ),
    ("file", lambda: recipe(data=io.StringIO("1,2\n3,4\n")), "data is", "StringIO", "map-style dataset"),
    ("set", lambda: recipe(data={1.0, 2.0}), "data is", "set", "list of samples"),
    ("int", lambda: recipe(data=3), "data is", "int", "list of samples"),
    ("string", lambda: recipe(data="mnist.npz"), "data", "str", "tuple or dict of arrays"),
    ("bytes", lambda: recipe(data=b"mnist"), "data", "bytes", "tuple or dict of arrays"),
    ("no-length", lambda: recipe(data=Unmeasured()), "data is", "Unmeasured", "without a length", "__len__"),
    ("column-of-strings", lambda: recipe(data=(X, ["a"] * 12)), "data[1] is a list", "numpy.asarray"),
    ("array-of-strings", lambda: go(data=(X, np.array(["a"] * 12))), "data[1]", "<U1"),
    ("array-of-objects", lambda: go(data=(X, np.array([None] * 12))), "data[1]", "object"),
    ("array-of-dates", lambda: go(data=(X, np.zeros(12, "datetime64[D]"))), "data[1]", "datetime64"),
    ("array-masked", lambda: go(data=(np.ma.masked_less(X, 0), Y)), "data[0] is a masked array", "filled(value)"),
    ("array-byte-order", lambda: go(data=(X.astype(">f4"), Y)), "data[0]", ">f4", ".astype(numpy.float32)"),
    ("array-longdouble", lambda: go(data=(X.astype(np.longdouble), Y)), "data[0]", "longdouble", ".astype"),
    ("column-list", lambda: recipe(data=(X.tolist(), Y.tolist())), "data[0] is a list", "numpy.asarray"),
    ("column-string", lambda: recipe(data={"x": X, "y": "labels"}), "data['y'] is a str", "arrays or tensors"),
    ("column-0d", lambda: recipe(data=(X, np.float32(1.0))), "data[1]", "first axis"),
    ("column-0d-tensor", lambda: recipe(data=(X, torch.tensor(1.0))), "data[1] is a Tensor", "first axis"),
    ("float64-tuple", lambda: go(data=(X.astype(np.float64), Y)), "data[0] is float64", ".astype(numpy.float32)"),
    (
        "float64-dict",
        lambda: go(
            data={"input": X.astype(np.float64)}, loss_fn=lambda output, batch: output.mean(), target_fn=lambda b: b
        ),
        "data['input'] is float64",
        ".astype(numpy.float32)",
    ),
    (
        "float64-array",
        lambda: go(data=X.astype(np.float64), loss_fn=lambda output, target: output.mean()),
        "data is float64",
        ".astype(numpy.float32)",
    ),
    ("float64-tensor", lambda: go(data=(torch.tensor(X).double(), Y)), "data[0] is float64", ".float()"),
    (
        "float64-samples",
        lambda: go(make_model=regressor, data=[(row, 0.5) for row in X], forward_fn=first_column, loss_fn=F.mse_loss),
        "loss_fn returned a float64 loss",
        "float32",
    ),
    (
        "float64-target",
        lambda: go(make_model=regressor, data=(X, REAL.astype(np.float64)), loss_fn=F.mse_loss),
        "data[1] is float64",
        ".astype(numpy.float32)",
    ),
]

NUMBERS = [
    ("batch_size-0", lambda: recipe(batch_size=0), "batch_size is 0", "at least 1", "None"),
    ("batch_size-negative", lambda: recipe(batch_size=-4), "batch_size is -4", "at least 1"),
    ("batch_size-float", lambda: recipe(batch_size=4.0), "batch_size is 4.0", "an integer"),
    ("batch_size-true", lambda: recipe(batch_size=True), "batch_size is True", "an integer"),
    ("batch_size-string", lambda: recipe(batch_size="4"), "batch_size is '4'", "an integer"),
    ("no-length", lambda: recipe(steps=None), "steps is None", "epochs is None", "exactly one"),
    ("two-lengths", lambda: recipe(steps=2, epochs=1), "steps is 2", "epochs is 1", "exactly one"),
    ("steps-without-data", lambda: recipe(data=None, steps=7), "steps=7", "data=None", "leave both out"),
    ("epochs-without-data", lambda: recipe(data=None, steps=None, epochs=3), "epochs=3", "data=None", "leave both out"),
    ("steps-negative", lambda: recipe(steps=-1), "steps is -1", "at least 0"),
    ("steps-float", lambda: recipe(steps=2.5), "steps is 2.5", "an integer"),
    ("epochs-float", lambda: recipe(steps=None, epochs=1.5), "epochs is 1.5", "an integer"),
    ("replicas-0", lambda: recipe(replicas=0), "replicas is 0", "at least 1"),
    ("replicas-negative", lambda: recipe(replicas=-1), "replicas is -1", "at least 1"),
    ("replicas-float", lambda: recipe(replicas=2.5), "replicas is 2.5", "an integer"),
    ("replicas-none", lambda: recipe(replicas=None), "replicas is None", "an integer"),
    ("lr-0", lambda: recipe(lr=0), "lr is 0", "above 0"),
    ("lr-nan", lambda: recipe(lr=float("nan")), "lr is nan", "above 0"),
    ("lr-negative", lambda: recipe(lr=-0.1), "lr is -0.1", "above 0"),
    ("lr-inf", lambda: recipe(lr=float("inf")), "lr is inf", "finite"),
    ("lr-string", lambda: recipe(lr="0.1"), "lr is '0.1'", "a number"),
    (
        "lr-with-optimizer",
        lambda: recipe(lr=0.1, optimizer=torch.optim.SGD),
        "lr is 0.1",
        "optimizer is given",
        "functools.partial(torch.optim.AdamW, lr=0.1)",
    ),
    ("max_norm-0", lambda: recipe(max_norm=0), "max_norm is 0", "above 0", "math.inf"),
    ("max_norm-nan", lambda: recipe(max_norm=float("nan")), "max_norm is nan", "above 0", "math.inf"),
    ("max_norm-string", lambda: recipe(max_norm="1"), "max_norm is '1'", "a number", "math.inf"),
    ("max_norm-none", lambda: recipe(max_norm=None), "max_norm is None", "math.inf"),
    ("seed-negative", lambda: recipe(seed=-1), "seed is -1", "from 0 to 18446744073709551615"),
    ("seed-2**64", lambda: recipe(seed=2**64), "seed is 18446744073709551616", "from 0 to 18446744073709551615"),
    ("seed-float", lambda: recipe(seed=1.5), "seed is 1.5", "an integer"),
    ("precision", lambda: recipe(precision="float16"), "precision is 'float16'", "None, 'bfloat16'"),
    ("precision-dtype", lambda: recipe(precision=torch.bfloat16), "precision is torch.bfloat16", "'bfloat16'"),
    ("threads-0", lambda: recipe(threads=0), "threads is 0", "at least 1"),
    ("on_nonfinite", lambda: recipe(on_nonfinite="raise"), "on_nonfinite is 'raise'", "'stop', 'skip', 'ignore'"),
    ("shuffle", lambda: recipe(shuffle="no"), "shuffle is 'no'", "True, False"),
    ("drop_last-int", lambda: recipe(drop_last=1), "drop_last is 1", "True, False"),
    (
        "collate-without-batch",
        lambda: recipe(batch_size=None, collate_fn=torch.utils.data.default_collate),
        "collate_fn",
        "batch_size is None",
        "drop one",
    ),
    (
        "drop_last-everything",
        lambda: recipe(batch_size=13, drop_last=True),
        "drop_last is True",
        "13",
        "12",
        "lower batch_size",
    ),
]

MODELS = [
    ("frozen", lambda: go(make_model=frozen), "make_model", "Linear", "without trainable parameters", "requires_grad"),
    ("no-parameters", lambda: go(make_model=nn.Flatten), "make_model", "Flatten", "trainable parameters", "Parameter"),
    ("not-callable", lambda: recipe(make_model="resnet18"), "make_model is 'resnet18'", "str", "lambda"),
    ("model-none", lambda: recipe(make_model=None), "make_model is None", "lambda"),
    ("returns-none", lambda: go(make_model=lambda: None), "make_model returned None", "return", "torch.nn.Module"),
    ("returns-dict", lambda: go(make_model=dict), "make_model returned a dict", "torch.nn.Module"),
    ("returns-class", lambda: go(make_model=lambda: nn.Flatten), "make_model returned", "type", "torch.nn.Module"),
    ("raises", lambda: go(make_model=failing_factory), "make_model raised KeyError", "weights.bin"),
    ("needs-argument", lambda: go(make_model=lambda width: nn.Linear(3, width)), "make_model", "width", "partial"),
    (
        "sparse-module",
        lambda: go(make_model=lambda: Embedded(True), data=(IDS, IDS[:, 0])),
        "'table.weight'",
        "sparse=False",
    ),
    ("sparse-call", lambda: go(make_model=SparseCall, data=(IDS, IDS[:, 0] % 2)), "'weight'", "sparse=False"),
    ("lazy", lambda: go(make_model=lambda: nn.LazyLinear(2)), "make_model", "lazy", "'weight'", "run one batch"),
    ("lazy-norm", lambda: go(make_model=lambda: nn.LazyBatchNorm1d()), "make_model", "lazy", "run one batch"),
    (
        "norm-of-one",
        lambda: go(make_model=normed, replicas=4),
        "BatchNorm",
        "1 sample",
        "raise batch_size or lower replicas",
        "drop_last=True",
    ),
    (
        "buffer-shape",
        lambda: go(make_model=lambda: Growing(torch.zeros(1), lambda seen: torch.cat([seen, seen]))),
        "buffer 'seen'",
        "(1,)",
        "(2,)",
        "__init__",
    ),
    (
        "buffer-dtype",
        lambda: go(make_model=lambda: Growing(torch.zeros(1), lambda seen: seen.double())),
        "buffer 'seen'",
        "torch.float32",
        "torch.float64",
        "__init__",
    ),
    (
        "buffer-from-none",
        lambda: go(make_model=lambda: Growing(None, lambda seen: torch.zeros(1))),
        "buffer 'seen'",
        "from None to torch.float32 (1,)",
        "__init__",
    ),
    (
        "buffer-to-none",
        lambda: go(make_model=lambda: Growing(torch.zeros(1), lambda seen: None)),
        "buffer 'seen'",
        "to None",
        "__init__",
    ),
    ("meta", lambda: go(make_model=lambda: nn.Linear(3, 2, device="meta")), "make_model", "meta"),
    ("written-parameter", lambda: go(make_model=Writing), "'layer.weight'", "in place", "buffer", "replicas=1"),
]

LOSSES = [
    ("class", lambda: recipe(loss_fn=nn.CrossEntropyLoss), "loss_fn is the class CrossEntropyLoss", "instance"),
    ("not-callable", lambda: recipe(loss_fn="mse"), "loss_fn is 'mse'", "str", "torch.nn.functional.cross_entropy"),
    (
        "vector",
        lambda: go(loss_fn=lambda output, target: F.cross_entropy(output, target, reduction="none")),
        "loss_fn returned a tensor of shape (2,)",
        "loss.mean()",
    ),
    ("float", lambda: go(loss_fn=lambda output, target: 0.5), "loss_fn returned a float", "scalar tensor"),
    ("item", lambda: go(loss_fn=lambda output, target: output.mean().item()), "loss_fn returned a float", "tensor"),
    ("none", lambda: go(loss_fn=lambda output, target: None), "loss_fn returned", "None", "scalar tensor"),
    ("complex", lambda: go(loss_fn=lambda o, t: o.mean() * (1 + 1j)), "loss_fn returned", "complex64", "real"),
    ("three-values", lambda: go(loss_fn=lambda o, t: (o.mean(), 1.0, 2)), "loss_fn returned a tuple", "weight"),
    ("detached", lambda: go(loss_fn=detached), "loss_fn returned a loss without a gradient", "detach()"),
    (
        "model-without-loss",
        lambda: go(loss_fn=None),
        "loss_fn is missing: the model returned a tensor of shape (2, 2)",
        "loss.mean()",
    ),
    (
        "forward-without-loss",
        lambda: go(loss_fn=None, forward_fn=lambda model, batch: model(batch[0])),
        "loss_fn is missing: forward_fn returned a tensor of shape (2, 2)",
        "loss.mean()",
    ),
    ("weight-negative", lambda: go(loss_fn=weighing(-1.0)), "loss_fn returned the weight -1.0", "at least 0"),
    ("weight-nan", lambda: go(loss_fn=weighing(float("nan"))), "loss_fn returned the weight nan", "finite"),
    ("weight-inf", lambda: go(loss_fn=weighing(float("inf"))), "loss_fn returned the weight inf", "finite"),
    ("weight-vector", lambda: go(loss_fn=weighing(torch.ones(3))), "loss_fn returned the weight", "(3,)", "number"),
    ("weight-string", lambda: go(loss_fn=weighing("many")), "loss_fn returned the weight 'many'", "number"),
    ("logs", lambda: go(loss_fn=weighing({"size": 1.0})), "returned the weight {'size': 1.0}", "{'loss': loss, "),
    ("weight-sometimes", lambda: go(loss_fn=sometimes), "loss_fn", "weight for some replicas", "always or never"),
    ("forward-not-callable", lambda: recipe(forward_fn=3), "forward_fn is 3", "int", "callable"),
    ("target-not-callable", lambda: recipe(target_fn="label"), "target_fn is 'label'", "str", "callable"),
    ("collate-not-callable", lambda: recipe(collate_fn=[]), "collate_fn is []", "list", "callable"),
]

OPTIMIZERS = [
    (
        "instance",
        lambda: recipe(optimizer=torch.optim.SGD(linear().parameters(), lr=0.1)),
        "optimizer is an instance of SGD; pass what makes one",
        "functools.partial",
    ),
    ("string", lambda: recipe(optimizer="adam"), "optimizer is 'adam'", "functools.partial"),
    (
        "other-parameters",
        lambda: go(optimizer=lambda named: torch.optim.SGD(linear().parameters(), lr=0.1)),
        "optimizer",
        "SGD",
        "other parameters",
        "named parameters",
    ),
    ("LBFGS", lambda: go(optimizer=lambda named: torch.optim.LBFGS([p for _, p in named])), "LBFGS", "AdamW"),
    ("closure", lambda: go(optimizer=functools.partial(Closing, lr=0.1)), "optimizer is Closing", "AdamW"),
    ("returns-none", lambda: go(optimizer=lambda named: None), "optimizer returned", "None", "functools.partial"),
    ("returns-empty", lambda: go(optimizer=lambda named: []), "optimizer returned an empty list", "functools.partial"),
    ("with-scheduler", lambda: go(optimizer=configured), "optimizer returned a dict", "scheduler=lambda", "'epoch'"),
    ("with-schedulers", lambda: go(optimizer=lambda named: ([configured], [])), "optimizer returned a list", "'epoch'"),
    ("raises", lambda: go(optimizer=functools.partial(torch.optim.SGD, lr=-1)), "optimizer raised ValueError", "-1"),
    ("typed", lambda: go(optimizer=Typed), "optimizer raised TypeError", "only optimize Tensors", "for _, parameter"),
    ("nameless", lambda: go(optimizer=Nameless), "optimizer raised AttributeError", "numel", "for _, parameter"),
    ("parameter-twice", lambda: go(optimizer=twice), "optimizer", "'weight'", "SGD", "give each to one"),
    ("scheduler-not-callable", lambda: recipe(scheduler="cosine"), "scheduler is 'cosine'", "StepLR"),
    ("scheduler-none", lambda: go(scheduler=lambda optimizer: None), "scheduler returned", "None", "LRScheduler"),
    ("scheduler-of-another", lambda: go(scheduler=foreign_scheduler), "scheduler", "another optimizer"),
    ("scheduler-raises", lambda: go(scheduler=torch.optim.lr_scheduler.StepLR), "scheduler raised TypeError", "StepLR"),
]

OPTIONS = [
    ("workers-0", lambda: train(workers=0), "workers is 0", "at least 1", "'auto'"),
    ("workers-inline", lambda: train(workers=2, engine="inline"), "workers is 2", "'inline'", "engine='processes'"),
    (
        "workers-devices",
        lambda: train(workers=1, devices=["cpu"] * 2),
        "workers is 1",
        "devices names cpu, cpu",
        "leave",
    ),
    ("workers-9", lambda: recipe(replicas=8).train(workers=9), "workers is 9", "8 replicas", "workers <= replicas"),
    ("workers-string", lambda: train(workers="many"), "workers is 'many'", "an integer", "'auto'"),
    ("engine-distributed", lambda: train(engine="distributed"), "engine is 'distributed'", "torchrun"),
    ("engine-unknown", lambda: train(engine="gpu"), "engine is 'gpu'", "'auto', 'inline'"),
    ("devices-absent", lambda: train(devices="cuda:99"), "devices", "'cuda:99'", "'cpu'"),
    ("devices-absent-list", lambda: train(devices=["cuda:99"]), "devices", "'cuda:99'", "'cpu'"),
    ("devices-nonsense", lambda: train(devices="gpu0"), "devices", "'gpu0'", "'cpu'"),
    ("devices-empty", lambda: train(devices=[]), "devices is []", "'auto'", "'cuda:0'"),
    ("devices-int", lambda: train(devices=3), "devices is 3", "'auto'", "'cuda:0'"),
    ("run_dir", lambda: train(run_dir=3), "run_dir is 3", "give a directory"),
    ("run_dir-array", lambda: train(run_dir=np.array(["a", "b"])), "run_dir is array", "give a directory"),
    ("workers-array", lambda: train(workers=np.array([1, 2])), "workers is array", "'auto'"),
    ("run_dir-file", lambda: train(run_dir="/dev/null"), "run_dir is '/dev/null'", "choose a directory"),
    ("warm_start", lambda: train(warm_start=""), "warm_start is ''", "no path"),
    ("snapshot_every", lambda: train(snapshot_every=10), "snapshot_every is 10", "no run_dir; give one"),
    ("snapshot_every-zero", lambda: train(snapshot_every=0, run_dir="x"), "snapshot_every is 0", "or 'auto'"),
    ("keep_snapshots", lambda: train(keep_snapshots=0, run_dir="x"), "keep_snapshots is 0", "at least 1"),
    ("deadline_seconds-zero", lambda: train(deadline_seconds=0), "deadline_seconds is 0", "above 0", "'auto'"),
    ("deadline_seconds-text", lambda: train(deadline_seconds="5"), "deadline_seconds is '5'", "above 0", "'auto'"),
    ("callbacks-function", lambda: train(callbacks=print), "callbacks is <built-in function print>", "a list"),
    ("callbacks-int", lambda: train(callbacks=[3]), "callbacks", "3", "f(report)"),
    ("callbacks-none", lambda: train(callbacks=None), "callbacks is None", "a list"),
    ("callbacks-number", lambda: train(callbacks=3), "callbacks is 3", "a list"),
    ("progress", lambda: train(progress="yes"), "progress is 'yes'", "True, False, 'auto'"),
    (
        "evaluation-data",
        lambda: train(evaluation=(X, Y)),
        "evaluation has a ndarray",
        "evaluation=phalanx.Evaluation(metric_fn, (x, y))",
    ),
    (
        "one-replica",
        lambda: recipe(replicas=1).train(workers=2),
        "workers is 2, but there is 1 replica to compute",
    ),
    (
        "evaluation",
        lambda: train(evaluation=accuracy),
        "evaluation has a function",
        "phalanx.Evaluation(metric_fn, data)",
    ),
    ("misspelt-argument", lambda: recipe(learning_rate=0.1), "learning_rate ", "is not an argument", "it is called lr"),
    ("misspelt-option", lambda: train(worker=2), "worker ", "did you mean 'workers'"),
    ("misspelt-start", lambda: recipe().start(devicess="cpu"), "devicess ", "did you mean 'devices'"),
    (
        "misspelt-field",
        lambda: phalanx.train(linear, (X, Y), F.cross_entropy, stepz=3),
        "stepz ",
        "did you mean 'steps'",
    ),
    ("unknown-option", lambda: train(verbosity=2), "verbosity ", "there are", "progress"),
]

RUNS = [
    ("step-after-close", after_close, "closed", "recipe.start()"),
    ("evaluate-after-close", evaluated_after_close, "closed", "recipe.start()"),
    ("step-beyond-plan", beyond_plan, "all 2 planned steps", "raise steps or epochs", "bring a batch"),
    ("step-without-batch", step_without_batch, "without a batch", "data is None", "run.step((x, y))"),
    ("iterate-without-data", iterated_without_data, "data=None", "run.step(batch)"),
    ("train-without-data", lambda: brought().train(), "data is None", "start()", "run.step(batch)"),
    ("plan-without-data", lambda: brought().plan, "plan", "data is None", "pass data"),
    ("batch-generator", lambda: step(x for x in X), "batch is", "generator", "tuple or dict of arrays"),
    ("batch-int", lambda: step(3), "batch is", "int", "tuple or dict of arrays"),
    ("batch-string", lambda: step("abc"), "batch is", "str", "tuple or dict of arrays"),
    ("batch-unequal", lambda: step((X, Y[:3])), "batch[0] has 12", "batch[1] has 3", "cut"),
    ("batch-empty", lambda: step([]), "batch", "empty", "at least one sample"),
    ("batch-float64", lambda: step((X.astype(np.float64), Y)), "batch[0] is float64", ".astype(numpy.float32)"),
    (
        "batch-over-replicas",
        lambda: step((X[:3], Y[:3]), batch_size=None),
        "batch has 3 samples",
        "2 replicas",
        "batch_size",
    ),
    ("metric-not-callable", lambda: evaluate("accuracy"), "metric_fn is 'accuracy'", "callable", "lambda"),
    ("metric-string", lambda: evaluate(lambda o, t: "good"), "metric_fn returned", "'good'", "(mean, weight)"),
    ("metric-none", lambda: evaluate(lambda o, t: None), "metric_fn returned", "None", "(mean, weight)"),
    ("metric-dict", lambda: evaluate(lambda o, t: {"a": 1.0}), "returned {'a': 1.0}", "Evaluation({'a': a, 'b': b}"),
    ("metric-vector", lambda: evaluate(lambda o, t: o), "metric_fn returned", "Tensor", "(mean, weight)"),
    ("metric-weightless", lambda: evaluate(lambda o, t: (1.0, 0)), "metric_fn", "weight 0", "every chunk"),
    ("metric-weight-negative", lambda: evaluate(lambda o, t: (1.0, -1)), "metric_fn", "weight", "-1"),
    ("metric-weight-nan", lambda: evaluate(lambda o, t: (1.0, float("nan"))), "metric_fn", "weight", "nan"),
    ("evaluate-empty", lambda: evaluate(accuracy, (X[:0], Y[:0])), "evaluation data", "empty", "at least one sample"),
    ("evaluate-unequal", lambda: evaluate(accuracy, (X, Y[:3])), "evaluation data[1] has 3", "cut"),
    ("evaluate-generator", lambda: evaluate(accuracy, (x for x in X)), "evaluation data is", "generator", "pass"),
    ("evaluate-float64", lambda: evaluate(accuracy, (X.astype(np.float64), Y)), "is float64", ".astype(numpy.float32)"),
    ("evaluate-float64-later", evaluated_later, "is float64", ".astype(numpy.float32)"),
    ("evaluate-batch_size", lambda: evaluate(accuracy, batch_size=0), "batch_size is 0", "at least 1"),
    ("Evaluation-metric", lambda: phalanx.Evaluation(3, (X, Y)), "metric_fn is 3", "callable"),
    ("metric-of-keras", lambda: phalanx.Evaluation(KERAS(), (X, Y)), "metric_fn has a Accuracy", "function of a chunk"),
    ("Evaluation-data", lambda: phalanx.Evaluation(accuracy, []), "evaluation data", "length 0"),
    ("Evaluation-batch_size", lambda: phalanx.Evaluation(accuracy, (X, Y), 2.0), "batch_size is 2.0", "an integer"),
    ("save", saved, "path is '/dev'", "exists already", "another name"),
    ("digest", lambda: phalanx.digest(3), "model is", "int", "torch.nn.Module"),
    ("digest-optimizer", lambda: phalanx.digest(linear(), optimizer=3), "optimizer is", "int", "torch.optim.Optimizer"),
]

TABLE = {
    "data": DATA,
    "numbers": NUMBERS,
    "model": MODELS,
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "options": OPTIONS,
    "run": RUNS,
}


def cases():
    """Every row of the table, with its name."""
    for chapter, rows in TABLE.items():
        for name, trigger, *words in rows:
            yield pytest.param(trigger, words, id=f"{chapter}-{name}")


@pytest.mark.parametrize(("trigger", "words"), list(cases()))
def test_a_wrong_call_is_refused_in_words_that_help(trigger, words):
    """A wrong call raises a UsageError, also a ValueError, that names the argument, its value and the way out."""
    with pytest.raises(phalanx.UsageError) as caught:
        trigger()
    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, phalanx.RunError)
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    assert "\n" not in message, message


def test_the_table_names_each_case_once():
    """No case hides another, and every open point is about a case that exists."""
    names = [f"{chapter}-{row[0]}" for chapter, rows in TABLE.items() for row in rows]
    assert len(names) == len(set(names))
