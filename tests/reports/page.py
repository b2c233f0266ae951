"""The page of reports, written from the programs: ``python -m tests.reports`` writes it anew."""

import pathlib
import re

from tests.reports import means, samples, test_ends, test_refusals, training  # noqa: F401
from tests.reports.report import REPORTS, THEMES

PATH = pathlib.Path(__file__).parents[2] / "docs" / "reports.md"
HEAD = """# Public reports, and what phalanx does

<!-- Written by `python -m tests.reports` from the programs in tests/reports: change those. -->

People have reported what hurts in data-parallel training. Here are {rows} causes, from {threads} public threads about
many libraries. Each is written anew as a small program. What a thread says may have been mended there since.

- A program with a *right value* gets it from plain torch on one device, or from arithmetic. It is run in one process,
  and with two and three workers. Once a worker is ended by SIGKILL. Once the run is left as a kill of everything leaves
  it, and goes on with other workers. Digest, losses and value have the same bits each time.
- *bits*: the value has the bits of the right one. *1e-12*: it is as near as that, in float64. One device adds in
  another order there. The mistakes of the reports are larger by far.
- *test*: a refusal, whose sentence is tried and whose advice works, or an end that leaves nothing behind.
- What is *not right yet* is marked so: {missing}.

To try them all: `pytest tests/reports/test_answers.py tests/reports/test_refusals.py tests/reports/test_ends.py`."""
COLUMNS = "| report | what went wrong | phalanx | tried |\n|---|---|---|---|"


def page():
    """Its text."""
    reports = sorted(REPORTS, key=lambda each: (each.program.__module__, each.program.__code__.co_firstlineno))
    links = sorted({link for each in reports for link in each.links.split()}, key=str.lower)
    missing = sum(hasattr(each.program, "not_yet") for each in reports)
    parts = [HEAD.format(rows=len(reports), threads=len(links), missing=missing)]
    for theme in THEMES:
        parts += [f"\n## {theme}\n", COLUMNS, *(row(each) for each in reports if each.theme == theme)]
    return "\n".join([*parts, "", *(f"[{link}]: {address(link)}" for link in links), ""])


def row(report):
    """A line of a table."""
    here = report.program.here
    if hasattr(report.program, "not_yet"):
        here = f"**Not right yet.** {here} {report.program.not_yet}"
    how = "test" if report.close is None else f"{report.close:g}" if report.close else "bits"
    links = ", ".join(f"[{link}]" for link in report.links.split())
    return f"| {links} | {report.program.wrong} | {here} | {how} |"


def address(link):
    """Of a thread; pull requests are found under the same one."""
    owner, name, number = re.fullmatch(r"([\w.-]+)/([\w.-]+)#(\d+)", link).groups()
    return f"https://github.com/{owner}/{name}/issues/{number}"
