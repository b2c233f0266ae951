"""Sums that are sent before it is known what other hosts have: the same bits, whatever turns out not to be as usual."""

import functools
import itertools
import os
import pathlib

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.engines.hosts.link import HostLink

WIDTH = 420  # a layer is more than what is sent at once
PLAIN, ABSENT, WEIGHED, TWICE, NOTHING, LATE = range(6)
MOODS = [PLAIN] * 3
for mood in (ABSENT, WEIGHED, TWICE, NOTHING, LATE):
    MOODS += [mood, mood, PLAIN, PLAIN, PLAIN]
SENT_AGAIN = {3, 5, 8, 13, 18, 23}  # where sums were sent in advance, and it was wrong


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
        """What a backward pass does at its end, when gradients were sent."""
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
        yield x, y


def spied(folder, trusting):
    """The model; in a worker, what it sends early and again is counted, and ``trusting`` takes all to be as usual."""
    give, judge = HostLink._give, HostLink._judge

    def counted_give(link, vectors, ready=None):
        due = len(link._sums._due)
        give(link, vectors, ready)
        if ready is not None and due > len(link._sums._due):
            note(folder, "early", link._step)

    def counted_judge(link, once):
        ahead = link._ahead
        judge(link, once)
        if link._early and any(entry is not None for entry in link._early[link._position]):
            note(folder, "kept", link._step)
        if ahead is not None and link._ahead is None:
            note(folder, "again", link._step)
            link._ahead = ahead if trusting else None

    HostLink._give, HostLink._judge = counted_give, counted_judge
    return Moody()


def note(folder, word, step):
    with (pathlib.Path(folder) / f"{word} {os.getpid()}").open("a") as file:
        file.write(f"{step}\n")


def noted(folder, word):
    """The steps in which this happened, in each worker."""
    return [set(map(int, path.read_text().split())) for path in pathlib.Path(folder).glob(f"{word} *")]


def digest(replicas, folder=None, trusting=False, steps=None, **options):
    """Of a run on the first batches."""
    make = Moody if folder is None else functools.partial(spied, folder, trusting)
    optimizer = functools.partial(torch.optim.SGD, lr=1e-3)
    recipe = phalanx.Recipe(make, None, loss, replicas=replicas, optimizer=optimizer)
    with recipe.start(progress=False, **options) as run:
        for batch in itertools.islice(batches(), steps):
            run.step(batch)
        return run.result().digest


CODE = """
from tests.hosts.test_overlap import digest
tried(lambda: digest({replicas}, {folder!r}, {trusting}, {steps}, workers=4, deadline_seconds=20))
"""


@pytest.mark.longest
@pytest.mark.parametrize("replicas", [4, pytest.param(8, marks=pytest.mark.campaign)])
def test_whatever_is_not_as_usual(pair, tmp_path, replicas):
    """Absent gradients, weights, layers used in a pass inside a pass, a short batch: the digest of one process."""
    found = pair(CODE.format(replicas=replicas, folder=str(tmp_path), trusting=False, steps=None))
    assert found == [[digest(replicas, engine="inline")]] * 2
    assert not noted(tmp_path, "kept"), "gradients that were told are let go of"
    again = noted(tmp_path, "again")
    assert len(again) == 4
    assert all(steps == (SENT_AGAIN if replicas == 4 else SENT_AGAIN - {13, 23}) for steps in again), again
    assert len(noted(tmp_path, "early")) == (4 if replicas == 4 else 0), "workers with one replica send as they compute"


@pytest.mark.longest
def test_taking_all_to_be_as_usual_is_another_answer(pair, tmp_path):
    """The comparison matters: without it, what was sent too early would be the answer."""
    [[here], [there]] = pair(CODE.format(replicas=4, folder=str(tmp_path), trusting=True, steps=4))
    wanted = digest(4, steps=4, engine="inline")
    assert len(here) == len(there) == len(wanted)
    assert wanted not in (here, there)
