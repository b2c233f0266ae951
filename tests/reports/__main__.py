"""Write the page of reports."""

from tests.reports.page import PATH, page

PATH.write_text(page(), encoding="utf-8")
print(PATH.name, len(page().splitlines()), "lines")
