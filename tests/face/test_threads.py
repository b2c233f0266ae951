"""Several runs at once in threads of one process: they take turns with what belongs to the process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phalanx
from phalanx import manual
from phalanx.definition import generators
from phalanx.surroundings.turns import ALONE, Turns

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(64, 1, generator=torch.Generator().manual_seed(1))
STEPS = 40


def make_model():
    return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1))


def noisy_loss(output, target):
    """Draws from all the generators of the process."""
    noise = float(torch.rand(())) + float(np.random.rand()) + random.random()
    return F.mse_loss(output, target) * noise


def recipe(seed, steps=STEPS, **changes):
    return phalanx.Recipe(make_model, (X, Y), noisy_loss, replicas=4, batch_size=16, seed=seed, steps=steps, **changes)


@functools.cache
def digest_of(seed, steps=STEPS):
    return recipe(seed, steps).train(engine="inline").digest


def metric(output, target):
    return (output - target).abs().mean() * (1 + torch.rand(()))


@pytest.mark.long
@pytest.mark.parametrize("options", [{"engine": "inline"}, {"workers": "auto"}], ids=["inline", "auto"])
def test_runs_in_threads_end_as_they_do_alone(options):
    """What Optuna's n_jobs, joblib and web servers do: each run has its own bits, and generators are as before."""
    due = {seed: digest_of(seed) for seed in range(4)}
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda seed: recipe(seed).train(**options, progress=False), due))
    assert [result.digest for result in results] == list(due.values())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.long
def test_without_turns_it_would_be_seen(monkeypatch):
    """Negative twin: where runs do not take turns, they draw from each other's generators, where both are in a step."""
    due = [digest_of(seed) for seed in range(2)]
    both, met = threading.Barrier(2), threading.local()

    def meeting_loss(output, target):
        if not hasattr(met, "once"):
            met.once = both.wait(60)  # generators are those of whoever seeded them last
        return noisy_loss(output, target)

    class Free(Turns):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(generators, "ALONE", Free())

    def trained(seed):
        one = dataclasses.replace(recipe(seed), loss_fn=meeting_loss)
        try:
            return one.train(engine="inline", progress=False).digest
        except phalanx.StateError:  # a replica that was computed twice drew other numbers the second time
            return None

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(trained, range(2))) != due


def test_runs_in_threads_take_turns_step_by_step():
    """No run waits for another to end: whoever wants a turn gets it after the step that is being done."""
    started, other = threading.Event(), threading.Event()
    seen = []

    def loss(output, target):
        started.set()
        seen.append("long")
        return F.mse_loss(output, target)

    def short():
        started.wait(300)
        recipe(1, 3).train(engine="inline", progress=False)
        seen.append("short is done")
        other.set()

    thread = threading.Thread(target=short)
    thread.start()
    made = phalanx.Recipe(make_model, (X, Y), loss, replicas=2, batch_size=16, steps=100_000)
    with made.start(engine="inline", progress=False) as run:
        while not other.is_set() and run.steps < 100_000:
            run.step()
    thread.join()
    assert other.is_set()
    assert run.steps < 100_000


def test_finish_gives_way_too():
    """A run that nobody watches keeps its environment from step to step, but not from others who wait for it."""
    started = threading.Event()
    done = []

    def loss(output, target):
        started.set()
        if done:
            raise RuntimeError("the other one is done")
        return F.mse_loss(output, target)

    def short():
        started.wait(300)
        done.append(recipe(1, 3).train(engine="inline", progress=False).digest)

    thread = threading.Thread(target=short)
    thread.start()
    made = phalanx.Recipe(make_model, (X, Y), loss, replicas=2, batch_size=16, steps=100_000)
    with pytest.raises(phalanx.WorkerError, match="the other one is done"):
        made.train(engine="inline", progress=False)
    thread.join()
    assert done == [digest_of(1, 3)]


@pytest.mark.long
@pytest.mark.parametrize("options", [{"engine": "inline"}, {"engine": "processes", "workers": 2}], ids=["inline", "W2"])
def test_a_run_may_be_asked_from_several_threads(options):
    """Evaluations and results from another thread wait for the step that is being done, and see a whole state."""
    with recipe(0).start(engine="inline", progress=False) as run:
        due = {}
        while run.steps < STEPS:
            run.step()
            due[run.steps] = run.evaluate(metric, (X, Y)), run.result().digest
    found, over = [], threading.Event()

    with recipe(0).start(**options, progress=False) as run:

        def ask():
            while not found or not over.wait(0.005):
                result = run.result()
                found.append((result.steps, None, result.digest))
                run.evaluate(metric, (X, Y))

        thread = threading.Thread(target=ask)
        thread.start()
        for _ in run:
            pass
        over.set()
        thread.join()
        for item in run.metric_history:
            assert item.steps == 0 or item.value == due[item.steps][0]
        assert run.result().digest == digest_of(0)
    assert all(steps == 0 or digest == due[steps][1] for steps, _, digest in found)
    assert found


@pytest.mark.long
def test_a_step_by_hand_takes_its_turn():
    """``manual`` draws from the same generators, so that it may not do so in the middle of a run's step."""
    due, over = digest_of(0, 150), threading.Event()
    replicas = manual.replicate(make_model(), ["cpu", "cpu"])
    optimizers = [torch.optim.SGD(replica.parameters(), lr=1e-3) for replica in replicas]

    def by_hand():
        while not over.is_set():
            manual.data_parallel_step(replicas, optimizers, (X, Y), F.mse_loss)

    thread = threading.Thread(target=by_hand)
    thread.start()
    try:
        result = recipe(0, 150).train(engine="inline", progress=False)
    finally:
        over.set()
        thread.join()
    assert result.digest == due


def test_plans_blocks_in_threads_are_separate():
    """``plan.seeded`` holds the generators for its block: another thread's block waits."""
    plan = recipe(0).plan

    def draw(replica):
        values = []
        for step in range(50):
            with plan.seeded(step, replica):
                values.append([float(torch.rand(())) for _ in range(20)])
        return values

    alone = [draw(replica) for replica in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(draw, range(4))) == alone


def test_turns_are_first_come_first_served():
    """A thread that lets go of a lock and takes it again at once stands behind those that wait."""
    turns, order = Turns(), []
    inside = threading.Barrier(2)

    def second():
        inside.wait()
        with turns:
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with turns:
        inside.wait()
        while not turns.wanted:
            pass
        with turns:
            order.append("first")
    with turns:
        order.append("third")
    thread.join()
    assert order == ["first", "second", "third"]


@contextlib.contextmanager
def another_has_the_turn():
    """A thread that holds it until the end."""
    inside, over = threading.Event(), threading.Event()

    def hold():
        with ALONE:
            inside.set()
            over.wait(300)

    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as undo:
        undo.callback(over.set)
        pool.submit(hold)
        inside.wait()
        yield


def test_ctrl_c_while_waiting_for_a_turn():
    """A run in the main thread that waits for another one's step can be interrupted; the other is not disturbed."""
    with another_has_the_turn():
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            recipe(0).train(engine="inline", progress=False)
    assert recipe(0).train(engine="inline", progress=False).digest == digest_of(0)


def test_a_fork_while_another_thread_has_its_turn():
    """The child of a fork has no other threads, so that it waits for none."""
    with another_has_the_turn(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax and Python 3.12 warn of forks
        if (pid := os.fork()) == 0:
            with ALONE:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_callbacks_may_ask_each_others_runs():
    """A callback holds no turn: two runs in threads may look at each other, and one may wait for another thread."""
    runs, ready, digests = {}, threading.Barrier(2), {}

    def go(number):
        def callback(report):
            assert runs[1 - number].result().steps <= 4
            thread = threading.Thread(target=runs[number].evaluate, args=[metric, (X, Y)])
            thread.start()
            thread.join()

        with recipe(number, 4).start(engine="inline", callbacks=[callback], progress=False) as run:
            runs[number] = run
            ready.wait()
            run.finish()
            digests[number] = run.result().digest
            ready.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(go, range(2)))
    assert digests == {number: digest_of(number, 4) for number in range(2)}


FORKED = """
import multiprocessing, os, signal, sys, threading, time, warnings, torch, phalanx
warnings.simplefilter("ignore")
x, y = torch.randn(24, 3), torch.randn(24, 1)

def slow(output, target):
    inside.set()
    time.sleep(0.01)
    return torch.nn.functional.mse_loss(output, target)

def ended(number):
    there, said = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: (os.write(said, b"1"), time.sleep(60)))
    child.start()
    os.read(there, 1)  # before that Python drops signals that wait
    os.kill(child.pid, number)
    child.join(50)
    alive = child.is_alive()
    child.kill()
    child.join()
    return not alive

inside = threading.Event()
found = []
made = phalanx.Recipe(lambda: torch.nn.Linear(3, 1), (x, y), slow, replicas=2, steps=4)
made.train(engine="inline", run_dir=sys.argv[1], callbacks=[lambda report: found.append(ended(signal.SIGTERM))])

def elsewhere():
    inside.wait()
    found.append(ended(signal.SIGINT))
    over.append(1)

over, thread = [], threading.Thread(target=elsewhere)
inside.clear()
thread.start()
made = phalanx.Recipe(lambda: torch.nn.Linear(3, 1), (x, y), slow, replicas=2, steps=100_000)
with made.start(engine="inline") as run:
    while not over:
        run.step()
thread.join()
print(found)
"""


@pytest.mark.long
def test_children_forked_while_training_end_by_signals(tmp_path):
    """SIGTERM ends a child of a callback, Ctrl-C one of another thread: the run's handlers are not theirs."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path / "run")], capture_output=True, text=True, timeout=500
    )
    assert done.stdout.strip() == str([True] * 5), done.stderr
