"""Names of frameworks stand in their own rooms, and the table of exceptions only shrinks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import reading

pytestmark = pytest.mark.house

# Who may say the name of a framework: its own room, and rooms that are torch's by nature. A room is a file, or a folder
# with all that is in it. What is said to people does not count: docstrings, comments, and texts that are no names.
FRAMEWORKS = re.compile("torch|jax|optax|tinygrad", re.IGNORECASE)
NAME = re.compile(r"[\w.:]+")  # of a module or what is in it, by which code looks something up
OWN_ROOMS: dict[str, tuple[str, str]] = {
    "frameworks/torch": ("torch", "its room"),
    "frameworks/jax": ("jax optax", "its room"),
    "frameworks/tinygrad": ("tinygrad", "its room"),
    "backend": ("torch", "it is a backend of torch.distributed"),
    "collectives": ("torch", "they are operations on torch's tensors"),
    "manual": ("torch", "one writes torch by hand there"),
    "engines/devices": ("torch", "devices exchange through torch.distributed, as torch's tensors"),
    "engines/hosts": ("torch", "hosts talk through Gloo and the store of torch.distributed"),
    "engines/flat.py": ("torch", "rows of sums that travel are torch's tensors"),
    "surroundings/presence.py": ("torch", "asks torch.distributed"),
    "callbacks": ("torch", "averages are torch's, and TensorBoard and the profiler are its own"),
    "integrations": ("torch", "models, data and optimizers of other libraries are torch's"),
    "lab": ("torch", "the demo is a recipe, rates are those of torch's groups, and an exchange is timed"),
}
# Who else does, and why: what stands here is to become fewer.
NAMED: dict[str, tuple[str, str]] = {
    "frameworks/registry.py": ("jax tinygrad torch", "the table of those that are built in"),
}


def framework_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every framework that identifiers, imports and names in texts mention."""
    docstrings = {id(docstring.value) for docstring in reading.docstrings(tree)}
    for node in ast.walk(tree):
        if id(node) not in docstrings:
            for text in _texts(node):
                yield from ((getattr(node, "lineno", 0), name.lower()) for name in FRAMEWORKS.findall(text))


def unexpected_names(path: str, tree: ast.Module) -> list[str]:
    """Names of frameworks in a file that the table does not allow there."""
    allowed = {word for key, (words, _) in (OWN_ROOMS | NAMED).items() if _covers(key, path) for word in words.split()}
    return [f"{path}:{line} says {name}" for line, name in framework_names(tree) if name not in allowed]


def package_files() -> dict[str, Path]:
    """Every file of the package, by its path there."""
    package = reading.SOURCE / reading.PACKAGE
    return {path.relative_to(package).as_posix(): path for path in reading.modules().values()}


def test_only_rooms_of_a_framework_name_it():
    """Identifiers and names in texts name torch, jax, optax or tinygrad only where a table has a reason for it."""
    wrong = [text for name, path in package_files().items() for text in unexpected_names(name, reading.parsed(path))]
    assert not wrong, "\n".join(wrong)


def test_every_reason_to_name_a_framework_is_needed():
    """No entry of the table of names stands there for nothing."""
    said = {
        (key, name)
        for path, file in package_files().items()
        for _, name in framework_names(reading.parsed(file))
        for key in OWN_ROOMS | NAMED
        if _covers(key, path)
    }
    assert not {(key, word) for key, (words, _) in (OWN_ROOMS | NAMED).items() for word in words.split()} - said


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from phalanx.frameworks import jax",
        "use_torch = 1",
        "model.jax_state",
        "def to_optax(): ...",
        "call(torch=1)",
        "def f(jax_key): ...",
        "import_module('jax.numpy')",
        "f'{name}.torch'",
        "class TorchModel: ...",
    ],
)
def test_a_framework_that_is_named_is_seen(source):
    """An import, a name, an attribute, an argument and a text are noticed; a docstring and a comment are not."""
    assert unexpected_names("step.py", ast.parse(source))
    assert not unexpected_names("backend/room.py", ast.parse("import torch"))
    assert unexpected_names("backend/room.py", ast.parse("import jax"))
    told = '"""As torch does it."""\n# and jax\ndef f():\n    """Optax."""\nclass A:\n    """Torch."""\n'
    told += "raise E('needs jax')\n"
    assert not unexpected_names("step.py", ast.parse(told))


def _texts(node: ast.AST) -> Iterator[str]:
    """What a node itself says: identifiers and texts."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
        yield node.value
    for field in ("id", "attr", "name", "arg", "module", "asname"):
        if isinstance(text := getattr(node, field, None), str):
            yield text


def _covers(key: str, path: str) -> bool:
    """Whether an entry of a table is this file, or a folder that it lies in."""
    return path == key or path.startswith(key + "/")
