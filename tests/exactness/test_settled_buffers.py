"""Queues are no statistics, and a recipe says how a buffer is settled; parameters stay those that make_model made."""

import warnings

import pytest
import torch
from torch import nn

import phalanx
from phalanx.frameworks.torch.replica.buffers import Buffers, is_queue

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
X[:, :3] = 0  # as the borders of MNIST
Y = (X[:, 4] > 0).long()
WAYS = [
    pytest.param({"engine": "inline"}, id="inline"),
    pytest.param({"workers": 2}, id="two", marks=pytest.mark.long),
    pytest.param({"workers": "auto"}, id="auto", marks=pytest.mark.long),
    pytest.param({"devices": ["cpu", "cpu"]}, id="devices", marks=pytest.mark.long),
]


class Queue(nn.Module):
    """A queue of unit keys, as MoCo's; from step ``since`` on each forward pass writes the next columns."""

    def __init__(self, since=0):
        super().__init__()
        self.body, self.since = nn.Linear(8, 2), since
        self.register_buffer("queue", nn.functional.normalize(torch.randn(2, 16), dim=0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        out = self.body(x)
        at = int(self.calls) % 16
        if self.calls >= self.since:
            self.queue[:, at] = nn.functional.normalize(out[0].detach(), dim=0)
        self.calls += 1
        return out + self.queue.mean()


def recipe(make_model, replicas=4, **more):
    facts = {"batch_size": 16, "steps": 5, "loss_fn": nn.functional.cross_entropy, **more}
    return phalanx.Recipe(make_model, (X, Y), replicas=replicas, **facts)


def quiet(recipe, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return recipe.train(progress=False, **(options or {"engine": "inline"}))


@pytest.mark.parametrize("options", WAYS)
def test_a_queue_is_refused(options):
    """A buffer of which replicas write some slices unlike, and none others, is refused; its own advice then helps."""
    with pytest.raises(phalanx.UsageError, match=r"'queue' looks like a queue.*'first'"):
        recipe(Queue).train(progress=False, **options)
    first = quiet(recipe(Queue, buffers={"queue": "first"}), **options)
    assert first.digest == quiet(recipe(Queue, buffers={"queue": "first"})).digest
    assert torch.allclose(first.model.queue.norm(dim=0), torch.ones(16))  # each is one replica's key: no oracle of bits
    mean = quiet(recipe(Queue, buffers={"que*": "mean"}), **options)
    assert mean.digest != first.digest
    assert mean.model.queue.norm(dim=0).min() < 0.99
    quiet(recipe(Queue, replicas=1), engine="inline")


@pytest.mark.parametrize("options", WAYS)
def test_a_queue_seen_late_is_one_warning(options):
    """A queue that begins after the first three steps does not end the run: there is one warning."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recipe(lambda: Queue(since=5), steps=12).train(progress=False, **options)
    assert ["looks like a queue" in str(each.message) for each in told] == [True]


def writing(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def reading(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model.body(x), y)


@pytest.mark.long
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize(("first", "every"), [(True, 1), (False, 1), (True, 3)], ids=["first", "second", "seldom"])
def test_a_queue_in_one_phase_is_refused(first, every, options):
    """A queue that one of two phases writes is refused in the third step that has this phase, and not before."""
    phases = [phalanx.Phase(writing, every=every, loss_takes="model"), phalanx.Phase(reading, loss_takes="model")]
    over = recipe(Queue, loss_fn=None, phases=phases if first else phases[::-1], steps=3 * every)
    with pytest.raises(phalanx.UsageError, match="'queue' looks like a queue"):
        over.train(progress=False, **options)
    quiet(over.replace(steps=3 * every - every), **options)
    quiet(over.replace(buffers={"queue": "mean"}), **options)


def test_a_queue_in_one_phase_seen_late_is_one_warning():
    """A queue that the second phase begins to write later does not end the run: there is one warning."""
    phases = [phalanx.Phase(reading, loss_takes="model"), phalanx.Phase(writing, loss_takes="model")]
    with pytest.warns(UserWarning, match="looks like a queue") as told:
        recipe(lambda: Queue(since=5), loss_fn=None, phases=phases, steps=12).train(progress=False, engine="inline")
    assert len(told) == 1


def test_refuse_names_the_buffer():
    """The rule "refuse" ends the run where replicas differ, and says nothing where they do not."""
    with pytest.raises(phalanx.UsageError, match="'queue' differs over replicas"):
        recipe(Queue, buffers={"queue": "refuse"}).train(engine="inline")
    quiet(recipe(Queue, buffers={"calls": "refuse", "queue": "first"}))


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"quoue": "first"}, "did you mean 'queue'"),
        ({"queue": "last"}, "must be one of 'mean', 'first', 'refuse'"),
        ("queue", "must be a dict of names"),
    ],
)
def test_what_is_no_rule_is_refused(rules, told):
    """Unknown names and values are refused with what there is."""
    with pytest.raises(phalanx.UsageError, match=told):
        recipe(Queue, buffers=rules).train(engine="inline")


class Norm(nn.Module):
    """A norm and a codebook of one's own: inputs that are always 0, and codes that are never used, leave zeros."""

    def __init__(self):
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(1, 8))
        self.register_buffer("most", torch.full((8,), -1.0))
        self.register_buffer("used", torch.zeros(1, 6))
        self.register_buffer("codes", torch.zeros(6, 2))

    def forward(self, x):
        out = self.body(self.norm(x))
        now = out.detach()
        self.mean.lerp_(x.mean(0, keepdim=True), 0.1)
        torch.maximum(self.most, x.max(0).values, out=self.most)
        ones = nn.functional.one_hot((now[:, 0] > 0).long(), 6).float()
        self.used.lerp_(ones.sum(0, keepdim=True), 0.1)
        self.codes.lerp_(ones.T @ now, 0.1)
        return out


def test_statistics_are_no_queues():
    """Running means, extremes and moving codebooks that leave some slices untouched are neither refused nor told."""
    quiet(recipe(Norm, steps=11))


def test_the_rule_by_hand():
    """The rule itself, on columns where it must and must not hold."""
    start = torch.arange(12.0).view(4, 3)
    one, two = start.clone(), start.clone()
    one[0], two[0] = 5, 6
    assert is_queue(start, [one, two])
    assert not is_queue(start, [one, one.clone()])  # equal on all
    for value in (0.0, 1.0):  # what was left is one value
        assert not is_queue(
            torch.full((4, 3), value), [torch.full((4, 3), value).index_fill(0, torch.tensor(0), n) for n in (5, 6)]
        )
    assert not is_queue(start, [start + 2, start + 3])  # all is written
    assert not is_queue(start[:, 0], [one[:, 0], two[:, 0]])  # slices of one element


def test_the_device_path_obeys():
    """Buffers in flat memory, as devices have them, are settled by the same rules."""
    model = nn.Module()
    for name in ("a", "b", "n"):
        model.register_buffer(name, torch.zeros(3, dtype=torch.long if name == "n" else torch.float32))
    model.weight = nn.Parameter(torch.zeros(1))
    answers = []
    for remote in (False, True):
        buffers = Buffers(model, {"b": "first"})
        buffers._remote = remote  # planted
        ran = [(1, [torch.full((3,), value).to(each.dtype) for each in buffers.starts]) for value in (1.0, 2.0)]
        buffers.settle(ran, 7)
        answers.append([each.tolist() for each in buffers.starts])
        model.zero_grad()
        for each in model.buffers():
            each.zero_()
    assert answers[0] == answers[1] == [[1.5] * 3, [1.0] * 3, [1] * 3]


class Changing(nn.Module):
    """Replaces or makes a parameter or a module in forward, as its ``kind`` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.body, self.scale = kind, nn.Linear(8, 2), nn.Parameter(torch.ones(2))
        self.more = None

    def forward(self, x):
        out = self.body(x) * self.scale
        if self.kind == "replaced":
            self.scale = nn.Parameter(self.scale.detach().clamp(-0.5, 0.9))
        elif self.kind == "late" and self.more is None:
            self.more = nn.Parameter(torch.ones(2))
        elif self.kind == "module" and not hasattr(self, "norm"):
            self.norm = nn.LayerNorm(2)
        elif self.kind == "evaluated" and not self.training:
            self.scale = nn.Parameter(self.scale * 2)
        elif self.kind == "empty":
            self.pool = nn.Identity()
        elif self.kind == "back":
            kept, self.scale = self.scale, nn.Parameter(self.scale * 2)
            self.scale = kept
        return out


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize(("kind", "name"), [("replaced", "scale"), ("late", "more"), ("module", "norm.weight")])
def test_parameters_stay(kind, name, options):
    """A parameter that forward replaces or makes is refused by its name in that step, and the state stays whole."""
    with pytest.raises(phalanx.UsageError, match=f"forward made, replaced or removed parameter '{name}'") as caught:
        recipe(lambda: Changing(kind)).train(progress=False, **options)
    assert "at step 0" in "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_parameters_stay_in_evaluations():
    """A parameter that forward replaces in an evaluation is refused, too."""
    evaluation = phalanx.Evaluation({"mean": lambda output, target: output.mean()}, (X, Y))
    with pytest.raises(phalanx.UsageError, match="parameter 'scale'"):
        recipe(lambda: Changing("evaluated")).train(engine="inline", evaluation=evaluation)


class Decaying(nn.Module):
    """Scales its output by 0.9 of a weight: written in evaluations or in training, or computed without a write."""

    def __init__(self, how):
        super().__init__()
        self.how, self.body, self.w = how, nn.Linear(8, 2), nn.Parameter(torch.ones(2))

    def forward(self, x):
        w = self.w
        if self.how == "computed":
            w = self.w * 0.9
        elif self.how == ("trained" if self.training else "evaluated"):
            with torch.no_grad():
                self.w.mul_(0.9)
        return self.body(x) * w


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_write_in_an_evaluation_has_a_way_out(replicas):
    """A parameter that is written in an evaluation is refused for any R, and what the message advises works."""
    evaluation = phalanx.Evaluation({"mean": lambda output, target: output.mean()}, (X, Y))
    with pytest.raises(phalanx.UsageError, match="'w' was written in place in an evaluation") as caught:
        recipe(lambda: Decaying("evaluated"), replicas).train(engine="inline", evaluation=evaluation)
    assert "w = self.w * 0.9" in str(caught.value)
    assert "in training" in str(caught.value)
    assert not any(word in str(caught.value) for word in ("buffer", "replicas=1"))
    for how in ("computed", *(["trained"] if replicas == 1 else [])):
        quiet(recipe(lambda: Decaying(how), replicas), engine="inline", evaluation=evaluation)  # noqa: B023
    with pytest.raises(phalanx.UsageError, match="use a buffer for what forward updates, or replicas=1"):
        recipe(lambda: Decaying("trained")).train(engine="inline")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["", "empty", "back"])
def test_modules_may_come(kind):
    """Modules without parameters may come, and a parameter that is put back stays what it was."""
    assert quiet(recipe(lambda: Changing(kind))).digest == quiet(recipe(lambda: Changing(""))).digest
    assert quiet(recipe(lambda: Changing(kind), seed=1)).digest != quiet(recipe(lambda: Changing(""))).digest
