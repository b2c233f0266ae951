"""Each situation comes to its right value, to the same bits on any workers, with a worker killed, and resumed."""

import pytest

from tests.reports import means, samples, training  # noqa: F401
from tests.reports.report import REPORTS, check

ANSWERS = [each for each in REPORTS if each.close is not None]


@pytest.mark.long
@pytest.mark.parametrize("report", ANSWERS, ids=lambda report: report.name)
def test_right_value(report, tmp_path):
    """Inline, with two and three workers, after SIGKILL of a worker, and resumed with other workers."""
    check(report.program(), tmp_path / "run", report.close)
