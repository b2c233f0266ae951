"""Imports point down, function-local and TYPE_CHECKING ones included; no part imports what it must not know."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest
import reading

pytestmark = pytest.mark.house

# The rooms of the package, and what each may import besides itself; function-local imports count. "" is the front of
# phalanx, its __init__. Every room may import ``errors``.
ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "plan": (),
    "surroundings": (),
    "definition": ("plan", "surroundings"),
    "seams": ("plan", "definition"),
    "frameworks": ("plan", "surroundings", "definition", "seams", "shared"),
    "step": ("plan", "surroundings", "definition", "seams"),
    "shared": ("plan", "surroundings", "seams"),
    "checkpoint": ("definition", "seams", "surroundings", "frameworks"),
    "collectives": ("plan", "surroundings", "definition"),
    "manual": ("plan", "surroundings", "definition", "seams", "frameworks", "step", "collectives"),
    "backend": ("plan", "shared"),
    "engines": ("plan", "surroundings", "definition", "seams", "frameworks", "step", "shared", "checkpoint"),
    "run": ("plan", "surroundings", "definition", "seams", "checkpoint", "engines"),
    "callbacks": ("definition", "checkpoint"),
    "recipe": ("surroundings", "definition", "engines", "run"),
    "": (
        "plan",
        "surroundings",
        "definition",
        "seams",
        "frameworks",
        "checkpoint",
        "callbacks",
        "run",
        "recipe",
        "proof",
        "testing",
        "lab",
    ),
    "proof": (
        "plan",
        "definition",
        "seams",
        "step",
        "checkpoint",
        "frameworks",
        "recipe",
        "run",
        "engines",
        "surroundings",
    ),
    "testing": ("proof", "recipe"),
    "lab": (
        "callbacks",
        "checkpoint",
        "definition",
        "engines",
        "frameworks",
        "proof",
        "recipe",
        "run",
        "seams",
        "shared",
        "surroundings",
    ),
    "cli": (
        "",
        "callbacks",
        "definition",
        "checkpoint",
        "collectives",
        "frameworks",
        "recipe",
        "run",
        "proof",
        "lab",
        "surroundings",
    ),
    "integrations": ("", "callbacks", "definition"),
    "__main__": ("cli",),
}
# Within a room: the first may not import the second.
APART = (
    ("frameworks.torch", "frameworks.jax"),
    ("frameworks.jax", "frameworks.torch"),
    ("frameworks.torch", "frameworks.tinygrad"),
    ("frameworks.jax", "frameworks.tinygrad"),
    ("frameworks.tinygrad", "frameworks.torch"),
    ("frameworks.tinygrad", "frameworks.jax"),
    ("frameworks.tinygrad", "frameworks.registry"),
    ("frameworks.torch", "frameworks.registry"),
    ("frameworks.jax", "frameworks.registry"),
    ("engines.inline", "engines.processes"),
    ("engines.processes", "engines.inline"),
    ("engines.processes", "engines.devices"),
    ("engines.hosts", "engines.devices"),
    ("engines.hosts", "frameworks.torch"),
    ("engines.processes", "engines.selection"),
    ("run.run", "engines"),
    ("run.loop", "engines"),
    ("run.observers", "engines"),
)

# What the core can do without. Only the front may name them, in functions, so that they are imported when asked for.
SATELLITES = "backend", "collectives", "frameworks.tinygrad", "integrations", "lab", "manual"
FRONT = "phalanx", "phalanx.testing", "phalanx.cli"

# Who may import optional packages and picklers, at the top of a file or inside. For frameworks test_rooms has a table.
HOMES = {
    "matplotlib": ("run.plots",),
    "tqdm": ("run.observers", "proof.verify", "lab.many", "lab.tuning"),
    "typer": ("cli",),
    "rich": ("cli",),
    "sklearn": ("lab.digits", "integrations.sklearn"),
    "runpy": ("cli",),
    "transformers": ("integrations.transformers",),
    "pickle": ("engines.processes", "frameworks.torch.record"),
    "cloudpickle": ("engines.processes",),
}
HOMES |= dict.fromkeys(("_pickle", "marshal", "shelve", "dill", "joblib"), ())

PLAN_KNOWS = {
    "__future__", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools", "itertools", "math",
    "numpy", "operator", "phalanx", "typing",
}  # fmt: skip
EFFECTS = frozenset({"open", "input", "print", "breakpoint"})
EXECUTES = frozenset({"eval", "exec", "compile", "__import__"})


def room_of(module: str) -> str:
    """The room of a module of phalanx: the entry at the top of the package that it is, or lies in."""
    return module.removeprefix(reading.PACKAGE).removeprefix(".").split(".")[0]


def wrong_imports(name: str, found: list[reading.Import]) -> Iterator[str]:
    """The imports of phalanx in a module that the table does not allow."""
    for target, line, typing_only in found:
        if not reading.is_within(target, reading.PACKAGE):
            continue
        mine, theirs = room_of(name), room_of(target)
        how = " under TYPE_CHECKING" if typing_only else ""
        if mine not in ROOMS or theirs not in ROOMS:
            yield f"{name}:{line} imports {target}{how}: {name if mine not in ROOMS else target} is in no known room"
        elif mine != theirs and theirs not in (*ROOMS[mine], "errors"):
            yield f"{name}:{line} imports {target}{how}: {mine or '__init__'} may not import {theirs or '__init__'}"
        elif apart := next((pair for pair in APART if _divides(pair, name, target)), None):
            yield f"{name}:{line} imports {target}{how}: {apart[0]} may not import {apart[1]}"


def _divides(pair: tuple[str, str], name: str, target: str) -> bool:
    return all(reading.is_within(module, f"phalanx.{part}") for module, part in zip((name, target), pair, strict=True))


def away_from_home(name: str, found: list[reading.Import]) -> Iterator[str]:
    """The imports of outside packages that do not belong in this module."""
    inner = name.removeprefix(reading.PACKAGE).removeprefix(".")
    for target, line, typing_only in found:
        homes = None if typing_only else HOMES.get(target.split(".")[0])
        if homes is not None and not any(reading.is_within(inner, home) for home in homes):
            yield f"{name}:{line} imports {target}, which only {', '.join(homes) or 'nobody'} may"


def calls(name: str, tree: ast.AST, forbidden: frozenset[str]) -> Iterator[str]:
    """Calls of builtins by a forbidden name; methods of the same name are something else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in forbidden:
            yield f"{name}:{node.lineno} calls {node.func.id}()"


def executing(name: str, tree: ast.AST) -> Iterator[str]:
    """Calls that make code of text."""
    yield from calls(name, tree, EXECUTES)


def unpickling(name: str, tree: ast.AST) -> Iterator[str]:
    """Uses of torch.load, torch.save and allow_pickle=True, however torch was imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save", "torch.hub"):
            yield f"{name}:{node.lineno} uses {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization"):
            for alias in node.names:
                if alias.name in ("load", "save", "hub"):
                    yield f"{name}:{node.lineno} imports {node.module}.{alias.name}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield f"{name}:{node.value.lineno} passes allow_pickle={ast.unparse(node.value)}"


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """One import cycle as the modules on it, the first one again at the end; empty if there is none."""
    done: set[str] = set()

    def walk(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if found := walk(target, [*trail, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := walk(module, []))), [])


def gathered(check: object, *arguments: object) -> list[str]:
    """What a check of (name, tree, ...) finds in all of the package."""
    return [
        text
        for name, path in reading.modules().items()
        for text in check(name, reading.parsed(path), *arguments)  # type: ignore[operator]
    ]


def imports_of(source: str, name: str = "phalanx.step") -> list[reading.Import]:
    """The imports of a made-up module, for the tests of the checks themselves."""
    return list(reading.imports(name, ast.parse(source), frozenset({"phalanx.plan.fold", "phalanx.recipe"})))


def test_imports_follow_the_table():
    """Every room imports only what the table of rooms allows, so imports point down."""
    wrong = [text for name in reading.modules() for text in wrong_imports(name, reading.module_imports(name))]
    assert not wrong, "\n".join(wrong)


def satellites(name: str, tree: ast.Module, found: list[reading.Import]) -> list[str]:
    """Imports of satellites: of a module of the core all of them, of the front those outside of functions."""
    whole = [f"{reading.PACKAGE}.{room}" for room in SATELLITES]
    if any(reading.is_within(name, room) for room in whole):
        return []
    lazy = {
        line
        for function in ast.walk(tree)
        if isinstance(function, reading.Function)
        for node in ast.walk(function)
        for line in range(getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) + 1)
    }
    front = name == reading.PACKAGE or any(reading.is_within(name, room) for room in FRONT[1:])
    return [
        f"{name}:{line} imports {target}"
        for target, line, typing_only in found
        if any(reading.is_within(target, room) for room in whole)
        if not front or not (typing_only or line in lazy)
    ]


def test_the_core_knows_no_satellite():
    """Nothing but the front names what the core can do without, and the front imports it in functions only."""
    wrong = [
        text
        for name, path in reading.modules().items()
        for text in satellites(name, reading.parsed(path), reading.module_imports(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_satellite_in_the_core_is_seen():
    """In a function of the core, too; of the front only outside of functions."""
    source = "from phalanx.lab import pages\ndef f():\n    from phalanx.lab import pages\n"
    found = list(reading.imports("phalanx.step", ast.parse(source), frozenset({"phalanx.lab", "phalanx.lab.pages"})))
    lines = [
        [text.split()[0] for text in satellites(name, ast.parse(source), found)] for name in ("phalanx.step", *FRONT)
    ]
    assert lines[0] == ["phalanx.step:1", "phalanx.step:3"]
    assert lines[1:] == [[f"{name}:1"] for name in FRONT]


def test_the_table_names_what_exists():
    """Every room of the package is in the table, every entry of the table is a room, and all that is allowed is."""
    assert set(ROOMS) == {room_of(name) for name in reading.modules()}
    assert {room for allowed in ROOMS.values() for room in allowed} <= set(ROOMS)


def test_the_table_allows_nothing_that_nobody_needs():
    """What a room may import, some module of it does import."""
    needed = {(room_of(name), room_of(found.module)) for name in reading.modules() for found in _own_imports(name)}
    unused = [
        f"{room} -> {other}" for room, allowed in ROOMS.items() for other in allowed if (room, other) not in needed
    ]
    assert not unused, ", ".join(unused)


def test_no_room_can_reach_itself():
    """The table of rooms has no cycle."""
    assert not cycle({room: set(allowed) for room, allowed in ROOMS.items()})


def test_there_is_no_import_cycle():
    """Following imports from any module never leads back to it, function-local and TYPE_CHECKING ones counted."""
    known = frozenset(reading.modules())
    graph = {name: {found.module for found in reading.module_imports(name)} & known - {name} for name in known}
    assert not cycle(graph), " -> ".join(cycle(graph))


def test_outside_packages_stay_at_home():
    """Optional packages are imported where they are used only, and pickle where workers are spoken to."""
    wrong = [text for name in reading.modules() for text in away_from_home(name, reading.module_imports(name))]
    assert not wrong, "\n".join(wrong)


def test_the_plan_is_pure():
    """The plan imports nothing that computes gradients, opens, waits or draws, and calls nothing that does."""
    plans = {name: path for name, path in reading.modules().items() if reading.is_within(name, "phalanx.plan")}
    assert plans
    for name, path in plans.items():
        wrong = [found for found in reading.module_imports(name) if found.module.split(".")[0] not in PLAN_KNOWS]
        assert not wrong, f"{name} imports {wrong}"
        assert not list(calls(name, reading.parsed(path), EFFECTS))
        drawn = [node.lineno for node in ast.walk(reading.parsed(path)) if "random" in _attribute(node)]
        assert not drawn, f"{name} draws random numbers in lines {drawn}"


def test_no_bytes_become_code():
    """Nothing in the package unpickles, evaluates text or loads a file that could run code."""
    wrong = gathered(unpickling) + gathered(executing)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "from phalanx.recipe import Recipe",
        "from phalanx import recipe",
        "import phalanx.recipe",
        "from .recipe import Recipe",
        "from . import recipe",
        "def late():\n    from phalanx.recipe import Recipe",
        "if TYPE_CHECKING:\n    from phalanx.recipe import Recipe",
        "import phalanx",
        "import phalanx.engines",
        "import phalanx.unheard_of",
    ],
)
def test_an_import_that_points_up_is_seen(source):
    """The layer check catches a wrong import in every way of writing one."""
    assert list(wrong_imports("phalanx.step", imports_of(source)))


def test_an_import_that_points_down_passes():
    """The layer check lets a step import the plan, by the module's name or from its package."""
    assert not list(wrong_imports("phalanx.step", imports_of("from phalanx.plan import fold\nimport phalanx.plan")))


@pytest.mark.parametrize(
    "source", ["import rich.table", "from rich import table", "def f():\n    import cloudpickle", "import pickle"]
)
def test_an_import_away_from_home_is_seen(source):
    """The core may not import an optional package or a pickler, not even inside a function."""
    assert list(away_from_home("phalanx.step", imports_of(source)))


@pytest.mark.parametrize(
    "source",
    ["torch.load(path)", "from torch import load", "numpy.load(path, allow_pickle=True)", "eval('1')", "exec(text)"],
)
def test_code_from_bytes_is_seen(source):
    """The check for loading code catches each way, and is not misled by ``model.eval()``."""
    tree = ast.parse(source)
    assert [*unpickling("it", tree), *calls("it", tree, EXECUTES)]
    assert not list(calls("it", ast.parse("model.eval()"), EXECUTES))


def test_a_cycle_is_seen():
    """A cycle of three modules is found and spelled out; a diamond is not one."""
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert cycle({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}}) == []


def _own_imports(name: str) -> list[reading.Import]:
    return [found for found in reading.module_imports(name) if reading.is_within(found.module, reading.PACKAGE)]


def _attribute(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""
