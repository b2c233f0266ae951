"""What callbacks, or the loop around a run, change of what the recipe's code reads is refused, in all engines."""

import functools
import logging
import time
import types
import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

import phalanx
from phalanx.definition.steady import Steady
from tests.engines.moving import hurry

LOG = logging.getLogger(__name__)
FACTOR, SEEN, HISTORY, CONFIG = 1.0, None, [], types.SimpleNamespace(factor=1.0, note="")
SAMPLES = 24


def columns():
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


class Annealed:
    """A loss with a weight that lies in its class until somebody sets it."""

    beta, distance = 0.0, staticmethod(torch.square)

    def __init__(self):
        self.best, self.calls, self.parts, self.cache, self.entropy = 9.0, 0, [], None, torch.nn.CrossEntropyLoss()

    def __call__(self, output, target):
        self.calls += 1
        self.parts.append(self.calls)
        if self.cache is None:
            self.cache = {}
        return self.entropy(output, target) + self.beta * self.distance(output).mean()


class Slotted:
    """A loss without a dict."""

    __slots__ = ("beta",)

    def __init__(self):
        self.beta = 0.0

    def __call__(self, output, target):
        return F.cross_entropy(output, target) + self.beta * output.square().mean()


class Rows(Dataset):
    """Rotates its rows by the epoch that it was told."""

    def __init__(self):
        self.epoch, self.offsets = 0, (0,)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x, y = columns()
        return x[(index + self.epoch + self.offsets[0]) % SAMPLES], y[index]


class Scaled(torch.nn.Linear):
    """A model that reads a global."""

    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        return CONFIG.factor * super().forward(x)


def recipe(loss_fn=F.cross_entropy, data=None, **fields):
    made = {"make_model": functools.partial(torch.nn.Linear, 4, 2), "replicas": 2, "batch_size": 8, "epochs": 3}
    return phalanx.Recipe(**{**made, "data": data or columns(), "loss_fn": loss_fn, **fields})


def of_global(output, target):
    return FACTOR * F.cross_entropy(output, target)


def of_config(output, target):
    return CONFIG.factor * F.cross_entropy(output, target)


def set_global(value):
    globals()["FACTOR"] = value


def closure():
    """A loss over a list, and what changes it."""
    scale = [1.0]
    return recipe(lambda output, target: scale[0] * F.cross_entropy(output, target)), functools.partial(
        scale.__setitem__, 0
    )


def changing(name, loss=Annealed):
    """A loss object, and what sets its attribute."""
    made = loss()
    return recipe(made), functools.partial(setattr, made, name)


def inner():
    loss = Annealed()
    return recipe(loss), functools.partial(setattr, loss.entropy, "label_smoothing")


def of_data(name, value):
    data = Rows()
    return recipe(data=data), lambda _: setattr(data, name, value)


def replaced():
    loss = Annealed()
    return recipe(loss), lambda _: setattr(loss, "distance", torch.abs)


def scheduled():
    scale = [1.0]
    schedule = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: scale[0])
    return recipe(scheduler=schedule), functools.partial(scale.__setitem__, 0)


def keyword():
    def smooth(output, target, factor):
        return factor["value"] * F.cross_entropy(output, target)

    loss = functools.partial(smooth, factor={"value": 1.0})
    return recipe(loss), functools.partial(loss.keywords["factor"].__setitem__, "value")


CHANGES = {
    "loss_fn.beta was 0.0 and is 0.5": functools.partial(changing, "beta"),
    "loss_fn.beta was 0.0 and is 0.5 now": functools.partial(changing, "beta", Slotted),
    "loss_fn.entropy.label_smoothing was 0.0": inner,
    "loss_fn.distance is another": replaced,
    "data.epoch was 0 and is 1": functools.partial(of_data, "epoch", 1),
    "data.offsets was (0,) and is (5,)": functools.partial(of_data, "offsets", (5,)),
    "loss_fn (its variable scale)[0] was 1.0": closure,
    "scheduler.keywords['lr_lambda'] (its variable scale)[0]": scheduled,
    "loss_fn.keywords['factor']['value'] was 1.0": keyword,
    "loss_fn (its global FACTOR) was 1.0": lambda: (recipe(of_global), set_global),
    "loss_fn (its global CONFIG).factor was 1.0": lambda: (
        recipe(of_config), functools.partial(setattr, CONFIG, "factor")),
    "make_model.forward (its global CONFIG).factor": lambda: (
        recipe(make_model=Scaled), functools.partial(setattr, CONFIG, "factor")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def put_back():
    yield
    set_global(1.0)
    CONFIG.factor, CONFIG.note = 1.0, ""
    HISTORY.clear()


def at(step, change):
    """A callback that changes something after one step."""
    return lambda report: change(0.5) if report.step == step else None


@pytest.mark.cases(3)
@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}, {}], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused_by_name(name, options):
    """What became another value is named before the next step, whichever engine computes."""
    job, change = CHANGES[name]()
    with pytest.raises(phalanx.UsageError) as caught:
        job.train(callbacks=[at(4, change)], progress=False, **options)
    text = str(caught.value)
    assert name.partition(" was")[0] in text.replace("__class__.", ""), text
    assert "before step 5" in text
    assert "phalanx.current_epoch()" in text
    assert caught.value.result.steps == 5


@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}], ids=str)
def test_a_change_in_the_loop_around_a_run_is_refused(options):
    """A loop by hand is as a callback is; putting the value back lets the run go on, as if nothing had been."""
    loss = Annealed()
    with recipe(loss).start(progress=False, **options) as run:
        next(run)
        loss.beta = 0.5
        for ask in (run.step, run.step, lambda: run.evaluate(lambda output, target: 1.0, columns())):
            with pytest.raises(phalanx.UsageError, match=r"loss_fn\.beta was 0\.0 and is 0\.5"):
                ask()
        del loss.beta
        run.finish()
        assert run.result().digest == recipe(Annealed()).train(progress=False).digest


@pytest.mark.parametrize("last", [True, False])
def test_before_the_first_step_and_after_the_last(last):
    """A change before the first step is refused; one after the last step has no effect, and is not."""
    loss, refused = Annealed(), False
    with recipe(loss).start(engine="inline", progress=False) as run:
        if last:
            run.finish()
        loss.beta = 0.5
        try:
            run.finish()
        except phalanx.UsageError as error:
            refused = "before step 0" in str(error)
    assert refused != last


def test_without_the_refusal_there_would_be_two_digests(monkeypatch):
    """The negative twin: unwatched, the same change counts in one process and not in workers."""
    monkeypatch.setattr(Steady, "check", lambda self, steps: None)  # planted
    digests = []
    for options in ({"engine": "inline"}, {"workers": 2}):
        job, change = changing("beta")
        digests.append(job.train(callbacks=[at(4, change)], progress=False, **options).digest)
    assert digests[0] != digests[1]


@pytest.mark.long
def test_a_change_before_the_move_to_workers_is_refused(monkeypatch):
    """With workers='auto' it is refused before anything is handed over, so the moment of that decides nothing."""
    for step in (0, 3, 6):
        job, change = changing("beta")
        hurry(monkeypatch, job)
        with pytest.raises(phalanx.UsageError, match=f"before step {step + 1}"):
            job.replace(epochs=8).train(callbacks=[at(step, change)], progress=False)


class Trainer:
    """One object with the loss, the callback and all that both keep: its callback changes what the loss never reads."""

    def __init__(self):
        self.best, self.begun, self.history, self.epoch, self.calls, self.weight = 9.0, time.time(), [], 0, 0, 1.0

    def loss(self, output, target):
        self.calls += 1
        LOG.debug("a loss of weight %s", self.weight)
        return self.weight * F.cross_entropy(output, target)

    def __call__(self, report):
        self.best, self.begun, self.epoch = min(self.best, report.loss), time.time(), report.epoch
        self.history.append(report.loss)
        self.calls = 0
        LOG.setLevel(10 + report.step % 2)


def noting(output, target):
    global SEEN
    SEEN = output.detach()
    return F.cross_entropy(output, target)


class Cached(Rows):
    """Keeps what it has read, and counts."""

    def __init__(self):
        super().__init__()
        self.kept, self.hits = {}, 0

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        self.hits += 1
        return self.kept[index]


def honest_trainer():
    trainer = Trainer()
    return recipe(trainer.loss), trainer


def honest_globals():
    def after(report):
        global SEEN
        SEEN = None
        HISTORY.append(report.loss)
        CONFIG.note = str(report.step)

    return recipe(noting), after


def honest_cache():
    data = Cached()
    return recipe(data=data), lambda report: setattr(data, "hits", 0)


def honest_state():
    loss = Annealed()

    def after(report):
        loss.best = min(loss.best, report.loss)
        loss.parts.clear()
        loss.beta = 0.0 * report.step  # equal, but another object

    return recipe(loss), after


class Sharded(torch.utils.data.Dataset):
    """Keeps the shard open that was read last."""

    def __init__(self):
        self.current, self.rows = -1, None

    def __len__(self):
        return 48

    def __getitem__(self, index):
        if index // 16 != self.current:
            self.current = index // 16
            self.rows = torch.full((16, 4), float(self.current))
        return self.rows[index % 16], index % 2


def honest_reader():
    data = Sharded()
    return recipe(data=data), lambda report: data[16 * (report.step % 3)]


class Slotted:
    """Has a value only while it is called."""

    __slots__ = ("difference",)

    def __call__(self, output, target):
        self.difference = F.cross_entropy(output, target)
        value = self.difference
        del self.difference
        return value


def honest_slots():
    return recipe(Slotted()), lambda report: None


HONEST = [honest_trainer, honest_globals, honest_cache, honest_state, honest_reader, honest_slots]


@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}, {}], ids=str)
@pytest.mark.parametrize("make", HONEST)
def test_what_the_code_does_not_read_may_change(make, options):
    """Records, clocks, loggers, caches and counters of a step's own: neither refused nor warned of."""
    job, after = make()
    alone = job.train(engine="inline", progress=False).digest
    job, after = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert job.train(callbacks=[after], progress=False, **options).digest == alone


@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}], ids=str)
def test_what_only_grows_is_one_warning(options):
    """A list that a callback adds to and the loss could read: one warning, which names it."""
    grown = []

    def loss(output, target):
        return F.cross_entropy(output, target) + 0 * len(grown)

    with pytest.warns(UserWarning, match=r"adds to loss_fn \(its variable grown\)") as told:
        recipe(loss).train(callbacks=[lambda report: grown.append(report.loss)], progress=False, **options)
    assert len([each for each in told if "adds to" in str(each.message)]) == 1


def of_the_epoch(output, target):
    return F.cross_entropy(output, target) * (1 + phalanx.current_epoch())


class OfTheEpoch(Rows):
    """Follows the advice: rotates its rows by the epoch that is computed."""

    def __getitem__(self, index):
        x, y = columns()
        return x[(index + phalanx.current_epoch()) % SAMPLES], y[index]


def collated(samples):
    x, y = torch.utils.data.default_collate(samples)
    return x + phalanx.current_epoch(), y


@pytest.mark.long
@pytest.mark.parametrize("options", [{"workers": 2}, {"workers": 2, "readers": 1}, {}], ids=str)
def test_the_current_epoch(options):
    """It is the plan's in datasets, collate_fn and losses, whoever calls them; the advice of the refusal works."""
    job = recipe(of_the_epoch, OfTheEpoch(), collate_fn=collated)
    digest = job.train(engine="inline", progress=False).digest
    assert job.train(progress=False, **options).digest == digest
    told = recipe(None, forward_fn=lambda model, batch: 0 * model(batch[0]).sum() + phalanx.current_epoch())
    assert told.train(progress=False, **options).loss_history == [step // 3 for step in range(9)]


@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}], ids=str)
def test_the_current_epoch_of_streams_and_brought_batches(options):
    """A stream's epoch is that of its pass; brought batches have none, and the error says so."""
    x, y = columns()
    fields = {"forward_fn": lambda model, batch: 0 * model(batch[0]).sum() + phalanx.current_epoch(), "loss_fn": None}
    stream = phalanx.Stream(lambda: list(zip(x[:12], y[:12], strict=True)))
    assert recipe(data=stream, **fields).train(progress=False, **options).loss_history == [0, 0, 1, 1, 2, 2]
    brought = phalanx.Recipe(torch.nn.Linear(4, 2), None, replicas=2, **fields)
    with (
        brought.start(progress=False, **options) as run,
        pytest.raises(phalanx.UsageError, match="there are no epochs"),
    ):
        run.step((x, y))
    with pytest.raises(phalanx.UsageError, match=r"current_epoch\(\) was called where no step is computed"):
        phalanx.current_epoch()


def test_a_run_inside_forward_leaves_the_current_step():
    """A step that trains another model goes on as the step that it is."""

    def forward(model, batch):
        before = phalanx.current_step(), phalanx.current_epoch()
        if before[0] == 4:
            recipe(epochs=1).train(engine="inline", progress=False)
        assert (phalanx.current_step(), phalanx.current_epoch()) == before
        return 0 * model(batch[0]).sum() + before[0]

    told = recipe(None, forward_fn=forward).train(engine="inline", progress=False)
    assert told.loss_history == list(range(9))
    with pytest.raises(phalanx.UsageError, match="no step is computed"):
        phalanx.current_step()


class Shown(Annealed):
    """Reads what it may have: an attribute of its own, a long list, a dict by key."""

    def __init__(self):
        super().__init__()
        self.gain, self.scales, self.named = 0.25, [1.0] * 40, {"a": 1.0, "b": 2.0}

    def __call__(self, output, target):
        return (
            super().__call__(output, target)
            * len(self.scales)
            * self.named.get("a", getattr(self, "gain", 0.5) + self.gain)
        )


LOST = {
    "loss_fn.gain was 0.25 and is gone": lambda loss: delattr(loss, "gain"),
    "loss_fn.scales (its length) was 40 and is 39": lambda loss: loss.scales.pop(),
    "loss_fn.named['a'] was 1.0 and is gone": lambda loss: loss.named.update(c=loss.named.pop("a")),
}


@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("name", LOST)
def test_what_is_gone_is_refused_by_name(name, options):
    """An attribute, an item of a long list, a key: what a callback takes away is a change, too."""
    loss = Shown()
    with pytest.raises(phalanx.UsageError) as caught:
        recipe(loss).train(callbacks=[at(4, lambda _: LOST[name](loss))], progress=False, **options)
    assert name in str(caught.value)


def test_a_long_list_that_grows_is_one_warning():
    """As a short one: whoever adds to it counts or logs, more often than not."""
    loss = Shown()
    with pytest.warns(UserWarning, match=r"adds to loss_fn.scales \(its length\)") as told:
        recipe(loss).train(callbacks=[lambda report: loss.scales.append(1.0)], engine="inline", progress=False)
    assert len(told) == 1


class Boxed:
    """A loss whose factor is an object of its own."""

    def __init__(self):
        self.factor = types.SimpleNamespace(low=1.0)

    def __call__(self, output, target):
        factor = self.factor
        return F.cross_entropy(output, target) * (factor.high if hasattr(factor, "high") else factor.low)


def test_a_change_is_not_told_as_an_addition():
    """An object in another's place may have more attributes: the error comes alone, without the warning."""
    loss = Boxed()
    with pytest.raises(phalanx.UsageError, match=r"loss_fn\.factor\.low was 1\.0 and is 2\.0"):
        recipe(loss).train(
            callbacks=[at(4, lambda _: setattr(loss, "factor", types.SimpleNamespace(high=1.0, low=2.0)))],
            engine="inline", progress=False,
        )  # fmt: skip
