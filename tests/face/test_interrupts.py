"""Ctrl-C anywhere: it comes where nothing is held, and whoever goes on ends in the bits of an undisturbed run."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx
from phalanx.engines import selection
from phalanx.engines.processes import pool as crew
from phalanx.surroundings import interrupts
from tests.engines.faulty import beside, first
from tests.sampling import SEED, generator

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(48, 1, generator=torch.Generator().manual_seed(1))
STEPS = 12
SWALLOWED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a finalizer


class Net(nn.Module):
    """Dropout, buffers, and context managers in forward."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        with torch.no_grad():
            x = x + 0.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x)
        return self.last(self.dropout(torch.relu(self.norm(x.float()))))


def recipe(loss_fn=F.mse_loss, steps=STEPS, make_model=Net, **changes):
    return phalanx.Recipe(make_model, (X, Y), loss_fn, **{"replicas": 4, "batch_size": 12, "steps": steps, **changes})


@functools.cache
def digest_after(steps=STEPS):
    return recipe(steps=steps).train(engine="inline").digest


def metric(output, target):
    return (output - target).abs().mean()


def press():
    """Ctrl-C, at once: sent to the process, another thread may be given it, and the main thread hears of it later."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def surroundings():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        signal.getsignal(signal.SIGINT),
    )


def lines_of(call, at=None):
    """Call, with Ctrl-C pressed at the line of that number; how many lines were run, and what Ctrl-C raised."""
    count, raised = [0], None

    def trace(frame, event, argument):
        if event == "line":
            count[0] += 1
            if count[0] == at:
                press()
        return trace

    before = sys.gettrace()
    gc.disable()  # lines of finalizers are not the verb's: Python swallows what is raised there
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt as error:
        raised = error
    finally:
        sys.settrace(before)
        gc.enable()
    return count[0], raised


VERBS = {
    "iterate": lambda run, folder: [report for report, _ in zip(run, range(2), strict=False)],
    "step": lambda run, folder: run.step(),
    "evaluate": lambda run, folder: run.evaluate(metric, (X, Y), batch_size=20),
    "result": lambda run, folder: run.result(),
    "save": lambda run, folder: run.save(folder / str(time.monotonic_ns())),
}


@pytest.mark.long
@SWALLOWED
@pytest.mark.parametrize("lines", [3, pytest.param(30, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_at_any_line_inline(verb, lines, tmp_path):
    """Wherever in a verb Ctrl-C comes, the process is as before, modules keep their modes, and the run can go on."""
    rng = generator(f"{lines} lines of {verb}")
    call = VERBS[verb]
    with recipe().start(engine="inline") as run:
        count, _ = lines_of(lambda: call(run, tmp_path))
    for at in sorted(rng.sample(range(1, count), lines)):
        before = surroundings()
        with recipe().start(engine="inline") as run:
            reached, raised = lines_of(lambda: call(run, tmp_path), at)
            assert raised is not None or reached < at, f"line {at}, PHALANX_SEED={SEED}: lost"
            assert surroundings() == before, f"line {at}, PHALANX_SEED={SEED}"
            assert all(module.training for module in run.result().model.modules()), f"line {at}, PHALANX_SEED={SEED}"
            run.finish()
            assert run.result().digest == digest_after(), f"line {at}, PHALANX_SEED={SEED}"
        assert surroundings() == before


@pytest.mark.long
@SWALLOWED
@pytest.mark.parametrize("steps", [10, pytest.param(60, marks=pytest.mark.campaign)])
def test_ctrl_c_at_any_line_with_workers(steps, tmp_path):
    """With workers the run goes on to the same digest, however often Ctrl-C comes, in whatever verb."""
    rng = generator(f"lines of {steps} steps")
    before = surroundings()
    with recipe(steps=steps + 10).start(engine="processes", workers=2) as run:
        while run.steps < steps:
            call = VERBS[rng.choice(list(VERBS))]
            lines_of(lambda: call(run, tmp_path), rng.randrange(1, 600))  # noqa: B023  called at once
            assert all(module.training for module in run.result().model.modules())
        run.finish()
        assert run.result().digest == digest_after(steps + 10), f"PHALANX_SEED={SEED}"
    assert surroundings() == before


@SWALLOWED
def test_ctrl_c_in_a_plans_block_leaves_the_generators_as_they_were():
    """A hand-written loop that follows the plan finds its generators again, wherever in it Ctrl-C comes.

    All but two places: no ``__exit__`` written in Python can do anything about Ctrl-C before its first line, and on the
    way there. Garbage collection could restore them, but then in the middle of something else.
    """
    plan = recipe().plan

    def step():
        with plan.seeded(3, 1):
            torch.rand(3)

    step()
    count, _ = lines_of(step)
    before = surroundings()
    torn = 0
    for at in range(1, count + 1):
        lines_of(step, at)
        torn += surroundings() != before
        torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
        random.setstate(before[1])
    assert torn <= 2


@pytest.mark.long
def test_a_block_that_is_left_behind_restores_nothing_later():
    """Of a block that was entered and lost, only the turn is given back when it is collected, not the generators."""
    block = recipe().plan.seeded(3, 1)
    block.__enter__()
    torch.manual_seed(5)
    random.seed(5)
    before = surroundings()
    del block
    gc.collect()
    assert surroundings() == before
    other = threading.Thread(target=lambda: recipe().plan.seeded(3, 1).__enter__())
    other.start()
    other.join(300)
    assert not other.is_alive()


# User code that holds something


HELD = []  # a global that a context manager of the user's sets and restores


@contextlib.contextmanager
def doubled(path, seconds):
    """Sets a global of the user's, and takes its time after Ctrl-C, once, before it is restored."""
    HELD.append(1)
    try:
        yield
    finally:
        if path is not None and first(path):
            wait_for(pressed(path))
            time.sleep(seconds)
        HELD.pop()


def pressed(path):
    return path.with_suffix(".pressed")


def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


def holding_loss(path, seconds, output, target):
    """A loss that would be another if the context manager had been torn."""
    loss = F.mse_loss(output, target) * (1 + len(HELD))
    with doubled(path, seconds):
        pass
    return loss


@contextlib.contextmanager
def ctrl_c_after(path, *waits):
    """Presses Ctrl-C so many seconds after user code has made ``path``, and after each other, while a run is there."""

    def work():
        wait_for(path)
        for wait in waits:
            time.sleep(wait)
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                press()
            pressed(path).touch()

    with beside(work):
        yield


@pytest.mark.long
@pytest.mark.parametrize("options", [{"engine": "inline"}, {"engine": "processes", "workers": 2}], ids=["inline", "W2"])
@pytest.mark.parametrize("seconds", [0.4, 3.0])
def test_ctrl_c_in_a_context_manager_of_the_users_tears_nothing(options, seconds, tmp_path):
    """User code that holds something finishes, or its worker is replaced; the run goes on to the same digest."""
    path = tmp_path / "there"
    with recipe(functools.partial(holding_loss, path, seconds)).start(**options) as run:
        with pytest.raises(KeyboardInterrupt), ctrl_c_after(path, 0.1):
            run.finish()
        assert HELD == []
        run.finish()
        assert run.result().digest == digest_after()


def test_a_torn_context_manager_would_be_seen():
    """Negative twin: with the global left set, the digest is another."""
    HELD.append(1)
    try:
        made = recipe(functools.partial(holding_loss, None, 0.0)).train(engine="inline")
    finally:
        HELD.clear()
    assert made.digest != digest_after()


def sleeping_loss(path, seconds, output, target):
    if first(path):
        time.sleep(seconds)
    return F.mse_loss(output, target)


@pytest.mark.long
def test_a_second_ctrl_c_breaks_user_code_off_and_ends_the_run(tmp_path):
    """Inline, user code that was broken off may be half done: the state before is kept, and no step follows."""
    path, before = tmp_path / "there", surroundings()
    with recipe(functools.partial(sleeping_loss, path, 60)).start(engine="inline") as run:
        with ctrl_c_after(path, 0.1, 0.2), pytest.raises(KeyboardInterrupt) as caught:
            run.finish()
        assert caught.value.result.steps == run.steps == 0
        assert surroundings() == before
        for call in (run.step, lambda: run.evaluate(metric, (X, Y))):
            with pytest.raises(phalanx.RunError, match=r"Ctrl-C broke off your code.*run_dir"):
                call()
        assert run.result().digest == recipe(steps=1).start(engine="inline").result().digest


def test_one_ctrl_c_is_enough_outside_a_step(tmp_path):
    """While a run is made nobody goes on from there, so the first Ctrl-C breaks user code off."""
    path = tmp_path / "there"

    def slow_model():
        path.touch()
        time.sleep(60)

    before = surroundings()
    with ctrl_c_after(path, 0.1), pytest.raises(KeyboardInterrupt):
        recipe(make_model=slow_model).train(engine="inline")
    assert surroundings() == before


@pytest.mark.long
def test_user_code_that_swallows_ctrl_c_does_not_go_on_with_what_it_left(tmp_path):
    """If user code catches what broke it off, the run stops all the same."""
    path = tmp_path / "there"

    def stubborn(output, target):
        with contextlib.suppress(KeyboardInterrupt):
            sleeping_loss(path, 60, output, target)
        return F.mse_loss(output, target)

    with ctrl_c_after(path, 0.1, 0.2), pytest.raises(KeyboardInterrupt) as caught:
        recipe(stubborn).train(engine="inline")
    assert caught.value.result.steps == 0


@pytest.mark.long
@pytest.mark.parametrize("waits", [(0.0, 0.2), (0.2, 0.2, 0.2)])
def test_ctrl_c_twice_with_workers_carries_the_state(waits, tmp_path):
    """However soon Ctrl-C comes again, the error has the state after the last whole step."""
    path = tmp_path / "there"
    with ctrl_c_after(path, *waits), pytest.raises(KeyboardInterrupt) as caught:
        recipe(functools.partial(sleeping_loss, path, 20)).train(engine="processes", workers=2)
    assert caught.value.result is not None
    assert caught.value.result.digest == recipe(steps=1).start(engine="inline").result().digest


@pytest.mark.long
def test_a_worker_that_ctrl_c_ends_is_told_of_and_not_counted(tmp_path, monkeypatch):
    """Incidents say why a worker was replaced, and any number of such ends does not end a run."""
    monkeypatch.setattr(crew, "PATIENCE_SECONDS", 0.1)
    with recipe().start(engine="processes", workers=2) as run:
        for number in range(5):
            (tmp_path / "due").write_text(str(number))
            with ctrl_c_after(tmp_path / str(number), 0.1), pytest.raises(KeyboardInterrupt):
                run.evaluate(functools.partial(sleeping_often, tmp_path), (X, Y))
        run.finish()
        assert run.result().digest == digest_after()
        whys = [item.why for item in run.incidents if item.kind == "death"]
        assert set(whys) == {"stayed in user code after Ctrl-C and was ended"}
        assert len(whys) >= 5, "and more where another worker was slow"


def sleeping_often(folder, output, target):
    """Sleeps whenever that is due, in one process only, and says so."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder / "due", folder / f"due for {os.getpid()}")
        (folder / (folder / f"due for {os.getpid()}").read_text()).touch()
        time.sleep(20)
    return F.l1_loss(output, target)


@pytest.mark.long
def test_ctrl_c_at_the_hand_over_comes_after_the_step(monkeypatch):
    """Engine auto that hears of Ctrl-C while workers start hands over, does the step, and can go on."""
    real, calls = selection.Processes, []

    def interrupted(*arguments, **options):
        calls.append(1)
        press()
        interrupts.check()
        return real(*arguments, **options)

    monkeypatch.setattr("phalanx.engines.selection.usable_cores", lambda: 2)
    phalanx.Recipe(Net, (X, Y), F.mse_loss, replicas=2, steps=1).train(workers=2, engine="processes")  # a warm zygote
    monkeypatch.setattr(selection, "Processes", interrupted)
    with recipe(functools.partial(slow_loss, 0.01), steps=150).start(workers="auto") as run:
        with pytest.raises(KeyboardInterrupt):
            run.finish()
        assert calls == [1]
        run.finish()
        assert run.result().digest == digest_after(150)


def slow_loss(seconds, output, target):
    time.sleep(seconds)
    return F.mse_loss(output, target)


# The module itself


def interrupted(call):
    """Whether ``call(log)`` is left by KeyboardInterrupt, and what it wrote until then."""
    log = []
    try:
        call(log)
    except KeyboardInterrupt:
        return True, log
    return False, log


def test_what_is_kept_comes_at_the_check_or_at_the_end():
    """SIGINT waits for ``check``, not while something is held, and for the end of the outermost block."""

    def checks(log):
        with interrupts.guarded():
            press()
            log.append("kept")
            with interrupts.held():
                interrupts.check()
                log.append("held")
            with interrupts.guarded():
                log.append("nested")
            interrupts.check()
            log.append("never")

    def checks_nothing(log):
        with interrupts.guarded():
            press()
            log.append("kept to the end")
        log.append("never")

    def leaves(log):
        with interrupts.guarded(leaving=True):
            press()
        log.append("dropped")

    assert interrupted(checks) == (True, ["kept", "held", "nested"])
    assert interrupted(checks_nothing) == (True, ["kept to the end"])
    assert interrupted(leaves) == (False, ["dropped"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def block():
    with interrupts.guarded():
        pass


def block_in_callback():
    with interrupts.guarded(), interrupts.user_code():
        block()


@pytest.mark.parametrize("call", [block, block_in_callback])
def test_ctrl_c_on_the_way_into_and_out_of_a_block_is_neither_lost_nor_late(call):
    """Pressed at any line of these blocks' own code, it leaves them, and the next block hears nothing of it."""
    count, _ = lines_of(call)
    for at in range(1, count + 1):
        assert lines_of(call, at)[1] is not None, f"line {at}: lost"
        assert lines_of(block)[1] is None, f"line {at}: late"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_was_dropped_holds_nothing():
    """The frame that a kept SIGINT came in, with all that its function knows, is let go of with it."""

    class Arena:
        pass

    def leaves():
        arena = Arena()
        with interrupts.guarded(leaving=True):
            press()
        return weakref.ref(arena)

    assert leaves()() is None


def test_a_second_comes_at_once():
    """What is held is broken off by the second SIGINT, in user code or at the check; what is held within by a third."""

    def in_user_code(log):
        with interrupts.held(), interrupts.user_code():
            press()
            log.append("first")
            press()
            log.append("never")

    def at_check(log):
        with interrupts.held():
            press()
            press()
            log.append("both kept")
            with interrupts.held():
                interrupts.check()
                log.append("within")
            interrupts.check()
            log.append("never")

    with interrupts.guarded():
        broken = interrupts.PROCESS.broken
        assert interrupted(in_user_code) == (True, ["first"])
        assert interrupted(at_check) == (True, ["both kept", "within"])
        assert interrupts.PROCESS.broken == broken + 2


def test_user_code_is_broken_off_and_a_run_in_it_is_not():
    """Where nothing is held user code hears of SIGINT at once; a run in it is guarded; handlers set there are kept."""

    def at_once(log):
        with interrupts.user_code():
            press()
            log.append("never")

    def run_in_callback(log):
        with interrupts.user_code(), interrupts.guarded():
            press()
            log.append("kept")

    log = []
    with interrupts.guarded():
        assert interrupted(at_once) == (True, [])
        press()
        assert interrupted(at_once) == (True, [])  # what was kept before
        assert interrupted(run_in_callback) == (True, ["kept"])
        with interrupts.user_code():
            signal.signal(signal.SIGINT, lambda *_: log.append("another handler"))
    press()
    assert log == ["another handler"]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_are_left_alone():
    """Only the main thread handles signals, so that nothing is kept elsewhere."""
    seen = []

    def work():
        with interrupts.guarded(), interrupts.user_code(), interrupts.held():
            interrupts.check()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
