"""Deaths of workers have no equal inline: they are told at once, with how each ended; Ctrl-C keeps the state."""

import contextlib
import ctypes
import functools
import os
import re
import signal
import sys
import threading
import time

import pytest
from torch.nn import functional as F

import phalanx
from tests.engines.faulty import (
    FAILING,
    SOON,
    STEPS,
    X,
    Y,
    assert_no_workers,
    beside,
    failing_at,
    first,
    has_mark,
    marked,
    recipe,
)
from tests.sampling import cover, sample

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

    with beside(press):
        yield


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
@pytest.mark.parametrize("place", ["loss", "backward"])
def test_ctrl_c_in_a_loss_over_the_batch(place, tmp_path):
    """A worker that sleeps after the exchange of outputs is in user code: the second Ctrl-C ends it."""
    sleeping = tmp_path / "sleeping"

    def sleep(*_):
        sleeping.touch()
        time.sleep(60)

    def loss_fn(output, target):
        if place == "loss":
            sleep()
        return F.mse_loss(output, target)

    def forward_fn(model, batch):
        output = model(batch[0])
        if place == "backward" and output.requires_grad:
            output.register_hook(sleep)
        return output

    made = recipe(loss_fn=loss_fn, forward_fn=forward_fn, loss_over="batch")
    with pytest.raises(KeyboardInterrupt), ctrl_c_once_there(sleeping, times=2):
        made.train(workers=2, engine="processes")
    assert time.time() - sleeping.stat().st_mtime < SOON
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
