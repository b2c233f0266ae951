"""Every test says in a sentence what holds."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import reading

pytestmark = pytest.mark.house


def silent(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Test functions without a docstring."""
    for name, node, _ in reading.functions(tree):
        if node.name.startswith("test_") and not (ast.get_docstring(node) or "").strip():
            yield name, node.lineno


def test_every_test_has_a_sentence():
    """Every test function under tests/ has a docstring."""
    found = [
        f"{path.relative_to(reading.ROOT)}:{line} {name}"
        for path in sorted((reading.ROOT / "tests").rglob("*.py"))
        for name, line in silent(reading.parsed(path))
    ]
    assert not found, "\n".join(found)


def test_a_silent_test_is_seen():
    """A test without a docstring is noticed, in a class and with an empty one too."""
    source = 'def test_a(): ...\nclass TestB:\n    def test_c(self): ...\ndef test_d():\n    ""\ndef helper(): ...\n'
    assert [name for name, _ in silent(ast.parse(source))] == ["test_a", "TestB.test_c", "test_d"]
