"""A replica is computed twice in some steps: state that user code keeps of its own is found, and nothing else is."""

import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import phalanx
from tests.by_hand import answer

SAMPLES, FEATURES = 64, 6
WAYS = {"inline": {"engine": "inline"}, "workers": {"workers": 2}, "auto": {"workers": "auto"}}
CALLS = [0]


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, FEATURES, generator=generator), torch.arange(SAMPLES) % 3


class Net(nn.Module):
    """A small one, for others to be made of."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, 8)
        self.outer = nn.Linear(8, 3)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))


class Momentum(Net):
    """A teacher that follows its student in forward, as MoCo's key encoder does; equal at first."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.teacher = nn.Linear(FEATURES, 8).requires_grad_(requires_grad=False)
        self.teacher.load_state_dict(self.inner.state_dict())

    def follow(self, mine, theirs):
        if self.how == "replaced":
            mine.data = mine.data * 0.5 + theirs.data * 0.5
        else:
            mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)

    def forward(self, x):
        for mine, theirs in zip(self.teacher.parameters(), self.inner.parameters(), strict=True):
            self.follow(mine, theirs)
        return self.outer(torch.relu(self.inner(x)) + self.teacher(x))


class Centre(nn.Module):
    """DINO's loss: outputs are centred by a buffer of the loss, which no snapshot has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, output, target):
        loss = F.cross_entropy(output - self.centre, target)
        self.centre = 0.5 * self.centre + output.detach().mean(0) + 1
        return loss


class Within(Net):
    """Runs a backward pass inside forward."""

    def forward(self, x):
        output = super().forward(x)
        output.square().mean().backward(retain_graph=True)
        return output


class Annealed(Net):
    """A temperature that falls with every call."""

    tau = 8.0

    def forward(self, x):
        self.tau = self.tau / 2
        return super().forward(x) / self.tau


class Running(Net):
    """A running mean in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(FEATURES)

    def forward(self, x):
        self.mean = self.mean + x.mean(0) + 1
        return super().forward(x - self.mean)


class Queue(Net):
    """Outputs of the last 16 calls, used once those are there."""

    def __init__(self):
        super().__init__()
        self.queue, self.calls = [], 0

    def forward(self, x):
        output = super().forward(x)
        self.calls += 1
        self.queue = [*self.queue, self.calls][-16:]
        return output * self.queue[0] if len(self.queue) == 16 else output


class Late(Net):
    """A factor that starts to grow after some calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * max(1, self.calls - 8)


def counted_loss(output, target):
    CALLS[0] += 1
    return F.cross_entropy(output, target) * CALLS[0]


def counted_collate(samples):
    CALLS[0] += 1
    x, y = default_collate(samples)
    return x * CALLS[0], y


def counted_forward(model, batch):
    CALLS[0] += 1
    return model(batch[0]) * CALLS[0]


def counter():
    calls = 0

    def loss_fn(output, target):
        nonlocal calls
        calls += 1
        return F.cross_entropy(output, target) * calls

    return loss_fn


def recipe(make_model=Net, loss_fn=F.cross_entropy, **options):
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    return phalanx.Recipe(
        make_model, data(), loss_fn, **{"batch_size": 16, "steps": 12, "optimizer": optimizer, **options}
    )


FAULTY = {  # a recipe, the steps in which it may be found, and what the message names
    "a teacher given other memory": (lambda: recipe(functools.partial(Momentum, "replaced")), {0}, "'teacher.weight'"),
    "a teacher written": (
        lambda: recipe(functools.partial(Momentum, "written")),
        {0, 1},
        "'teacher.weight' was written",
    ),
    "a loss with a buffer": (lambda: recipe(loss_fn=Centre()), {0}, "loss_fn.centre"),
    "a backward pass within": (lambda: recipe(Within), {0}, "'inner.weight' had a gradient"),
    "a temperature": (lambda: recipe(Annealed), {0}, "model.tau ("),
    "a running mean": (lambda: recipe(Running), {0}, "model.mean"),
    "a queue": (lambda: recipe(Queue), {10}, "model.queue[0] ("),
    "a late factor": (lambda: recipe(Late), {1, 10}, "model.calls ("),
    "a count in a loss": (lambda: recipe(loss_fn=counted_loss), {0}, "loss_fn (its global CALLS)[0] ("),
    "a count in a closure": (lambda: recipe(loss_fn=counter()), {0}, "loss_fn (its variable calls) ("),
    "a count in collate": (lambda: recipe(collate_fn=counted_collate), {0}, "collate_fn (its global CALLS)[0] ("),
    "a count in forward": (lambda: recipe(forward_fn=counted_forward), {0}, "forward_fn (its global CALLS)[0] ("),
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAULTY)
def test_state_is_found(name, way):
    """State outside of parameters and buffers ends the run before an update, and is named with the ways out."""
    faulty, steps, named = FAULTY[name]
    with pytest.raises(phalanx.RunError, match="in between") as caught:
        faulty().train(progress=False, **WAYS[way])
    error = caught.value
    assert type(error) is phalanx.StateError
    assert error.step in steps
    assert error.replica in (0, 2)
    assert f"replica {error.replica} of step {error.step}, samples [" in str(error)
    assert named in str(error)
    assert "a buffer of the model" in str(error)
    assert "phalanx.current_step()" in str(error)
    assert error.result.steps == error.step


class Attention(Net):
    """Stores what it attended to, makes a table when it is first called, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.dropout = nn.Dropout(0.5)
        self.table = None
        self.maps = []

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, FEATURES).cos()
        self.maps.append(torch.softmax(self.norm(x), -1).detach())
        self.calls = len(self.maps)
        return super().forward(self.dropout(self.norm(x)) * self.table)


class Centred(Net):
    """The remedy for ``Centre``: the buffer is one of the model, which returns the loss."""

    def __init__(self):
        super().__init__()
        self.loss = Centre()


def centred(model, batch):
    return model.loss(model(batch[0]), batch[1])


def annealed(model, batch):
    return model(batch[0]) / (1 + phalanx.current_step())


def step_of_output(model, batch):
    return 0 * model(batch[0]).sum() + phalanx.current_step()


def counted_in(phase):
    def loss_fn(model, batch):
        CALLS[0] += phase == "second"
        return F.cross_entropy(model(batch[0]), batch[1]) * (CALLS[0] if phase == "second" else 1)

    return loss_fn


def phases(losses):
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    named = zip(("first", "second"), ("inner", "outer"), losses, strict=True)
    return [phalanx.Phase(loss, layer, optimizer, name=name, loss_takes="model") for name, layer, loss in named]


SOUND = {
    "maps, a table, BatchNorm and dropout": lambda: recipe(Attention),
    "micro-batches": lambda: recipe(Attention, micro_batches=2),
    "bfloat16": lambda: recipe(Attention, precision="bfloat16"),
    "a loss in the model": lambda: recipe(Centred, loss_fn=None, forward_fn=centred),
    "a function of the step": lambda: recipe(forward_fn=annealed),
    "one sample each": lambda: recipe(batch_size=None),
    "phases": lambda: recipe(loss_fn=None, optimizer=None, phases=phases([counted_in("first")] * 2)),
}


@pytest.mark.long
@pytest.mark.cases(3)
@pytest.mark.parametrize("name", SOUND)
def test_nothing_else_is_found(name):
    """What is stored and not used, or computed anew from the step, is no reason; the bits are those of any W."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        digests = {SOUND[name]().train(progress=False, **way).digest for way in WAYS.values()}
    assert len(digests) == 1


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["maps, a table, BatchNorm and dropout", "micro-batches"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_bits_are_those_of_the_plain_loop(name, replicas):
    """That a replica is computed twice moves no bit."""
    made = SOUND[name]()
    options = {field: getattr(made, field) for field in ("steps", "batch_size", "optimizer", "micro_batches")}
    made = phalanx.Recipe(Attention, data(), F.cross_entropy, replicas=replicas, **options)
    result = made.train(progress=False, engine="inline")
    if made.micro_batches == 1:
        assert (result.digest, result.loss_history) == answer(made)
    assert result.digest == made.train(progress=False, workers=replicas).digest


def test_a_phase_is_named():
    """Each phase of a step is computed twice, and the message names the one that keeps state."""
    faulty = recipe(loss_fn=None, optimizer=None, phases=phases([counted_in("first"), counted_in("second")]))
    with pytest.raises(phalanx.StateError, match=r"replica 0 of step 0, phase 'second'.*phases\[\d\].loss_fn"):
        faulty.train(progress=False, engine="inline")


def count_in_step(step, model, batch):
    CALLS[0] += 1
    return model(batch[0]) * (CALLS[0] if phalanx.current_step() == step else 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:going on with another recipe")
@pytest.mark.parametrize("way", WAYS)
def test_the_first_step_after_a_resume(tmp_path, way):
    """It is computed twice, whichever it is; in the run before, the same step was not."""
    whole = recipe(forward_fn=functools.partial(count_in_step, 5))
    whole.train(progress=False, **WAYS[way])
    forward_fn = functools.partial(count_in_step, 5)
    CALLS[0] = 0
    recipe(forward_fn=forward_fn, steps=5).train(run_dir=tmp_path, progress=False, **WAYS[way])
    CALLS[0] = 0
    with pytest.raises(phalanx.StateError, match="of step 5,") as caught:
        recipe(forward_fn=forward_fn, steps=8).train(run_dir=tmp_path, resume="anyway", progress=False, **WAYS[way])
    assert caught.value.result.steps == 5


def count_sample(model, batch):
    x = batch[0]
    CALLS[0] += 1
    return model(x) * (CALLS[0] if (x == data()[0][9]).all(-1).any() else 1)


def test_every_worker_looks():
    """What only the third replica does is seen by the worker that begins with it, and not by one that begins before."""
    late = recipe(forward_fn=count_sample, shuffle=False, steps=1)
    late.train(progress=False, engine="inline")
    with pytest.raises(phalanx.StateError) as caught:
        late.train(progress=False, workers=2)
    assert (caught.value.replica, caught.value.samples) == (2, (8, 9, 10, 11))


class FirstScale(Net):
    """Divides by what it makes of its first call: of its samples, or of none of them."""

    def __init__(self, of):
        super().__init__()
        self.of, self.scale = of, None

    def forward(self, x):
        if self.scale is None:
            self.scale = x.abs().max() if self.of == "samples" else torch.tensor(2.0)
        return super().forward(x / self.scale)


class FirstMean:
    """Collates around the mean of the first share that it is given."""

    mean = None

    def __call__(self, samples):
        x, y = default_collate(samples)
        if self.mean is None:
            self.mean = x.mean(0)
        return x - self.mean, y


STICKY = {
    "in forward": lambda: recipe(functools.partial(FirstScale, "samples")),
    "in collate": lambda: recipe(collate_fn=FirstMean()),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", STICKY)
def test_what_the_first_call_leaves_is_found(name, workers):
    """A value that stays as the first samples of a worker made it differs from worker to worker: refused at once."""
    with pytest.raises(phalanx.StateError, match=r"step 0, .*keeps what its first call came to") as caught:
        STICKY[name]().train(progress=False, engine="processes", workers=workers)
    assert caught.value.result.steps == 0


@pytest.mark.long
def test_a_table_of_the_first_call_is_no_reason():
    """What the first call makes of no sample is the same in every worker: one digest."""
    kept = recipe(functools.partial(FirstScale, "none"))
    ways = [{"engine": "inline"}, *({"engine": "processes", "workers": workers} for workers in (2, 3, 4))]
    assert len({kept.train(progress=False, **way).digest for way in ways}) == 1


@pytest.mark.cases(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["a count in a loss", "a teacher given other memory", "a backward pass within"])
def test_a_warning_where_it_is_allowed(name, way):
    """nondeterministic="allow" makes of all of it one warning, and the run goes on."""
    faulty, _, named = FAULTY[name]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = faulty().train(progress=False, nondeterministic="allow", **WAYS[way])
    assert result.steps == 12
    assert [named in str(warning.message) for warning in told] == [True]


def unlike(output, target):
    return F.cross_entropy(output, target) * (1 + next(LIKE_A_KERNEL))


LIKE_A_KERNEL = iter(np.linspace(0, 1, 1000).tolist())


def test_an_operation_that_does_not_compute_the_same_twice():
    """Where nothing in sight has changed, the message says what it may be."""
    with pytest.raises(phalanx.StateError, match=r"nothing in sight \(an operation"):
        recipe(loss_fn=unlike).train(progress=False, engine="inline")


class Halved(Net):
    """Writes a parameter in forward, which a lone replica may."""

    def forward(self, x):
        with torch.no_grad():
            self.outer.bias.mul_(0.5)
        return super().forward(x)


def test_a_lone_replica_may_write_parameters():
    """It does so once in every step, as in a plain loop."""
    lone = recipe(Halved, replicas=1)
    result = lone.train(progress=False, engine="inline")
    assert (result.digest, result.loss_history) == answer(lone)
    assert lone.train(progress=False, engine="processes", workers=1).digest == result.digest
    with pytest.raises(phalanx.UsageError, match="written in place"):
        recipe(Halved).train(progress=False, engine="inline")


class Augmented(torch.utils.data.Dataset):
    """Samples that depend on the step."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x, y = data()
        return x[index] + phalanx.current_step(), y[index]


def collated(samples):
    x, y = default_collate(samples)
    return x * phalanx.current_step(), y


def stepped_loss(output, target):
    return F.cross_entropy(output, target) / (1 + phalanx.current_step())


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options", [{"engine": "inline"}, {"workers": 2}, {"workers": 2, "readers": 1}, {"workers": 3}]
)
def test_the_current_step_is_told(tmp_path, options):
    """In datasets, collate_fn, forward_fn and loss_fn, whoever calls them, and after a resume."""
    fields = {"collate_fn": collated, "forward_fn": annealed, "loss_fn": stepped_loss, "replicas": 3, "batch_size": 6}
    fields |= {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)}
    whole = phalanx.Recipe(Net, Augmented(), steps=6, **fields)
    digest = whole.train(engine="inline", progress=False).digest
    phalanx.Recipe(Net, Augmented(), steps=3, **fields).train(run_dir=tmp_path, progress=False, **options)
    assert whole.train(run_dir=tmp_path, progress=False, **options).digest == digest
    told = recipe(forward_fn=step_of_output, loss_fn=None, steps=4).train(progress=False, **options)
    assert told.loss_history == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:phase .* changed nothing in step 0")  # the losses are the step
def test_the_current_step_of_brought_batches_and_phases():
    """Batches that the caller brings count as steps; phases of one step have the same."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    brought = phalanx.Recipe(Net, None, None, forward_fn=step_of_output, optimizer=optimizer)
    with brought.start(engine="inline", progress=False) as run:
        assert [run.step(data()) for _ in range(3)] == [0, 1, 2]
    result = recipe(loss_fn=None, optimizer=None, steps=3, phases=phases([step_of_output] * 2)).train(progress=False)
    assert result.phase_history == {"first": [0, 1, 2], "second": [0, 1, 2]}


def test_outside_of_steps_there_is_no_current_one():
    """Neither in calls of one's own nor in evaluations; the error says where there is one."""
    with pytest.raises(phalanx.UsageError, match="where no step is computed"):
        phalanx.current_step()
    evaluation = phalanx.Evaluation(lambda output, target: (output.argmax(-1) == target).float().mean(), data())
    with pytest.raises(phalanx.UsageError, match=r"self\.tau\.fill_"):
        recipe(forward_fn=annealed, steps=1).train(evaluation=evaluation, progress=False, engine="inline")
    with pytest.raises(phalanx.UsageError, match="where no step is computed"):
        phalanx.current_step()
