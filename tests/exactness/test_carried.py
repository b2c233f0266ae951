"""State that is carried from batch to batch: the bits of a loop that keeps it, for any R and W."""

import functools
import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests import by_hand

ROWS, LENGTH, WORDS = 8, 6, 13


class Language(nn.Module):
    """An LSTM that goes on where it was in the batch before; its state runs over the batch in dimension 1."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.dropout = nn.Dropout(0.1)
        self.lstm = nn.LSTM(8, 10, batch_first=True)
        self.head = nn.Linear(10, WORDS)
        self.register_buffer("hidden", torch.zeros(1, ROWS, 10))
        self.register_buffer("cell", torch.zeros(1, ROWS, 10))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        state = (self.hidden, self.cell) if self.training else None
        output, state = self.lstm(self.dropout(self.embedding(x)), state)
        if self.training:
            self.seen = self.seen + x.float().mean()
            self.hidden, self.cell = state
        return self.head(output).flatten(0, 1)


def text(batches=5):
    """Sample i of a batch goes on where sample i of the batch before ended."""
    words = torch.randint(WORDS, (ROWS, batches * LENGTH + 1), generator=torch.Generator().manual_seed(0))
    x, y = ([words[:, at + off : at + off + LENGTH] for at in range(0, batches * LENGTH, LENGTH)] for off in (0, 1))
    return torch.cat(x), torch.cat(y)


def loss_fn(output, target):
    return F.cross_entropy(output, target.flatten())


def recipe(replicas=2, **changes):
    options = {"batch_size": ROWS, "shuffle": False, "epochs": 2, "carry": {"hidden": 1, "cell": 1}} | changes
    optimizer = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    return phalanx.Recipe(Language, text(), loss_fn, replicas=replicas, optimizer=optimizer, **options)


def answer(recipe, fault=None):
    """The loop by hand: the state of all rows in two tensors, of which each replica has those of its samples."""
    model, (optimizer,), _ = by_hand.start(recipe)
    hidden, cell = model.hidden.clone(), model.cell.clone()
    losses = []
    for step in range(recipe.plan.steps):
        if recipe.reset_carry == "epoch" and step % recipe.plan.steps_per_epoch == 0 and fault != "never_reset":
            hidden, cell = torch.zeros_like(hidden), torch.zeros_like(cell)
        begun, seen, first, replicas = model.seen.clone(), [], 0, []
        after = hidden.clone(), cell.clone()
        for replica, indices in enumerate(recipe.plan.shares(step)):
            if not len(indices):
                replicas.append(None)
                continue
            rows = slice(first, first + len(indices))
            model.seen = begun.clone()
            model.hidden, model.cell = hidden[:, rows].clone(), cell[:, rows].clone()
            x, y = by_hand.read(recipe, step, indices)
            model.zero_grad()
            with recipe.plan.seeded(step, replica):
                loss = loss_fn(model(x), y)
                loss.backward()
            if fault != "forgotten":
                after[0][:, rows], after[1][:, rows] = model.hidden.detach(), model.cell.detach()
            seen.append(model.seen.clone())
            gradient = by_hand.copies(parameter.grad for parameter in model.parameters())
            replicas.append(by_hand.Replica(len(indices), loss.item(), None, gradient, []))
            first += len(indices)
        hidden, cell = after
        weights = by_hand.weigh(replicas)
        model.seen = by_hand.settle(seen, by_hand.shares(replicas))
        losses.append(by_hand.mean([r and r.loss for r in replicas], weights))
        for position, parameter in enumerate(model.parameters()):
            parameter.grad = by_hand.mean([r and r.gradient[position] for r in replicas], weights)
        optimizer.step()
    model.hidden, model.cell = hidden, cell
    return phalanx.digest(model, optimizer, recipe.plan.steps), losses


def trained(recipe, workers=1, **options):
    result = recipe.train(workers=workers, engine="inline" if workers == 1 else "processes", **options)
    return result.digest, result.loss_history


@pytest.mark.parametrize("reset", [None, "epoch"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_by_hand(replicas, reset):
    """One replica has the bits of the plain loop; several, of unlike sizes too, those of the loop over shares."""
    assert trained(recipe(replicas, reset_carry=reset)) == answer(recipe(replicas, reset_carry=reset))


def test_a_plain_loop():
    """R = 1 is what anyone would write: the model goes on with what it left, detached."""
    plan = recipe(1).plan
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.5, momentum=0.9)
    x, y = text()
    for step in range(plan.steps):
        with plan.seeded(step, 0):
            loss = loss_fn(model(x[plan.indices(step)]), y[plan.indices(step)])
            optimizer.zero_grad()
            loss.backward()
        model.hidden, model.cell = model.hidden.detach(), model.cell.detach()
        optimizer.step()
    assert phalanx.digest(model, optimizer, plan.steps) == trained(recipe(1))[0]


@pytest.mark.parametrize("fault", ["forgotten", "never_reset"])
def test_faults_are_noticed(fault):
    """State that is not carried, or not reset, ends in other bits."""
    assert trained(recipe(reset_carry="epoch"))[0] != answer(recipe(reset_carry="epoch"), fault)[0]


def test_a_short_batch():
    """The rows of a last batch go with the positions that it has; the others stay as they were."""
    x, y = text()
    one = phalanx.Recipe(
        Language, (x[:-5], y[:-5]), loss_fn, replicas=3, batch_size=ROWS, shuffle=False, epochs=2,
        carry={"hidden": 1, "cell": 1}, optimizer=functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    )  # fmt: skip
    assert trained(one) == answer(one)


@pytest.mark.long
def test_workers_kills_and_resumes(tmp_path):
    """Two or three workers, one of which is killed, and a run that is resumed, end in one digest."""
    wanted = trained(recipe(3))[0]
    for workers in (2, 3):
        with recipe(3).start(workers=workers, engine="processes") as run:
            for report in run:
                if report.step in (2, 5) and run.worker_pids:
                    os.kill(run.worker_pids[report.step % len(run.worker_pids)], signal.SIGKILL)
            assert run.result().digest == wanted
    recipe(3, epochs=1).train(run_dir=tmp_path / "run", workers=2, engine="processes")
    assert trained(recipe(3), 2, run_dir=tmp_path / "run")[0] == wanted


def test_devices():
    """Devices of one process have the bits of one."""
    assert recipe(4).train(devices=["cpu", "cpu"]).digest == trained(recipe(4))[0]


def test_micro_batches():
    """Each part has its own rows, too; parts of one replica are as good as replicas."""
    assert trained(recipe(2, micro_batches=2, epochs=1))[0] == trained(recipe(2, micro_batches=2, epochs=1), 2)[0]


def test_batches_that_the_caller_brings():
    """The state goes on over batches that the caller brings, as over planned ones."""
    x, y = text()
    options = {"replicas": 2, "carry": {"hidden": 1, "cell": 1}, "batch_size": ROWS}
    optimizer = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    with phalanx.Recipe(Language, None, loss_fn, optimizer=optimizer, **options).start() as run:
        for start in range(0, len(x), ROWS):
            run.step((x[start : start + ROWS], y[start : start + ROWS]))
        assert run.result().digest == trained(recipe(epochs=1))[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"carry": {"state": 1}}, "carry names 'state'"),
        ({"carry": {"hidden": 3}}, "dimension 3"),
        ({"carry": ["hidden"]}, "carry is"),
        ({"carry": {"hidden": -1}}, "carry"),
        ({"batch_size": 2 * ROWS}, "has 8 rows"),
        ({"carry": None, "reset_carry": "epoch"}, "nothing is carried"),
        ({"shuffle": True}, "go on with any other"),
        ({"batch_size": ROWS // 2}, "would never be used"),
    ],
)
def test_refused(changes, message):
    """What cannot be carried is told by its name, with the way out."""
    with pytest.raises(phalanx.UsageError, match=message):
        recipe(**changes).train(engine="inline")
