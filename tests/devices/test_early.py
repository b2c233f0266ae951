"""Gradients are sent while others are computed, where they can be foreseen; to the bits of one device in any case."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import phalanx
from phalanx.engines import flat
from phalanx.engines.devices.early import Early
from phalanx.engines.devices.exchanged import Exchanged
from tests.by_hand import answer
from tests.devices.planting import Planted
from tests.devices.ranks import (
    MLP,
    devices,
    equal_layers,
    in_full,
    slow,
    small_buckets,
    trained,
    two_phases,
)
from tests.engines.deaths import once


class Sending:
    """Notes in a file for each step of the first worker whether what it sent early was what there is: "+", "-" or ".".

    ``fault(patch)`` is planted, too.
    """

    def __init__(self, file, fault=None):
        self.file, self.fault = str(file), fault

    def __call__(self, patch):
        sent_early = Exchanged._sent_early

        def noted(sums, masks, over):
            early = sums._early is not None
            mean = sent_early(sums, masks, over)
            if sums._station.worker == 0:
                with open(self.file, "a") as file:
                    file.write("." if not early else "-" if mean is None else "+")
            return mean

        patch.setattr(Exchanged, "_sent_early", noted)
        if self.fault is not None:
            self.fault(patch)


class Again(nn.Module):
    """A part that is computed again in the backward pass: weights that both parts use get gradients one by one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        inner = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        return self.last(self.first(inner))


def half(output, target):
    return F.cross_entropy(output, target), 0.5


class Changing(nn.Module):
    """From the fifth step on the second half has no gradient in every other step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        step = phalanx.current_step()
        return self.first(x) + (self.second(x) if step < 4 or step % 2 else 0)


NUMBERS = (torch.arange(240.0).reshape(48, 5) / 240, torch.arange(240.0).reshape(48, 5) / 480)
EARLY = {  # the recipe, and what is sent in each step
    "whole batches": (lambda: in_full(), "..+++++"),
    "weights": (lambda: MLP.recipe(4, batch_size=10, steps=7, drop_last=True), "..+++++"),
    "returned weights": (lambda: in_full(loss_fn=half), "..---.."),
    "another in some steps": (lambda: in_full(make_model=Changing), "..++-.."),
    "parts": (lambda: in_full(make_model=Again), "..---.."),
    "micro-batches": (lambda: in_full(micro_batches=2), "......."),
    "phases": (lambda: two_phases(steps=4), "." * 8),
    "small buckets": (lambda: in_full(make_model=equal_layers, loss_fn=F.mse_loss, data=NUMBERS), "..+++++"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", slow(EARLY, "whole batches", "weights", "parts"))
def test_gradients_are_sent_early(tmp_path, name):
    """While others are computed, where they can be foreseen; the bits are those of one device in any case."""
    make, sent = EARLY[name]
    recipe = make()
    fault = small_buckets if name == "small buckets" else None
    planted = dataclasses.replace(recipe, make_model=Planted(recipe.make_model, Sending(tmp_path / "sent", fault)))
    assert trained(planted, 3) == trained(recipe, 1)
    assert (tmp_path / "sent").read_text() == sent


def sent_too_soon(patch):
    """A bucket goes as soon as one gradient of it is there."""
    patch.setattr(Early, "arrived", lambda own, index, gradient: (arrived(own, index, gradient), send_all(own)))


arrived = Early.arrived


def send_all(early):
    while len(early._journeys) < len(early._buckets):
        early._send()


def parts_unseen(patch):
    """A gradient that comes in parts is taken as it was when its first part came."""

    def first(own, index, gradient):
        if index not in own.came:
            arrived(own, index, gradient)

    patch.setattr(Early, "arrived", first)
    uncompared(patch)


def uncompared(patch):
    """Nobody sees that a gradient is another one than that which was sent; no fault where none is planted."""
    patch.setattr(Early, "compare", lambda own, gradient: None)


def unscaled(patch):
    """The weight of the last replica is forgotten."""
    uncompared(patch)
    begin = Early.__init__
    patch.setattr(Early, "__init__", lambda own, *facts: begin(own, *facts[:-1], 1))


def left_out(patch):
    """The last replica is added to nothing."""
    patch.setattr(Early, "expect", lambda own, sums: setattr(own, "_sums", [(lefts[:0], last) for lefts, last in sums]))


EARLY_FAULTS = {
    sent_too_soon: "whole batches",
    parts_unseen: "parts",
    unscaled: "weights",
    left_out: "whole batches",
}


@pytest.mark.long
@pytest.mark.parametrize("fault", slow(EARLY_FAULTS, sent_too_soon, unscaled), ids=lambda fault: fault.__name__)
def test_faults_of_sending_early_are_seen(tmp_path, fault):
    """The test above can fail: each ends in other bits."""
    recipe = EARLY[EARLY_FAULTS[fault]][0]()
    planted = dataclasses.replace(recipe, make_model=Planted(recipe.make_model, Sending(tmp_path / "sent", fault)))
    assert trained(planted, 3) != trained(recipe, 1)


class Unsteady(nn.Linear):
    """Computes something else each time, on purpose."""

    calls = 0

    def forward(self, x):
        Unsteady.calls += 1
        return super().forward(x) * (1 + Unsteady.calls / 1000)


class Halving(nn.Module):
    """At the end of each backward pass all gradients are halved, in place or by others in their place."""

    def __init__(self, other):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
        self.other = other

    def forward(self, x):
        output = self.layers(x)
        if output.requires_grad:
            output.register_hook(lambda _: Variable._execution_engine.queue_callback(self.halve))
        return output

    def halve(self):
        for parameter in self.parameters():
            if self.other:
                parameter.grad = parameter.grad / 2
            else:
                parameter.grad.div_(2)


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("other", [False, True], ids=["in place", "others"])
@pytest.mark.parametrize("batch_size", [12, 11], ids=["even", "weighted"])
def test_gradients_that_change_after_they_were_sent(other, batch_size):
    """They are sent again, to the bits of one process."""
    recipe = MLP.recipe(4, steps=8, batch_size=batch_size, make_model=functools.partial(Halving, other))
    wanted = answer(recipe)
    assert trained(recipe, 2) == trained(recipe, 1) == wanted
    unseen = dataclasses.replace(recipe, make_model=Planted(recipe.make_model, uncompared))
    assert trained(unseen, 2) != wanted


class Deciding:
    """Notes for each worker and step whether it sends early."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self, patch):
        foresee = Exchanged._foresee

        def noted(sums, early):
            foresee(sums, early)
            with open(f"{self.folder}/{sums._station.worker}", "a") as file:
                file.write("." if sums._early is None else "+")

        patch.setattr(Exchanged, "_foresee", noted)


@pytest.mark.filterwarnings("ignore:replica 0 of step")
def test_workers_decide_alike_where_replicas_may_differ(tmp_path):
    """The worker that warns of another outcome still knows in which steps the others compute a replica twice."""
    recipe = MLP.recipe(4, make_model=Planted(functools.partial(Unsteady, 5, 3), Deciding(tmp_path)), steps=13)
    recipe.train(**devices(2), nondeterministic="allow")
    first, second = ((tmp_path / name).read_text() for name in "01")
    assert first == second
    assert "+" in first


class BrokenOff:
    """In the fourth step the last worker's memory is short once, when half of the exchange is done."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self, patch):
        travel = flat.Flat.travel

        def failing(own, carriers, number, *facts, **how):
            last = own._among[0].position == 2
            for at, whole in enumerate(travel(own, carriers, number, *facts, **how)):
                if last and number == at == 1 and phalanx.current_step() == 3 and once(self.folder, "short"):
                    raise MemoryError("planted")
                yield whole

        small_buckets(patch)
        patch.setattr(flat.Flat, "travel", failing)


def test_an_exchange_that_was_broken_off(tmp_path):
    """All connect anew after an error of one worker in the middle of it; the step is done again."""
    recipe = in_full()
    faulty = dataclasses.replace(recipe, make_model=Planted(recipe.make_model, BrokenOff(tmp_path)))
    with faulty.start(**devices(3)) as run:
        with pytest.raises(MemoryError, match="planted"):
            run.finish()
        assert run.steps == 3
        run.finish()
        assert run.result().digest == trained(recipe, 1)[0]


class Raising:
    """The first replica's loss raises once, in the fifth step."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self, output, target):
        if phalanx.current_step() == 4 and once(self.folder, "raised"):
            raise ValueError("only once")
        return F.cross_entropy(output, target)


@pytest.mark.long
def test_an_error_while_gradients_are_under_way(tmp_path):
    """A replica that raises leaves the others waiting for what it would have sent; the step can be done again."""
    recipe = in_full()
    raising = in_full(loss_fn=Raising(tmp_path))
    with raising.start(**devices(3)) as run:
        with pytest.raises(phalanx.WorkerError, match="only once"):
            run.finish()
        assert run.steps == 4
        run.finish()
        assert run.result().digest == trained(recipe, 1)[0]
