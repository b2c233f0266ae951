"""The syntax tree of code that runs.

A file may have changed since it was imported, so its text counts only if it compiles to the very code object that runs;
otherwise there is no tree, and the code object itself is compared.
"""

from __future__ import annotations

import ast
import linecache
import types
from collections import Counter
from collections.abc import Mapping
from typing import Any

from phalanx.surroundings.sources import nested

SKIPPED = frozenset({"ctx", "kind", "type_comment", "type_ignores", "returns", "type_params"})
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Sources:
    """Files that were read and compiled, each once."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[dict[Any, list[types.CodeType]], list[Node]] | None] = {}

    def tree(self, code: types.CodeType, names: Mapping[str, Any]) -> Node | None:
        """The function that ``code`` was compiled from; None where its text is gone or has changed since."""
        if code.co_filename not in self._files:
            self._files[code.co_filename] = _compiled(code.co_filename, names)
        compiled = self._files[code.co_filename]
        if compiled is None:
            return None
        codes, nodes = compiled
        if not any(code == other for other in codes.get((code.co_name, code.co_firstlineno), ())):
            return None
        fitting = [node for node in nodes if _fits(node, code)]
        if len(fitting) == 1:
            return fitting[0]
        spans = [_span(position) for position in code.co_positions()]
        within = [node for node in fitting if all(_holds(node, span) for span in spans if span is not None)]
        within.sort(key=lambda node: (_ended(node)[0] - node.lineno, _ended(node)[1] - node.col_offset))
        return within[0] if within and any(spans) else None


def spelled(node: Node) -> str | None:
    """What a function does, as text: without name, decorators, defaults, docstrings, annotations, comments, lines.

    Defaults and what decorators made are values, and compared as such. None: it is nested too deeply.
    """
    try:
        return f"{type(node).__name__} {_parameters(node.args)} {_text(node.body, True)}"
    except RecursionError:
        return None


def writes(node: Node) -> set[str]:
    """What a function changes beyond its own names: ``name`` or ``name.attribute``.

    Those are names declared global or nonlocal, what is assigned to an item or an attribute, and what a method is
    called of as a statement of its own, whose value nobody takes: it is called for what it changes. ``a = b.c`` makes
    what is done to ``a`` be done to ``b.c``, where nothing else is ever called ``a``.
    """
    written: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, (ast.Global, ast.Nonlocal)):
            written |= set(part.names)
        elif isinstance(part, (ast.Subscript, ast.Attribute)) and not isinstance(part.ctx, ast.Load):
            written |= _base(part if isinstance(part, ast.Attribute) else part.value)
        elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
            called = part.value.func
            written |= _base(called.value) if isinstance(called, ast.Attribute) else set()
    others = _aliases(node)
    for name in [*written]:
        known: set[str] = set()
        while (head := name.partition(".")[0]) in others and head not in known:
            known.add(head)
            name = ".".join([others[head], *name.split(".")[1:]])
            written.add(".".join(name.split(".")[:2]))
    return written


def _aliases(node: Node) -> dict[str, str]:
    """Names that a function gives to another name or its attributes, and to nothing else."""
    bound = Counter(
        part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    )
    bound.update(part.arg for part in ast.walk(node) if isinstance(part, ast.arg))
    aliases: dict[str, str] = {}
    for part in ast.walk(node):
        if isinstance(part, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and part.value is not None:
            for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                if isinstance(target, ast.Name) and bound[target.id] == 1 and (name := _dotted(part.value)):
                    aliases[target.id] = name
    return aliases


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` as text; "" for all else, as an item may be a copy."""
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(chain)]) if isinstance(node, ast.Name) else ""


def calls_of(node: Node) -> set[str]:
    """Names of the methods of its first argument that a function calls or takes."""
    arguments = [*node.args.posonlyargs, *node.args.args]
    own = arguments[0].arg if arguments else None
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == own
    }


def _parameters(given: ast.arguments) -> list[list[str]]:
    kinds = [given.posonlyargs, given.args, [given.vararg], given.kwonlyargs, [given.kwarg]]
    return [[argument.arg for argument in kind if argument is not None] for kind in kinds]


def _base(node: ast.expr) -> set[str]:
    """``a.b`` of ``a.b[0].c``, ``a`` of ``a[0].c``."""
    chain: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute):
            chain.append(node.attr)
        else:
            chain.clear()
        node = node.value
    return {".".join([node.id, *reversed(chain)][:2])} if isinstance(node, ast.Name) else set()


def _compiled(filename: str, names: Mapping[str, Any]) -> tuple[dict[Any, list[types.CodeType]], list[Node]] | None:
    try:
        linecache.checkcache(filename)
        text = "".join(linecache.getlines(filename, dict(names)))
        if not text:
            return None
        tree = ast.parse(text)
        code = compile(tree, filename, "exec", dont_inherit=True)  # to be compared, never to be run
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    codes: dict[Any, list[types.CodeType]] = {}
    for inner in nested(code):
        codes.setdefault((inner.co_name, inner.co_firstlineno), []).append(inner)
    return codes, [node for node in ast.walk(tree) if isinstance(node, Node)]


def _fits(node: Node, code: types.CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
    return node.name == code.co_name and first == code.co_firstlineno


def _span(position: tuple[int | None, ...]) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Where an instruction's text begins and ends; None for those that stand for no text."""
    line, last, column, end = position
    if line is None or last is None or column is None or end is None or (line, column) >= (last, end):
        return None
    return (line, column), (last, end)


def _ended(node: Node) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _holds(node: Node, span: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    return (node.lineno, node.col_offset) <= span[0] and span[1] <= _ended(node)


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Those that do something: no ``pass``, no docstring or other bare constant, no name that is only annotated."""
    return [
        item
        for item in body
        if not isinstance(item, ast.Pass) and not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
    ]


def _text(node: Any, inside: bool) -> str:
    """A node with its fields, leaving out what is empty: new versions of Python add such fields.

    ``inside``: of a function, where an annotation says nothing; in a class it may make a field.
    """
    if isinstance(node, list):
        body = _statements(node) if node and isinstance(node[0], ast.stmt) else node
        return f"[{', '.join(text for text in (_text(item, inside) for item in body) if text)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.AnnAssign):
        if inside:
            return f"Assign(targets=[{_text(node.target, inside)}], value={_text(node.value, inside)})" * bool(
                node.value
            )
        return f"Field({_text(node.target, inside)}, {_text(node.value, inside)})"
    inside = not isinstance(node, ast.ClassDef) and (inside or isinstance(node, Node))
    skipped = SKIPPED | {"annotation"}
    fields = [(name, getattr(node, name, None)) for name in node._fields if name not in skipped]
    told = [f"{name}={_text(value, inside)}" for name, value in fields if value is not None and value != []]
    return f"{type(node).__name__}({', '.join(told)})"
