"""The seams between engines and frameworks stay few, and say once what their methods do."""

from __future__ import annotations

import ast
import re

import pytest
import reading

pytestmark = pytest.mark.house

IMPLEMENTS = re.compile(r"Implements ``[\w.]*?(\w+)``")
PROTOCOLS, METHODS = 8, 53  # in seams/; lower them whenever you can


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


WRITERS = {"progress": "phalanx.engines", "seen": "phalanx.run"}  # of the records of a run; options are frozen


def assigned(tree: ast.AST) -> list[tuple[str, str]]:
    """The records of a run whose fields, or parts of which, are assigned or deleted, and what that is."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            names = [name.lstrip("_") for name in ast.unparse(node).partition("[")[0].split(".")]
            found += [(name, ast.unparse(node)) for name in names[:-1] if name in WRITERS]
    return found


def test_each_record_of_a_run_has_one_writer():
    """Progress is assigned by engines alone, and what was seen by the run alone."""
    wrong = [
        (module, what)
        for module, path in reading.modules().items()
        for record, what in assigned(reading.parsed(path))
        if not reading.is_within(module, WRITERS[record])
    ]
    assert not wrong


def test_assignments_to_records_are_found():
    """Fields that are assigned, added to or deleted count, and so do parts of them; what is read does not."""
    source = "a._seen.observed = 1\nb.progress.samples += 1\ndel progress.loss_history[1:]\nx = options.allow\n"
    assert [record for record, _ in assigned(ast.parse(source))] == ["seen", "progress", "progress"]


def undocumented(trees: list[ast.Module]) -> list[str]:
    """Public methods that have no docstring, neither here nor in a base class or a protocol that their class names."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    told: dict[str, set[str]] = {}
    above: dict[str, set[str]] = {}
    for one in classes:
        fields = {
            item.target.id for item in one.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        methods = {item.name for item in one.body if isinstance(item, reading.Function) and ast.get_docstring(item)}
        told.setdefault(one.name, set()).update(fields | methods)
        bases = {re.split(r"[\[.]", ast.unparse(base))[-1 if "[" not in ast.unparse(base) else 0] for base in one.bases}
        above.setdefault(one.name, set()).update(bases | set(IMPLEMENTS.findall(ast.get_docstring(one) or "")))

    def says(kind: str, method: str, seen: frozenset[str] = frozenset()) -> bool:
        if kind in seen:
            return False
        others = above.get(kind, set())
        return method in told.get(kind, set()) or any(says(other, method, seen | {kind}) for other in others)

    return [
        f"{one.name}.{item.name}"
        for one in classes
        for item in one.body
        if isinstance(item, reading.Function) and not item.name.startswith("_")
        if not one.name.startswith("_") and not says(one.name, item.name)
        if not any(ast.unparse(mark) in ("overload", f"{item.name}.setter") for mark in item.decorator_list)
    ]


def test_methods_say_what_they_do():
    """Each public method has a docstring, or its class inherits it or names the protocol that has it."""
    assert undocumented([reading.parsed(path) for path in reading.modules().values()]) == []


def test_a_method_without_words_is_seen():
    """A protocol that a class names speaks for its methods alone, through bases, too."""
    source = """
class Link(Protocol):
    def push(self):
        "Take."
class Local:
    "Implements ``seams.Link``."
    def push(self): ...
    def pull(self): ...
class Far(Local):
    def push(self): ...
class Other:
    def push(self): ...
"""
    assert undocumented([ast.parse(source)]) == ["Local.pull", "Other.push"]
