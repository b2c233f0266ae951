"""The house stays a house: few rooms, few files in each, and nobody reaches into another's drawers.

Every table of exceptions is of today and may only shrink: an entry that nothing needs any more fails the test.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest
import reading

pytestmark = pytest.mark.house

ENTRIES = 21
FOLDER_FILES = 13
SMALL_FILES, SMALL_LINES = 8, 40

# Folders with more files than they should have, how many, and why.
LARGE_FOLDERS = {}

SMALL = {
    "plan/shares.py": "the weights of shares, proved by tests of their own",
    "surroundings/presence.py": "asks torch.distributed, so that no other file of this room has to know it",
}

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
    "engines/hosts": ("torch", "hosts talk through Gloo and the store of torch.distributed"),
    "surroundings/presence.py": ("torch", "asks torch.distributed"),
    "callbacks": ("torch", "averages are torch's, and TensorBoard and the profiler are its own"),
    "cli": ("jax optax tinygrad torch", "demos are recipes, and say what to install for them"),
}
# Who else does, and why: what stands here is to become fewer.
NAMED: dict[str, tuple[str, str]] = {
    "frameworks/registry.py": ("jax tinygrad torch", "the table of those that are built in"),
    "proof/find_lr.py": ("torch", "its rates are those of torch's parameter groups"),
    "definition/fingerprint/arrays.py": ("jax torch", "dtypes are called by one name for all frameworks"),
    "definition/fingerprint/objects.py": ("torch", "parametrized modules have made-up classes"),
    "engines/processes/launch.py": ("jax", "there is a zygote for workers that need jax, and one for others"),
    "engines/processes/starter.py": ("jax", "a zygote whose workers need jax has a folder for what jax compiles"),
}

# Who takes any arguments at all, so that no type checker looks at them, how often, and why.
ANY_ARGUMENTS = {
    "engines/hosts/gloo.py": (1, "calls whatever it is given"),
    "engines/hosts/world.py": (1, "calls whatever it is given"),
    "engines/processes/messages.py": (1, "what a worker tells differs from message to message"),
    "engines/processes/pool.py": (1, "what a worker tells differs from message to message"),
    "engines/processes/worker.py": (1, "a signal handler"),
    "frameworks/torch/schedules.py": (1, "stands in for methods of lists and dicts, whatever they take"),
}

# Where a private name of a class is used outside its file (in the package), how often, and why.
REACHED = {
    "frameworks/torch/replica/buffers.py": (4, "torch's own: where a module keeps its buffers"),
    "manual/replicas.py": (1, "torch's own: how a module moves what it holds"),
}

# The same in tests, where it is right only to plant a fault; what stands here is to become fewer.
REACHED_IN_TESTS = {
    "attacks/deaths.py": 3,
    "backend/test_failures.py": 1,
    "engines/moving.py": 2,
    "engines/test_compiled.py": 1,
    "engines/test_falls.py": 7,
    "engines/test_same_bits.py": 1,
    "engines/test_starter.py": 8,
    "engines/test_surroundings.py": 2,
    "face/test_traps.py": 1,
    "hosts/test_across.py": 1,
    "hosts/test_hosts.py": 2,
    "hosts/test_overlap.py": 11,
    "recovery/test_tally.py": 1,
    "state/test_directory.py": 2,
    "state/test_resume.py": 1,
}
PLANTED = "# planted"  # at the end of a line of a test: this reaches into the package to plant a fault
RECORD = frozenset({"_replace", "_make", "_fields", "_asdict"})  # the public face of a NamedTuple
RAISED = re.compile(r"(Error|Exception|Warning)$")


def rooms(files: list[str]) -> set[str]:
    """Entries at the top of the package, out of the paths of its files."""
    return {PurePosixPath(path).parts[0] for path in files}


def folders(files: list[str]) -> Counter[str]:
    """How many files each folder has of its own."""
    return Counter(str(PurePosixPath(path).parent) for path in files)


def small_files(lengths: Mapping[str, int]) -> set[str]:
    """Files with fewer lines than a story has; ``__init__`` and ``__main__`` may be as short as they like."""
    short = [PurePosixPath(path) for path, lines in lengths.items() if lines < SMALL_LINES]
    return {str(path) for path in short if not path.stem.startswith("__")}


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


def any_arguments(tree: ast.AST) -> list[int]:
    """Lines of functions that take ``*arguments: Any``, whatever it is called."""
    return [
        node.lineno
        for _, node, _ in reading.functions(tree)
        if node.args.vararg is not None
        and node.args.vararg.annotation is not None
        and ast.unparse(node.args.vararg.annotation) in ("Any", "typing.Any")
    ]


def private_names(tree: ast.AST) -> set[str]:
    """Private attributes and methods that the classes of a file define."""
    names: set[str] = set()
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for item in owner.body:
            targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", item)]
            names |= {name for target in targets if (name := getattr(target, "id", getattr(target, "name", "")))}
        names |= {
            node.attr
            for node in ast.walk(owner)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node)
        }
    return {name for name in names if _is_private(name)}


def reaching(tree: ast.AST, known: set[str]) -> list[tuple[int, str]]:
    """Uses of private names that classes of the package (``known``) define, but none in this file: (line, code).

    ``self._name`` counts too, where only a base class in another file defines it.
    """
    own = private_names(tree)
    return [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in known - own - RECORD
    ]


def exceptions_defined(tree: ast.AST) -> list[str]:
    """Classes of a file that derive from something that is raised."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(RAISED.search(ast.unparse(base)) for base in node.bases)
    ]


def grown(figures: Mapping[str, int], table: Mapping[str, int]) -> dict[str, str]:
    """Where figures are not what a table of exceptions allows: larger than there, or so small that it can shrink."""
    return {
        name: f"{figures.get(name, 0)}, and the table has {table.get(name, 0)}"
        for name in {*figures, *table}
        if figures.get(name, 0) != table.get(name, 0)
    }


def package_files() -> dict[str, Path]:
    """Every file of the package, by its path there."""
    return reading.python_files(reading.SOURCE / reading.PACKAGE)


def package_privates() -> set[str]:
    """Private names that classes of the package define."""
    return set().union(*(private_names(reading.parsed(path)) for path in package_files().values()))


def test_the_top_is_small():
    """At most 21 entries stand at the top of the package."""
    entries = rooms(list(package_files()))
    assert len(entries) <= ENTRIES, sorted(entries)


def test_no_folder_is_a_heap():
    """A folder has at most 13 files of its own, but for those in the table, which may only shrink."""
    large = {folder: count for folder, count in folders(list(package_files())).items() if count > FOLDER_FILES}
    assert not grown(large, {folder: count for folder, (count, _) in LARGE_FOLDERS.items()})


def test_few_files_are_scraps():
    """At most 8 files have fewer than 40 lines, each with a reason in the table."""
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in package_files().items()}
    small = small_files(lengths)
    assert small == set(SMALL), {name: lengths.get(name) for name in small ^ set(SMALL)}
    assert len(small) <= SMALL_FILES


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


def test_arguments_have_types():
    """Nothing takes ``*arguments: Any``, but for those in the table, which may only shrink."""
    figures = {name: len(any_arguments(reading.parsed(path))) for name, path in package_files().items()}
    assert not grown(_positive(figures), {name: count for name, (count, _) in ANY_ARGUMENTS.items()})


def test_no_class_reaches_into_another():
    """Private names are used in the file of their class only, but for those in the table, which may only shrink."""
    known = package_privates()
    figures = {name: len(reaching(reading.parsed(path), known)) for name, path in package_files().items()}
    assert not grown(_positive(figures), {name: count for name, (count, _) in REACHED.items()})


def test_tests_reach_into_the_package_to_plant_faults_only():
    """In tests such a line ends with ``# planted``; files that have others are in the table, which may only shrink."""
    known, figures = package_privates(), Counter[str]()
    for name, path in reading.python_files(reading.ROOT / "tests").items():
        lines = path.read_text(encoding="utf-8").splitlines()
        reached = {line for line, _ in reaching(reading.parsed(path), known)}
        figures[name] = sum(not lines[line - 1].rstrip().endswith(PLANTED) for line in reached)
    assert not grown(_positive(figures), REACHED_IN_TESTS)


def test_the_whole_exception_tree_is_in_one_file():
    """Every exception class of the package stands in ``errors``, and in the tree in its docstring."""
    elsewhere = {
        name: defined
        for name, path in package_files().items()
        if name != "errors.py" and (defined := exceptions_defined(reading.parsed(path)))
    }
    assert not elsewhere
    errors = reading.parsed(package_files()["errors.py"])
    told = ast.get_docstring(errors) or ""
    assert [name for name in exceptions_defined(errors) if not re.search(rf"\b{name}\b", told)] == []


def test_counting_rooms_is_right():
    """Entries, folders and small files of a made-up package are counted as a reader would."""
    files = ["__init__.py", "step.py", "plan/__init__.py", "plan/fold.py", "engines/hosts/link.py"]
    assert rooms(files) == {"__init__.py", "step.py", "plan", "engines"}
    assert folders(files) == {".": 2, "plan": 2, "engines/hosts": 1}
    assert small_files({"a.py": 39, "b.py": 40, "plan/__init__.py": 1, "__main__.py": 5}) == {"a.py"}


def test_a_table_that_is_not_true_is_seen():
    """What has grown is seen, what may shrink too, and what nobody listed."""
    assert set(grown({"more": 3, "new": 1, "same": 2}, {"more": 2, "gone": 1, "same": 2})) == {"more", "new", "gone"}


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
    """An import, a name, an attribute, an argument and a name in a text are noticed; what is said to people is not."""
    assert unexpected_names("step.py", ast.parse(source))
    assert not unexpected_names("backend/room.py", ast.parse("import torch"))
    assert unexpected_names("backend/room.py", ast.parse("import jax"))
    told = '"""As torch does it."""\n# and jax\ndef f():\n    """Optax."""\nclass A:\n    """Torch."""\n'
    told += "raise E('needs jax')\n"
    assert not unexpected_names("step.py", ast.parse(told))


def test_any_arguments_are_seen():
    """``*arguments: Any`` is noticed in a method and a nested function; other types and keywords are not."""
    source = "class A:\n    def f(self, *a: Any): ...\ndef g(*a: int, **b: Any):\n    def h(*c: typing.Any): ...\n"
    assert any_arguments(ast.parse(source)) == [2, 4]


def test_reaching_into_another_class_is_seen():
    """Another's private name is noticed, and a base's elsewhere; one's own, a stranger's and a record's are not."""
    other = "class Room:\n    _size: int\n    _limit = 3\n    def _grow(self): self._seen, self.open = 1, 2\n"
    known = private_names(ast.parse(other))
    assert known == {"_size", "_limit", "_grow", "_seen"}
    source = (
        "class Guest(Room):\n    def look(self, room):\n        room._size, room.open, room._replace, room._torch\n"
        "        self.room._grow()\n        self._seen\n        room._limit\n    def _limit(self): ...\n"
    )
    assert sorted(reaching(ast.parse(source), known)) == [(3, "room._size"), (4, "self.room._grow"), (5, "self._seen")]


def test_an_exception_elsewhere_is_seen():
    """A class that derives from an error of Python, of the package or of a module is noticed; others are not."""
    source = "class A(Exception): ...\nclass B(errors.RunError, X): ...\nclass C(Observer): ...\nclass D: ...\n"
    assert exceptions_defined(ast.parse(source)) == ["A", "B"]


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


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _positive(figures: Mapping[str, int]) -> dict[str, int]:
    return {name: figure for name, figure in figures.items() if figure}
