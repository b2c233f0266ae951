"""The budgets: code tokens of the package, lines of a file and of a function, lines of tests."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

import pytest
import reading

pytestmark = pytest.mark.house

TOKENS = 299_147
FILE_LINES = 500
FUNCTION_LINES = 40
TEST_LINES = 70_104  # of all files of tests; lower it whenever you can
TEST_FILE_LINES = 800

NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip

Figures = dict[str, int]


def lines(node: reading.Function) -> int:
    """Lines of a function from ``def`` to its end, docstring not counted."""
    count = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        count -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return count


def code_tokens(text: str) -> int:
    """Tokens of a file's code: neither comments nor docstrings, nor what only lays it out.

    Tokens, not lines: lines get longer where those are counted. A text that is not a docstring is one token.
    """
    silent = set[int]()
    for docstring in reading.docstrings(ast.parse(text)):
        silent |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in NO_CODE and token.start[0] not in silent for token in tokens)


def code_figures() -> Figures:
    """Tokens of every file."""
    return {name: code_tokens(path.read_text(encoding="utf-8")) for name, path in reading.modules().items()}


def file_figures() -> Figures:
    """Lines of every file."""
    return {name: _lines(path) for name, path in reading.modules().items()}


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def function_figures() -> Figures:
    """Lines of every function without its docstring."""
    return {
        f"{module}.{name}": lines(node)
        for module, path in reading.modules().items()
        for name, node in reading.functions(reading.parsed(path))
    }


def lines_of_tests() -> Figures:
    """Lines of every file of tests."""
    folder = reading.ROOT / "tests"
    return {path.relative_to(folder).as_posix(): _lines(path) for path in sorted(folder.rglob("*.py"))}


def over(figures: Figures, budget: int) -> Figures:
    """What exceeds a budget."""
    return {name: figure for name, figure in figures.items() if figure > budget}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="later versions cut f-strings into tokens")
def test_the_package_is_small():
    """The code of the package fits in its budget."""
    figures = code_figures()
    assert sum(figures.values()) <= TOKENS, f"{sum(figures.values())} tokens of code in {len(figures)} files"


def test_files_are_short():
    """No file has more than 500 lines."""
    assert over(file_figures(), FILE_LINES) == {}


def test_tests_are_few_lines():
    """All tests together fit in their budget, and no file of tests has more than 800 lines."""
    figures = lines_of_tests()
    assert sum(figures.values()) <= TEST_LINES, f"{sum(figures.values())} lines in {len(figures)} files"
    assert not over(figures, TEST_FILE_LINES)


def test_functions_are_short():
    """No function has more than 40 lines without its docstring."""
    assert over(function_figures(), FUNCTION_LINES) == {}


def test_the_counting_of_code_is_right():
    """Docstrings, comments and the layout are not counted; all else is, and any other text is one token."""
    text = (
        '"""A module\nof two lines."""\n\nimport ast  # why\n\n# alone\n@cached\n'
        'def f(\n    a,\n\n    # in between\n):\n    """One line."""\n    return """not\n\n    a docstring"""\n\n\n'
        'class A:\n    """Two\n    lines."""\n'
        "    x = 1; y = 2\n"
    )
    assert code_tokens(text) == 23
    assert code_tokens(text.replace("x = 1", "x = 1\n    z = 3")) == code_tokens(text) + 3
    assert code_tokens('"""Nothing."""\n\n# else\n') == 0


def test_the_counting_of_functions_is_right():
    """Methods and nested functions are counted, each without its docstring; what is over a budget is named."""
    tree = ast.parse(
        "class A:\n    def f(self):\n"
        '        """One\n        two."""\n        def g():\n            return 1\n        return g()\n'
    )
    found = {name: lines(node) for name, node in reading.functions(tree)}
    assert found == {"A.f": 4, "A.f.g": 2}
    assert over(found, 3) == {"A.f": 4}
