"""What becomes of a run that goes on with a changed recipe: the table of docs/details.md, case by case."""

import dataclasses

import pytest

from tests.state.changes import Change, Made, outcome_of
from tests.state.runs import assert_same, bytes_of, engine_of, killed

TABLE = {
    "code of a loss": Change(
        "refused", old="return smooth(F.mse_loss", new="return 2 * smooth(F.mse_loss", told="loss_fn reads differently"
    ),
    "code of a function it calls": Change(
        "refused",
        old="loss * (1 - SMOOTHING)",
        new="loss * (2 - SMOOTHING)",
        told="loss_fn (its global smooth) reads differently",
    ),
    "global of a function it calls": Change(
        "refused",
        old="SMOOTHING = 0.1",
        new="SMOOTHING = 0.2",
        told="loss_fn (its global smooth) (its global SMOOTHING) is 0.2 here, and 0.",
    ),
    "closure": Change(
        "refused",
        given="loss_fn=enclosed_loss",
        old="wrapped(plain_loss, 0.5)",
        new="wrapped(plain_loss, 0.6)",
        told="loss_fn (its variable alpha) is 0.6 here, and 0.5 there",
    ),
    "nested loss": Change(
        "refused",
        given="loss_fn=enclosed_loss",
        old="return smooth(F",
        new="return -smooth(F",
        told="loss_fn (its variable inner) reads differently",
    ),
    "default": Change(
        "refused",
        given="loss_fn=default_loss",
        old="power=2, *",
        new="power=3, *",
        told="loss_fn.__defaults__[0] is 3 here, and 2 there",
    ),
    "default by name": Change(
        "refused",
        given="loss_fn=default_loss",
        old="scale=1.5",
        new="scale=1.6",
        told="loss_fn.__kwdefaults__['scale'] is 1.6 here, and 1.5 there",
    ),
    "function of another module": Change(
        "refused",
        given="loss_fn=helped_loss",
        helpers=("x / 2", "x / 3"),
        told="loss_fn (its global halved) reads differently",
    ),
    "number of another module": Change(
        "refused",
        given="loss_fn=helped_loss",
        helpers=("SCALE = 2.0", "SCALE = 3.0"),
        told="loss_fn (its global helpers.SCALE) is 3.0 here, and 2.0 there",
    ),
    "import inside": Change(
        "refused",
        given="loss_fn=late_loss",
        helpers=("SCALE = 2.0", "SCALE = 3.0"),
        told="replica 0 of step 2 comes to another loss, another gradient",
    ),
    "module inside": Change(
        "refused",
        given="loss_fn=late_loss",
        helpers=("x / 2", "x / 3"),
        told="replica 0 of step 2 comes to another loss, another gradient",
    ),
    "item of a global": Change(
        "refused",
        given="loss_fn=table_loss",
        old='"scale": 1.0',
        new='"scale": 1.1',
        told="loss_fn (its global TABLE)['scale'] is 1.1 here, and 1.0 there",
    ),
    "annotated code": Change(
        "refused", given="loss_fn=typed_loss", old="= x / 2", new="= x / 3", told="loss_fn reads differently"
    ),
    "attribute of an object": Change(
        "refused",
        given="loss_fn=object_loss",
        old="Loss(0.5)",
        new="Loss(0.6)",
        told="loss_fn.scale is 0.6 here, and 0.5 there",
    ),
    "attribute of a class": Change(
        "refused",
        given="loss_fn=object_loss",
        old="    power = 2",
        new="    power = 3",
        told="loss_fn.__class__.power is 3 here, and 2 there",
    ),
    "method of an object": Change(
        "refused",
        given="loss_fn=object_loss",
        old="x.mean() *",
        new="x.sum() *",
        told="loss_fn.__class__.weigh reads differently",
    ),
    "bound object": Change(
        "refused",
        given="loss_fn=Loss(0.5).bound",
        old="self.scale = scale\n        self.n",
        new="self.scale = 1\n        self.n",
        told="loss_fn.__self__.scale is 1 here, and 0.5 there",
    ),
    "dataclass": Change(
        "refused",
        given="loss_fn=functools.partial(options_loss, Options())",
        old="rate: float = 0.5",
        new="rate: float = 0.6",
        told="loss_fn.args[0].rate is 0.6 here, and 0.5 there",
    ),
    "method of a dataclass": Change(
        "refused",
        given="loss_fn=functools.partial(options_loss, Options())",
        old="x * self.rate",
        new="x / self.rate",
        told="loss_fn.args[0].__class__.apply reads differently",
    ),
    "slots": Change(
        "refused",
        given="loss_fn=Slots(1.0)",
        after="loss_fn=Slots(2.0)",
        told="loss_fn.scale is 2.0 here, and 1.0 there",
    ),
    "functions that call each other": Change(
        "refused",
        given="loss_fn=circular_loss",
        old="n != 0 and",
        new="n != 1 and",
        told="loss_fn (its global even) (its global odd) reads differently",
    ),
    "the first of two lambdas": Change(
        "refused", given="loss_fn=first", old="target) * 2)", new="target) * 4)", told="loss_fn reads differently"
    ),
    "the second of two lambdas": Change(
        "refused", given="loss_fn=second", old="(o, t) * 3)", new="(o, t) * 4)", told="loss_fn reads differently"
    ),
    "below a decorator": Change(
        "refused",
        given="loss_fn=decorated_loss",
        old="* 0.25",
        new="* 0.75",
        told="loss_fn (its global decorated) (its variable func) reads differently",
    ),
    "below a cache": Change(
        "refused",
        given="loss_fn=cached_loss",
        old="n * 0.5",
        new="n * 0.6",
        told="loss_fn (its global factor).__wrapped__ reads differently",
    ),
    "weight of a loss": Change(
        "refused",
        given="loss_fn=phalanx.weighted(plain_loss, lambda o, t: len(o) * SMOOTHING)",
        old="SMOOTHING = 0.1",
        new="SMOOTHING = 0.2",
        told="loss_fn.args[1] (its global SMOOTHING) is 0.2 here, and 0.1 there",
    ),
    "code of a model": Change(
        "refused",
        old="self.body(x) *",
        new="self.body(x) /",
        told="make_model (its global Net).forward reads differently",
    ),
    "default of a model": Change(
        "refused",
        old="hidden=8",
        new="hidden=9",
        told="make_model: body.0.weight is float32[9, 4] here, and float32[8, 4] the",
    ),
    "activation of a model's code": Change(
        "refused",
        old="act=nn.ReLU):\n        super",
        new="act=nn.Tanh):\n        super",
        told="make_model (its global Net).__init__.__defaults__[1] is torch.nn.modul",
    ),
    "arguments of the program": Change(
        "refused",
        given="make_model=make_by_arguments",
        old="hidden=8",
        new="hidden=9",
        told="make_model: body.0.weight is float32[9, 4] here, and float32[8, 4] the",
    ),
    "dict in a partial": Change(
        "refused",
        given="make_model=functools.partial(make_of, {'hidden': 16})",
        after="make_model=functools.partial(make_of, {'hidden': 32})",
        told="make_model: body.0.weight is float32[32, 4] here, and float32[16, 4] t",
    ),
    "an object in place of a function": Change(
        "warned",
        given="loss_fn=F.cross_entropy",
        after="loss_fn=nn.CrossEntropyLoss()",
        told="loss_fn is torch.nn.modules.loss.CrossEntropyLoss here, and torch.nn.functional.cross_entropy there",
    ),
    "activation": Change(
        "refused",
        given="make_model=made()",
        after="make_model=made(nn.Tanh)",
        told="make_model._modules['1'].__class__ is torch.nn.modules.activation.Tanh",
    ),
    "dropout": Change(
        "refused",
        given="make_model=made()",
        after="make_model=made(dropout=0.5)",
        told="make_model._modules['2'].p is 0.5 here, and 0.1 there",
    ),
    "mode of a module": Change(
        "refused",
        given="make_model=made()",
        after="make_model=(lambda m: (m[2].eval(), m)[1])(made())",
        told="make_model._modules['2'].training is False here, and True there",
    ),
    "frozen parameter": Change(
        "refused",
        given="make_model=made()",
        after="make_model=(lambda m: (m[0].requires_grad_(False), m)[1])(made())",
        told="replica 0 of step 2 comes to another gradient",
    ),
    "columns": Change(
        "refused",
        old="arange(48.0)",
        new="arange(1, 49.0)",
        told="data: item 0 is another float32[12, 4] here than there",
    ),
    "name of a column": Change(
        "refused",
        given="data={'x': X, 'y': Y}, forward_fn=first_of, target_fn=last_of",
        after="data={'z': X, 'y': Y}, forward_fn=first_of, target_fn=last_of",
        told="data: item 'z' is float32[12, 4] here, and absent there",
    ),
    "order of rows": Change(
        "refused",
        old="X, Y = torch.arange(48.0)",
        new="X, Y = torch.arange(47.0, -1, -1)",
        told="data: item 0 is another float32[12, 4] here than there",
    ),
    "list of samples": Change(
        "refused",
        given="data=[(x, y) for x, y in zip(X, Y)]",
        old="arange(48.0)",
        new="arange(1, 49.0)",
        told="data is another list of 12 here than there",
    ),
    "long list of samples": Change(
        "refused",
        given="data=[(x, y) for x, y in zip(X, Y)] * 5",
        old="/ 48,",
        new="/ 49,",
        told="data is another list of 60 here than there",
    ),
    "list of objects": Change(
        "refused",
        given="data=[Sample(x, y) for x, y in zip(X, Y)], collate_fn=collate_objects",
        old="/ 48,",
        new="/ 49,",
        told="data[0].x is float32[4] 9131f9e8a7d6aa2d here, and float32[4] 71a9b553",
    ),
    "array of a dataset": Change(
        "refused",
        given="data=Items(X, Y)",
        old="/ 48,",
        new="/ 49,",
        told="data._x is float32[12, 4] dc82dad0cc695ef2 here, and float32[12, 4] a6",
    ),
    "code of a dataset": Change(
        "refused",
        given="data=Items(X, Y)",
        old="_x[i] * 1.0",
        new="_x[i] * 2.0",
        told="data.__class__.__getitem__ reads differently",
    ),
    "transform of a dataset": Change(
        "refused",
        given="data=Items(X, Y, centred)",
        old="[0.25]",
        new="[0.5]",
        told="data.transform (its global MEANS)[0] is 0.5 here, and 0.25 there",
    ),
    "wrapped dataset": Change(
        "refused",
        given="data=torch.utils.data.Subset(Items(X, Y), [0, 1, 2, 3])",
        old="/ 48,",
        new="/ 49,",
        told="data.dataset._x is float32[12, 4] dc82dad0cc695ef2 here, and float32[1",
    ),
    "global that collate reads": Change(
        "refused",
        given="collate_fn=collate",
        old="rate=0.5)",
        new="rate=0.6)",
        told="collate_fn (its global ARGS).rate is 0.6 here, and 0.5 there",
    ),
    "code of forward": Change(
        "refused",
        given="forward_fn=lambda m, b: m(b[0])",
        after="forward_fn=lambda m, b: m(b[0]) * 2",
        told="forward_fn reads differently",
    ),
    "rate of an optimizer": Change(
        "refused",
        given="optimizer=functools.partial(torch.optim.SGD, lr=1.0)",
        after="optimizer=functools.partial(torch.optim.SGD, lr=2.0)",
        told="optimizer.keywords['lr'] is 2.0 here, and 1.0 there",
    ),
    "class of an optimizer": Change(
        "refused",
        given="optimizer=functools.partial(torch.optim.SGD, lr=1)",
        after="optimizer=functools.partial(torch.optim.Adam, lr=1)",
        told="optimizer.func is torch.optim.adam.Adam here, and torch.optim.sgd.SGD",
    ),
    "global that an optimizer reads": Change(
        "refused",
        given="optimizer=make_optimizer",
        old='"scale": 1.0',
        new='"scale": 1.1',
        told="optimizer: options.0.0.0.lr is 1.1 here, and 1.0 there",
    ),
    "lambda of a schedule": Change(
        "refused",
        given="scheduler=functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda s: SMOOTHING ** s)",
        old="SMOOTHING = 0.1",
        new="SMOOTHING = 0.2",
        told="loss_fn (its global smooth) (its global SMOOTHING) is 0.2 here, and 0.",
    ),
    "what the user sets": Change(
        "refused",
        given="loss_fn=object_loss",
        after="loss_fn=(object_loss.set_scale(0.7), object_loss)[1]",
        told="loss_fn.scale is 0.7 here, and 0.5 there",
    ),
    "one of a long list of objects": Change(
        "refused",
        given="data=[Sample(X[0], Y[n % 12]) for n in range(60)], collate_fn=collate_objects",
        after="data=[Sample(X[0], Y[n % 11]) for n in range(60)], collate_fn=collate_objects",
        told="data[11].y is float32[1] [0.0]  here, and float32[1] [0.91666668653488",
    ),
    "code without source": Change(
        "refused",
        given="loss_fn=lambda o, t: (o - t).mean()",
        after="loss_fn=lambda o, t: (t - o).mean()",
        told="loss_fn reads differently",
    ),
    "hook of a module": Change(
        "refused",
        given="make_model=made()",
        after="make_model=(lambda m: (m[0].register_forward_hook(lambda m, i, o: o * 2), m)[1])(made())",
        told="make_model._modules['0']._forward_hooks",
    ),
    "seed": Change("refused", given="seed=1", after="seed=2", told="seed is 2 here, and 1 there"),
    "learning rate": Change("refused", given="lr=0.01", after="lr=0.02", told="lr is 0.02 here, and 0.01 there"),
    "weight decay": Change(
        "refused",
        given="optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.1)",
        after="optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.2)",
        told="optimizer.keywords['weight_decay'] is 0.2 here, and 0.1 there",
    ),
    "weight decay in a function": Change(
        "refused",
        given="optimizer=lambda named: torch.optim.AdamW(named, weight_decay=0.1)",
        after="optimizer=lambda named: torch.optim.AdamW(named, weight_decay=0.2)",
        told="optimizer: options.0.0.0.weight_decay is 0.2 here, and 0.1 there",
    ),
    "row of the data": Change(
        "refused",
        after="data=(X.index_fill(0, torch.tensor(7), 9.0), Y)",
        told="data: item 0 is another float32[12, 4] here than there",
    ),
    "augmentation": Change(
        "refused",
        given="data=Jittered(X, Y, 0.2)",
        after="data=Jittered(X, Y, 0.9)",
        told="data.share is 0.9 here, and 0.2 there",
    ),
    "depth of a model": Change(
        "refused",
        old="nn.Linear(hidden, 1))",
        new="nn.Linear(hidden, hidden), nn.Linear(hidden, 1))",
        told="make_model: body.3.weight is float32[8, 8] here, and float32[1, 8] the",
    ),
    "dropout in a model's code": Change(
        "refused",
        old="nn.Dropout(0.1), nn.Linear(hidden",
        new="nn.Dropout(0.5), nn.Linear(hidden",
        told="make_model (its global Net).__init__ reads differently",
    ),
    "option of a schedule": Change(
        "refused",
        given="scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=5)",
        after="scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=6)",
        told="scheduler.keywords['step_size'] is 6 here, and 5 there",
    ),
    "option of a schedule in a function": Change(
        "refused",
        given="scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 5)",
        after="scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 6)",
        told="optimizer: options.1.0.step_size is 6 here, and 5 there",
    ),
    "batch size": Change(
        "refused", given="batch_size=4", after="batch_size=6", told="batch_size is 6 here, and 4 there"
    ),
    "weights of samples": Change(
        "refused",
        given="weights=[1.0] * 12",
        after="weights=[1.0] * 11 + [2.0]",
        told="weights is another float64[12] ",
    ),
    "batches of a sampler": Change(
        "refused",
        given="batch_size=32, batch_sampler=functools.partial(grouped, size=4)",
        after="batch_size=32, batch_sampler=functools.partial(grouped, size=3)",
        told="batch_sampler.keywords['size'] is 3 here, and 4 there",
    ),
    "batches of a sampler in later epochs": Change(
        "warned",
        given="batch_size=32, batch_sampler=functools.partial(grouped, size=4)",
        after="batch_size=32, batch_sampler=functools.partial(grouped, size=4, growth=1)",
        told="batch_sampler.keywords['growth'] is 1 here, and absent there",
    ),
    "clipping": Change(
        "refused", given="max_norm=1.0", after="max_norm=2.0", told="max_norm is 2.0 here, and 1.0 there"
    ),
    "micro-batches": Change("refused", after="micro_batches=2", told="micro_batches is 2 here, and 1 there"),
    "gradient alone": Change(
        "refused",
        old="return self.body(x) * self.rate",
        new="return steeper(self.body(x) * self.rate)",
        told="make_model (its global Net).forward reads differently",
    ),
    "set of a global": Change(
        "warned",
        given="loss_fn=named_loss",
        old='"c"}',
        new='"d"}',
        told="loss_fn (its global KINDS) is set('a', 'b', 'd') here, and set('a', 'b",
    ),
    "constants of a set": Change(
        "warned", given="loss_fn=named_loss", old="{1, 2, 3}", new="{1, 2, 4}", told="loss_fn reads differently"
    ),
    "what a method sets": Change(
        "warned",
        given="loss_fn=object_loss",
        old="self.names = names",
        new="self.names = 1",
        told="loss_fn.names is 1 here, and absent there",
    ),
    "field of a dataclass": Change(
        "warned",
        given="loss_fn=functools.partial(options_loss, Options())",
        old="lambda: [1, 2]",
        new="lambda: [1, 3]",
        told="loss_fn.args[0].extra[1] is 3 here, and 2 there",
    ),
    "enumeration": Change(
        "warned",
        given="loss_fn=functools.partial(mode_loss, Mode.MEAN, Pair(0, 1))",
        old='MEAN = "mean"',
        new='MEAN = "sum"',
        told="loss_fn.args[0]._value_ is 'sum' here, and 'mean' there",
    ),
    "named tuple": Change(
        "warned",
        given="loss_fn=functools.partial(mode_loss, Mode.MEAN, Pair(0, 1))",
        after="loss_fn=functools.partial(mode_loss, Mode.MEAN, Pair(0, 2))",
        told="loss_fn.args[1][1] is 2 here, and 1 there",
    ),
    "options of a loss": Change(
        "warned",
        given="loss_fn=nn.HuberLoss()",
        after="loss_fn=nn.HuberLoss(delta=2.0)",
        told="loss_fn.delta is 2.0 here, and 1.0 there",
    ),
    "weights": Change(
        "warned",
        given="make_model=made()",
        after="make_model=made(seed=1)",
        told="make_model._modules['0']._parameters['weight'] is float32[8, 4] 6b1e55",
    ),
    "buffer": Change(
        "warned",
        given="make_model=made()",
        after="make_model=made(scale=2.0)",
        told="make_model._buffers['scale'] is float32[] 2.0  here, and float32[] 1.0",
    ),
    "indices of a subset": Change(
        "warned",
        given="data=torch.utils.data.Subset(Items(X, Y), [0, 1, 2, 4])",
        after="data=torch.utils.data.Subset(Items(X, Y), [0, 1, 2, 8])",
        told="data.indices[3] is 8 here, and 4 there",
    ),
    "function of a schedule": Change(
        "warned",
        given="scheduler=make_schedule",
        old="0.9 **",
        new="0.8 **",
        told="scheduler (its global decay) reads differently",
    ),
    "attribute of a function": Change(
        "warned",
        given="loss_fn=plain_loss",
        after="loss_fn=(setattr(plain_loss, 'scale', 2), plain_loss)[1]",
        told="loss_fn.scale is 2 here, and absent there",
    ),
    "number in a deep container": Change(
        "warned",
        given="loss_fn=functools.partial(kept_loss, [{'a': ({1}, [2, b'c'])}])",
        after="loss_fn=functools.partial(kept_loss, [{'a': ({1}, [3, b'c'])}])",
        told="loss_fn.args[0][0]['a'][1][0] is 3 here, and 2 there",
    ),
    "item of a long list": Change(
        "warned",
        given="loss_fn=functools.partial(kept_loss, list(range(99)))",
        after="loss_fn=functools.partial(kept_loss, [*range(98), 0])",
        told="loss_fn.args[0][98] is 0 here, and 98 there",
    ),
    "one of objects that were equal": Change(
        "warned",
        given="loss_fn=functools.partial(kept_loss, [wrapped(0, 1), wrapped(0, 1)])",
        after="loss_fn=functools.partial(kept_loss, [wrapped(0, 1), wrapped(0, 2)])",
        told="loss_fn.args[0][1] (its variable alpha) is 2 here, and 1 there",
    ),
    "row of an array of a dataset that the next step does not read": Change(
        "warned",
        given="data=Items(X, Y)",
        after="data=Items(X.index_fill(0, torch.tensor(5), 9.0), Y)",
        told="data._x is float32[12, 4] 82e83683c6c53487 here, and float32[12, 4] a6",
    ),
    "augmentation that draws the same in the next step": Change(
        "warned",
        given="data=Jittered(X, Y, 0.2)",
        after="data=Jittered(X, Y, 0.2000001)",
        told="data.share is 0.2000001 here, and 0.2 there",
    ),
    "code that acts later": Change(
        "warned",
        old="return smooth(F.mse_loss(output, target))",
        new="return smooth(F.mse_loss(output, target)) * (1 if phalanx.current_step() < 99 else 2)",
        told="loss_fn reads differently",
    ),
    "inner annotation": Change(
        "warned",
        given="loss_fn=typed_loss",
        old="inner(x: torch.Tensor",
        new="inner(x",
        told="loss_fn reads differently",
    ),
    "future annotations": Change(
        "warned",
        given="loss_fn=typed_loss",
        old="\nimport c",
        new="\nfrom __future__ import annotations\nimport c",
        told="loss_fn reads differently",
    ),
    "unread item": Change(
        "warned",
        given="loss_fn=table_loss, optimizer=make_optimizer",
        old='"runs/a"',
        new='"runs/b"',
        told="loss_fn (its global TABLE)['log'] is 'runs/b' here, and 'runs/a' there",
    ),
    "unread argument of the program": Change(
        "warned",
        given="make_model=make_by_arguments",
        old="epochs=3",
        new="epochs=30",
        told="make_model (its global ARGS).epochs is 30 here, and 3 there",
    ),
    "copies of objects": Change(
        "warned",
        given="loss_fn=functools.partial(kept_loss, [Slots(1)] * 2)",
        after="loss_fn=functools.partial(kept_loss, [Slots(1), Slots(1)])",
        told="loss_fn.args[0][1].scale is 1 here, and absent there",
    ),
    "copies of functions": Change(
        "warned",
        given="loss_fn=functools.partial(kept_loss, [wrapped(0, 1)] * 2)",
        after="loss_fn=functools.partial(kept_loss, [wrapped(0, 1), wrapped(0, 1)])",
        told="loss_fn.args[0][1] reads differently",
    ),
    "counter of a loss": Change(
        "warned",
        given="loss_fn=object_loss",
        after="loss_fn=(object_loss(X, X), object_loss)[1]",
        told="loss_fn.calls is 1 here, and 0 there",
    ),
    "what a bound method notes": Change(
        "warned",
        given="loss_fn=object_loss.bound",
        after="loss_fn=(object_loss.bound(X, X), object_loss.bound)[1]",
        told="loss_fn.__self__.calls is 1 here, and 0 there",
    ),
    "global counter": Change(
        "warned",
        given="loss_fn=counting_loss",
        after="loss_fn=(counting_loss(X, X), counting_loss)[1]",
        told="loss_fn (its global COUNT) is 1 here, and 0 there",
    ),
    "cache of a dataset": Change(
        "warned",
        given="data=Items(X, Y)",
        after="data=(lambda d: (d[0], d)[1])(Items(X, Y))",
        told="data.reads is 1 here, and 0 there",
    ),
    "order of a dict": Change(
        "silent",
        given="loss_fn=functools.partial(kept_loss, {'a': 1, 'b': 2})",
        after="loss_fn=functools.partial(kept_loss, {'b': 2, 'a': 1})",
    ),
    "nothing": Change("silent"),
    "comment": Change("silent", old="# the mean\n    return", new="# the mean,\n    # halved\n    return"),
    "no comment": Change("silent", old="    # the mean\n", new=""),
    "comment behind": Change("silent", old="* (1 - SMOOTHING)\n", new="* (1 - SMOOTHING)  # smoothed\n"),
    "docstring": Change("silent", given="loss_fn=typed_loss", old="'''The mean.'''", new="'''The mean of all.'''"),
    "no docstring": Change("silent", given="loss_fn=typed_loss", old="    '''The mean.'''\n", new=""),
    "inner docstring": Change("silent", given="loss_fn=typed_loss", old="        '''Halved.'''\n", new=""),
    "docstring of a class": Change(
        "silent", old="    rate = 0.5\n    def", new="    '''A net.'''\n    rate = 0.5\n    def"
    ),
    "annotation": Change(
        "silent", given="loss_fn=typed_loss", old="typed_loss(output: torch.Tensor, ", new="typed_loss(output, "
    ),
    "returns": Change(
        "silent", given="loss_fn=typed_loss", old="target: torch.Tensor) -> torch.Tensor:", new="target: torch.Tensor):"
    ),
    "annotated name": Change("silent", given="loss_fn=typed_loss", old="total: torch.Tensor =", new="total ="),
    "annotation of a field": Change(
        "silent",
        given="loss_fn=functools.partial(options_loss, Options())",
        old="rate: float = 0.5",
        new="rate: object = 0.5",
    ),
    "lines above": Change("silent", old="SMOOTHING", new="\n\n\nOTHER = 1\n\nSMOOTHING"),
    "functions above": Change(
        "silent", given="loss_fn=enclosed_loss", old="# Losses", new="def another():\n    return 1\n# Losses"
    ),
    "broken line": Change(
        "silent", old="loss * (1 - SMOOTHING)", new="(\n        loss\n        * (1 - SMOOTHING)\n    )"
    ),
    "pass": Change("silent", old="    # the mean\n", new="    pass\n"),
    "order of imports": Change(
        "silent", old="import numpy, torch\nfrom torch import nn", new="from torch import nn\nimport torch, numpy"
    ),
    "unused import": Change("silent", old="import numpy", new="import json\nimport numpy"),
    "unread global": Change("silent", given="loss_fn=helped_loss", helpers=("UNUSED = 1", "UNUSED = 2")),
    "order of a set": Change("silent", given="loss_fn=named_loss", old='{"a", "b", "c"}', new='{"c", "b", "a"}'),
    "the other lambda of a line": Change(
        "silent", given="loss_fn=first", old="F.l1_loss(o, t) * 3", new="F.l1_loss(o, t) * 4"
    ),
    "the lambda before it": Change(
        "silent", given="loss_fn=second", old="F.mse_loss(output, target) * 2", new="F.mse_loss(output, target) * 44"
    ),
    "name of a function": Change(
        "silent", given="loss_fn=default_loss", old="def default_loss(", new="def mean_loss(", after="loss_fn=mean_loss"
    ),
    "another function": Change("silent", given="loss_fn=circular_loss", old="loss * (1 - SMOOTHING)", new="loss"),
    "more steps": Change("silent", given="steps=2", after="steps=5"),
    "epochs": Change("silent", after="steps=None, epochs=5"),
    "numpy for torch": Change("silent", after="data=(X.numpy(), Y.numpy())"),
    "copies": Change("silent", given="data=(X, Y)", after="data=(X.clone(), Y.clone())"),
    "order of named arguments": Change(
        "silent",
        given="loss_fn=functools.partial(default_loss, power=1, scale=2)",
        after="loss_fn=functools.partial(default_loss, scale=2, power=1)",
    ),
    "used cache": Change("silent", given="loss_fn=cached_loss", after="loss_fn=(factor(1), factor(2), cached_loss)[2]"),
    "model that was copied": Change(
        "silent", given="make_model=made()", after="make_model=__import__('copy').deepcopy(made())"
    ),
    "generator of a dataset": Change(
        "silent", given="data=Items(X, Y)", after="data=(lambda d: (d.rng.random(), d)[1])(Items(X, Y))"
    ),
    "iterator": Change(
        "silent",
        given="loss_fn=functools.partial(kept_loss, itertools.count())",
        after="loss_fn=functools.partial(kept_loss, itertools.count(5))",
    ),
    "what cannot be seen": Change(
        "silent", given="loss_fn=functools.partial(kept_loss, __import__('threading').Lock())"
    ),
    "module as a whole": Change("silent", given="loss_fn=functools.partial(kept_loss, helpers)"),
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
    change, options = TABLE[name], {"run_dir": tmp_path / "run", "progress": False, **engine_of(workers)}
    longer(change.before(make), 2).train(**options)
    kept = bytes_of(tmp_path / "run")
    outcome, said = outcome_of(longer(change.changed(make), 3), **options)
    assert (outcome, change.told in said) == (change.outcome, True), said
    assert (bytes_of(tmp_path / "run") == kept) == (outcome == "refused")
    assert (outcome == "silent") == (not said)


SEEN_LATER = [
    name for name, change in TABLE.items() if change.outcome == "refused" and change.told.endswith("reads differently")
]


@pytest.mark.long
@pytest.mark.cases(6)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", SEEN_LATER)
def test_a_changed_recipe_after_a_kill(make, tmp_path, name, workers):
    """The first step is compared with the old link of it, before a callback hears of it or a byte is written."""
    if workers > 1 and name in STAYS_HERE:
        pytest.skip("a module that is made anew under one name does not travel")
    change, run_dir, told = TABLE[name], tmp_path / "run", []
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
