"""A run that is held: what you see while you hold it, what it measures, reports and leaves behind."""

import functools
import itertools
import math
import random
import threading
import types

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import phalanx
from phalanx.run import observers
from phalanx.seams.records import Progress, StepReport

SAMPLES, BATCH, PER_EPOCH, STEPS = 22, 8, 3, 7
X = np.random.default_rng(0).standard_normal((SAMPLES, 3)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 2, SAMPLES)
TEST_X = np.random.default_rng(2).standard_normal((22, 3)).astype(np.float32)
TEST_Y = np.random.default_rng(3).integers(0, 2, 22)
TEST = (TEST_X, TEST_Y)


class Net(nn.Module):
    """BatchNorm that learns, BatchNorm that is frozen, dropout, and a buffer that counts in any mode."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.learning = nn.BatchNorm1d(4)
        self.frozen = nn.BatchNorm1d(4).eval()
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.last(self.dropout(self.frozen(self.learning(self.first(x)))))


def recipe(**changes):
    """Seven steps over three and a bit epochs; every third batch is a short one."""
    fields = {
        "make_model": Net,
        "data": (X, Y),
        "loss_fn": F.cross_entropy,
        "replicas": 3,
        "batch_size": BATCH,
        "steps": STEPS,
        "optimizer": functools.partial(torch.optim.Adam, lr=0.01),
    }
    return phalanx.Recipe(**{**fields, **changes})


@functools.cache
def digest_after(steps):
    return recipe(steps=steps).train().digest


def accuracy(output, target):
    return (output.argmax(1) == target).double().mean()


def predictions(model, x=TEST_X):
    """What the model says in evaluation mode, without gradients, in a fresh copy's buffers."""
    modes = [module.training for module in model.modules()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        output = model.eval()(torch.tensor(x))
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    for module, training in zip(model.modules(), modes, strict=True):
        module.training = training
    return output


# Holding


def test_the_state_while_you_hold_a_report_is_the_one_after_its_step():
    """While report k is held, the digest is that of a run of k + 1 steps."""
    with recipe().start() as run:
        for report in run:
            assert run.steps == report.step + 1
            assert run.result().digest == digest_after(report.step + 1)
    assert report.step == STEPS - 1


def test_holding_feeding_and_training_are_one_thing():
    """train(), iterating, step() and a mixture of both end in the same digest, history and counts."""
    made = recipe()
    results = [made.train()]
    with made.start() as run:
        for _ in run:
            pass
    results.append(run.result())
    with made.start() as run:
        losses = [run.step() for _ in range(STEPS)]
    results.append(run.result())
    with made.start() as run:
        next(run)
        run.step()
        for _ in run:
            pass
    results.append(run.result())
    assert {result.digest for result in results} == {digest_after(STEPS)}
    assert all(result.loss_history == losses for result in results)
    assert {(result.steps, result.samples) for result in results} == {(STEPS, 22 + 22 + 8)}


def test_a_run_that_is_left_early_keeps_what_it_did():
    """After break, result() is the state of the steps done, inside the block and behind it."""
    with recipe().start() as run:
        for report in run:
            if report.step == 2:
                break
        inside = run.result()
    outside = run.result()
    assert inside.digest == outside.digest == digest_after(3)
    assert (inside.steps, outside.steps) == (3, 3)
    assert list(run) == []


def test_a_broken_iteration_goes_on_where_it_stopped():
    """A second loop over the same run takes the steps that are left; a third finds none."""
    with recipe().start() as run:
        first = [report.step for report in itertools.islice(run, 2)]
        second = [report.step for report in run]
        assert list(run) == []
    assert (first, second) == ([0, 1], [2, 3, 4, 5, 6])
    assert run.result().digest == digest_after(STEPS)


def test_a_result_taken_in_the_middle_is_independent():
    """Training on does not change an earlier result, and changing the result does not change the run."""
    with recipe().start() as run:
        for report in run:
            if report.step == 2:
                middle = run.result()
                kept = phalanx.digest(middle.model)
                other = run.result()
                with torch.no_grad():
                    for tensor in (*other.model.parameters(), *other.model.buffers()):
                        tensor.zero_()
                other.loss_history.clear()
    assert phalanx.digest(middle.model) == kept
    assert (middle.steps, len(middle.loss_history)) == (3, 3)
    assert middle.digest == digest_after(3)
    assert run.result().digest == digest_after(STEPS)


def test_a_closed_run_still_has_its_result():
    """result() after close(), any number of times, is the state as it was left; close() may come twice."""
    run = recipe().start()
    run.step()
    run.close()
    run.close()
    assert run.result().digest == run.result().digest == digest_after(1)
    assert list(run) == []


def test_an_error_in_the_block_leaves_the_run_closed_and_whole():
    """What the caller raises in the block passes through; the state can still be taken."""
    held = []

    def block():
        with recipe().start() as run:
            held.append(run)
            run.step()
            raise LookupError

    with pytest.raises(LookupError):
        block()
    (run,) = held
    with pytest.raises(phalanx.UsageError, match="closed"):
        run.step()
    assert run.result().digest == digest_after(1)


def test_no_steps_leave_the_untrained_model():
    """steps=0 gives the model as make_model made it, and an empty history."""
    for result in (recipe(steps=0).train(), recipe(steps=None, epochs=0).train()):
        torch.manual_seed(0)
        assert result.digest == phalanx.digest(Net(), step=0)
        assert (result.steps, result.samples, result.loss_history, result.loss) == (0, 0, [], None)
        assert result.seconds == 0.0


def test_a_run_without_steps_took_its_time_to_start():
    """Making the model and the optimizer takes time, also where no step follows."""
    assert recipe(steps=0).train().startup_seconds > 0


def test_epochs_count_passes_over_the_data():
    """Two epochs of three steps are six steps; with drop_last the short batch is left out."""
    assert recipe(steps=None, epochs=2).train().digest == digest_after(2 * PER_EPOCH)
    dropped = recipe(steps=None, epochs=2, drop_last=True).train()
    assert (dropped.steps, dropped.samples, dropped.steps_per_epoch) == (4, 32, 2)


# Reports and callbacks


def test_a_report_tells_what_its_step_was():
    """Each field of StepReport is what a hand-written loop over the plan would print."""
    made = recipe(
        replicas=1,
        steps=None,
        epochs=2,
        max_norm=0.1,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    x, y = torch.tensor(X), torch.tensor(Y)
    with made.start() as run:
        for t, report in enumerate(run):
            rows = torch.as_tensor(made.plan.indices(t))
            optimizer.zero_grad()
            with made.plan.seeded(t, 0):
                loss = F.cross_entropy(model(x[rows]), y[rows])
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert report.step == t
            assert report.epoch == t // PER_EPOCH
            assert report.loss == loss.item()
            assert report.grad_norm == norm.item()
            assert report.lr == optimizer.param_groups[0]["lr"]
            assert report.samples == len(rows)
            assert report.seconds > 0
            assert report.metric is None
            optimizer.step()
            scheduler.step()
    assert run.result().digest == phalanx.digest(model, optimizer, 2 * PER_EPOCH)
    assert t == 2 * PER_EPOCH - 1


def test_a_report_on_a_brought_batch_has_no_epoch():
    """Where the caller brings the batches there are no passes over the data."""
    reports = []
    with recipe(data=None, steps=None).start(callbacks=[reports.append]) as run:
        run.step((X[:7], Y[:7]))
    assert [(report.step, report.epoch, report.samples) for report in reports] == [(0, None, 7)]


def test_the_mean_loss_is_weighted_by_share_size():
    """The reported loss over unequal shares is the mean over samples, in float64."""
    plain = {"make_model": lambda: nn.Linear(3, 2)}
    torch.manual_seed(0)
    output = nn.Linear(3, 2)(torch.tensor(X))
    expected = F.cross_entropy(output.double(), torch.tensor(Y)).item()
    loss = recipe(**plain, batch_size=SAMPLES, replicas=5, steps=1).train().loss
    assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("held", [True, False])
def test_callbacks_see_each_step_once_in_order(held):
    """Every callback is called once a step, in the order given, with the same report, in the caller's thread."""
    calls = []
    threads = set()

    def first(report):
        calls.append(("first", report))
        threads.add(threading.current_thread())

    callbacks = (first, lambda report: calls.append(("second", report)))
    if held:
        with recipe().start(callbacks=callbacks) as run:
            reports = list(run)
        assert [report for _, report in calls[::2]] == reports
    else:
        recipe().train(callbacks=list(callbacks))
    assert [name for name, _ in calls] == ["first", "second"] * STEPS
    assert [report.step for _, report in calls[::2]] == list(range(STEPS))
    assert [report for _, report in calls[::2]] == [report for _, report in calls[1::2]]
    assert threads == {threading.current_thread()}


# Evaluation


def test_evaluation_is_exact_over_unequal_chunks():
    """Every sample counts once: the value equals one mean over all, though the last chunk is short."""
    with recipe().start() as run:
        run.step()
        correct = (predictions(run.result().model).argmax(1) == torch.tensor(TEST_Y)).sum().item()
        for batch_size in (4, 16, 22, 256):
            assert run.evaluate(accuracy, TEST, batch_size=batch_size) == correct / 22
        assert run.evaluate(accuracy, TEST) == correct / 22
        assert run.evaluate(accuracy, TEST, batch_size=1) == correct / 22
        assert type(run.evaluate(accuracy, TEST)) is float


def test_a_metric_may_bring_its_weight():
    """(mean, weight) counts what the weight counts; a chunk of weight 0 is not looked at."""

    def recall(output, target):
        positive = target == 1
        return (output.argmax(1)[positive] == 1).double().mean(), positive.sum()

    with recipe().start() as run:
        run.step()
        found = predictions(run.result().model).argmax(1)[torch.tensor(TEST_Y) == 1] == 1
        for batch_size in (1, 4, 22):
            value = run.evaluate(recall, TEST, batch_size=batch_size)
            assert value == pytest.approx(found.double().mean().item(), rel=1e-12)


@pytest.mark.parametrize("number", [int, float, np.float32, torch.tensor])
def test_a_metric_may_be_any_number(number):
    """Python, numpy and torch numbers are all means."""
    with recipe().start() as run:
        assert run.evaluate(lambda output, target: number(1), TEST, batch_size=5) == 1.0


EVALUATION_FORMS = {
    "tensors": (torch.tensor(TEST_X), torch.tensor(TEST_Y)),
    "list": list(zip(TEST_X, TEST_Y, strict=True)),
    "dataset": TensorDataset(torch.tensor(TEST_X), torch.tensor(TEST_Y)),
}


@pytest.mark.parametrize("form", EVALUATION_FORMS)
def test_evaluation_takes_data_in_any_form(form):
    """Lists and datasets are evaluated as columns are, in their own order; some samples are measured again later."""
    seen = []

    def metric(output, target):
        seen.extend(target.tolist())
        return accuracy(output, target)

    with recipe().start() as run:
        run.step()
        assert run.evaluate(metric, EVALUATION_FORMS[form], batch_size=5) == run.evaluate(accuracy, TEST)
    assert seen[: len(TEST_Y)] == TEST_Y.tolist()


def test_evaluation_uses_the_recipes_own_functions():
    """forward_fn, target_fn and collate_fn are the recipe's; a dict is evaluated by name."""
    changes = {
        "data": {"x": X, "y": Y},
        "forward_fn": lambda model, batch: model(batch["x"]),
        "target_fn": lambda batch: batch["y"],
    }
    with recipe(**changes).start() as named, recipe().start() as plain:
        named.step()
        plain.step()
        expected = plain.evaluate(accuracy, TEST)
        assert named.evaluate(accuracy, {"x": TEST_X, "y": TEST_Y}) == expected
    with recipe(collate_fn=torch.utils.data.default_collate).start() as run:
        run.step()
        assert run.evaluate(accuracy, TEST, batch_size=5) == expected


def test_evaluation_is_in_evaluation_mode_and_restores_every_module():
    """All modules evaluate; afterwards each has its own mode again, the frozen BatchNorm too."""
    models, modes = [], []

    def make_model():
        models.append(Net())
        return models[-1]

    def forward(model, batch):
        modes.append({name: module.training for name, module in model.named_modules()})
        return model(batch[0])

    with recipe(make_model=make_model, forward_fn=forward).start() as run:
        before = {name: module.training for name, module in models[0].named_modules()}
        assert not before["frozen"]
        assert before["learning"]
        run.evaluate(accuracy, TEST)
        assert {name: module.training for name, module in models[0].named_modules()} == before
        assert set(modes[0].values()) == {False}
        run.step()
        assert modes[-1] == before


def test_evaluation_keeps_no_gradient_and_no_buffer():
    """A forward that counts even in evaluation mode leaves no trace; outputs carry no gradient."""
    carrying = []

    def metric(output, target):
        carrying.append(output.requires_grad)
        return accuracy(output, target)

    with recipe().start() as run:
        run.step()
        before = run.result()
        run.evaluate(metric, TEST, batch_size=4)
        after = run.result()
    assert before.digest == after.digest
    assert torch.equal(before.model.calls, after.model.calls)
    assert set(carrying) == {False}


def test_evaluation_does_not_move_the_answer():
    """A run that is evaluated after every step, by a metric that draws, ends in the same digest."""

    def metric(output, target):
        torch.rand(3)
        np.random.rand(3)
        random.random()
        return accuracy(output, target)

    with recipe().start() as run:
        run.evaluate(metric, TEST)
        for _ in run:
            run.evaluate(metric, TEST, batch_size=5)
    assert run.result().digest == digest_after(STEPS)
    assert len(run.metric_history) == STEPS + 1
    due = phalanx.Evaluation(metric, TEST, batch_size=5)
    assert recipe().train(evaluation=due).digest == digest_after(STEPS)


def test_random_metrics_are_reproducible():
    """Each chunk's generators are seeded: evaluating the same state twice gives the same value."""
    metric = lambda output, target: torch.rand(()).item() + np.random.rand() + random.random()  # noqa: E731
    with recipe().start() as run:
        assert run.evaluate(metric, TEST, batch_size=5) == run.evaluate(metric, TEST, batch_size=5)


def test_recipes_of_single_samples_are_evaluated_one_by_one():
    """With batch_size=None forward_fn and metric_fn see one sample with no added axis, each in order."""
    seen = []

    def forward(model, sample):
        assert sample[0].shape == (3,)
        return model(sample[0])

    def metric(output, target):
        assert (output.shape, target.shape) == ((2,), ())
        seen.append(int(target))
        return float(output.argmax() == target)

    made = recipe(make_model=lambda: nn.Linear(3, 2), batch_size=None, forward_fn=forward)
    with made.start() as run:
        value = run.evaluate(metric, TEST, batch_size=7)
        correct = (predictions(run.result().model).argmax(1) == torch.tensor(TEST_Y)).sum().item()
    assert value == pytest.approx(correct / 22, rel=1e-12)
    assert seen[: len(TEST_Y)] == TEST_Y.tolist()


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({"steps": STEPS}, [3, 6, 7]),
        ({"steps": None, "epochs": 2}, [3, 6]),
        ({"steps": 2}, [2]),
        ({"steps": 0}, []),
    ],
)
def test_an_evaluation_is_due_after_every_epoch_and_at_the_end(changes, due):
    """Evaluations follow each whole epoch and the last step, once each, with the state of that step."""
    evaluation = phalanx.Evaluation(accuracy, TEST, batch_size=5)
    reports, by_hand = [], {}
    with recipe(**changes).start() as run:
        for report in run:
            by_hand[report.step + 1] = run.evaluate(accuracy, TEST, batch_size=5)
    result = recipe(**changes).train(evaluation=evaluation, callbacks=[reports.append])
    assert [evaluated.steps for evaluated in result.metric_history] == due
    assert [evaluated.value for evaluated in result.metric_history] == [by_hand[steps] for steps in due]
    assert {report.step + 1: report.metric for report in reports if report.metric is not None} == {
        steps: by_hand[steps] for steps in due
    }


def test_an_evaluation_over_brought_batches_is_the_callers_affair():
    """Without data there are no epochs: evaluations are those that the caller asks for."""
    with pytest.raises(phalanx.UsageError, match=r"evaluation is given, but data is None.*run\.evaluate"):
        recipe(data=None, steps=None).start(evaluation=phalanx.Evaluation(accuracy, TEST))
    with recipe(data=None, steps=None).start() as run:
        run.step((X, Y))
        assert run.metric_history == []
        run.evaluate(accuracy, TEST)
        assert [evaluated.steps for evaluated in run.metric_history] == [1]


def test_the_metric_history_knows_when_and_what():
    """Each entry has the finished steps and the value; results hold a list of their own."""
    with recipe().start() as run:
        values = [run.evaluate(accuracy, TEST)]
        for report in run:
            if report.step in (1, 4):
                values.append(run.evaluate(accuracy, TEST))
        result = run.result()
        assert [(evaluated.steps, evaluated.value) for evaluated in run.metric_history] == [
            (steps, value) for steps, value in zip((0, 2, 5), values, strict=True)
        ]
        assert result.metric_history == run.metric_history
        result.metric_history.clear()
        assert len(run.metric_history) == 3


# What is left


def test_a_result_has_its_facts():
    """Steps, samples, replicas, workers, losses, parameters and times are those of the run."""
    result = recipe().train(workers=1, engine="inline", devices="cpu")
    assert (result.steps, result.samples, result.replicas, result.workers) == (STEPS, 52, 3, 1)
    assert result.steps_per_epoch == PER_EPOCH
    assert len(result.loss_history) == STEPS
    assert all(type(loss) is float and math.isfinite(loss) for loss in result.loss_history)
    assert result.loss == result.loss_history[-1]
    assert result.seconds > 0
    assert result.startup_seconds > 0
    assert len(result.digest) == 64
    assert result.digest == digest_after(STEPS)
    assert list(result.params) == [name for name, _ in result.model.named_parameters()]
    for name, parameter in result.model.named_parameters():
        assert torch.equal(result.params[name], parameter)
        assert not result.params[name].requires_grad
        assert parameter.grad is None
    assert "digest=" in repr(result)
    assert len(repr(result)) < 500


def test_the_trained_model_is_the_callers_to_train_on():
    """The result's model has its modes and can be trained by hand at once."""
    model = recipe().train().model
    assert model.learning.training
    assert not model.frozen.training
    F.cross_entropy(model(torch.tensor(X)), torch.tensor(Y)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_times_leave_out_what_is_not_training():
    """The seconds run from the first step's start to the last step's end, whatever comes after."""
    with recipe().start() as run:
        for _ in run:
            pass
        seconds = run.result().seconds
        recipe().train()
        assert run.result().seconds == seconds


@pytest.fixture
def terminal(monkeypatch):
    """Stderr passes for a terminal."""
    monkeypatch.setattr(observers, "terminal", lambda: True)


@pytest.mark.parametrize("start", [True, False])
def test_progress_draws_one_bar_on_a_terminal(capsys, start, terminal):
    """progress=True draws a single bar that ends at the last step; nothing goes to stdout."""
    if start:
        with recipe().start(progress=True) as run:
            for _ in run:
                pass
    else:
        recipe().train(progress=True, evaluation=phalanx.Evaluation(accuracy, TEST))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert f"{STEPS}/{STEPS}" in captured.err.splitlines()[-1]
    assert "loss=" in captured.err
    assert start or "accuracy=" in captured.err


def test_progress_of_brought_batches_counts_without_an_end(capsys, terminal):
    """Where the caller brings the batches the bar counts steps and knows no total."""
    with recipe(data=None, steps=None).start(progress=True) as run:
        for _ in range(3):
            run.step((X, Y))
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "3step" in captured.err.splitlines()[-1]


@pytest.mark.parametrize("progress", [False, "auto"])
def test_no_progress_where_nobody_looks(capsys, progress):
    """progress=False draws nothing, nor does 'auto' where stderr is no terminal."""
    recipe().train(progress=progress)
    assert capsys.readouterr() == ("", "")


def test_progress_leaves_the_bar_after_an_error(capsys, terminal):
    """A run that stops early closes its bar, so that the traceback starts on a line of its own."""

    def stop(report):
        if report.step == 2:
            raise LookupError

    with pytest.raises(LookupError):
        recipe().train(progress=True, callbacks=[stop])
    assert capsys.readouterr().err.endswith("\n")


def test_progress_is_lines_where_there_is_no_terminal(capsys, tmp_path):
    """A plain line for each epoch, with all metrics, and for what is done after the last; none that draws over one."""
    made = recipe()
    made.train(progress=True, evaluation=phalanx.Evaluation([accuracy], TEST), run_dir=tmp_path, max_seconds=1e-9)
    made.train(progress=True, evaluation=phalanx.Evaluation([accuracy], TEST), run_dir=tmp_path)
    out, err = capsys.readouterr()
    assert (out, "\r" in err) == ("", False)
    first, resumed, *lines = err.splitlines()
    assert first.startswith("phalanx: epoch 1/3, step 1/7, loss ")
    assert resumed.startswith("phalanx: going on from step 1 of ")
    assert resumed.endswith(tmp_path.name)
    assert [line.split(",")[:2] for line in lines] == [
        ["phalanx: epoch 1/3", " step 3/7"], ["phalanx: epoch 2/3", " step 6/7"], ["phalanx: epoch 3/3", " step 7/7"]
    ]  # fmt: skip
    assert all(" accuracy " in line and " samples/s" in line for line in lines)
    assert [line.endswith(" left") for line in lines] == [True, True, False]


@pytest.mark.long
def test_a_run_killed_before_its_first_snapshot_says_that_it_begins_anew(capsys, tmp_path):
    """Where only the snapshot of step 0 is there, the same call says that it begins anew."""
    recipe().start(run_dir=tmp_path).close()  # what such a kill leaves, without its log
    assert recipe().train(progress=True, run_dir=tmp_path).resumed_from == 0
    said = capsys.readouterr().err.splitlines()[0]
    assert said == f"phalanx: {tmp_path} has no snapshot of a later step than 0: beginning anew"


def test_progress_is_a_line_a_minute_where_epochs_are_long(capsys, monkeypatch):
    """Without the end of an epoch a line comes after each minute, with the mean loss since the last one."""
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr(observers.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(observers, "say", print)
    lines = observers.ProgressLines(recipe(data=None, steps=None))
    lines.begin(types.SimpleNamespace(progress=Progress()), types.SimpleNamespace(run_dir=None))
    for step in range(5):
        lines.step(StepReport(step, None, float(step), 0.0, 0.0, 32, 1.0))
    lines.end()
    said = [line.split(",")[:2] for line in capsys.readouterr().out.splitlines()]
    assert said == [["step 3", " loss 1"], ["step 5", " loss 3.5"]]


# A limit of time


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{"engine": "inline"}, {"engine": "processes", "workers": 2}])
def test_a_run_of_limited_time_goes_on_to_the_same_bits(options, tmp_path):
    """It stops after a step, says so, and is not finished; the same call goes on, to the digest of a run of one go."""
    result = recipe().train(run_dir=tmp_path, max_seconds=1e-9, **options)
    while result.stopped_early is not None:
        assert result.stopped_early == f"at step {result.steps} of {STEPS} by max_seconds=1e-09"
        before, result = result, recipe().train(run_dir=tmp_path, max_seconds=1e-9, engine="inline")
        assert result.resumed_from == before.steps < result.steps
    assert result.digest == digest_after(STEPS) == recipe().train(max_seconds=3600).digest
    assert result.digest != recipe(seed=1).train(max_seconds=3600).digest


def test_a_limit_of_time_that_cannot_hold_is_refused(monkeypatch):
    """Where the caller brings the batches, or several processes stop by clocks of their own; and by another name."""
    with pytest.raises(phalanx.UsageError, match="max_seconds is 5, but data is None"):
        recipe(data=None, steps=None).start(max_seconds=5)
    with pytest.raises(phalanx.UsageError, match="max_seconds is 5, but this run has several processes"):
        recipe().train(max_seconds=5, engine="distributed")
    for call in (lambda: recipe(max_time=5), lambda: recipe().train(max_time=5)):
        with pytest.raises(phalanx.UsageError, match="it is called max_seconds"):
            call()


def test_a_printed_result_is_readable():
    """Loss, last metrics, steps and what stopped the run are lines of their own, before the digest."""
    result = recipe().train(evaluation=phalanx.Evaluation(accuracy, TEST, every_steps=1), max_seconds=1e-9)
    names = [line.split()[0] for line in str(result).splitlines()]
    assert names == ["loss", "accuracy", "steps", "stopped", "seconds", "replicas", "digest"]
    assert f"{result.loss:.6g}" in str(result)
    assert "by max_seconds=1e-09" in str(result)


# Pictures


def fresh_axes():
    figure = Figure()
    FigureCanvasAgg(figure)
    return figure.subplots()


def test_a_result_plots_itself(tmp_path):
    """plot() returns axes that show the losses; their figure saves as a picture, without pyplot."""
    result = recipe().train(evaluation=phalanx.Evaluation(accuracy, TEST))
    ax = result.plot()
    assert isinstance(ax, Axes)
    drawn = ax.get_lines()[0].get_ydata()
    assert list(drawn) == result.loss_history
    path = tmp_path / "history.png"
    ax.figure.savefig(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 5_000
    assert result.digest[:12] in ax.get_title()


def test_a_result_plots_on_given_axes():
    """plot(ax) draws on the axes it is given and returns them."""
    ax = fresh_axes()
    assert recipe().train().plot(ax) is ax
    assert ax.get_lines()


def test_each_metric_has_a_chart_of_its_own():
    """Below the loss is a chart for each metric, with its name above it; a notebook gets a picture."""
    metrics = {"accuracy": accuracy, "loss": lambda o, t: 40.0}
    result = recipe().train(evaluation=phalanx.Evaluation(metrics, TEST))
    ax = result.plot()
    assert ax._repr_png_().startswith(b"\x89PNG")
    assert [one.get_title(loc="left") for one in ax.figure.axes] == ["loss", "accuracy", "evaluation/loss"]
    last = ax.figure.axes[1].get_lines()[0]
    assert (last.get_xdata()[-1], last.get_ydata()[-1]) == (result.steps, result.metric_history[-2].value)
    given = fresh_axes()
    assert result.plot(given) is given
    assert len(given.figure.axes) == 1


ODD_RESULTS = {
    "brought": lambda: fed(3),
    "untrained": lambda: recipe(steps=0).train(),
    "one-step": lambda: recipe(steps=1).train(),
    "steep": lambda: recipe(loss_fn=lambda output, target: output.square().mean() * 1e6, steps=30).train(),
    "negative": lambda: recipe(loss_fn=lambda output, target: output.mean() - 5).train(),
    "nan": lambda: recipe(loss_fn=lambda output, target: output.mean() * math.nan, on_nonfinite="ignore").train(),
    "nan-metric": lambda: recipe().train(evaluation=phalanx.Evaluation(lambda output, target: math.nan, TEST)),
    "before-training": lambda: evaluated_untrained(),
}


def fed(steps):
    with recipe(data=None, steps=None).start() as run:
        for _ in range(steps):
            run.step((X, Y))
            run.evaluate(accuracy, TEST)
    return run.result()


def evaluated_untrained():
    with recipe().start() as run:
        run.evaluate(accuracy, TEST)
    return run.result()


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ODD_RESULTS)
def test_an_odd_history_plots_too(kind, tmp_path):
    """No steps, one step, NaN, negative or steep losses: a picture comes out, without a warning."""
    ax = ODD_RESULTS[kind]().plot()
    ax.figure.savefig(tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 2_000


# Beside other things


def test_two_runs_of_one_recipe_do_not_disturb_each_other():
    """One recipe may be running twice at a time."""
    made = recipe()
    with made.start() as one, made.start() as two:
        one.step()
        for _ in two:
            pass
        for _ in one:
            pass
        assert one.result().digest == two.result().digest == digest_after(STEPS)


def test_a_run_in_one_process_has_no_other_workers():
    """worker_pids is a tuple, empty where replicas are computed in the caller's process."""
    with recipe().start() as run:
        assert run.worker_pids == ()


def test_closing_twice_or_before_any_run_does_no_harm():
    """phalanx.close() can be called at any time, and runs go on working after it."""
    phalanx.close()
    phalanx.close()
    assert recipe().train().steps > 0
