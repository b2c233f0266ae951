"""The budgets of the package: its lines of code, the lines of a file, the lines of a function."""

from __future__ import annotations

import ast
import io
import tokenize

import pytest
import reading

pytestmark = pytest.mark.house

CODE_LINES = 22_606  # of the package: docstrings, comments and blanks do not count; lower it whenever you can
FILE_LINES = 500
FUNCTION_LINES = 40

NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

Figures = dict[str, int]


def lines(node: reading.Function) -> int:
    """Lines of a function from ``def`` to its end, docstring not counted."""
    count = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        count -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return count


def code_lines(text: str) -> int:
    """Lines of a file on which there is code: docstrings, comments and blank lines do not count, imports do.

    A text that is not a docstring is code in all its lines, and so is each line of a statement that goes over several.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for docstring in reading.docstrings(ast.parse(text)):
        lines -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def code_figures() -> Figures:
    """Lines of code of every file."""
    return {name: code_lines(path.read_text(encoding="utf-8")) for name, path in reading.modules().items()}


def file_figures() -> Figures:
    """Lines of every file."""
    return {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in reading.modules().items()}


def function_figures() -> Figures:
    """Lines of every function without its docstring."""
    return {
        f"{module}.{name}": lines(node)
        for module, path in reading.modules().items()
        for name, node in reading.functions(reading.parsed(path))
    }


def over(figures: Figures, budget: int) -> Figures:
    """What exceeds a budget."""
    return {name: figure for name, figure in figures.items() if figure > budget}


def test_the_package_is_small():
    """The code of the package fits in its budget."""
    figures = code_figures()
    assert sum(figures.values()) <= CODE_LINES, f"{sum(figures.values())} lines of code in {len(figures)} files"


def test_files_are_short():
    """No file has more than 500 lines."""
    assert over(file_figures(), FILE_LINES) == {}


def test_functions_are_short():
    """No function has more than 40 lines without its docstring."""
    assert over(function_figures(), FUNCTION_LINES) == {}


def test_the_counting_of_code_is_right():
    """Docstrings, comments and blanks are not counted; imports, decorators and long texts are, line by line."""
    text = (
        '"""A module\nof two lines."""\n\nimport ast  # why\n\n# alone\n@cached\n'
        'def f(\n    a,\n\n    # in between\n):\n    """One line."""\n    return """not\n\n    a docstring"""\n\n\n'
        'class A:\n    """Two\n    lines."""\n'
        "    x = 1; y = 2\n    'no docstring any more'\n"
    )
    assert code_lines(text) == 11
    assert code_lines(text.replace("x = 1", "x = 1\n    z = 3")) == 12
    assert code_lines('"""Nothing."""\n\n# else\n') == 0


def test_the_counting_of_functions_is_right():
    """Methods and nested functions are counted, each without its docstring; what is over a budget is named."""
    tree = ast.parse(
        "class A:\n    def f(self):\n"
        '        """One\n        two."""\n        def g():\n            return 1\n        return g()\n'
    )
    found = {name: lines(node) for name, node in reading.functions(tree)}
    assert found == {"A.f": 4, "A.f.g": 2}
    assert over(found, 3) == {"A.f": 4}
