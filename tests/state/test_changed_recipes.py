"""What becomes of a run that goes on with a changed recipe: the table of docs/details.md, case by case."""

import dataclasses

import pytest

from tests.state.changes import Change, Made, outcome_of
from tests.state.runs import assert_same, bytes_of, engine_of, killed

REFUSED = {
    "code of a loss": Change(
        "loss_fn reads differently", text=("return smooth(F.mse_loss", "return 2 * smooth(F.mse_loss")
    ),
    "code of a function it calls": Change(
        "loss_fn (its global smooth) reads differently", text=("loss * (1 - SMOOTHING)", "loss * (2 - SMOOTHING)")
    ),
    "global of a function it calls": Change(
        "loss_fn (its global smooth) (its global SMOOTHING) is 0.2 here, and 0.",
        text=("SMOOTHING = 0.1", "SMOOTHING = 0.2"),
    ),
    "closure": Change(
        "loss_fn (its variable alpha) is 0.6 here, and 0.5 there",
        given="loss_fn=enclosed_loss",
        text=("wrapped(plain_loss, 0.5)", "wrapped(plain_loss, 0.6)"),
    ),
    "nested loss": Change(
        "loss_fn (its variable inner) reads differently",
        given="loss_fn=enclosed_loss",
        text=("return smooth(F", "return -smooth(F"),
    ),
    "default": Change(
        "loss_fn.__defaults__[0] is 3 here, and 2 there",
        given="loss_fn=default_loss",
        text=("power=2, *", "power=3, *"),
    ),
    "default by name": Change(
        "loss_fn.__kwdefaults__['scale'] is 1.6 here, and 1.5 there",
        given="loss_fn=default_loss",
        text=("scale=1.5", "scale=1.6"),
    ),
    "function of another module": Change(
        "loss_fn (its global halved) reads differently", given="loss_fn=helped_loss", helpers=("x / 2", "x / 3")
    ),
    "number of another module": Change(
        "loss_fn (its global helpers.SCALE) is 3.0 here, and 2.0 there",
        given="loss_fn=helped_loss",
        helpers=("SCALE = 2.0", "SCALE = 3.0"),
    ),
    "import inside": Change(
        "replica 0 of step 2 comes to another loss, another gradient",
        given="loss_fn=late_loss",
        helpers=("SCALE = 2.0", "SCALE = 3.0"),
    ),
    "module inside": Change(
        "replica 0 of step 2 comes to another loss, another gradient",
        given="loss_fn=late_loss",
        helpers=("x / 2", "x / 3"),
    ),
    "item of a global": Change(
        "loss_fn (its global TABLE)['scale'] is 1.1 here, and 1.0 there",
        given="loss_fn=table_loss",
        text=('"scale": 1.0', '"scale": 1.1'),
    ),
    "annotated code": Change("loss_fn reads differently", given="loss_fn=typed_loss", text=("= x / 2", "= x / 3")),
    "attribute of an object": Change(
        "loss_fn.scale is 0.6 here, and 0.5 there", given="loss_fn=object_loss", text=("Loss(0.5)", "Loss(0.6)")
    ),
    "attribute of a class": Change(
        "loss_fn.__class__.power is 3 here, and 2 there",
        given="loss_fn=object_loss",
        text=("    power = 2", "    power = 3"),
    ),
    "method of an object": Change(
        "loss_fn.__class__.weigh reads differently", given="loss_fn=object_loss", text=("x.mean() *", "x.sum() *")
    ),
    "bound object": Change(
        "loss_fn.__self__.scale is 1 here, and 0.5 there",
        given="loss_fn=Loss(0.5).bound",
        text=("self.scale = scale\n        self.n", "self.scale = 1\n        self.n"),
    ),
    "dataclass": Change(
        "loss_fn.args[0].rate is 0.6 here, and 0.5 there",
        given="loss_fn=functools.partial(options_loss, Options())",
        text=("rate: float = 0.5", "rate: float = 0.6"),
    ),
    "method of a dataclass": Change(
        "loss_fn.args[0].__class__.apply reads differently",
        given="loss_fn=functools.partial(options_loss, Options())",
        text=("x * self.rate", "x / self.rate"),
    ),
    "slots": Change("loss_fn.scale is 2.0 here, and 1.0 there", given="loss_fn=Slots(1.0)", after="loss_fn=Slots(2.0)"),
    "functions that call each other": Change(
        "loss_fn (its global even) (its global odd) reads differently",
        given="loss_fn=circular_loss",
        text=("n != 0 and", "n != 1 and"),
    ),
    "the first of two lambdas": Change(
        "loss_fn reads differently", given="loss_fn=first", text=("target) * 2)", "target) * 4)")
    ),
    "the second of two lambdas": Change(
        "loss_fn reads differently", given="loss_fn=second", text=("(o, t) * 3)", "(o, t) * 4)")
    ),
    "below a decorator": Change(
        "loss_fn (its global decorated) (its variable func) reads differently",
        given="loss_fn=decorated_loss",
        text=("* 0.25", "* 0.75"),
    ),
    "below a cache": Change(
        "loss_fn (its global factor).__wrapped__ reads differently",
        given="loss_fn=cached_loss",
        text=("n * 0.5", "n * 0.6"),
    ),
    "weight of a loss": Change(
        "loss_fn.args[1] (its global SMOOTHING) is 0.2 here, and 0.1 there",
        given="loss_fn=phalanx.weighted(plain_loss, lambda o, t: len(o) * SMOOTHING)",
        text=("SMOOTHING = 0.1", "SMOOTHING = 0.2"),
    ),
    "code of a model": Change(
        "make_model (its global Net).forward reads differently", text=("self.body(x) *", "self.body(x) /")
    ),
    "default of a model": Change(
        "make_model: body.0.weight is float32[9, 4] here, and float32[8, 4] the", text=("hidden=8", "hidden=9")
    ),
    "activation of a model's code": Change(
        "make_model (its global Net).__init__.__defaults__[1] is torch.nn.modul",
        text=("act=nn.ReLU):\n        super", "act=nn.Tanh):\n        super"),
    ),
    "arguments of the program": Change(
        "make_model: body.0.weight is float32[9, 4] here, and float32[8, 4] the",
        given="make_model=make_by_arguments",
        text=("hidden=8", "hidden=9"),
    ),
    "dict in a partial": Change(
        "make_model: body.0.weight is float32[32, 4] here, and float32[16, 4] t",
        given="make_model=functools.partial(make_of, {'hidden': 16})",
        after="make_model=functools.partial(make_of, {'hidden': 32})",
    ),
    "activation": Change(
        "make_model._modules['1'].__class__ is torch.nn.modules.activation.Tanh",
        given="make_model=made()",
        after="make_model=made(nn.Tanh)",
    ),
    "dropout": Change(
        "make_model._modules['2'].p is 0.5 here, and 0.1 there",
        given="make_model=made()",
        after="make_model=made(dropout=0.5)",
    ),
    "mode of a module": Change(
        "make_model._modules['2'].training is False here, and True there",
        given="make_model=made()",
        after="make_model=(lambda m: (m[2].eval(), m)[1])(made())",
    ),
    "frozen parameter": Change(
        "replica 0 of step 2 comes to another gradient",
        given="make_model=made()",
        after="make_model=(lambda m: (m[0].requires_grad_(False), m)[1])(made())",
    ),
    "columns": Change(
        "data: item 0 is another float32[12, 4] here than there", text=("arange(48.0)", "arange(1, 49.0)")
    ),
    "name of a column": Change(
        "data: item 'z' is float32[12, 4] here, and absent there",
        given="data={'x': X, 'y': Y}, forward_fn=first_of, target_fn=last_of",
        after="data={'z': X, 'y': Y}, forward_fn=first_of, target_fn=last_of",
    ),
    "order of rows": Change(
        "data: item 0 is another float32[12, 4] here than there",
        text=("X, Y = torch.arange(48.0)", "X, Y = torch.arange(47.0, -1, -1)"),
    ),
    "list of samples": Change(
        "data is another list of 12 here than there",
        given="data=[(x, y) for x, y in zip(X, Y)]",
        text=("arange(48.0)", "arange(1, 49.0)"),
    ),
    "long list of samples": Change(
        "data is another list of 60 here than there",
        given="data=[(x, y) for x, y in zip(X, Y)] * 5",
        text=("/ 48,", "/ 49,"),
    ),
    "list of objects": Change(
        "data[0].x is float32[4] 9131f9e8a7d6aa2d here, and float32[4] 71a9b553",
        given="data=[Sample(x, y) for x, y in zip(X, Y)], collate_fn=collate_objects",
        text=("/ 48,", "/ 49,"),
    ),
    "array of a dataset": Change(
        "data._x is float32[12, 4] dc82dad0cc695ef2 here, and float32[12, 4] a6",
        given="data=Items(X, Y)",
        text=("/ 48,", "/ 49,"),
    ),
    "code of a dataset": Change(
        "data.__class__.__getitem__ reads differently", given="data=Items(X, Y)", text=("_x[i] * 1.0", "_x[i] * 2.0")
    ),
    "transform of a dataset": Change(
        "data.transform (its global MEANS)[0] is 0.5 here, and 0.25 there",
        given="data=Items(X, Y, centred)",
        text=("[0.25]", "[0.5]"),
    ),
    "wrapped dataset": Change(
        "data.dataset._x is float32[12, 4] dc82dad0cc695ef2 here, and float32[1",
        given="data=torch.utils.data.Subset(Items(X, Y), [0, 1, 2, 3])",
        text=("/ 48,", "/ 49,"),
    ),
    "global that collate reads": Change(
        "collate_fn (its global ARGS).rate is 0.6 here, and 0.5 there",
        given="collate_fn=collate",
        text=("rate=0.5)", "rate=0.6)"),
    ),
    "code of forward": Change(
        "forward_fn reads differently",
        given="forward_fn=lambda m, b: m(b[0])",
        after="forward_fn=lambda m, b: m(b[0]) * 2",
    ),
    "rate of an optimizer": Change(
        "optimizer.keywords['lr'] is 2.0 here, and 1.0 there",
        given="optimizer=functools.partial(torch.optim.SGD, lr=1.0)",
        after="optimizer=functools.partial(torch.optim.SGD, lr=2.0)",
    ),
    "class of an optimizer": Change(
        "optimizer.func is torch.optim.adam.Adam here, and torch.optim.sgd.SGD",
        given="optimizer=functools.partial(torch.optim.SGD, lr=1)",
        after="optimizer=functools.partial(torch.optim.Adam, lr=1)",
    ),
    "global that an optimizer reads": Change(
        "optimizer: options.0.0.0.lr is 1.1 here, and 1.0 there",
        given="optimizer=make_optimizer",
        text=('"scale": 1.0', '"scale": 1.1'),
    ),
    "lambda of a schedule": Change(
        "loss_fn (its global smooth) (its global SMOOTHING) is 0.2 here, and 0.",
        given="scheduler=functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda s: SMOOTHING ** s)",
        text=("SMOOTHING = 0.1", "SMOOTHING = 0.2"),
    ),
    "what the user sets": Change(
        "loss_fn.scale is 0.7 here, and 0.5 there",
        given="loss_fn=object_loss",
        after="loss_fn=(object_loss.set_scale(0.7), object_loss)[1]",
    ),
    "one of a long list of objects": Change(
        "data[11].y is float32[1] [0.0]  here, and float32[1] [0.91666668653488",
        given="data=[Sample(X[0], Y[n % 12]) for n in range(60)], collate_fn=collate_objects",
        after="data=[Sample(X[0], Y[n % 11]) for n in range(60)], collate_fn=collate_objects",
    ),
    "code without source": Change(
        "loss_fn reads differently",
        given="loss_fn=lambda o, t: (o - t).mean()",
        after="loss_fn=lambda o, t: (t - o).mean()",
    ),
    "hook of a module": Change(
        "make_model._modules['0']._forward_hooks",
        given="make_model=made()",
        after="make_model=(lambda m: (m[0].register_forward_hook(lambda m, i, o: o * 2), m)[1])(made())",
    ),
    "replicas": Change("replicas is 3 here, and 2 there", after="replicas=3"),
    "order of samples": Change("shuffle is False here, and True there", after="shuffle=False"),
    "the last batch": Change(
        "drop_last is True here, and False there", "batch_size=5", after="batch_size=5, drop_last=True"
    ),
    "precision": Change("precision is 'bfloat16' here, and None there", after="precision='bfloat16'"),
    "threads": Change("threads is 2 here, and 1 there", after="threads=2"),
    "what is not finite": Change("on_nonfinite is 'skip' here, and 'stop' there", after="on_nonfinite='skip'"),
    "what a loss takes": Change(
        "loss_takes is 'model' here", after="loss_takes='model', loss_fn=lambda m, b: -plain_loss(m(b[0]), b[1])"
    ),
    "a target_fn": Change("target_fn reads differently", after="target_fn=lambda batch: -batch[1]"),
    "a collate_fn": Change("collate_fn reads differently", after="collate_fn=collate"),
    "a scheduler": Change("scheduler is absent here, and None there", after="scheduler=make_schedule"),
    "a rate in a tensor": Change(
        "optimizer.keywords['lr']",
        given="optimizer=functools.partial(torch.optim.Adam, lr=torch.tensor(0.01))",
        after="optimizer=functools.partial(torch.optim.Adam, lr=torch.tensor(0.02))",
    ),
    "seed": Change("seed is 2 here, and 1 there", given="seed=1", after="seed=2"),
    "learning rate": Change("lr is 0.02 here, and 0.01 there", given="lr=0.01", after="lr=0.02"),
    "weight decay": Change(
        "optimizer.keywords['weight_decay'] is 0.2 here, and 0.1 there",
        given="optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.1)",
        after="optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.2)",
    ),
    "weight decay in a function": Change(
        "optimizer: options.0.0.0.weight_decay is 0.2 here, and 0.1 there",
        given="optimizer=lambda named: torch.optim.AdamW(named, weight_decay=0.1)",
        after="optimizer=lambda named: torch.optim.AdamW(named, weight_decay=0.2)",
    ),
    "row of the data": Change(
        "data: item 0 is another float32[12, 4] here than there",
        after="data=(X.index_fill(0, torch.tensor(7), 9.0), Y)",
    ),
    "augmentation": Change(
        "data.share is 0.9 here, and 0.2 there", given="data=Jittered(X, Y, 0.2)", after="data=Jittered(X, Y, 0.9)"
    ),
    "depth of a model": Change(
        "make_model: body.3.weight is float32[8, 8] here, and float32[1, 8] the",
        text=("nn.Linear(hidden, 1))", "nn.Linear(hidden, hidden), nn.Linear(hidden, 1))"),
    ),
    "dropout in a model's code": Change(
        "make_model (its global Net).__init__ reads differently",
        text=("nn.Dropout(0.1), nn.Linear(hidden", "nn.Dropout(0.5), nn.Linear(hidden"),
    ),
    "option of a schedule": Change(
        "scheduler.keywords['step_size'] is 6 here, and 5 there",
        given="scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=5)",
        after="scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=6)",
    ),
    "option of a schedule in a function": Change(
        "optimizer: options.1.0.step_size is 6 here, and 5 there",
        given="scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 5)",
        after="scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 6)",
    ),
    "batch size": Change("batch_size is 6 here, and 4 there", given="batch_size=4", after="batch_size=6"),
    "weights of samples": Change(
        "weights is another float64[12] ", given="weights=[1.0] * 12", after="weights=[1.0] * 11 + [2.0]"
    ),
    "batches of a sampler": Change(
        "batch_sampler.keywords['size'] is 3 here, and 4 there",
        given="batch_size=32, batch_sampler=functools.partial(grouped, size=4)",
        after="batch_size=32, batch_sampler=functools.partial(grouped, size=3)",
    ),
    "clipping": Change("max_norm is 2.0 here, and 1.0 there", given="max_norm=1.0", after="max_norm=2.0"),
    "micro-batches": Change("micro_batches is 2 here, and 1 there", after="micro_batches=2"),
    "gradient alone": Change(
        "make_model (its global Net).forward reads differently",
        text=("return self.body(x) * self.rate", "return steeper(self.body(x) * self.rate)"),
    ),
}
WARNED = {
    "an object in place of a function": Change(
        "loss_fn is torch.nn.modules.loss.CrossEntropyLoss here, and torch.nn.functional.cross_entropy there",
        given="loss_fn=F.cross_entropy",
        after="loss_fn=nn.CrossEntropyLoss()",
    ),
    "batches of a sampler in later epochs": Change(
        "batch_sampler.keywords['growth'] is 1 here, and absent there",
        given="batch_size=32, batch_sampler=functools.partial(grouped, size=4)",
        after="batch_size=32, batch_sampler=functools.partial(grouped, size=4, growth=1)",
    ),
    "set of a global": Change(
        "loss_fn (its global KINDS) is set('a', 'b', 'd') here, and set('a', 'b",
        given="loss_fn=named_loss",
        text=('"c"}', '"d"}'),
    ),
    "constants of a set": Change(
        "loss_fn reads differently", given="loss_fn=named_loss", text=("{1, 2, 3}", "{1, 2, 4}")
    ),
    "what a method sets": Change(
        "loss_fn.names is 1 here, and absent there",
        given="loss_fn=object_loss",
        text=("self.names = names", "self.names = 1"),
    ),
    "field of a dataclass": Change(
        "loss_fn.args[0].extra[1] is 3 here, and 2 there",
        given="loss_fn=functools.partial(options_loss, Options())",
        text=("lambda: [1, 2]", "lambda: [1, 3]"),
    ),
    "enumeration": Change(
        "loss_fn.args[0]._value_ is 'sum' here, and 'mean' there",
        given="loss_fn=functools.partial(mode_loss, Mode.MEAN, Pair(0, 1))",
        text=('MEAN = "mean"', 'MEAN = "sum"'),
    ),
    "named tuple": Change(
        "loss_fn.args[1][1] is 2 here, and 1 there",
        given="loss_fn=functools.partial(mode_loss, Mode.MEAN, Pair(0, 1))",
        after="loss_fn=functools.partial(mode_loss, Mode.MEAN, Pair(0, 2))",
    ),
    "options of a loss": Change(
        "loss_fn.delta is 2.0 here, and 1.0 there",
        given="loss_fn=nn.HuberLoss()",
        after="loss_fn=nn.HuberLoss(delta=2.0)",
    ),
    "weights": Change(
        "make_model._modules['0']._parameters['weight'] is float32[8, 4] 6b1e55",
        given="make_model=made()",
        after="make_model=made(seed=1)",
    ),
    "buffer": Change(
        "make_model._buffers['scale'] is float32[] 2.0  here, and float32[] 1.0",
        given="make_model=made()",
        after="make_model=made(scale=2.0)",
    ),
    "indices of a subset": Change(
        "data.indices[3] is 8 here, and 4 there",
        given="data=torch.utils.data.Subset(Items(X, Y), [0, 1, 2, 4])",
        after="data=torch.utils.data.Subset(Items(X, Y), [0, 1, 2, 8])",
    ),
    "function of a schedule": Change(
        "scheduler (its global decay) reads differently", given="scheduler=make_schedule", text=("0.9 **", "0.8 **")
    ),
    "attribute of a function": Change(
        "loss_fn.scale is 2 here, and absent there",
        given="loss_fn=plain_loss",
        after="loss_fn=(setattr(plain_loss, 'scale', 2), plain_loss)[1]",
    ),
    "number in a deep container": Change(
        "loss_fn.args[0][0]['a'][1][0] is 3 here, and 2 there",
        given="loss_fn=functools.partial(kept_loss, [{'a': ({1}, [2, b'c'])}])",
        after="loss_fn=functools.partial(kept_loss, [{'a': ({1}, [3, b'c'])}])",
    ),
    "item of a long list": Change(
        "loss_fn.args[0][98] is 0 here, and 98 there",
        given="loss_fn=functools.partial(kept_loss, list(range(99)))",
        after="loss_fn=functools.partial(kept_loss, [*range(98), 0])",
    ),
    "one of objects that were equal": Change(
        "loss_fn.args[0][1] (its variable alpha) is 2 here, and 1 there",
        given="loss_fn=functools.partial(kept_loss, [wrapped(0, 1), wrapped(0, 1)])",
        after="loss_fn=functools.partial(kept_loss, [wrapped(0, 1), wrapped(0, 2)])",
    ),
    "row of an array of a dataset that the next step does not read": Change(
        "data._x is float32[12, 4] 82e83683c6c53487 here, and float32[12, 4] a6",
        given="data=Items(X, Y)",
        after="data=Items(X.index_fill(0, torch.tensor(5), 9.0), Y)",
    ),
    "augmentation that draws the same in the next step": Change(
        "data.share is 0.2000001 here, and 0.2 there",
        given="data=Jittered(X, Y, 0.2)",
        after="data=Jittered(X, Y, 0.2000001)",
    ),
    "code that acts later": Change(
        "loss_fn reads differently",
        text=(
            "return smooth(F.mse_loss(output, target))",
            "return smooth(F.mse_loss(output, target)) * (1 if phalanx.current_step() < 99 else 2)",
        ),
    ),
    "inner annotation": Change(
        "loss_fn reads differently", given="loss_fn=typed_loss", text=("inner(x: torch.Tensor", "inner(x")
    ),
    "future annotations": Change(
        "loss_fn reads differently",
        given="loss_fn=typed_loss",
        text=("\nimport c", "\nfrom __future__ import annotations\nimport c"),
    ),
    "unread item": Change(
        "loss_fn (its global TABLE)['log'] is 'runs/b' here, and 'runs/a' there",
        given="loss_fn=table_loss, optimizer=make_optimizer",
        text=('"runs/a"', '"runs/b"'),
    ),
    "unread argument of the program": Change(
        "make_model (its global ARGS).epochs is 30 here, and 3 there",
        given="make_model=make_by_arguments",
        text=("epochs=3", "epochs=30"),
    ),
    "copies of objects": Change(
        "loss_fn.args[0][1].scale is 1 here, and absent there",
        given="loss_fn=functools.partial(kept_loss, [Slots(1)] * 2)",
        after="loss_fn=functools.partial(kept_loss, [Slots(1), Slots(1)])",
    ),
    "copies of functions": Change(
        "loss_fn.args[0][1] reads differently",
        given="loss_fn=functools.partial(kept_loss, [wrapped(0, 1)] * 2)",
        after="loss_fn=functools.partial(kept_loss, [wrapped(0, 1), wrapped(0, 1)])",
    ),
    "counter of a loss": Change(
        "loss_fn.calls is 1 here, and 0 there",
        given="loss_fn=object_loss",
        after="loss_fn=(object_loss(X, X), object_loss)[1]",
    ),
    "what a bound method notes": Change(
        "loss_fn.__self__.calls is 1 here, and 0 there",
        given="loss_fn=object_loss.bound",
        after="loss_fn=(object_loss.bound(X, X), object_loss.bound)[1]",
    ),
    "global counter": Change(
        "loss_fn (its global COUNT) is 1 here, and 0 there",
        given="loss_fn=counting_loss",
        after="loss_fn=(counting_loss(X, X), counting_loss)[1]",
    ),
    "cache of a dataset": Change(
        "data.reads is 1 here, and 0 there",
        given="data=Items(X, Y)",
        after="data=(lambda d: (d[0], d)[1])(Items(X, Y))",
    ),
}
SILENT = {
    "order of a dict": Change(
        given="loss_fn=functools.partial(kept_loss, {'a': 1, 'b': 2})",
        after="loss_fn=functools.partial(kept_loss, {'b': 2, 'a': 1})",
    ),
    "nothing": Change(),
    "comment": Change(text=("# the mean\n    return", "# the mean,\n    # halved\n    return")),
    "no comment": Change(text=("    # the mean\n", "")),
    "comment behind": Change(text=("* (1 - SMOOTHING)\n", "* (1 - SMOOTHING)  # smoothed\n")),
    "docstring": Change(given="loss_fn=typed_loss", text=("'''The mean.'''", "'''The mean of all.'''")),
    "no docstring": Change(given="loss_fn=typed_loss", text=("    '''The mean.'''\n", "")),
    "inner docstring": Change(given="loss_fn=typed_loss", text=("        '''Halved.'''\n", "")),
    "docstring of a class": Change(text=("    rate = 0.5\n    def", "    '''A net.'''\n    rate = 0.5\n    def")),
    "annotation": Change(given="loss_fn=typed_loss", text=("typed_loss(output: torch.Tensor, ", "typed_loss(output, ")),
    "returns": Change(
        given="loss_fn=typed_loss", text=("target: torch.Tensor) -> torch.Tensor:", "target: torch.Tensor):")
    ),
    "annotated name": Change(given="loss_fn=typed_loss", text=("total: torch.Tensor =", "total =")),
    "annotation of a field": Change(
        given="loss_fn=functools.partial(options_loss, Options())", text=("rate: float = 0.5", "rate: object = 0.5")
    ),
    "lines above": Change(text=("SMOOTHING", "\n\n\nOTHER = 1\n\nSMOOTHING")),
    "functions above": Change(
        given="loss_fn=enclosed_loss", text=("# Losses", "def another():\n    return 1\n# Losses")
    ),
    "broken line": Change(text=("loss * (1 - SMOOTHING)", "(\n        loss\n        * (1 - SMOOTHING)\n    )")),
    "pass": Change(text=("    # the mean\n", "    pass\n")),
    "order of imports": Change(
        text=("import numpy, torch\nfrom torch import nn", "from torch import nn\nimport torch, numpy")
    ),
    "unused import": Change(text=("import numpy", "import json\nimport numpy")),
    "unread global": Change(given="loss_fn=helped_loss", helpers=("UNUSED = 1", "UNUSED = 2")),
    "order of a set": Change(given="loss_fn=named_loss", text=('{"a", "b", "c"}', '{"c", "b", "a"}')),
    "the other lambda of a line": Change(given="loss_fn=first", text=("F.l1_loss(o, t) * 3", "F.l1_loss(o, t) * 4")),
    "the lambda before it": Change(
        given="loss_fn=second", text=("F.mse_loss(output, target) * 2", "F.mse_loss(output, target) * 44")
    ),
    "name of a function": Change(
        given="loss_fn=default_loss", text=("def default_loss(", "def mean_loss("), after="loss_fn=mean_loss"
    ),
    "another function": Change(given="loss_fn=circular_loss", text=("loss * (1 - SMOOTHING)", "loss")),
    "more steps": Change(given="steps=2", after="steps=5"),
    "epochs": Change(after="steps=None, epochs=5"),
    "numpy for torch": Change(after="data=(X.numpy(), Y.numpy())"),
    "copies": Change(given="data=(X, Y)", after="data=(X.clone(), Y.clone())"),
    "order of named arguments": Change(
        given="loss_fn=functools.partial(default_loss, power=1, scale=2)",
        after="loss_fn=functools.partial(default_loss, scale=2, power=1)",
    ),
    "used cache": Change(given="loss_fn=cached_loss", after="loss_fn=(factor(1), factor(2), cached_loss)[2]"),
    "model that was copied": Change(given="make_model=made()", after="make_model=__import__('copy').deepcopy(made())"),
    "generator of a dataset": Change(
        given="data=Items(X, Y)", after="data=(lambda d: (d.rng.random(), d)[1])(Items(X, Y))"
    ),
    "iterator": Change(
        given="loss_fn=functools.partial(kept_loss, itertools.count())",
        after="loss_fn=functools.partial(kept_loss, itertools.count(5))",
    ),
    "what cannot be seen": Change(given="loss_fn=functools.partial(kept_loss, __import__('threading').Lock())"),
    "module as a whole": Change(given="loss_fn=functools.partial(kept_loss, helpers)"),
}
TABLE = {
    name: (outcome, change)
    for outcome, changes in (("refused", REFUSED), ("warned", WARNED), ("silent", SILENT))
    for name, change in changes.items()
}


STAYS_HERE = ("import inside", "module inside", "what cannot be seen")


@pytest.fixture
def make(tmp_path):
    """See ``Made``."""
    made = Made(tmp_path)
    yield made
    made.forget()


def longer(recipe, steps):
    """The recipe with so many steps, unless it counts epochs."""
    return recipe if recipe.epochs else dataclasses.replace(recipe, steps=steps)


class Hears:
    """A callback that notes what it is told."""

    def __init__(self, told):
        self.told = told

    def hear(self, report):
        self.told.append(report.step)

    step = evaluated = hear

    def end(self, result):
        self.told.append(("end", result))


@pytest.mark.long
@pytest.mark.cases(24)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", TABLE)
def test_a_changed_recipe(make, tmp_path, name, workers):
    """A run that stopped is refused, warned or goes on as the table says; a refusal changes no file."""
    if workers > 1 and name in STAYS_HERE:
        pytest.skip("a lock does not travel, nor does a module that is made anew under one name")
    (due, change), options = TABLE[name], {"run_dir": tmp_path / "run", "progress": False, **engine_of(workers)}
    longer(change.before(make), 2).train(**options)
    kept = bytes_of(tmp_path / "run")
    outcome, said = outcome_of(longer(change.changed(make), 3), **options)
    assert (outcome, change.told in said) == (due, True), said
    assert (bytes_of(tmp_path / "run") == kept) == (outcome == "refused")
    assert (outcome == "silent") == (not said)
    assert (outcome == "warned") == ("what it computes next is the same" in said)


SEEN_LATER = [name for name, change in REFUSED.items() if change.told.endswith("reads differently")]


@pytest.mark.long
@pytest.mark.cases(6)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", SEEN_LATER)
def test_a_changed_recipe_after_a_kill(make, tmp_path, name, workers):
    """The first step is compared with the old link of it, before a callback hears of it or a byte is written."""
    if workers > 1 and name in STAYS_HERE:
        pytest.skip("a module that is made anew under one name does not travel")
    change, run_dir, told = REFUSED[name], tmp_path / "run", []
    options = {"run_dir": run_dir, "progress": False, "snapshot_every": 2, **engine_of(workers)}
    whole = longer(change.before(make), 4).train(**options)
    killed(run_dir)
    kept, callback = bytes_of(run_dir), Hears(told)
    outcome, said = outcome_of(longer(change.changed(make), 4), callbacks=[callback, callback.hear], **options)
    assert (outcome, "step 2 comes to another" in said, change.told in said) == ("refused", True, True), said
    assert bytes_of(run_dir) == kept
    assert told == [("end", None)]
    result = longer(change.before(make), 4).train(**options)
    assert_same(result, whole)
    assert (result.resumed_from, result.chain) == (2, whole.chain)
