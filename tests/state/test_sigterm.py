"""SIGTERM: the step that is being done is saved, an error says so, and the same call again goes on."""

import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import phalanx
from tests.families import FAMILIES, FEATURES
from tests.state.runs import accuracy, assert_same, engine_of, norm_recipe

JOB = """
import itertools, time, torch, phalanx
random = torch.Generator().manual_seed(0)
x, y = torch.randn(64, 4, generator=random), torch.randn(64, 1, generator=random)
calls = itertools.count()
def loss(output, target):
    if next(calls) == 20:
        print("ready", flush=True)
    time.sleep(0.004)
    return torch.nn.functional.mse_loss(output, target)
recipe = phalanx.Recipe(lambda: torch.nn.Linear(4, 1), (x, y), loss, replicas=2, steps=150)
"""


@pytest.mark.campaign
def test_sigterm_on_the_command_line(tmp_path):
    """It exits with 75 and says how to go on; the same command again ends in the digest of one that was left alone."""
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "phalanx", "train", "job.py", "--quiet", "--workers", "1", "--run-dir", "kept"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=500)
    assert process.returncode == 75, errors
    assert "the same call again" in errors
    steps = phalanx.load(tmp_path / "kept").step
    assert 0 < steps < 150
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=True)
    namespace = {}
    exec(JOB.replace("time.sleep(0.004)", ""), namespace)
    assert done.stdout.splitlines()[-1].split() == ["digest", namespace["recipe"].train(engine="inline").digest]


@pytest.fixture
def earlier():
    """A handler of SIGTERM that was there before, which notes its calls; what was there before it comes back."""
    calls = []

    def handler(number, frame):
        calls.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    yield handler, calls
    signal.signal(signal.SIGTERM, before)


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_here(tmp_path, earlier, workers):
    """The step is done and saved, Preempted raised; an earlier handler is called once, and there again afterwards."""
    handler, calls = earlier

    def strike(report):
        if report.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(phalanx.Preempted, match="SIGTERM came, and the state after 4 steps") as caught:
        norm_recipe(9).train(run_dir=tmp_path, callbacks=[strike], **engine_of(workers))
    assert (calls, signal.getsignal(signal.SIGTERM)) == ([signal.SIGTERM], handler)
    assert_same(caught.value.result, norm_recipe(4).train(engine="inline"))
    assert phalanx.load(tmp_path).step == 4
    alone = norm_recipe(9).train(engine="inline")
    assert_same(norm_recipe(9).train(run_dir=tmp_path, **engine_of(workers)), alone)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_at_any_time(tmp_path, earlier, workers):
    """It comes a dozen times, some milliseconds apart, while the run goes freely: in the end, nothing is missing."""
    give = functools.partial(FAMILIES["mlp"].recipe, 2, batch_size=2, epochs=15)  # epochs of ten steps
    evaluation = phalanx.Evaluation(accuracy, FEATURES)
    (handler, _), rng, preempted, result = earlier, random.Random(0), 0, None

    def strike():
        while signal.getsignal(signal.SIGTERM) is handler and not ended.is_set():
            time.sleep(0.001)
        if not ended.wait(rng.uniform(0.0, 0.02)) and preempted < 12:
            os.kill(os.getpid(), signal.SIGTERM)

    while result is None:
        ended = threading.Event()
        thread = threading.Thread(target=strike)
        thread.start()
        try:
            result = give().train(run_dir=tmp_path, evaluation=evaluation, **engine_of(workers))
        except phalanx.Preempted:
            preempted += 1
        finally:
            ended.set()
            thread.join()
    assert preempted
    alone = give().train(engine="inline", evaluation=evaluation)
    assert_same(result, alone)
    assert result.metric_history == alone.metric_history


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_no_earlier_handler(tmp_path, before):
    """Where SIGTERM was ignored, or nobody cared, it is so again afterwards."""
    found = signal.signal(signal.SIGTERM, before)
    try:
        with pytest.raises(phalanx.Preempted):
            norm_recipe(4).train(
                run_dir=tmp_path, engine="inline", callbacks=[lambda report: os.kill(os.getpid(), signal.SIGTERM)]
            )
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, found)


def test_sigterm_is_left_alone(tmp_path, earlier):
    """Without run_dir, outside the main thread and in a run that somebody holds, the handler is the caller's."""
    handler, _ = earlier
    seen = []

    def look(report):
        seen.append(signal.getsignal(signal.SIGTERM))

    norm_recipe(2).train(engine="inline", callbacks=[look])
    thread = threading.Thread(
        target=norm_recipe(2).train, kwargs={"run_dir": tmp_path / "one", "engine": "inline", "callbacks": [look]}
    )
    thread.start()
    thread.join()
    with norm_recipe(2).start(run_dir=tmp_path / "two", engine="inline", callbacks=[look]) as run:
        run.finish()
    assert seen == [handler] * 6
    norm_recipe(2).train(run_dir=tmp_path / "three", engine="inline", callbacks=[look])
    assert handler not in seen[6:]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_terminate_without_a_directory():
    """The run ends after the step, and says that nothing was saved; the state is in the error."""
    with FAMILIES["mlp"].recipe(2).start(engine="inline") as run:
        run.terminate()
        with pytest.raises(
            phalanx.Preempted, match=r"run\.terminate\(\) was called, and nothing is saved here"
        ) as caught:
            run.step()
        assert caught.value.result.steps == 1


def test_a_step_that_fails_is_not_taken_for_a_saved_one(tmp_path):
    """SIGTERM, and then a step that goes wrong: the error is that of the step, or a scheduler would begin it again."""
    x, y = torch.ones(8, 4), torch.ones(8, 1)

    def loss(output, target):
        return (output - target).pow(2).mean(), 0.0

    recipe = phalanx.Recipe(lambda: torch.nn.Linear(4, 1), (x, y), loss, replicas=2, batch_size=8, steps=2)
    with recipe.start(engine="inline", run_dir=tmp_path) as run:
        run.terminate()
        with pytest.raises(phalanx.RunError, match="every replica of step 0 has weight 0") as caught:
            run.step()
        assert not isinstance(caught.value, phalanx.Preempted)
