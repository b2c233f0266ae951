"""What goes wrong in a worker reaches the caller as the same fault does with engine="inline": error, address, state."""

import contextlib
import functools
import os
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from tests.engines.faulty import (
    FAILING,
    MARK,
    PLACES,
    SHARES,
    STEPS,
    X,
    Y,
    assert_no_workers,
    assert_same,
    failing_at,
    has_mark,
    inline_error,
    marked,
    notes,
    poisoned,
    raising,
    recipe,
    workers_error,
)
from tests.families import TrappedNet
from tests.sampling import cover, sample

# User code


@pytest.mark.long
@pytest.mark.parametrize(("place", "workers"), cover("errors in user code", PLACES, [2, 3]))
def test_an_error_in_user_code_arrives_as_inline(place, workers):
    """A WorkerError from the user's exception, with step, replica, samples, remote traceback and last good state."""
    changes = failing_at(place, raising(lambda: KeyError("no such image")))
    several, alone = workers_error(workers, **changes), inline_error(**changes)
    assert type(several) is phalanx.WorkerError
    assert_same(several, alone)
    assert (several.step, several.result.steps) == (FAILING, FAILING)
    assert "Traceback" in notes(several)
    assert "in explode" in notes(several)
    assert "in worker" in notes(several)


class Plain(Exception):
    """An exception of this module."""


class NeedsTwo(Exception):
    """Its constructor takes other arguments than it keeps; such an exception cannot be unpickled."""

    def __init__(self, path, code):
        super().__init__(f"{path} gave {code}")
        self.path = path
        self.code = code


class NeedsKeyword(ValueError):
    """Has a required keyword."""

    def __init__(self, *, why):
        super().__init__(f"because {why}")
        self.why = why


def local_class():
    class Local(LookupError):
        pass

    return Local


LOCAL = local_class()
ERRORS = {
    "builtin": lambda: ValueError("of", 3, "values"),
    "with errno": lambda: FileNotFoundError(2, "No such file", "image.png"),
    "of this module": lambda: Plain("boom"),
    "of a function": lambda: LOCAL("boom"),
    "two arguments": lambda: NeedsTwo("image.png", 404),
    "a keyword": lambda: NeedsKeyword(why="of it"),
    "no text": lambda: RuntimeError(),
    "stop iteration": lambda: StopIteration(3),
    "a group": lambda: ExceptionGroup("several", [ValueError("one"), Plain("two")]),
    "of torch": lambda: torch.OutOfMemoryError("too large"),
    "of phalanx": lambda: phalanx.UsageError("mine"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", sample("errors of users", ERRORS, 2))
def test_the_cause_is_of_the_users_own_class(kind):
    """``except`` and ``isinstance`` work on the cause: it has the class, text and attributes of what was raised."""
    changes = failing_at("loss", raising(ERRORS[kind]))
    several, alone = workers_error(**changes), inline_error(**changes)
    assert_same(several, alone)
    if kind == "of phalanx":
        assert several.__cause__ is None
        return
    assert type(several.__cause__) is type(ERRORS[kind]())
    assert repr(several.__cause__.args) == repr(alone.__cause__.args)
    if kind != "a group":
        assert several.__cause__.__dict__.items() >= vars(ERRORS[kind]()).items()


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["attribute", "argument"])
def test_an_error_that_cannot_travel_is_told_by_name_and_text(kind):
    """An exception that holds a lock arrives as one of the same name and text, with the address and the state."""

    def explode():
        error = Plain("boom", threading.Lock()) if kind == "argument" else Plain("boom")
        error.lock = threading.Lock()
        raise error

    changes = failing_at("loss", explode)
    several, alone = workers_error(**changes), inline_error(**changes)
    assert type(several) is phalanx.WorkerError
    assert (several.step, several.replica, several.samples) == (alone.step, alone.replica, alone.samples)
    assert several.result.digest == alone.result.digest
    assert type(several.__cause__).__name__ == "Plain"
    assert "boom" in str(several.__cause__)
    assert "in explode" in notes(several)


@pytest.mark.long
@pytest.mark.parametrize(("workers", "slow"), cover("several errors", [2, 3, 4], [False, True]))
def test_of_several_errors_the_one_of_the_lowest_replica_is_raised(slow, workers):
    """Whichever worker fails first: the error is that of the lowest replica, as one process would have met it."""

    class Numbered(TrappedNet):
        def forward(self, x):
            if has_mark(x):
                position = int((x[:, 0] == MARK).nonzero()[0])
                if slow and x[position, 1] == 1:
                    time.sleep(0.3)
                raise LookupError(f"sample {x[position, 1]:.0f}")
            return super().forward(x)

    inputs, targets = marked(1, 2, 3)
    for replica in (1, 2, 3):
        inputs[SHARES[replica][1], 1] = replica
    changes = {"make_model": Numbered, "data": (inputs, targets)}
    several = workers_error(workers, **changes)
    assert several.replica == 1
    assert str(several.__cause__) == "sample 1"
    assert_same(several, inline_error(**changes))


def failing_once(path):
    """A function that fails the first time that any process calls it: a file says whether somebody has."""

    def explode():
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            raise OSError("connection reset")

    return explode


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize("place", sample("going on after an error", PLACES, 3))
def test_a_run_goes_on_after_an_error(place, tmp_path):
    """A step that failed once can be done again, by iterating or stepping, to the digest of an undisturbed run."""
    changes = failing_at(place, failing_once(tmp_path / "failed"))
    with recipe(**changes).start(workers=2, engine="processes") as run:
        for _ in range(FAILING):
            run.step()
        with pytest.raises(phalanx.WorkerError) as caught:
            run.step()
        assert run.steps == FAILING
        kept = caught.value.result.digest
        assert kept == run.result().digest
        assert [report.step for report in run] == list(range(FAILING, STEPS))
        assert run.result().digest == recipe(**failing_at(place, lambda: None)).train(engine="inline").digest
    assert caught.value.result.digest == kept


@pytest.mark.long
def test_an_error_far_ahead_of_the_caller_is_raised_in_its_step(tmp_path):
    """Where nobody watches, workers run ahead; reports and state up to the failing step are those of inline."""
    changes = {**failing_at("loss", raising(lambda: KeyError("x"))), "steps": 40}
    assert_same(workers_error(**changes), inline_error(**changes))
    seen = []
    with pytest.raises(phalanx.WorkerError):
        recipe(**changes).train(workers=2, engine="processes", callbacks=[lambda report: seen.append(report.step)])
    assert seen == list(range(FAILING))


@pytest.mark.long
def test_an_error_on_a_brought_batch_names_positions_in_the_batch():
    """Where the caller brings the batch, samples are counted from its start, and the next batch works."""
    x, y = X[:16].copy(), Y[:16].copy()
    x[9, 0] = MARK
    changes = {**failing_at("model", raising(lambda: LookupError("x"))), "data": None, "steps": None}
    digests = []
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": 2}):
        with recipe(**changes).start(**options) as run:
            run.step((X[:16], Y[:16]))
            with pytest.raises(phalanx.WorkerError) as caught:
                run.step((x, y))
            assert (caught.value.step, caught.value.replica, caught.value.samples) == (1, 2, (8, 9, 10, 11))
            run.step((X[16:32], Y[16:32]))
            digests += [(caught.value.result.digest, run.result().digest)]
    assert digests[0] == digests[1]


# Values that are not finite


def bad_value(kind):
    """Changes that make the loss or the gradient of two replicas of step FAILING NaN or infinite."""
    if kind == "gradient":
        return {"data": marked(1, 3, y=None), "make_model": poisoned}
    return {"data": marked(1, 3, x=None, y=float(kind))}


@pytest.mark.long
@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "workers"), cover("values not finite", ["nan", "inf", "gradient"], [2, 3]))
def test_a_value_that_is_not_finite_is_told_as_inline(kind, workers):
    """A NonFiniteError with the same words, step, replica, samples and state, whoever computed the replica."""
    several = workers_error(workers, **bad_value(kind))
    assert type(several) is phalanx.NonFiniteError
    assert (several.step, several.replica) == (FAILING, 1)
    assert_same(several, inline_error(**bad_value(kind)))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "choice"), cover("skip and ignore", ["nan", "inf", "gradient"], ["skip", "ignore"]))
def test_skip_and_ignore_do_as_inline(kind, choice):
    """With on_nonfinite='skip' and 'ignore' the digests agree."""
    made = recipe(**bad_value(kind), on_nonfinite=choice)
    assert made.train(workers=3, engine="processes").digest == made.train(engine="inline").digest


@pytest.mark.long
def test_a_step_in_which_nothing_counts_is_told_as_inline():
    """All weights 0: the same RunError."""
    counted = lambda output, target: (F.mse_loss(output, target), 0.0)  # noqa: E731
    assert_same(workers_error(loss_fn=counted), inline_error(loss_fn=counted))


@pytest.mark.filterwarnings("ignore:loss_fn comes to something else")  # a sum
def test_an_overflow_in_the_fold_is_told_as_inline():
    """Each replica finite, the sum not: the same words, and no replica is blamed."""
    changes = {
        "make_model": lambda: nn.Linear(3, 1),
        "data": (np.zeros_like(X), Y),
        "loss_fn": lambda output, target: output.sum() * 5e37,
    }
    several = workers_error(**changes)
    assert several.replica is None
    assert_same(several, inline_error(**changes))


# The update


class FailingAdam(torch.optim.Adam):
    """Raises in the middle of the update of step FAILING; of a class that phalanx does not know."""

    calls = 0

    def step(self, closure=None):
        super().step(closure)
        self.calls += 1
        if self.calls == FAILING + 1:
            raise ZeroDivisionError("bias correction")


class FailingSchedule(torch.optim.lr_scheduler.LambdaLR):
    """Raises when it is stepped after step FAILING."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda epoch: 1.0)

    def step(self, epoch=None):
        super().step()
        if self.last_epoch == FAILING + 1:
            raise ZeroDivisionError("bias correction")


UPDATES = {
    "optimizer": {"optimizer": functools.partial(FailingAdam, lr=0.01)},
    "scheduler": {"scheduler": FailingSchedule},
}


@pytest.mark.long
@pytest.mark.parametrize("place", UPDATES)
def test_an_error_in_the_update_ends_the_run_as_inline(place):
    """What raises in the optimizer leaves no state, in the scheduler it does; either way the run refuses to go on."""
    several, alone = workers_error(**UPDATES[place]), inline_error(**UPDATES[place])
    assert_same(several, alone)
    assert "Traceback" in notes(several)
    with recipe(**UPDATES[place]).start(workers=2, engine="processes") as run:
        for _ in range(FAILING):
            run.step()
        with pytest.raises(phalanx.WorkerError):
            run.step()
        refused = [run.step, lambda: next(run), lambda: run.evaluate(F.mse_loss, (X, Y))]
        if place == "optimizer":
            refused.append(run.result)
        else:
            assert run.result().digest == alone.result.digest
        for call in refused:
            with pytest.raises(phalanx.RunError, match=r"cannot go on.*bias correction"):
                call()
        assert run.steps == FAILING + (place == "scheduler")


class FailingAtLast(torch.optim.lr_scheduler.LambdaLR):
    """Raises when it is stepped after the last step, a moment later than the step is reported."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda epoch: 1.0)

    def step(self, epoch=None):
        super().step()
        if self.last_epoch == STEPS:
            time.sleep(0.1)
            raise ZeroDivisionError("bias correction")


@pytest.mark.long
def test_an_error_in_the_schedule_of_the_last_step_is_told_as_inline():
    """No error is lost because it comes after the last report."""
    assert_same(workers_error(scheduler=FailingAtLast), inline_error(scheduler=FailingAtLast))


# The start


@pytest.mark.long
def test_a_model_that_cannot_be_made_in_a_worker():
    """make_model raises only in workers: the error is the user's, names the worker, and the next run works."""
    home = os.getpid()

    def make_model():
        if os.getpid() != home:
            raise LookupError("no such file here")
        return TrappedNet()

    for _ in range(3):
        with pytest.raises(Exception, match="no such file here") as caught:
            recipe(make_model=make_model).start(workers=2, engine="processes")
        error = caught.value
        assert isinstance(error, LookupError) or isinstance(error.__cause__, LookupError)
        assert "in make_model" in notes(error)
    assert_no_workers()
    assert recipe().train(workers=2, engine="processes").digest == recipe().train(engine="inline").digest


def test_another_model_in_a_worker_is_refused():
    """make_model that depends on the process is a UsageError that says so."""
    home = os.getpid()
    makers = [
        lambda: TrappedNet() if os.getpid() == home else nn.Linear(3, 1),
        lambda: nn.Linear(3, 1, bias=os.getpid() == home),
        lambda: nn.Linear(3, 1, dtype=torch.float32 if os.getpid() == home else torch.float64),
    ]
    for maker in makers:
        with pytest.raises(phalanx.UsageError, match="another model in a worker process"):
            recipe(make_model=maker).start(workers=2, engine="processes")
    assert_no_workers()


# Evaluation


@pytest.mark.long
@pytest.mark.parametrize("workers", sample("errors in a metric", [2, 3], 1))
def test_an_error_in_a_metric_arrives_as_inline(workers):
    """A WorkerError from the user's exception, with the samples of the first failing chunk; the run goes on."""
    x = X.copy()
    x[[21, 34], 0] = MARK

    def metric_fn(output, target):
        if has_mark(target):
            raise LookupError("no such class")
        return (output - target).abs().mean()

    errors, digests = [], []
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": workers}):
        with recipe().start(**options) as run:
            run.step()
            y = np.where(x[:, :1] == MARK, MARK, Y).astype(np.float32)
            with pytest.raises(phalanx.WorkerError) as caught:
                run.evaluate(metric_fn, (X, y), batch_size=5)
            errors.append(caught.value)
            assert run.metric_history == []
            for _ in run:
                pass
            digests.append(run.result().digest)
    assert errors[1].samples == (20, 21, 22, 23, 24)
    assert_same(errors[1], errors[0])
    assert "in metric_fn" in notes(errors[1])
    assert digests[0] == digests[1]


def test_a_due_evaluation_that_fails_carries_the_state():
    """In train() the error of an evaluation after an epoch holds the state after that epoch, as inline."""

    def metric_fn(output, target):
        raise LookupError("no such class")

    evaluation = phalanx.Evaluation(metric_fn, (X, Y), batch_size=10)
    errors = []
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": 2}):
        with pytest.raises(phalanx.WorkerError) as caught:
            recipe().train(evaluation=evaluation, **options)
        errors.append(caught.value)
    assert_same(errors[1], errors[0])


def test_a_metric_that_weighs_nothing_is_told_as_inline():
    """All weights 0: the same UsageError."""
    errors = []
    for options in ({"engine": "inline"}, {"engine": "processes", "workers": 2}):
        with recipe().start(**options) as run, pytest.raises(phalanx.UsageError) as caught:
            run.evaluate(lambda output, target: (output.mean(), 0.0), (X, Y), batch_size=10)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_a_breakpoint_in_a_worker_says_what_to_do():
    """A debugger finds no terminal there: the error says so, and names engine='inline'."""

    def loss_fn(output, target):
        breakpoint()
        return F.mse_loss(output, target)

    x = torch.randn(8, 3)
    recipe = phalanx.Recipe(lambda: torch.nn.Linear(3, 3), (x, x), loss_fn, replicas=2, steps=1)
    with pytest.raises(phalanx.WorkerError, match=r"BdbQuit.*no terminal in a worker process.*engine='inline'"):
        recipe.train(workers=2, engine="processes")
