"""Steps over two hosts in which not everything is as usual: the bits of one process."""

import functools
import time

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.engines import flat
from phalanx.engines.hosts import pieces
from tests.hosts.worlds import world

WIDTH = 420  # a layer is more than one piece
PLAIN, ABSENT, WEIGHED, TWICE, NOTHING, LATE, UNCOUNTED = range(7)
MOODS = [PLAIN] * 3
for mood in (ABSENT, WEIGHED, TWICE, NOTHING, LATE, UNCOUNTED):
    MOODS += [mood, mood, PLAIN, PLAIN, PLAIN]


class Moody(torch.nn.Module):
    """Batches decide which layers are used, how often, and what a replica weighs."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(size, WIDTH) for size in (8, WIDTH, WIDTH)])
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, x):
        first, second, third = self.layers
        mood, half = x[0, 0].item(), x[0, 1].item()
        hidden = torch.relu(first(x))
        if mood != ABSENT or half:
            hidden = torch.relu(second(hidden))
        if mood == TWICE:
            hidden = checkpoint(third, hidden, use_reentrant=True)
        if mood == LATE and hidden.requires_grad:
            hidden.register_hook(lambda _: Variable._execution_engine.queue_callback(self.halve))
        return self.last(torch.relu(third(hidden)))

    def halve(self):
        """What a backward pass does at its end."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def loss(output, target):
    """The weight is the target's second column."""
    return (output[:, 0] - target[:, 0]).pow(2).mean(), target[0, 1].item()


def batches():
    """One per step; of the last, shares are uneven."""
    generator = torch.Generator().manual_seed(5)
    for step, mood in enumerate(MOODS):
        size = 14 if step == len(MOODS) - 1 else 16
        x, y = torch.randn(size, 8, generator=generator), torch.randn(size, 2, generator=generator)
        x[:, 0], x[:, 1], y[:, 1] = mood, torch.arange(size) < 8, 1
        if mood == WEIGHED:
            y[:, 1] = 0.5 + (torch.arange(size) < 4)
        if mood == NOTHING:
            y[:4, 1] = 0
        if mood == UNCOUNTED:
            y[:, 1] = 0
        yield x, y


def planted(make):
    """The model; in a worker, the last of the additions of partial sums is left out."""
    add = flat.add
    pieces.add = flat.add = lambda target, parts, order, **how: add(target, parts, order[:-1], **how)  # planted
    return make()


def digest(replicas, *, plant=False, **options):
    """Of a run on the batches."""
    make = functools.partial(planted, Moody) if plant else Moody
    optimizer = functools.partial(torch.optim.SGD, lr=1e-3)
    recipe = phalanx.Recipe(make, None, loss, replicas=replicas, optimizer=optimizer, on_nonfinite="skip")
    with recipe.start(progress=False, **options) as run:
        for batch in batches():
            run.step(batch)
        return run.result().digest


CODE = """
from tests.hosts.test_unusual_steps import digest
tried(lambda: digest({replicas}, plant={plant}, workers=4, deadline_seconds=20))
"""


@pytest.mark.longest
@pytest.mark.parametrize("replicas", [4, pytest.param(8, marks=pytest.mark.campaign)])
def test_whatever_is_not_as_usual(pair, replicas):
    """Absent gradients, weights, batches in which nothing counts, odd passes, a short batch: one process's digest."""
    assert pair(CODE.format(replicas=replicas, plant=False)) == [[digest(replicas, engine="inline")]] * 2


TWO_HOSTS = """
from phalanx.engines.hosts import world
from tests.hosts.test_unusual_steps import digest
world.host_name = lambda: f"host {{rank // 2}}"
rendezvous = world.World.rendezvous
world.World.rendezvous = lambda own, blocks: told.append(rendezvous(own, blocks).hosts) or rendezvous(own, blocks)
tried(lambda: digest(8, plant={plant}, deadline_seconds=20))
"""


@pytest.mark.longest
def test_two_processes_on_each_of_two_hosts():
    """They add up within each host first, to the digest of one process; with an addition left out to another."""
    wanted = digest(8, engine="inline")
    assert world(TWO_HOSTS.format(plant=False), 4) == [[2, wanted]] * 4
    assert all(found != [2, wanted] for found in world(TWO_HOSTS.format(plant=True), 4))


@pytest.mark.longest
def test_a_sum_that_is_not_whole_is_another_answer(pair):
    """Negative twin: with one addition left out on each host, both end in a digest of their own."""
    [[here], [there]] = pair(CODE.format(replicas=4, plant=True))
    wanted = digest(4, engine="inline")
    assert len(here) == len(there) == len(wanted)
    assert wanted not in (here, there)


class Slow(torch.nn.Module):
    """Its backward pass takes a while."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(size, WIDTH) for size in (8, WIDTH)])

    def forward(self, x):
        first, second = self.layers
        hidden = first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: time.sleep(0.1))
        return torch.relu(second(hidden)).mean(1)


def slow(interrupted=False, **options):
    """The digest of a run; ``interrupted``: by Ctrl-C between two steps, while workers are in the next, and gone on."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(64, 8, generator=generator), torch.randn(64, generator=generator)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    recipe = phalanx.Recipe(Slow, data, torch.nn.functional.mse_loss, replicas=4, steps=12, optimizer=optimizer)
    with recipe.start(progress=False, **options) as run:
        advance, pending = run._loop.advance, [interrupted]  # planted

        def breaking_off(batch, *, watched):
            if run.steps == 6 and pending.pop():
                pending.append(False)
                time.sleep(0.15)
                raise KeyboardInterrupt
            return advance(batch, watched=watched)

        run._loop.advance = breaking_off  # planted
        try:
            run.finish()
        except KeyboardInterrupt:
            assert run.model is not None
            run.finish()
        return run.result().digest


SLOW = """
from tests.hosts.test_unusual_steps import slow
import os
tried(lambda: slow(os.environ["RANK"] == "0", workers=4, deadline_seconds=20))
"""


@pytest.mark.longest
def test_a_step_that_is_left(pair):
    """It is done again, and the others wait for that and nothing else."""
    assert pair(SLOW) == [[slow(engine="inline")]] * 2
