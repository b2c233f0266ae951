"""Sums that are sent before it is known what other hosts have: the same bits, whatever turns out not to be as usual."""

import functools
import itertools
import os
import pathlib
import time

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.engines.hosts import link
from phalanx.engines.hosts.link import HostLink, Patience

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


class Impatient(Patience):
    """Sends as early as possible from the start."""

    lost = property(lambda self: True, lambda self, value: None)


class Patient(Patience):
    """Never does."""

    lost = property(lambda self: False, lambda self, value: None)


def spied(folder, trusting, patience, model):
    """The model; in a worker, what it sends early and again is counted, and ``trusting`` takes all to be as usual."""
    link.Patience = patience
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
    return model()


def note(folder, word, step):
    with (pathlib.Path(folder) / f"{word} {os.getpid()}").open("a") as file:
        file.write(f"{step}\n")


def noted(folder, word):
    """The steps in which this happened, in each worker."""
    return [set(map(int, path.read_text().split())) for path in pathlib.Path(folder).glob(f"{word} *")]


def digest(replicas, folder=None, trusting=False, steps=None, patience=Impatient, **options):
    """Of a run on the first batches."""
    make = Moody if folder is None else functools.partial(spied, folder, trusting, patience, Moody)
    optimizer = functools.partial(torch.optim.SGD, lr=1e-3)
    recipe = phalanx.Recipe(make, None, loss, replicas=replicas, optimizer=optimizer)
    with recipe.start(progress=False, **options) as run:
        for batch in itertools.islice(batches(), steps):
            run.step(batch)
        return run.result().digest


CODE = """
from tests.hosts.test_overlap import Impatient, Patient, Unequal, digest
tried(lambda: digest({replicas}, {folder!r}, {trusting}, {steps}, {patience}, workers=4, deadline_seconds=20))
"""


@pytest.mark.longest
@pytest.mark.parametrize(
    ("replicas", "patience"),
    [
        (4, "Impatient"),
        pytest.param(4, "Patient", marks=pytest.mark.campaign),
        pytest.param(8, "Impatient", marks=pytest.mark.campaign),
    ],
)
def test_whatever_is_not_as_usual(pair, tmp_path, replicas, patience):
    """Absent gradients, weights, layers used in a pass inside a pass, a short batch: the digest of one process."""
    folder = str(tmp_path)
    found = pair(CODE.format(replicas=replicas, folder=folder, trusting=False, steps=None, patience=patience))
    assert found == [[digest(replicas, engine="inline")]] * 2
    assert not noted(tmp_path, "kept"), "gradients that were told are let go of"
    again = noted(tmp_path, "again")
    assert len(again) == 4
    assert all(steps == (SENT_AGAIN if replicas == 4 else SENT_AGAIN - {13, 23}) for steps in again), again
    early = 4 if replicas == 4 and patience == "Impatient" else 0
    assert len(noted(tmp_path, "early")) == early, "workers with one replica send as they compute"


@pytest.mark.longest
def test_taking_all_to_be_as_usual_is_another_answer(pair, tmp_path):
    """The comparison matters: without it, what was sent too early would be the answer."""
    [[here], [there]] = pair(
        CODE.format(replicas=4, folder=str(tmp_path), trusting=True, steps=4, patience="Impatient")
    )
    wanted = digest(4, steps=4, engine="inline")
    assert len(here) == len(there) == len(wanted)
    assert wanted not in (here, there)


@pytest.mark.parametrize(("waited", "busy", "lost"), [(0.1, 0.01, True), (0.1, 0.06, False), (0.01, 0.0, False)])
def test_patience_is_lost_by_idle_waiting(monkeypatch, waited, busy, lost):
    """Not by waiting for a processor, nor by waiting that is a small part of a step (of 0.4 s here)."""
    clock, processor = [1.0], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "process_time", lambda: processor[0])
    patience, found = Patience(), []
    for _ in range(8):
        patience.begin()
        clock[0] += 0.4 - waited
        patience.wait()
        clock[0] += waited
        processor[0] += busy
        patience.end()
        clock[0] += 5  # an evaluation
        found.append(patience.lost)
    assert found == [lost and step >= link.STEPS - 1 for step in range(8)]


class Unequal(Patience):
    """Workers send early, or when all is computed, as their numbers in the system are even or odd."""

    lost = property(lambda self: os.getpid() % 2 == 0, lambda self, value: None)


@pytest.mark.longest
def test_each_worker_may_send_when_it_likes(pair, tmp_path):
    """What travels is the same, in the same order: the others need not know."""
    code = CODE.format(replicas=4, folder=str(tmp_path), trusting=False, steps=None, patience="Unequal")
    assert pair(code) == [[digest(4, engine="inline")]] * 2
    assert len(noted(tmp_path, "early")) < 4


class Slow(torch.nn.Module):
    """Gradients of its last layer are there long before those of its first."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(size, WIDTH) for size in (8, WIDTH, WIDTH)])

    def forward(self, x):
        first, *others = self.layers
        hidden = first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: time.sleep(0.1))
        for layer in others:
            hidden = torch.relu(layer(hidden))
        return hidden.mean(1)


def slow(folder=None, interrupted=False, brought=False, **options):
    """The digest of a run; ``interrupted``: by Ctrl-C between two steps, while workers are in the next, and gone on.

    ``brought``: on a batch of the caller's.
    """
    make = Slow if folder is None else functools.partial(spied, folder, False, Impatient, Slow)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(64, 8, generator=generator), torch.randn(64, generator=generator)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    recipe = phalanx.Recipe(make, data, torch.nn.functional.mse_loss, replicas=4, steps=12, optimizer=optimizer)
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
            if brought:
                run.step(tuple(column[:16] for column in data))
            run.finish()
        return run.result().digest


SLOW = """
from tests.hosts.test_overlap import slow
import os
tried(lambda: slow({folder!r}, {brought} or os.environ["RANK"] == "0", {brought}, workers=4, deadline_seconds=20))
"""


@pytest.mark.longest
def test_a_step_that_is_left_when_some_of_it_was_sent(pair, tmp_path):
    """It is done again, and only what was not sent then is sent: the others wait for that and nothing else."""
    assert pair(SLOW.format(folder=str(tmp_path), brought=False)) == [[slow(engine="inline")]] * 2
    assert noted(tmp_path, "early")


@pytest.mark.longest
def test_a_step_of_which_some_was_sent_is_not_done_on_another_batch(pair, tmp_path):
    """Not even where all processes were interrupted, and bring the same: what was sent is not that batch's."""
    [[here], [there]] = pair(SLOW.format(folder=str(tmp_path), brought=True))
    assert "was left in the middle when some of its sums had been sent" in here + there
    assert "Error" in here
    assert "Error" in there
