"""Steps with several phases: the bits of loops by hand that alternate between losses, for any R, W and kill."""

import contextlib
import functools
import os
import random
import signal
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx.plan.rounds import Rounds
from tests import by_hand
from tests.families import normal

NOISE, STEPS = 4, 6
ADAM = functools.partial(torch.optim.Adam, lr=0.01, betas=(0.5, 0.9))
RMS = functools.partial(torch.optim.RMSprop, lr=0.005)
model_phase = functools.partial(phalanx.Phase, loss_takes="model")


class Gan(nn.Module):
    """A generator with BatchNorm and a discriminator with dropout, over small pictures."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Linear(12, 36),
            nn.Tanh(),
            nn.Unflatten(1, (1, 6, 6)),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 1)
        )


def against(logits, real):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def discriminator_loss(model, batch):
    (x,) = batch
    fake = model.generator(torch.randn(len(x), NOISE)).detach()
    return against(model.discriminator(x), True) + against(model.discriminator(fake), False)


def generator_loss(model, batch):
    (x,) = batch
    return against(model.discriminator(model.generator(torch.randn(len(x), NOISE))), True)


class ActorCritic(nn.Module):
    """A policy and a value over a body that both train."""

    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.actor(h), self.critic(h).squeeze(1)


def critic_loss(output, target):
    return F.mse_loss(output[1], target[:, 1])


def actor_loss(output, target):
    chosen = F.log_softmax(output[0], 1).gather(1, target[:, :1].long()).squeeze(1)
    return -(chosen * (target[:, 1] - output[1].detach())).mean()


def walks():
    """A small world: a position on a line, pushed left or right; what is earned is how near it comes to 0."""
    draw = torch.Generator().manual_seed(0)
    x, target = [], []
    for _ in range(10):
        position, speed = 2 * torch.rand((), generator=draw) - 1, torch.zeros(())
        for when in range(4):
            action = torch.randint(2, (), generator=draw)
            x.append(torch.stack([position, speed, torch.tensor(when / 4)]))
            speed = 0.9 * speed + 0.2 * (2 * action - 1)
            position = position + speed
            target.append(torch.stack([action.float(), -position.abs()]))
    return torch.stack(x), torch.stack(target)


KINDS = {
    "gan": (Gan, (normal(22, 1, 6, 6),), [
        model_phase(discriminator_loss, parameters="discriminator", optimizer=ADAM),
        model_phase(generator_loss, parameters="generator", optimizer=RMS),
    ]),
    "seldom": (Gan, (normal(22, 1, 6, 6),), [
        model_phase(generator_loss, parameters="generator", optimizer=RMS, every=3),
        model_phase(discriminator_loss, parameters=["discriminator"], optimizer=ADAM),
    ]),
    "actor_critic": (ActorCritic, walks(), [
        phalanx.Phase(critic_loss, parameters=["critic", "body"], optimizer=ADAM, name="critic"),
        phalanx.Phase(actor_loss, parameters=["actor", "body"], optimizer=ADAM, name="actor",
                      scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)),
    ]),
}  # fmt: skip


def recipe(kind="gan", replicas=3, **changes):
    make_model, data, phases = KINDS[kind]
    options = {"batch_size": 8, "steps": STEPS, "phases": phases} | changes
    return phalanx.Recipe(make_model, data, replicas=replicas, **options)


def answer(recipe, fault=None):
    """The loop by hand: each phase its gradients, fold, update, with the buffers settled after each."""
    torch.manual_seed(recipe.seed)
    model = recipe.make_model()
    named, optimizers, schedulers = dict(model.named_parameters()), [], []
    for phase in recipe.phases:
        names = [phase.parameters] if isinstance(phase.parameters, str) else phase.parameters
        mine = [(name, p) for name, p in named.items() if any(name.startswith(f"{top}.") for top in names)]
        optimizers.append(phase.optimizer(mine))
        schedulers.append(phase.scheduler and phase.scheduler(optimizers[-1]))
    losses = {name: [] for name in recipe.rounds.names}
    for step in range(recipe.plan.steps):
        for number, phase in enumerate(recipe.phases):
            if step % phase.every:
                continue
            begun = by_hand.copies(model.buffers())
            replicas = [compute(recipe, model, begun, step, r, number, fault) for r in range(recipe.replicas)]
            weights = by_hand.weigh(replicas)
            losses[recipe.rounds.names[number]].append(by_hand.mean([r and r.loss for r in replicas], weights))
            for position, parameter in enumerate(named.values()):
                parameter.grad = by_hand.mean([r and r.gradient[position] for r in replicas], weights)
            for position, buffer in enumerate(model.buffers()):
                ran = [r for r in replicas if r]
                buffer.data.copy_(by_hand.settle([r.buffers[position] for r in ran], by_hand.shares(replicas)))
            optimizers[number].step()
            if schedulers[number]:
                schedulers[number].step()
    return phalanx.digest(model, optimizers, recipe.plan.steps), losses


def compute(recipe, model, begun, step, replica, number, fault):
    indices = recipe.plan.shares(step)[replica]
    if not len(indices):
        return None
    for buffer, value in zip(model.buffers(), begun, strict=True):
        buffer.data.copy_(value)
    batch, loss_fn = by_hand.read(recipe, step, indices), recipe.phases[number].loss_fn
    with recipe.plan.seeded(step, replica, 0 if fault == "one_key" else number):
        loss = (
            loss_fn(model, batch) if recipe.phases[number].loss_takes == "model" else loss_fn(model(batch[0]), batch[1])
        )
        model.zero_grad()
        loss.backward()
    gradient = by_hand.copies(parameter.grad for parameter in model.parameters())
    return by_hand.Replica(len(indices), loss.item(), None, gradient, by_hand.copies(model.buffers()))


def trained(recipe, workers=1, **options):
    result = recipe.train(workers=workers, engine="inline" if workers == 1 else "processes", **options)
    return result.digest, result.phase_history


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_by_hand(kind, replicas):
    """A GAN, one whose generator is updated seldom, and actor-critic end in the bits of loops by hand."""
    assert trained(recipe(kind, replicas)) == answer(recipe(kind, replicas))


def test_the_usual_loop():
    """R = 1 is the loop of any tutorial, with plan and keys of the recipe."""
    one = recipe(replicas=1)
    torch.manual_seed(0)
    model = Gan()
    first, second = ADAM(model.discriminator.parameters()), RMS(model.generator.parameters())
    for step in range(STEPS):
        real = KINDS["gan"][1][0][one.plan.indices(step)]
        with one.plan.seeded(step, 0, phase=0):
            first.zero_grad()
            discriminator_loss(model, (real,)).backward()
            first.step()
        with one.plan.seeded(step, 0, phase=1):
            second.zero_grad()
            generator_loss(model, (real,)).backward()
            second.step()
    assert phalanx.digest(model, [first, second], STEPS) == trained(one)[0]


def test_one_key_for_all_phases_is_noticed():
    """Each phase draws from keys of its own."""
    assert trained(recipe())[0] != answer(recipe(), "one_key")[0]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["swapped", "other_every", "one_phase"])
def test_the_phases_are_the_answer(fault):
    """Their order, how often each is done, and leaving one out change the bits."""
    first, second = KINDS["gan"][2]
    often = model_phase(generator_loss, parameters="generator", optimizer=RMS, every=2)
    phases = {"swapped": [second, first], "other_every": [first, often], "one_phase": [first]}[fault]
    assert trained(recipe())[0] != trained(recipe(phases=phases))[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_kills(kind):
    """Two and three workers have the bits of one, also where one is killed at a random instant, within any phase."""
    wanted, draw = trained(recipe(kind, steps=12)), random.Random(os.environ.get("PHALANX_SEED", "0"))
    for workers in (2, 3):
        with recipe(kind, steps=12).start(workers=workers, engine="processes", callbacks=[]) as run:
            for report in run:
                if report.step % 4 == 1:
                    killer = threading.Timer(draw.uniform(0, 0.01), kill, (run, draw.randrange(workers)))
                    killer.start()
            killer.join()
            result = run.result()
        assert (result.digest, result.phase_history) == wanted
        assert all(each.step < 12 for each in result.incidents)  # steps, not updates


def kill(run, number):
    pids = run.worker_pids
    if number < len(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[number], signal.SIGKILL)


@pytest.mark.long
def test_resumes(tmp_path):
    """A run goes on from a snapshot as if it had not stopped, to the same digest, losses and chain."""
    whole = recipe("seldom", steps=9).train(run_dir=tmp_path / "whole", engine="inline", snapshot_every=2)
    recipe("seldom", steps=4).train(run_dir=tmp_path / "parts", engine="inline")
    parts = recipe("seldom", steps=9).train(run_dir=tmp_path / "parts", engine="inline")
    assert (parts.digest, parts.phase_history, parts.chain) == (whole.digest, whole.phase_history, whole.chain)
    assert (parts.resumed_from, parts.steps, parts.samples) == (4, 9, whole.samples)
    loaded = phalanx.load(tmp_path / "parts")
    assert loaded.step == 9
    assert len(loaded.loss_history) == 12
    with pytest.raises(phalanx.UsageError, match="phases"):
        recipe("gan", steps=12).train(run_dir=tmp_path / "parts", engine="inline")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gan", "actor_critic"])
def test_devices(kind):
    """Devices of one process have the bits of one."""
    four = recipe(kind, 4, drop_last=True)
    several = four.train(devices=["cpu", "cpu"])
    assert (several.digest, several.phase_history) == trained(four)


class Tied(nn.Module):
    """An encoder and a decoder with one weight and biases of their own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def encoded_loss(model, batch):
    return model.encoder(batch[0]).square().mean()


def decoded_loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[0])


@pytest.mark.long
@pytest.mark.parametrize("second", ["decoder", ["decoder.weight", "decoder.bias"]])
def test_tied_parameters(second):
    """A parameter with two names is updated by the phases that name either, as in the loop by hand."""
    x = normal(24, 4)
    phases = [
        model_phase(encoded_loss, parameters="encoder", optimizer=ADAM),
        model_phase(decoded_loss, parameters=second, optimizer=RMS, name="decoder"),
    ]
    one = phalanx.Recipe(Tied, (x,), batch_size=8, steps=STEPS, replicas=1, phases=phases)
    torch.manual_seed(0)
    model = Tied()
    first, other = ADAM(model.encoder.parameters()), RMS(model.decoder.parameters())
    for step in range(STEPS):
        batch = (x[one.plan.indices(step)],)
        for loss_fn, optimizer in ((encoded_loss, first), (decoded_loss, other)):
            model.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
    result = one.train(engine="inline")
    assert all(torch.equal(result.params[name], parameter) for name, parameter in model.named_parameters())
    several = phalanx.Recipe(Tied, (x,), batch_size=8, steps=STEPS, replicas=3, phases=phases)
    assert trained(several, 2) == trained(several)
    assert several.train(devices=["cpu", "cpu"]).digest == trained(several)[0]
    alone = [phases[0], model_phase(decoded_loss, parameters="decoder.bias", optimizer=RMS, name="decoder")]
    untied = phalanx.Recipe(Tied, (x,), batch_size=8, steps=STEPS, replicas=3, phases=alone)
    assert trained(untied)[0] != trained(several)[0]


def test_reports():
    """There is one report a step, with what each of its phases was; the main phase's loss is the step's."""
    with recipe("seldom").start(workers=1, engine="inline") as run:
        reports = list(run)
        result = run.result()
    assert [report.step for report in reports] == list(range(STEPS))
    assert [list(report.phases) for report in reports[:4]] == [
        ["generator", "phase 1"],
        *[["phase 1"]] * 2,
        ["generator", "phase 1"],
    ]
    assert (
        result.loss_history == result.phase_history["phase 1"] == [report.phases["phase 1"].loss for report in reports]
    )
    assert reports[0].lr == reports[0].phases["phase 1"].lr == 0.01
    assert reports[0].phases["generator"].lr == 0.005
    assert result.samples == sum(report.samples for report in reports) == 8 + 8 + 6 + 8 + 8 + 6
    assert len(reports[0].parts) == 2 * len(reports[1].parts)


def test_a_phase_that_changes_nothing_is_told():
    """A phase whose loss never comes to its parameters is warned of, by name, after the first step; others are not."""
    wrong = model_phase(discriminator_loss, parameters="generator", name="wrong")  # what is fake is detached there
    with pytest.warns(UserWarning, match="phase 'wrong' changed nothing in step 0") as told:
        recipe(phases=[wrong, model_phase(generator_loss, name="right")]).train(engine="inline")
    assert len(told) == 1


def test_batches_that_the_caller_brings():
    """All phases of a step are done on the batch; the bits are those of planned ones."""
    planned = recipe()
    make_model, (x,), phases = KINDS["gan"]
    with phalanx.Recipe(make_model, None, phases=phases, replicas=3, batch_size=8).start() as run:
        for step in range(STEPS):
            run.step((x[planned.plan.indices(step)],))
        assert run.result().digest == trained(planned)[0]


def test_it_is_broken_off_between_two_phases():
    """What fails in the second phase leaves the state after the first; the step is gone on with from there."""
    failing = [True]

    def sometimes(model, batch):
        if failing and failing.pop():
            raise ValueError("not now")
        return generator_loss(model, batch)

    phases = [KINDS["gan"][2][0], model_phase(sometimes, parameters="generator", optimizer=RMS)]
    with recipe(phases=phases).start(workers=1, engine="inline") as run:
        with pytest.raises(phalanx.WorkerError, match="step 0, phase 'generator', replica 0") as caught:
            run.step()
        assert (caught.value.step, caught.value.result.steps, run.steps) == (0, 0, 0)
        assert {name: len(losses) for name, losses in caught.value.result.phase_history.items()} == {
            "discriminator": 1, "generator": 0,
        }  # fmt: skip
        with pytest.raises(phalanx.UsageError, match="between two of its phases"):
            run.save("nowhere")
        reports = list(run)
        assert list(reports[0].phases) == ["discriminator", "generator"]
        assert run.result().digest == trained(recipe())[0]


@pytest.mark.long
def test_micro_batches_and_clipping():
    """Phases compute in parts, and each one's gradient is clipped, as steps do and are."""
    both = recipe(batch_size=12, micro_batches=2, max_norm=0.1, drop_last=True)
    assert trained(both) == trained(both, 2)
    assert trained(both)[0] != trained(recipe(batch_size=12, micro_batches=2, drop_last=True))[0]


def test_which_update_belongs_where():
    """Updates are counted through steps and phases and back, for any numbers of ``every``."""
    for every in [(1,), (1, 1), (3, 1), (1, 2, 5), (4, 6, 1)]:
        rounds = Rounds(every, tuple(map(str, every)) if len(every) > 1 else ("",))
        expected = [(step, phase) for step in range(40) for phase, n in enumerate(every) if step % n == 0]
        moments = [rounds.at(update) for update in range(len(expected))]
        assert [(moment.step, moment.phase) for moment in moments] == expected
        assert [moment.step for moment in moments if moment.first] == list(range(40))
        assert [moment.step for moment in moments if moment.last] == list(range(40))
        assert rounds.updates(40) == len(expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phases": []}, "phases is"),
        ({"phases": [generator_loss]}, "phases is"),
        ({"phases": [model_phase(generator_loss, every=2)]}, "every=2"),
        ({"loss_fn": F.mse_loss}, "loss_fn is given"),
        ({"optimizer": ADAM}, "optimizer is given"),
        ({"loss_takes": "model"}, "loss_takes is given"),
        ({"phases": [model_phase(generator_loss, name="a"), model_phase(generator_loss, name="a")]}, "called a, a"),
        ({"phases": [model_phase(generator_loss, parameters="painter")]}, "'painter'"),
        ({"phases": [phalanx.Phase(nn.Linear(2, 2))]}, "with parameters"),
    ],
)
def test_refused(changes, message):
    """What is no phase, or says something twice, is told by its name, with the way out."""
    with pytest.raises(phalanx.UsageError, match=message):
        recipe(**changes).train(engine="inline")


@pytest.mark.parametrize(
    "arguments", [{"loss_fn": None}, {"every": 0}, {"parameters": []}, {"optimizer": 3}, {"loss_takes": "batch"}]
)
def test_a_phase_checks_what_it_is_given(arguments):
    """Arguments are checked where they are written."""
    with pytest.raises(phalanx.UsageError, match=next(iter(arguments))):
        model_phase(**{"loss_fn": generator_loss} | arguments)
