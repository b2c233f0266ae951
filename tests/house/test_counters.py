"""Shared words are read and written by name: nobody but the class of counters knows where one lies."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import reading

pytestmark = pytest.mark.house

HOME = "phalanx.shared.counters"
OWN_PROTOCOLS = (
    "phalanx.backend",  # processes of torch.distributed share words of their own
    "phalanx.shared.inputs",  # readers, and those who take from them, too: two classes in one file
)
VIEWS = {  # who makes words of shared memory
    "phalanx.shared.arena": "for the counters, which get them from it",
    "phalanx.backend.memory": "of its own protocol",
    "phalanx.shared.inputs": "of its own protocol",
}


def subscripts(name: str, tree: ast.AST) -> Iterator[str]:
    """Where a module indexes something that is called words, or reaches for the words of another object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _last_name(node.value).strip("_") == "words":
            yield f"{name}:{node.lineno} indexes {ast.unparse(node.value)}"
        if isinstance(node, ast.Attribute) and node.attr == "_words" and _last_name(node.value) != "self":
            yield f"{name}:{node.lineno} reaches for {ast.unparse(node)}"


def views(name: str, tree: ast.AST) -> Iterator[str]:
    """Where a module makes words of memory, so that it could index them under another name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node).endswith(".cast('q')"):
            yield f"{name}:{node.lineno} makes words: {ast.unparse(node)}"


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_nobody_else_indexes_shared_words():
    """Only the class of counters subscripts shared words, and only those of ``VIEWS`` make any."""
    wrong: list[str] = []
    for name, path in reading.modules().items():
        if name != HOME and not any(reading.is_within(name, home) for home in OWN_PROTOCOLS):
            wrong += subscripts(name, reading.parsed(path))
        if name not in VIEWS:
            wrong += views(name, reading.parsed(path))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "words[3] = 1",
        "counters.words[GRANT] += 1",
        "pause = self._words[2]",
        "mine = counters._words",
        "anything = memoryview(arena)[8:].cast('q')",
    ],
)
def test_an_index_is_seen(source):
    """The check catches reading, writing and reaching for words, and a view of them under another name."""
    tree = ast.parse(source)
    assert [*subscripts("it", tree), *views("it", tree)]


def test_names_of_counters_pass():
    """Counters may be used by name, and arrays of other names by index."""
    tree = ast.parse("counters.pause = 1\nrows[0] = counters.done\nmemoryview(content).cast('B')")
    assert not [*subscripts("it", tree), *views("it", tree)]
