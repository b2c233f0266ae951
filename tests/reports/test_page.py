"""The page of reports is what the programs say, and cannot drift from them."""

import re

from tests.reports import page
from tests.reports.report import REPORTS, THEMES, Report, here, wrong


def test_the_page_is_up_to_date():
    """The committed page is the generated one; ``python -m tests.reports`` writes it."""
    assert page.PATH.read_text(encoding="utf-8") == page.page()


def test_every_report_has_a_row():
    """At least 60 reports; each has links, sentences of at most 35 words, and a row in the table of its theme."""
    text = page.page()
    assert len(REPORTS) >= 60
    assert {each.theme for each in REPORTS} == set(THEMES)
    for each in REPORTS:
        assert page.row(each) in text
        assert each.links
        for sentence in re.split(r"(?<=[.?!]) ", f"{each.program.wrong} {each.program.here}"):
            assert len(sentence.split()) <= 35
            assert sentence[-1] == "."
    assert all(text.count(f"\n[{link}]: ") == 1 for each in REPORTS for link in each.links.split())


def test_a_changed_report_changes_the_page(monkeypatch):
    """Negative twin: another sentence, link or closeness is another page."""

    @wrong("It broke.")
    @here("It works.")
    def added():
        """A program."""

    before = page.page()
    monkeypatch.setattr(page, "REPORTS", [*REPORTS, Report(THEMES[0], 0.0, "some/where#1", added)])
    text = page.page()
    assert text != before
    assert "| [some/where#1] | It broke. | It works. | bits |" in text
    assert "[some/where#1]: https://github.com/some/where/issues/1" in text
