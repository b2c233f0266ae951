"""Reads the package as text and as syntax trees, for the house tests. Imports none of it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGE = "phalanx"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


class Import(NamedTuple):
    """One imported module, with its address; ``typing_only`` if it stands under ``if TYPE_CHECKING``."""

    module: str
    line: int
    typing_only: bool


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found: dict[str, Path] = {}
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(name: str, tree: ast.Module, known: frozenset[str], *, is_package: bool = False) -> Iterator[Import]:
    """What module ``name`` imports anywhere in it: at its top, in functions, under TYPE_CHECKING.

    ``from a import b`` counts as ``a.b`` where that is a module in ``known``, else as ``a``.
    """
    for node, typing_only in _with_typing(tree, False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node, is_package)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if inner in known else base, node.lineno, typing_only)


def module_imports(name: str) -> list[Import]:
    """What a module of the package imports."""
    path = modules()[name]
    return list(imports(name, parsed(path), frozenset(modules()), is_package=path.name == "__init__.py"))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        named = isinstance(node, Function | ast.ClassDef)
        yield from functions(node, f"{prefix}{node.name}." if named else prefix)


def docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """The docstring of every module, class and function in a tree, as the statement that it is."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            assert isinstance(docstring, ast.Expr)
            yield docstring


def is_within(module: str, package: str) -> bool:
    """Whether ``module`` is ``package`` or lies in it."""
    return module == package or module.startswith(package + ".")


def _with_typing(node: ast.AST, typing_only: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, typing_only
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _with_typing(child, True)
        for child in node.orelse:
            yield from _with_typing(child, typing_only)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _with_typing(child, typing_only)


def _absolute(name: str, node: ast.ImportFrom, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = name.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)
