"""What goes wrong in a worker reaches the caller as the same fault does with engine="inline": error, address, state.

One sample is marked; the plan says in which step and replica it comes up first. Deaths have no equal inline: they are
told at once, with the worker, its pid and how it ended.
"""

import contextlib
import ctypes
import functools
import math
import os
import re
import signal
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import phalanx
from tests.families import TrappedNet
from tests.sampling import cover, sample

SAMPLES, STEPS, FAILING, MARK, REPLICAS = 96, 6, 3, 50.0, 4
SOON = 30  # seconds within which nothing may hang, on a busy machine
X = np.random.default_rng(0).standard_normal((SAMPLES, 3)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((SAMPLES, 1)).astype(np.float32)


def recipe(**changes):
    """A recipe of six steps, one epoch, that goes well but for the changes."""
    fields = {
        "make_model": TrappedNet,
        "data": (X, Y),
        "loss_fn": F.mse_loss,
        "replicas": REPLICAS,
        "batch_size": 16,
        "steps": STEPS,
        "optimizer": functools.partial(torch.optim.Adam, lr=0.01),
    }
    return phalanx.Recipe(**{**fields, **changes})


SHARES = recipe().plan.shares(FAILING)


def marked(*replicas, x=MARK, y=MARK):
    """The data, where one sample of each of these replicas of step FAILING is marked."""
    inputs, targets = X.copy(), Y.copy()
    for replica in replicas:
        if x is not None:
            inputs[SHARES[replica][1], 0] = x
        if y is not None:
            targets[SHARES[replica][1]] = y
    return inputs, targets


def has_mark(values):
    return bool((torch.as_tensor(values) == MARK).any())


class Rows:
    """A map-style dataset that calls ``fail`` at a marked sample."""

    def __init__(self, columns, fail):
        self.columns = columns
        self.fail = fail

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x, y = (column[index] for column in self.columns)
        if has_mark(x):
            self.fail()
        return x, y


PLACES = ["model", "loss", "dataset", "collate", "target"]


def failing_at(place, fail, *replicas):
    """Changes that make user code at ``place`` call ``fail`` where it meets a marked sample."""
    columns = marked(*(replicas or (2,)))

    def guarded(function, look):
        def call(*arguments):
            if has_mark(look(*arguments)):
                fail()
            return function(*arguments)

        return call

    changes = {
        "model": {"make_model": lambda: TrappedNet(guarded(lambda x, hidden: hidden, lambda x, hidden: x))},
        "loss": {"loss_fn": guarded(F.mse_loss, lambda output, target: target)},
        "dataset": {"data": Rows(columns, fail)},
        "collate": {"collate_fn": guarded(default_collate, lambda samples: default_collate(samples)[0])},
        "target": {"target_fn": guarded(lambda batch: batch[1], lambda batch: batch[0])},
    }
    return {"data": columns, **changes[place]}


def raising(make_error):
    """A function that raises a new error."""

    def explode():
        raise make_error()

    return explode


def inline_error(**changes):
    """What engine="inline" makes of the same fault."""
    with pytest.raises(phalanx.PhalanxError) as caught:
        recipe(**changes).train(engine="inline")
    return caught.value


def workers_error(workers=2, **changes):
    """What worker processes make of it."""
    with pytest.raises(phalanx.PhalanxError) as caught:
        recipe(**changes).train(workers=workers, engine="processes")
    return caught.value


def assert_same(several, alone):
    """Same kind of error, words, address and state."""
    assert type(several) is type(alone)
    assert str(several) == str(alone)
    for fact in ("step", "replica", "samples"):
        assert getattr(several, fact, None) == getattr(alone, fact, None)
    assert (several.result is None) == (alone.result is None)
    if alone.result is not None:
        assert (several.result.steps, several.result.digest) == (alone.result.steps, alone.result.digest)
        assert several.result.loss_history == alone.result.loss_history
    cause, expected = several.__cause__, alone.__cause__
    assert (type(cause), str(cause)) == (type(expected), str(expected))


def notes(error):
    """All notes of an error and its cause."""
    return "\n".join(getattr(error, "__notes__", []) + getattr(error.__cause__, "__notes__", []))


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


def test_an_error_far_ahead_of_the_caller_is_raised_in_its_step(tmp_path):
    """Where nobody watches, workers run ahead; reports and state up to the failing step are those of inline."""
    changes = {**failing_at("loss", raising(lambda: KeyError("x"))), "steps": 40}
    assert_same(workers_error(**changes), inline_error(**changes))
    seen = []
    with pytest.raises(phalanx.WorkerError):
        recipe(**changes).train(workers=2, engine="processes", callbacks=[lambda report: seen.append(report.step)])
    assert seen == list(range(FAILING))


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


class PoisonedGradient(torch.autograd.Function):
    """The identity, whose gradient is NaN where ``bad``."""

    @staticmethod
    def forward(ctx, hidden, bad):
        ctx.bad = bad
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad * math.nan if ctx.bad else grad), None


def bad_value(kind):
    """Changes that make the loss or the gradient of two replicas of step FAILING NaN or infinite."""
    if kind == "gradient":
        poisoned = lambda: TrappedNet(lambda x, hidden: PoisonedGradient.apply(hidden, has_mark(x)))  # noqa: E731
        return {"data": marked(1, 3, y=None), "make_model": poisoned}
    return {"data": marked(1, 3, x=None, y=float(kind))}


@pytest.mark.parametrize(("kind", "workers"), cover("values not finite", ["nan", "inf", "gradient"], [2, 3]))
def test_a_value_that_is_not_finite_is_told_as_inline(kind, workers):
    """A NonFiniteError with the same words, step, replica, samples and state, whoever computed the replica."""
    several = workers_error(workers, **bad_value(kind))
    assert type(several) is phalanx.NonFiniteError
    assert (several.step, several.replica) == (FAILING, 1)
    assert_same(several, inline_error(**bad_value(kind)))


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


def test_an_error_in_the_schedule_of_the_last_step_is_told_as_inline():
    """No error is lost because it comes after the last report."""
    assert_same(workers_error(scheduler=FailingAtLast), inline_error(scheduler=FailingAtLast))


# The start


def children():
    """Zygotes of this process, and what is below them; not what other tests keep warm."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "phalanx.engines.processes.zygote" in " ".join(child.cmdline()):
                found |= {child.pid, *(process.pid for process in child.children(recursive=True))}
    return found


def assert_no_workers(before=()):
    """All that is left below this process is the zygote, or what was there before."""
    zygotes = {process.pid for process in psutil.Process().children()}
    deadline = time.monotonic() + SOON
    while (left := children() - zygotes - set(before)) and time.monotonic() < deadline:
        time.sleep(0.02)  # a zygote that imports something has a short-lived child, too
    assert not left


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


def test_what_cannot_travel_is_refused_by_its_path():
    """A recipe that holds a lock is a UsageError that names the way to it; nothing is left of the attempt."""
    lock = threading.Lock()

    def loss_fn(output, target):
        with lock:
            return F.mse_loss(output, target)

    with pytest.raises(phalanx.UsageError, match=r"loss_fn.*lock.*cannot be sent to a worker"):
        recipe(loss_fn=loss_fn).start(workers=2, engine="processes")
    assert_no_workers()


# Deaths


def die_by(way):
    """End this process."""
    if way == "exit":
        os._exit(3)
    elif way == "segfault":
        ctypes.string_at(8)
    elif way == "abort":
        os.abort()
    else:
        os.kill(os.getpid(), getattr(signal, way))


DEATHS = {
    "exit": "exited with status 3",
    "segfault": "was killed by SIGSEGV",
    "abort": "was killed by SIGABRT",
    "SIGKILL": "was killed by SIGKILL",
    "SIGTERM": "was killed by SIGTERM",
}


@pytest.mark.long
@pytest.mark.parametrize(("way", "place"), cover("what ends workers", DEATHS, ["model", "dataset"]))
def test_what_ends_every_worker_is_told_soon(way, place):
    """os._exit, a segmentation fault or a signal in user code, each time: a RunError says where and how; no hang."""
    with recipe(**failing_at(place, lambda: die_by(way))).start(workers=2, engine="processes") as run:
        for _ in range(FAILING):
            run.step()
        began = time.monotonic()
        with pytest.raises(phalanx.RunError) as caught:
            run.step()
        assert time.monotonic() - began < SOON
        error = caught.value
        assert type(error) is phalanx.RunError
        count = "3" if way in ("exit", "segfault", "abort") else r"\d+"  # others could have sent a signal
        assert re.search(rf"replica {error.replica} of step {FAILING} ended {count} workers", str(error))
        assert ", ".join([DEATHS[way]] * 3) in str(error)
        assert error.step == FAILING
        assert error.result.digest == recipe(steps=FAILING).train(engine="inline").digest
        for call in (run.step, lambda: run.evaluate(F.mse_loss, (X, Y))):
            with pytest.raises(phalanx.RunError, match="cannot go on"):
                call()
        assert run.result().digest == error.result.digest
    assert run.worker_pids == ()
    assert_no_workers()
    assert recipe().train(workers=2, engine="processes").digest == recipe().train(engine="inline").digest


@pytest.mark.campaign
def test_what_ends_workers_while_everybody_runs_ahead_is_told():
    """Workers that die in train(), far from the caller, are told too."""
    began = time.monotonic()
    error = workers_error(3, **failing_at("loss", lambda: os._exit(3)), steps=400)
    assert type(error) is phalanx.RunError
    assert "exited with status 3" in str(error)
    assert time.monotonic() - began < SOON
    assert_no_workers()


MOMENTS = ["between steps", "in a step", "in an evaluation", "before close"]


@pytest.mark.long
@pytest.mark.parametrize(("when", "number"), cover("killed workers", MOMENTS, [0, 1]))
def test_a_worker_that_is_killed_is_replaced(when, number, tmp_path):
    """SIGKILL from outside, whenever it comes: the run goes on with another, close() works, nothing is left."""
    there, killed = tmp_path / "there", tmp_path / "killed"

    def slow(output, target):
        if when == "in a step" and first(there):
            wait_for(killed)
        return F.mse_loss(output, target)

    def metric_fn(output, target):
        if os.getpid() == pids[number] and first(there):
            wait_for(killed)
        return F.mse_loss(output, target)

    run = recipe(loss_fn=slow).start(workers=2, engine="processes")
    if when != "in a step":
        run.step()
    pids = run.worker_pids
    kill = functools.partial(os.kill, pids[number], signal.SIGKILL)

    def kill_inside():
        wait_for(there)
        kill()
        killed.touch()

    began = time.monotonic()
    thread = threading.Thread(target=kill_inside)
    if when.startswith("in "):
        thread.start()
        run.step() if when == "in a step" else run.evaluate(metric_fn, (X, Y), batch_size=4)
        thread.join()
    else:
        kill()
        if when == "between steps":
            run.step()
    if when != "before close":
        assert len(set(run.worker_pids) & set(pids)) == 1
        assert len(run.worker_pids) == 2
    steps = run.steps
    run.close()
    assert time.monotonic() - began < SOON + 3
    assert run.result().digest == recipe(steps=steps).train(engine="inline").digest
    assert_no_workers()


def test_exit_in_user_code_does_not_hang():
    """sys.exit() in a worker's user code ends the run with some error, soon."""
    began = time.monotonic()
    with pytest.raises((SystemExit, phalanx.RunError)):
        recipe(**failing_at("loss", lambda: sys.exit(75))).train(workers=2, engine="processes")
    assert time.monotonic() - began < SOON
    assert_no_workers()


@pytest.mark.campaign
def test_the_death_of_the_zygote_is_survived():
    """If the process that starts workers is killed, they end with it; the run starts another and goes on."""
    phalanx.close()
    before = children()
    with recipe().start(workers=2, engine="processes") as run:
        run.step()
        ours = children() - before  # the zygote and what is below it
        (zygote,) = [process for process in psutil.Process().children() if process.pid in ours]
        zygote.kill()
        began = time.monotonic()
        all_of(run)
        assert time.monotonic() - began < SOON + 10  # of importing the framework
        assert "replaced" in [incident.kind for incident in run.result().incidents]
        assert run.result().digest == recipe().train(engine="inline").digest
    assert_no_workers()


def all_of(run):
    for _ in run:
        pass


# Ctrl-C


@contextlib.contextmanager
def ctrl_c_once_there(path, times=1):
    """SIGINT for this process, as a terminal sends it, once user code has made ``path``; then again each second."""

    def press():
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        for number in range(times):
            time.sleep(1.0 if number else 0.2)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        while thread.is_alive():
            with contextlib.suppress(KeyboardInterrupt):
                thread.join()


def first(path):
    """Whether no process was here before this one."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def wait_for(path):
    """Until another process or thread made this file."""
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


def all_steps(made, call):
    """Train in one of the ways that there are."""
    if call == "train":
        made.train(workers=2, engine="processes")
        return
    with made.start(workers=2, engine="processes") as run:
        while run.steps < STEPS:
            run.step() if call == "step" else next(run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "replicas"), cover("Ctrl-C in a long step", ["train", "iterate", "step"], [[2], [0, 1, 2, 3]])
)
def test_ctrl_c_in_a_long_step_comes_back_with_the_state(call, replicas, tmp_path):
    """A step of 60 s is left at the second Ctrl-C; ``error.result`` is the state after the last whole step."""
    sleeping = tmp_path / "sleeping"

    def loss_fn(output, target):
        if has_mark(target):
            sleeping.touch()
            time.sleep(60)
        return F.mse_loss(output, target)

    made = recipe(loss_fn=loss_fn, data=marked(*replicas))
    with pytest.raises(KeyboardInterrupt) as caught, ctrl_c_once_there(sleeping, times=2):
        all_steps(made, call)
    assert time.time() - sleeping.stat().st_mtime < SOON
    result = caught.value.result
    assert result.steps == FAILING
    assert result.digest == recipe(data=marked(*replicas), steps=FAILING).train(engine="inline").digest
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_no_workers()


@pytest.mark.long
def test_a_run_goes_on_after_ctrl_c(tmp_path):
    """Ctrl-C in a step comes after it; who catches it goes on to the digest of an undisturbed run."""
    sleeping = tmp_path / "sleeping"
    sleep_once = lambda: first(sleeping) and time.sleep(2)  # noqa: E731
    with recipe(**failing_at("loss", sleep_once)).start(workers=2, engine="processes") as run:
        with pytest.raises(KeyboardInterrupt), ctrl_c_once_there(sleeping):
            for _ in run:
                pass
        assert run.steps == FAILING + 1
        for _ in run:
            pass
        assert run.result().digest == recipe(data=marked(2)).train(engine="inline").digest


@pytest.mark.long
@pytest.mark.parametrize("then", sample("after Ctrl-C", ["step", "result", "evaluate"], 2))
def test_a_run_goes_on_after_ctrl_c_in_an_evaluation(then, tmp_path):
    """Interrupted in a metric, the run is whole: steps, result and evaluations are as if nothing had been."""
    sleeping = tmp_path / "sleeping"

    def metric_fn(output, target):
        if first(sleeping):
            time.sleep(60)
        return F.mse_loss(output, target)

    values = []
    with recipe().start(workers=2, engine="processes") as run:
        run.step()
        with pytest.raises(KeyboardInterrupt), ctrl_c_once_there(sleeping):
            run.evaluate(metric_fn, (X, Y), batch_size=10)
        assert run.metric_history == []
        if then == "result":
            assert run.result().digest == recipe(steps=1).train(engine="inline").digest
        elif then == "evaluate":
            run.evaluate(metric_fn, (X, Y), batch_size=7)
        for _ in run:
            pass
        time.sleep(0.3)  # the workers are idle again, and nothing that was asked before may be taken for an answer
        values.append(run.evaluate(metric_fn, (X, Y), batch_size=10))
        assert run.result().digest == recipe().train(engine="inline").digest
    with recipe().start(engine="inline") as run:
        for _ in run:
            pass
        values.append(run.evaluate(metric_fn, (X, Y), batch_size=10))
    assert values[0] == values[1]


@pytest.mark.long
def test_ctrl_c_in_a_long_evaluation_comes_back_with_the_state(tmp_path):
    """An evaluation that is due in train() and would take 40 s is left at once, with the state after the last step."""
    sleeping = tmp_path / "sleeping"

    def metric_fn(output, target):
        sleeping.touch()
        time.sleep(40)
        return F.mse_loss(output, target)

    with pytest.raises(KeyboardInterrupt) as caught, ctrl_c_once_there(sleeping):
        recipe().train(workers=2, engine="processes", evaluation=phalanx.Evaluation(metric_fn, (X, Y)))
    assert time.time() - sleeping.stat().st_mtime < SOON
    assert caught.value.result.digest == recipe().train(engine="inline").digest
    assert_no_workers()


@pytest.mark.long
def test_ctrl_c_pressed_twice_comes_back_from_stubborn_code(tmp_path):
    """Where user code swallows the first Ctrl-C, the second one ends the run, and nothing is left."""
    sleeping = tmp_path / "sleeping"

    def stubborn(output, target):
        end = time.monotonic() + 60
        while has_mark(target) and time.monotonic() < end:
            with contextlib.suppress(BaseException):
                sleeping.touch()
                time.sleep(end - time.monotonic())
        return F.mse_loss(output, target)

    with pytest.raises(KeyboardInterrupt), ctrl_c_once_there(sleeping, times=2):
        recipe(loss_fn=stubborn, data=marked(0, 1, 2, 3)).train(workers=2, engine="processes")
    assert time.time() - sleeping.stat().st_mtime < SOON
    assert_no_workers()


# Evaluation


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


def test_a_metric_that_cannot_travel_is_refused_and_the_run_goes_on():
    """A metric that holds a lock is a UsageError that names the way to it; the run is as it was."""
    lock = threading.Lock()

    def metric_fn(output, target):
        with lock:
            return F.mse_loss(output, target)

    with recipe().start(workers=2, engine="processes") as run:
        run.step()
        with pytest.raises(phalanx.UsageError, match=r"metric_fn.*lock.*cannot be sent to a worker"):
            run.evaluate(metric_fn, (X, Y))
        value = run.evaluate(F.mse_loss, (X, Y))
        assert math.isfinite(value)
        for _ in run:
            pass
        assert run.result().digest == recipe().train(engine="inline").digest


def test_a_batch_that_cannot_travel_is_refused_and_the_run_goes_on():
    """A brought batch that holds something bound to this process is a UsageError; the next batch works."""
    changes = {"data": None, "steps": None, "forward_fn": lambda model, batch: model(batch["x"])}
    changes["target_fn"] = lambda batch: batch["y"]
    with recipe(**changes).start(workers=2, engine="processes") as run:
        run.step({"x": X[:16], "y": Y[:16]})
        with pytest.raises(phalanx.UsageError, match="lock"):
            run.step({"x": X[:16], "y": Y[:16], "lock": [threading.Lock() for _ in range(16)]})
        run.step({"x": X[16:32], "y": Y[16:32]})
        assert run.steps == 2


def test_a_breakpoint_in_a_worker_says_what_to_do():
    """A debugger finds no terminal there: the error says so, and names engine='inline'."""

    def loss_fn(output, target):
        breakpoint()
        return F.mse_loss(output, target)

    x = torch.randn(8, 3)
    recipe = phalanx.Recipe(lambda: torch.nn.Linear(3, 3), (x, x), loss_fn, replicas=2, steps=1)
    with pytest.raises(phalanx.WorkerError, match=r"BdbQuit.*no terminal in a worker process.*engine='inline'"):
        recipe.train(workers=2, engine="processes")
