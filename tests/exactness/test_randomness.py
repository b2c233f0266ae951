"""Random numbers follow from seed, step and replica; generators, threads and modes are the caller's when outside."""

import contextlib
import random
import signal
import sys
import threading

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import phalanx
from phalanx.definition import generators
from tests.by_hand import answer
from tests.families import DATA, FAMILIES
from tests.sampling import cover

TRANSFORMER = FAMILIES["transformer"]
EVERY_GENERATOR = FAMILIES["mlp"].recipe(2, **DATA["dataset_and_drawing_collate"])


def digest(recipe):
    return recipe.train(engine="inline").digest


def masks(replicas, steps=4):
    """Dropout masks of every forward pass of a run, in order: one per replica per step."""
    drawn = []

    def forward(model, batch):
        drawn.append(tuple(F.dropout(torch.ones(40), 0.5).tolist()))
        return model(batch[0])

    FAMILIES["mlp"].recipe(replicas, forward_fn=forward, steps=steps).train(engine="inline")
    assert len(drawn) == replicas * steps
    return drawn


@pytest.mark.usefixtures("computed_once")
def test_masks_differ_between_replicas_and_steps():
    """No two replica-steps of a run draw the same dropout mask."""
    assert len(set(masks(4))) == 16


@pytest.mark.usefixtures("computed_once")
def test_masks_are_the_same_on_rerun():
    """A second run draws the same masks, whatever was drawn in between, and however long it is."""
    first = masks(3)
    torch.manual_seed(123)
    assert masks(3) == first
    assert masks(3, steps=2) == first[:6]


@pytest.mark.usefixtures("computed_once")
def test_masks_are_those_of_the_plan():
    """``recipe.plan.seeded`` gives a hand-written loop the masks of the run."""
    plan, by_hand = FAMILIES["mlp"].recipe(3).plan, []
    for step in range(4):
        for replica in range(3):
            with plan.seeded(step, replica):
                by_hand.append(tuple(F.dropout(torch.ones(40), 0.5).tolist()))
    assert by_hand == masks(3)


def test_another_seed_is_another_answer():
    """The seed reaches order, weights and dropout: another one ends elsewhere."""
    assert len({digest(TRANSFORMER.recipe(3, seed=seed)) for seed in (0, 1, 2**32, 2**63)}) == 4


def surroundings():
    """Everything of the caller's that a run must not touch, as one comparable value."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": (keys.tolist(), position, has_gauss, gauss),
        "random": random.getstate(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast_cache": (torch.is_autocast_cache_enabled(), nesting),
        "dtype": torch.get_default_dtype(),
    }


def unusual(threads=3):
    """Leave every generator with a cached normal, and another thread count than the recipe's."""
    torch.manual_seed(11), np.random.seed(12), random.seed(13)
    torch.randn(1), np.random.normal(), random.gauss(0, 1)
    torch.set_num_threads(threads)
    assert np.random.get_state()[3] == 1


@contextlib.contextmanager
def no_grad_and_autocast():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        yield


@contextlib.contextmanager
def autocast_without_cache():
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    yield
    torch.set_autocast_cache_enabled(before)


MODES = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast_off": lambda: torch.autocast("cpu", enabled=False),
    "autocast_without_cache": autocast_without_cache,
    "no_grad_and_autocast": no_grad_and_autocast,
}


CAST = ["transformer", "conv_norm", "bfloat16", "bfloat16_reused", "own_autocast"]


@pytest.mark.parametrize(("name", "mode"), cover("modes of the caller", CAST, MODES))
def test_the_caller_s_modes_change_nothing(name, mode):
    """Whatever grad mode, inference mode or autocast the caller is in, the answer is the same, and so is the model."""
    recipe = FAMILIES[name].recipe(3)
    expected = answer(recipe)
    with MODES[mode]():
        result = recipe.train(engine="inline")
    assert (result.digest, result.loss_history) == expected
    assert not any(parameter.is_inference() for parameter in result.model.parameters())
    assert all(parameter.requires_grad for parameter in result.model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_a_result_in_the_middle_can_be_trained_on(mode):
    """A copy of the model taken in the middle, in any mode, is a plain model with the state of that moment."""
    recipe = FAMILIES["conv_norm"].recipe(3)
    with MODES[mode](), recipe.start(engine="inline") as run:
        next(run)
        result = run.result()
        next(run)
    assert result.digest == digest(FAMILIES["conv_norm"].recipe(3, steps=1))
    result.model(recipe.data[0]).sum().backward()
    assert result.model[0].weight.grad is not None


@pytest.mark.parametrize("mode", MODES)
def test_every_report_finds_the_surroundings(mode):
    """While a report of an iterated run is held, the surroundings are the caller's."""
    unusual()
    with MODES[mode]():
        before = surroundings()
        with EVERY_GENERATOR.start(engine="inline") as run:
            assert surroundings() == before
            for _ in run:
                assert surroundings() == before
            run.evaluate(F.cross_entropy, DATA["dataset"]["data"])
            assert surroundings() == before
            run.result()
        assert surroundings() == before


@pytest.mark.parametrize("mode", MODES)
def test_callbacks_find_the_surroundings(mode):
    """Inside a callback the surroundings are the caller's."""
    unusual()
    found = []
    with MODES[mode]():
        before = surroundings()
        EVERY_GENERATOR.train(engine="inline", callbacks=[lambda report: found.append(surroundings())])
        assert found == [before] * EVERY_GENERATOR.plan.steps
        assert surroundings() == before


def test_the_run_itself_has_its_own_surroundings():
    """Inside user code the threads are the recipe's, gradients are on, and autocast and inference mode are off."""
    found = []

    def forward(model, batch):
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        found.append((torch.get_num_threads(), *modes))
        return model(batch[0])

    unusual()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        FAMILIES["mlp"].recipe(2, forward_fn=forward, threads=2).train(engine="inline")
    assert set(found) == {(2, True, False, False)}


class Planned(Exception):
    """Raised on purpose."""


def failing(kind, after=5):
    """A forward function that raises in its sixth call, having drawn numbers."""
    calls = []

    def forward(model, batch):
        calls.append(torch.rand(3) + np.random.normal() + random.gauss(0, 1))
        if len(calls) > after:
            raise kind
        return model(batch[0])

    return forward


def not_finite(model, batch):
    return model(batch[0]) * torch.rand(()) * torch.nan


def raising():
    raise Planned


def interrupting(report):
    raise KeyboardInterrupt


FAILURES = {
    "forward": (phalanx.WorkerError, {"forward_fn": lambda *both: failing(Planned)(*both)}, ()),
    "not_finite": (phalanx.NonFiniteError, {"forward_fn": not_finite}, ()),
    "make_model": (phalanx.UsageError, {"make_model": raising}, ()),
    "optimizer": (phalanx.UsageError, {"optimizer": lambda named: raising()}, ()),
    "scheduler": (phalanx.UsageError, {"scheduler": lambda optimizer: raising()}, ()),
    "callback": (KeyboardInterrupt, {}, [interrupting]),
}


@pytest.mark.parametrize(("name", "mode"), cover("failures in modes", FAILURES, MODES))
def test_failures_leave_the_surroundings(name, mode):
    """After any failure, Ctrl-C included, the surroundings are the caller's."""
    kind, changes, callbacks = FAILURES[name]
    changes = changes if name != "forward" else {"forward_fn": failing(Planned)}
    unusual()
    with MODES[mode]():
        before = surroundings()
        with pytest.raises(kind):
            FAMILIES["mlp"].recipe(2, **changes).train(engine="inline", callbacks=callbacks)
        assert surroundings() == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("computed_once")
@pytest.mark.parametrize("kind", [Planned, KeyboardInterrupt, SystemExit])
def test_a_failure_in_the_middle_of_an_iterated_run_leaves_the_surroundings(kind):
    """An exception or an exit out of a held run's step leaves the surroundings and the state before that step."""
    recipe = FAMILIES["mlp"].recipe(2, forward_fn=failing(kind))
    unusual()
    before = surroundings()
    with recipe.start(engine="inline") as run:
        next(run), next(run)
        with pytest.raises(phalanx.WorkerError if kind is Planned else kind):
            next(run)
        assert surroundings() == before
        assert run.result().digest == digest(FAMILIES["mlp"].recipe(2, steps=2))


def test_reading_the_plan_leaves_the_surroundings():
    """The context managers of the plan restore every generator, after an exception too."""
    unusual()
    before, plan = surroundings(), EVERY_GENERATOR.plan
    with plan.seeded(3, 1), plan.seeded_sample(2, 5):
        torch.randn(3), np.random.normal(), random.gauss(0, 1)
    assert surroundings() == before
    with contextlib.suppress(Planned), plan.seeded(3, 1):
        torch.randn(3)
        raise Planned
    assert surroundings() == before


def test_what_the_caller_draws_changes_nothing():
    """Numbers drawn and threads set between steps change no answer, and are drawn from the caller's own stream."""
    undisturbed, drawn = answer(TRANSFORMER.recipe(3))[0], []
    torch.manual_seed(5)
    expected = [float(torch.rand(())) for _ in range(TRANSFORMER.steps)]
    torch.manual_seed(5)

    def draw(report):
        drawn.append(float(torch.rand(())))
        np.random.normal(), random.random()
        torch.set_num_threads(1 + report.step % 2)

    result = TRANSFORMER.recipe(3).train(engine="inline", callbacks=[draw])
    assert drawn == expected
    assert result.digest == undisturbed


def test_runs_may_alternate():
    """Two runs held at once, stepped in turn, each end as if alone."""
    recipes = [TRANSFORMER.recipe(3), FAMILIES["conv_norm"].recipe(2), EVERY_GENERATOR]
    with contextlib.ExitStack() as held:
        runs = [held.enter_context(recipe.start(engine="inline")) for recipe in recipes]
        for _ in zip(*runs, strict=True):
            pass
        assert [run.result().digest for run in runs] == [digest(recipe) for recipe in recipes]


@pytest.mark.parametrize("hold", ["train", "start"])
def test_a_run_inside_a_callback(hold):
    """A whole other run in a callback changes neither run's answer."""
    inner, outer = FAMILIES["mlp"].recipe(2), TRANSFORMER.recipe(3)
    expected, found = digest(inner), []
    if hold == "train":
        ended = outer.train(engine="inline", callbacks=[lambda report: found.append(digest(inner))])
    else:
        with outer.start(engine="inline") as run:
            found.extend(digest(inner) for _ in run)
        ended = run.result()
    assert found == [expected] * outer.plan.steps
    assert ended.digest == answer(outer)[0]


@pytest.mark.parametrize("name", ["transformer", "wide_sum"])
def test_another_thread(name):
    """A run in another thread than the main one has the same bits, and leaves the main one's surroundings."""
    recipe, found = FAMILIES[name].recipe(3), []
    unusual()
    before = surroundings()
    thread = threading.Thread(target=lambda: found.append(digest(recipe)))
    thread.start()
    thread.join()
    assert surroundings() == before
    assert found == [digest(recipe)]


# What would go wrong is noticed.


def spelled(state):
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in state]


@pytest.mark.parametrize("inside", ["nothing", "seeded", "one drawn", "two drawn", "another put there"])
@pytest.mark.parametrize("drawn", range(4))
@pytest.mark.parametrize("used", [0, 622, 623, 624])
def test_numpy_s_generator_is_given_back(drawn, used, inside):
    """Wherever it stands, and whether or not the second of two normal numbers waits, ``get_state`` cannot tell."""
    before = np.random.get_bit_generator()
    np.random.seed(7)
    np.random.bytes(4 * used)
    np.random.normal(size=drawn)
    there = spelled(np.random.get_state())
    with generators.kept():
        assert spelled(np.random.get_state()) == there
        {
            "nothing": lambda: None,
            "seeded": lambda: np.random.seed(3),
            "one drawn": np.random.normal,
            "two drawn": lambda: np.random.normal(size=2),
            "another put there": lambda: np.random.set_bit_generator(np.random.PCG64(1)),
        }[inside]()
    assert spelled(np.random.get_state()) == there
    assert np.random.get_bit_generator() is before
    np.random.normal()
    assert spelled(np.random.get_state()) != there


@pytest.mark.parametrize("gauss", [0, 1])
def test_who_breaks_it_off_finds_numpy_s_generator_as_it_was(gauss):
    """Taking the state changes nothing, so what a handler of a signal raises in the middle of it leaves no trace."""
    np.random.seed(7)
    np.random.normal(size=gauss)
    there = spelled(np.random.get_state())
    raised = []

    def trace(frame, event, argument):
        if frame.f_code.co_name == "_restoring_numpy":
            frame.f_trace_opcodes = True
            if event == "opcode":
                raised[0] -= 1
                if not raised[0]:
                    raise TimeoutError
            return trace
        return None

    moments = 0
    for moment in range(1, 200):
        raised[:] = [moment]
        try:
            sys.settrace(trace)
            with generators.kept():
                pass
        except TimeoutError:
            moments += 1
        finally:
            sys.settrace(None)
        assert spelled(np.random.get_state()) == there
    assert moments > 20


def test_another_kind_of_numpy_generator_is_given_back():
    """Who has put a generator of another kind behind ``numpy.random`` finds its next numbers there."""
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        np.random.normal()
        with generators.kept():
            np.random.normal(size=3)
        kept = np.random.normal(size=4).tolist()
        np.random.set_bit_generator(np.random.PCG64(1))
        assert kept == np.random.normal(size=5)[1:].tolist()
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("key", ["torch", "numpy", "random", "threads", "grad", "inference", "autocast"])
def test_a_change_of_the_surroundings_is_seen(key):
    """Each part of the surroundings is really looked at, a cached normal included."""
    unusual()
    before = surroundings()
    with contextlib.ExitStack() as modes:
        {
            "torch": lambda: torch.randn(1),  # takes the cached one
            "numpy": lambda: np.random.normal(),  # takes the cached one
            "random": lambda: random.gauss(0, 1),  # takes the cached one
            "threads": lambda: torch.set_num_threads(1),
            "grad": lambda: modes.enter_context(torch.no_grad()),
            "inference": lambda: modes.enter_context(torch.inference_mode()),
            "autocast": lambda: modes.enter_context(torch.autocast("cpu", torch.bfloat16)),
        }[key]()
        after = surroundings()
    assert before[key] != after[key]
