"""The seams between engines and frameworks stay few."""

from __future__ import annotations

import ast

import pytest
import reading

pytestmark = pytest.mark.house

PROTOCOLS, METHODS = 8, 50  # in seams/; lower them whenever you can


def protocols(tree: ast.AST) -> dict[str, int]:
    """Protocols of a file, and how many methods and properties each has."""
    return {
        node.name: sum(isinstance(item, reading.Function) for item in node.body)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
    }


def test_seams_are_few():
    """The folder of seams has no more protocols and methods than it is allowed."""
    found: dict[str, int] = {}
    for name, path in reading.modules().items():
        if reading.is_within(name, "phalanx.seams"):
            found |= protocols(reading.parsed(path))
    assert len(found) <= PROTOCOLS, found
    assert sum(found.values()) <= METHODS, found


def test_methods_are_counted():
    """Methods and properties of a protocol count, fields and other classes do not."""
    source = (
        "class A(B, Protocol):\n    x: int\n    def f(self): ...\n    @property\n    def g(self): ...\nclass C: ..."
    )
    assert protocols(ast.parse(source)) == {"A": 2}
