"""Each situation comes to its right value, to the same bits on any workers, with a worker killed, and resumed."""

import os

import pytest
from torch.nn import functional as F

import phalanx
from tests.reports import means, samples, training  # noqa: F401  they note their reports
from tests.reports.hand import X, Y, net, plain, recipe, told
from tests.reports.report import REPORTS, ROUNDING, Case, Noted, bereft, check, noting

ANSWERS = [each for each in REPORTS if each.close is not None]
CALLS = []


@pytest.mark.long
@pytest.mark.parametrize("report", ANSWERS, ids=lambda report: report.name)
def test_right_value(report, tmp_path):
    """Inline, with two and three workers, after SIGKILL of a worker, and resumed with other workers."""
    check(report.program(), tmp_path / "run", report.close)


@pytest.mark.long
def test_a_mean_of_means_is_no_right_value(tmp_path):
    """Negative twin: what the reports complain of is farther from the right value than rounding."""

    def of_means(model, x, y):
        shares = [F.cross_entropy(model(x[part]), y[part]) for part in ([0, 1], [2, 3], [4, 5], [6])]
        return sum(shares) / 4

    data = [(X[:7], Y[:7]), (X[7:14], Y[7:14])]
    case = Case(recipe(batch_size=7, steps=2), told(plain(net(), of_means, data)))
    with pytest.raises(AssertionError, match="inline: "):
        check(case, tmp_path, ROUNDING)


def counting(output, target):
    CALLS.append(os.getpid())
    return F.cross_entropy(output, target)


def test_what_depends_on_the_process_is_seen(tmp_path):
    """Negative twin: a value that the caller's process counts is another one in workers."""
    CALLS.clear()
    case = Case(recipe(loss_fn=counting), True, lambda result, options: bool(CALLS and not CALLS.clear()))
    with pytest.raises(AssertionError, match="two workers"):
        check(case, tmp_path, 0.0)


def test_a_loss_that_depends_on_the_process_is_seen(tmp_path):
    """Negative twin: a loss that asks which process it is in ends the run, or comes to other bits."""
    caller = os.getpid()
    by_process = recipe(loss_fn=lambda output, target: F.cross_entropy(output, target) * (1 + (os.getpid() - caller)))
    case = Case(by_process, 6, lambda result, options: result.steps)
    with pytest.raises((AssertionError, phalanx.RunError), match=r"two workers|came to"):
        check(case, tmp_path, 0.0)


class Forgetful(Noted):
    """A callback that begins anew with each run."""

    def load(self, state):
        self.loaded = []


@pytest.mark.long
def test_what_a_resume_forgets_is_seen(tmp_path):
    """Negative twin: what no snapshot holds differs after a resume, and only there."""
    made = noting(lambda told: told.step)
    case = Case(recipe(), list(range(6)), made["seen"], lambda: {"callbacks": [Forgetful(lambda told: told.step)]})
    with pytest.raises(AssertionError, match="killed and resumed"):
        check(case, tmp_path, 0.0)


def test_workers_are_really_killed():
    """Negative twin: without a signal there is no death, and that fails."""
    with pytest.raises(AssertionError, match="nobody died"):
        bereft(Case(recipe(), None), {}, 0)


def test_a_planted_fault_is_seen(monkeypatch, tmp_path):
    """Negative twin: where phalanx gives shares of unlike sizes one weight, the report about them fails."""
    monkeypatch.setattr("phalanx.step.share_weights", lambda sizes: [float(size > 0) for size in sizes])  # planted
    with pytest.raises(AssertionError, match="inline: "):
        check(means.shares_of_unlike_sizes(), tmp_path, ROUNDING)
