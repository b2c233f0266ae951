"""What a run leaves behind when it goes wrong: the error's facts, and a state that is always a whole step's.

One sample is marked. The plan says in which step and replica it comes up first, so what fails there, where and after
how many good steps is known; the expected state is that of a run which ends just before.
"""

import contextlib
import functools
import math
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.engines.faulty import MARK, PLACES, failing_with, poisoned
from tests.families import TrappedNet

SAMPLES, STEPS, FAILING = 36, 6, 1
X = np.random.default_rng(0).standard_normal((SAMPLES, 3)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((SAMPLES, 1)).astype(np.float32)


def recipe(**changes):
    """A recipe of six steps, three an epoch, that goes well but for the changes."""
    fields = {
        "make_model": TrappedNet,
        "data": (X, Y),
        "loss_fn": F.mse_loss,
        "replicas": 3,
        "batch_size": 12,
        "steps": STEPS,
        "optimizer": functools.partial(torch.optim.Adam, lr=0.01),
    }
    return phalanx.Recipe(**{**fields, **changes})


def failing_replica(replicas):
    return max(0, replicas - 2)


def failing_samples(replicas):
    """The share that holds the marked sample, in step FAILING."""
    return tuple(recipe(replicas=replicas).plan.shares(FAILING)[failing_replica(replicas)].tolist())


def digest_after(steps, **changes):
    """The digest of an undisturbed run of so many steps."""
    return recipe(**{**changes, "steps": steps}).train().digest


def marked_data(replicas, x=None, y=None):
    """The data, with the first input or the target of the marked sample replaced."""
    inputs, targets = X.copy(), Y.copy()
    sample = failing_samples(replicas)[1]
    if x is not None:
        inputs[sample, 0] = x
    if y is not None:
        targets[sample] = y
    return inputs, targets


def failing_at(place, replicas, fail):
    """Changes that make user code at ``place`` call ``fail`` where it meets the marked sample."""
    return {"replicas": replicas, **failing_with(place, fail, marked_data(replicas, x=MARK, y=MARK))}


def always(error):
    """A function that raises ``error``."""

    def fail():
        raise error

    return fail


def once(error):
    """A function that raises ``error`` when it is first called, and never again."""
    errors = [error]

    def fail():
        if errors:
            raise errors.pop()

    return fail


def failed(**changes):
    """The RunError of a recipe's training."""
    with pytest.raises(phalanx.RunError) as caught:
        recipe(**changes).train()
    return caught.value


def assert_address(error, replicas):
    """The failing step, replica and samples, as fields and in words."""
    replica, samples = failing_replica(replicas), failing_samples(replicas)
    assert (error.step, error.replica, error.samples) == (FAILING, replica, samples)
    assert f"step {FAILING}, replica {replica}" in str(error)
    assert f"samples [{', '.join(map(str, samples[:8]))}" in str(error)


# User code


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_in_user_code_arrives_with_its_address_and_the_last_good_state(place, replicas):
    """A WorkerError is raised from the user's own exception, knows where it happened, and holds the state before."""
    boom = KeyError("no such image")
    changes = failing_at(place, replicas, always(boom))
    error = failed(**changes)
    assert type(error) is phalanx.WorkerError
    assert not isinstance(error, ValueError)
    assert error.__cause__ is boom
    assert "KeyError" in str(error)
    assert "no such image" in str(error)
    assert_address(error, replicas)
    assert (error.result.steps, len(error.result.loss_history)) == (FAILING, FAILING)
    assert error.result.digest == digest_after(FAILING, **changes)
    assert all(parameter.grad is None for parameter in error.result.model.parameters())


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_failed_can_be_done_again(place, replicas):
    """A run whose user code failed once goes on to the digest of a run in which it never did."""
    changes = failing_at(place, replicas, once(OSError("connection reset")))
    with recipe(**changes).start() as run:
        run.step()
        with pytest.raises(phalanx.WorkerError):
            run.step()
        reports = list(run)
        assert [report.step for report in reports] == list(range(FAILING, STEPS))
        assert run.result().digest == recipe(**failing_at(place, replicas, lambda: None)).train().digest


def test_the_result_in_an_error_is_independent_of_the_run():
    """Going on after an error does not change the state that the error carries."""
    with recipe(**failing_at("loss", 3, once(RuntimeError("boom")))).start() as run:
        run.step()
        with pytest.raises(phalanx.WorkerError) as caught:
            run.step()
        kept = caught.value.result
        before = phalanx.digest(kept.model)
        for _ in run:
            pass
    assert phalanx.digest(kept.model) == before
    assert (kept.steps, len(kept.loss_history)) == (FAILING, FAILING)


def test_an_error_on_a_brought_batch_names_positions_in_the_batch():
    """Where the caller brings the batch, samples are counted from its start."""
    x, y = X[:12].copy(), Y[:12].copy()
    x[9, 0] = MARK
    changes = failing_at("model", 3, always(RuntimeError("boom")))
    with recipe(**{**changes, "data": None, "steps": None}).start() as run:
        with pytest.raises(phalanx.WorkerError) as caught:
            run.step((x, y))
        assert (caught.value.step, caught.value.replica, caught.value.samples) == (0, 2, (8, 9, 10, 11))
        assert caught.value.result.steps == 0


def test_a_long_share_is_shortened_in_words_but_not_in_the_field():
    """The message shows the first samples and how many more there are; the field has all."""
    changes = failing_at("model", 1, always(RuntimeError("boom")))
    error = failed(**changes)
    assert len(error.samples) == 12
    assert "... and 4 more]" in str(error)


# Values that are not finite


def bad_value(kind, replicas):
    """Changes that make the marked sample's loss or gradient NaN or infinite."""
    if kind == "gradient":
        return {"replicas": replicas, "data": marked_data(replicas, x=MARK), "make_model": poisoned}
    return {"replicas": replicas, "data": marked_data(replicas, y=float(kind))}


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("kind", "words"), [("nan", "loss is nan"), ("inf", "loss is inf"), ("gradient", "gradient")])
def test_a_value_that_is_not_finite_stops_the_run_before_the_update(kind, words, replicas):
    """A NonFiniteError says what, names step, replica and samples, and holds the weights as before."""
    changes = bad_value(kind, replicas)
    error = failed(**changes)
    assert type(error) is phalanx.NonFiniteError
    assert words in str(error)
    assert "on_nonfinite='skip'" in str(error)
    assert_address(error, replicas)
    assert len(error.result.loss_history) == FAILING
    assert error.result.digest == digest_after(FAILING, **changes)


@pytest.mark.parametrize("kind", ["nan", "inf", "gradient"])
def test_a_run_stopped_by_a_value_that_is_not_finite_is_whole(kind):
    """The run itself, not only the error, is in the state before the bad step."""
    changes = bad_value(kind, 3)
    with recipe(**changes).start() as run:
        run.step()
        for _ in range(2):
            with pytest.raises(phalanx.NonFiniteError):
                run.step()
        assert run.result().digest == digest_after(FAILING, **changes)


class Seen:
    """Keeps the model and the optimizer of a run, to look at them from outside."""

    def __init__(self):
        self.model = None
        self.optimizer = None

    def make_model(self, trap=None):
        self.model = TrappedNet() if trap is None else TrappedNet(trap)
        return self.model

    def make_poisoned(self):
        self.model = poisoned()
        return self.model

    def make_optimizer(self, named):
        self.optimizer = torch.optim.SGD(named, lr=0.1, momentum=0.9)
        return self.optimizer

    def digest(self):
        return phalanx.digest(self.model, self.optimizer)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", ["nan", "inf", "gradient"])
def test_skip_leaves_everything_but_step_and_scheduler(kind, replicas):
    """A skipped step keeps weights, buffers and optimizer bit for bit; step and schedule advance; training goes on."""
    seen = Seen()
    changes = {
        **bad_value(kind, replicas),
        "make_model": seen.make_poisoned if kind == "gradient" else seen.make_model,
        "optimizer": seen.make_optimizer,
        "scheduler": halving,
        "on_nonfinite": "skip",
    }
    digests, reports = [], []
    with recipe(**changes).start() as run:
        for report in run:
            reports.append(report)
            digests.append(seen.digest())
        history = run.result().loss_history
    second_visit = [t for t in range(STEPS) if failing_samples(replicas)[1] in recipe(**changes).plan.indices(t)]
    assert second_visit[0] == FAILING
    for t in range(1, STEPS):
        assert (digests[t] == digests[t - 1]) == (t in second_visit)
    assert [report.step for report in reports] == list(range(STEPS))
    assert [report.lr for report in reports] == [0.1 * 0.5**t for t in range(STEPS)]
    assert [t for t, loss in enumerate(history) if not math.isfinite(loss)] == (
        [] if kind == "gradient" else second_visit
    )


def test_skip_in_the_first_step_is_quiet_and_whole():
    """A bad first step is skipped too: no warning from the scheduler, and the state is the untrained model's."""
    seen = Seen()
    y = np.full_like(Y, math.nan)
    changes = {"make_model": seen.make_model, "optimizer": seen.make_optimizer, "scheduler": halving}
    result = recipe(data=(X, y), steps=2, on_nonfinite="skip", **changes).train()
    torch.manual_seed(0)
    assert phalanx.digest(result.model) == phalanx.digest(TrappedNet())
    assert seen.optimizer.state == {}
    assert all(math.isnan(loss) for loss in result.loss_history)


def test_skip_follows_the_hand_written_loop():
    """With one replica, skipping is what a plain loop does that puts back the buffers and goes on."""
    changes = {
        **bad_value("nan", 1),
        "optimizer": functools.partial(torch.optim.Adam, lr=0.1),
        "scheduler": halving,
        "on_nonfinite": "skip",
    }
    plan = recipe(**changes).plan
    x, y = map(torch.tensor, changes["data"])
    torch.manual_seed(0)
    model = TrappedNet()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.1)
    scheduler = halving(optimizer)
    for t in range(STEPS):
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        rows = torch.as_tensor(plan.indices(t))
        with plan.seeded(t, 0):
            loss = F.mse_loss(model(x[rows]), y[rows])
        if loss.isfinite():
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            model.load_state_dict(kept, strict=False)
        scheduler.step()
    assert recipe(**changes).train().digest == phalanx.digest(model, optimizer, STEPS)


def test_ignore_lets_values_through_that_are_not_finite():
    """With on_nonfinite='ignore' nothing is screened: the NaN reaches loss and weights, as in a plain loop."""
    result = recipe(**bad_value("nan", 3), on_nonfinite="ignore").train()
    finite = [math.isfinite(loss) for loss in result.loss_history]
    assert finite == [t < FAILING for t in range(STEPS)]
    assert result.params["last.weight"].isnan().all()
    assert result.steps == STEPS


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("max_norm", [math.inf, 1.0])
def test_a_finite_gradient_whose_norm_overflows_is_no_error(replicas, max_norm):
    """Huge but finite gradients train on, clipped as clip_grad_norm_ would: by a factor of zero."""
    made = recipe(
        make_model=lambda: nn.Linear(3, 1),
        loss_fn=lambda output, target: output.mean() * 1e30,
        replicas=replicas,
        optimizer=functools.partial(torch.optim.SGD, lr=1e-33),
        max_norm=max_norm,
        steps=2,
    )
    with made.start() as run:
        report = next(run)
        assert math.isfinite(report.loss)
        assert report.grad_norm == math.inf
        next(run)
        result = run.result()
    torch.manual_seed(0)
    untrained = nn.Linear(3, 1)
    moved = not torch.equal(result.model.bias, untrained.bias)
    assert moved == (max_norm == math.inf)
    assert all(parameter.isfinite().all() for parameter in result.model.parameters())


@pytest.mark.filterwarnings("ignore:loss_fn comes to something else")  # a sum
def test_gradients_that_overflow_only_in_the_fold_are_named_as_such():
    """Where each replica is finite and only the sum is not, the error says so and blames no replica."""
    error = failed(
        make_model=lambda: nn.Linear(3, 1),
        data=(np.zeros_like(X), Y),
        loss_fn=lambda output, target: output.sum() * 5e37,
        replicas=2,
    )
    assert type(error) is phalanx.NonFiniteError
    assert "overflows" in str(error)
    assert (error.step, error.replica) == (0, None)
    assert error.result.steps == 0


# The update


class FailingAdam(torch.optim.Adam):
    """Raises in the middle of the update of step FAILING, after half of it is done."""

    def __init__(self, params, error):
        super().__init__(params, lr=0.01)
        self.error = error
        self.calls = 0

    def step(self, closure=None):
        super().step(closure)
        self.calls += 1
        if self.calls == FAILING + 1:
            raise self.error


class FailingSchedule(torch.optim.lr_scheduler.LambdaLR):
    """Raises when it is stepped after step FAILING."""

    def __init__(self, optimizer, error):
        self.error = error
        super().__init__(optimizer, lambda epoch: 1.0)

    def step(self, epoch=None):
        super().step()
        if self.last_epoch == FAILING + 1:
            raise self.error


@pytest.mark.parametrize("place", ["optimizer", "scheduler"])
def test_an_error_in_the_update_ends_the_run(place):
    """What raises in the optimizer leaves no whole state, in the scheduler it does; either way the run is over."""
    boom = ZeroDivisionError("bias correction")
    updates = {
        "optimizer": {"optimizer": functools.partial(FailingAdam, error=boom)},
        "scheduler": {"scheduler": functools.partial(FailingSchedule, error=boom)},
    }
    with recipe(**updates[place]).start() as run:
        run.step()
        with pytest.raises(phalanx.WorkerError) as caught:
            run.step()
        assert caught.value.__cause__ is boom
        assert caught.value.step == FAILING
        assert f"ZeroDivisionError (bias correction) at step 1 in the {place}" in str(caught.value)
        refused = [run.step, lambda: next(run), lambda: run.evaluate(F.mse_loss, (X, Y))]
        if place == "optimizer":
            assert caught.value.result is None
            refused.append(run.result)
        else:
            assert caught.value.result.digest == run.result().digest == digest_after(FAILING + 1)
        for call in refused:
            with pytest.raises(phalanx.RunError, match=r"cannot go on.*bias correction"):
                call()
        assert run.steps == FAILING + (place == "scheduler")


@pytest.mark.parametrize("error", [SystemExit(75), KeyboardInterrupt()])
def test_an_exit_in_the_update_is_not_taken_for_a_whole_step(error):
    """What a signal handler raises within the update, SystemExit say, leaves no whole state either."""
    with recipe(optimizer=functools.partial(FailingAdam, error=error)).start() as run:
        run.step()
        with pytest.raises(type(error)):
            run.step()
        with pytest.raises(phalanx.RunError):
            run.result()


class Locking(TrappedNet):
    """Keeps a lock as an attribute; such a module cannot be deep-copied."""

    def forward(self, x):
        self.lock = threading.Lock()
        return super().forward(x)


def uncopyable_failures():
    """Recipes of such a model that fail, and the error that is due."""
    boom = KeyError("no such image")
    return {
        "loss": (failing_at("loss", 3, always(boom)), phalanx.WorkerError),
        "nan": (bad_value("nan", 3), phalanx.NonFiniteError),
        "interrupt": (failing_at("loss", 3, interrupt), KeyboardInterrupt),
    }


@pytest.mark.parametrize("kind", ["loss", "nan", "interrupt"])
def test_a_model_that_cannot_be_copied_does_not_hide_the_error(kind):
    """Where the last good state cannot be copied, the error is still the real one, and hands over the state itself."""
    changes, due = uncopyable_failures()[kind]
    with pytest.raises(due) as caught:
        recipe(make_model=Locking, **changes).train()
    plain = failing_at("loss", 3, lambda: None) if kind == "interrupt" else {}  # Ctrl-C comes after that step
    assert caught.value.result.digest == digest_after(caught.value.result.steps, **plain)
    assert isinstance(caught.value.result.model, Locking)


# The caller's own callbacks


def raising_after(step, error):
    def callback(report):
        if report.step == step:
            raise error

    return callback


@pytest.mark.parametrize("error", [LookupError("board"), phalanx.UsageError("mine"), StopIteration(3)])
def test_an_error_in_a_callback_passes_through(error):
    """What a callback raises reaches the caller unchanged, and the run stands after the step just reported."""
    with recipe().start(callbacks=[raising_after(2, error)]) as run:
        run.step()
        run.step()
        with pytest.raises(type(error)) as caught:
            run.step()
        assert caught.value is error
        assert run.steps == 3
        assert run.result().digest == digest_after(3)
        for _ in run:
            pass
        assert run.result().digest == digest_after(STEPS)


def test_an_error_in_a_callback_passes_through_train():
    """train() lets a callback's exception out as it is, with the state, as nobody else holds the run."""
    error = LookupError("board")
    with pytest.raises(LookupError) as caught:
        recipe().train(callbacks=[raising_after(2, error)])
    assert caught.value is error
    assert caught.value.result.digest == digest_after(3)


def test_a_stop_iteration_in_a_callback_does_not_end_the_training_in_silence():
    """A callback that exhausts an iterator of its own is an error, not the end of the run."""
    remaining = iter([1, 2])
    with pytest.raises((RuntimeError, phalanx.RunError)):
        recipe().train(callbacks=[lambda report: next(remaining)])


@pytest.mark.parametrize("boom", [LookupError("no such class"), StopIteration()])
def test_an_error_in_a_due_evaluation_carries_the_state(boom):
    """A metric that raises ends the training with a WorkerError from it; the steps before it are not lost."""
    error = failed_evaluation(always(boom))
    assert error.__cause__ is boom
    assert error.result.digest == digest_after(3)


def failed_evaluation(fail):
    with pytest.raises(phalanx.WorkerError) as caught:
        recipe().train(evaluation=phalanx.Evaluation(lambda output, target: fail(), (X, Y)))
    return caught.value


def test_callbacks_see_a_step_whose_evaluation_failed():
    """The step is done and stays done, and observers see it once, as every other, when its evaluation has succeeded."""
    seen, tries = [], []

    def metric(output, target):
        tries.append(1)
        if len(tries) % 2:
            raise LookupError
        return output.mean()

    evaluation = phalanx.Evaluation(metric, (X, Y))
    with recipe().start(callbacks=[lambda report: seen.append(report.step)], evaluation=evaluation) as run:
        while run.steps < STEPS:
            with contextlib.suppress(phalanx.WorkerError):
                run.step()
        run.finish()
    assert seen == list(range(STEPS))


def test_an_error_in_a_metric_leaves_the_run_whole():
    """A WorkerError names the chunk's samples; modes and state are those after the last step, and steps go on."""
    boom = LookupError("no such class")
    with recipe().start() as run:
        run.step()
        with pytest.raises(phalanx.WorkerError, match="LookupError") as caught:
            run.evaluate(lambda output, target: always(boom)(), (X, Y), batch_size=5)
        assert caught.value.__cause__ is boom
        assert caught.value.samples == (0, 1, 2, 3, 4)
        assert caught.value.result.digest == digest_after(1)
        assert run.metric_history == []
        assert all(module.training for module in run.result().model.modules())
        for _ in run:
            pass
        assert run.result().digest == digest_after(STEPS)


# Ctrl-C


def interrupt():
    signal.raise_signal(signal.SIGINT)


class InterruptedAdam(torch.optim.Adam):
    """Presses Ctrl-C in the middle of the update of step FAILING."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == FAILING + 1:
            interrupt()
        super().step(closure)


def interrupted_in(moment, press):
    """(changes, options, finished steps) of a training in which ``press`` is called at ``moment`` of step FAILING."""
    if moment == "callback":
        return {}, {"callbacks": [lambda report: press() if report.step == FAILING else None]}, FAILING + 1
    if moment == "optimizer":
        return {"optimizer": functools.partial(InterruptedAdam, lr=0.01)}, {}, FAILING + 1
    return failing_at(moment, 3, once_calling(press)), {}, FAILING + 1


def once_calling(press):
    """A function that calls ``press`` when it is first called, and never again."""
    presses = [press]

    def fail():
        if presses:
            presses.pop()()

    return fail


@contextlib.contextmanager
def interrupts_go_to(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def iterated(run):
    with run:
        for _ in run:
            pass


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("moment", ["callback", "model", "loss", "dataset", "collate", "optimizer"])
def test_ctrl_c_carries_the_state_of_a_whole_step(moment, held):
    """KeyboardInterrupt holds the result after the last whole step; one that comes within a step waits for its end."""
    changes, options, steps = interrupted_in(moment, interrupt)
    run = recipe(**changes).start(**options) if held else None
    with pytest.raises(KeyboardInterrupt) as caught:
        iterated(run) if held else recipe(**changes).train(**options)
    result = caught.value.result
    assert (result.steps, len(result.loss_history)) == (steps, steps)
    plain = {} if moment in ("callback", "optimizer") else failing_at(moment, 3, lambda: None)
    assert result.digest == digest_after(steps, **plain)
    assert not held or run.result().digest == result.digest
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_callers_loop_carries_the_state():
    """Ctrl-C in the body of ``for report in run`` finds the state after the step just reported."""

    def loop():
        with recipe().start() as run:
            for report in run:
                if report.step == FAILING:
                    interrupt()

    with pytest.raises(KeyboardInterrupt) as caught:
        loop()
    assert caught.value.result.digest == digest_after(FAILING + 1)


def test_ctrl_c_in_an_evaluation_carries_the_state():
    """Ctrl-C in the metric leaves modes, buffers and weights as after the last step."""

    def metric(output, target):
        interrupt()

    with pytest.raises(KeyboardInterrupt) as caught:
        recipe().train(evaluation=phalanx.Evaluation(metric, (X, Y)))
    assert caught.value.result.digest == digest_after(3)
    assert all(module.training for module in caught.value.result.model.modules())


@pytest.mark.parametrize("moment", ["callback", "model", "optimizer"])
def test_a_handler_of_the_callers_own_is_called_and_kept(moment):
    """Where the caller handles SIGINT without raising, training goes on, and the handler stays."""
    received = []

    def handler(number, frame):
        received.append(number)

    changes, options, _ = interrupted_in(moment, interrupt)
    with interrupts_go_to(handler):
        result = recipe(**changes).train(**options)
        assert signal.getsignal(signal.SIGINT) is handler
    assert received == [signal.SIGINT]
    plain = failing_at("model", 3, lambda: None) if moment == "model" else {}
    assert result.digest == digest_after(STEPS, **plain)


def test_an_ignored_ctrl_c_stays_ignored():
    """Where the caller ignores SIGINT, so does the run."""
    changes, _, _ = interrupted_in("model", interrupt)
    with interrupts_go_to(signal.SIG_IGN):
        assert recipe(**changes).train().steps == STEPS
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_every_error_is_a_phalanx_error_with_words_of_its_own():
    """The tree is as documented, and str() of an error is a sentence, with and without facts."""
    for kind in (phalanx.UsageError, phalanx.RunError, phalanx.WorkerError, phalanx.NonFiniteError):
        assert issubclass(kind, phalanx.PhalanxError)
        assert str(kind("something happened")) == "something happened"
    assert issubclass(phalanx.UsageError, ValueError)
    assert issubclass(phalanx.WorkerError, phalanx.RunError)
    assert issubclass(phalanx.NonFiniteError, phalanx.RunError)
    bare = phalanx.RunError("something happened")
    assert (bare.step, bare.replica, bare.samples, bare.result) == (None, None, (), None)
