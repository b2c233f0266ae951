"""The budgets of the package. Raising one takes a commit that says why in DECISIONS.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
import reading

pytestmark = pytest.mark.house

CODE_LINES = 24_965
FILE_LINES = 500
FUNCTION_LINES = 40
PARAMETERS = 8
PUBLIC_METHODS = 9

# Fields of records and keyword dictionaries count as parameters: somebody has to pass them.
MANY_PARAMETERS = {
    "phalanx.definition.fields.Definition": "the face: what defines the answer, each argument by its name",
    "phalanx.run.options.Options": "the face: what train() and start() accept",
    "phalanx.run.options.Settled": "the same, checked",
    "phalanx.checkpoint.snapshot.Snapshot": "what is on the disk",
    "phalanx.seams.records.RunState": "what a run has done, for whoever goes on with it",
    "phalanx.proof.compare.diff.Difference": "the face: what differs, users only read it",
    "phalanx.proof.replay.Replayed": "the face: what a replica computed",
    "phalanx.run.result.Result": "the face: a run fills it in, users only read it",
    "phalanx.engines.selection.open_engine": "the options that say where and how a run computes",
    "phalanx.manual.step.data_parallel_step": "the face: a step by hand, with its hooks",
    "phalanx.seams.events.StepReport": "the face: what is told of a step, and users only read it",
    "phalanx.cli.app.train": "the face: options of a command",
    "phalanx.cli.app.demo": "the face: options of a command",
}

MANY_METHODS = {
    "phalanx.seams.observer.Observer": "what a run tells: whoever looks on defines those that it needs",
    "phalanx.run.run.Run": "the face: what can be done with a run that one holds",
    "phalanx.engines.recovery.supervisor.Supervisor": "what the driver asks of it",
    "phalanx.engines.processes.driver.Processes": "seams.Engine, and what engines that hold it ask of it",
    "phalanx.frameworks.record.Record": "all that a framework may say of itself; each defines what it has",
    "phalanx.frameworks.jax.record.JaxRecord": "what jax says of itself",
    "phalanx.backend.group.Group": "torch.distributed says which methods a process group has",
}

NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
RECORDS = ("NamedTuple", "TypedDict")
PROPERTIES = ("property", "cached_property", "setter", "getter", "deleter")
UNDONE = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!.*(https?://|#\d))")

Figures = dict[str, int]


def lines(node: reading.Function) -> int:
    """Lines of a function from ``def`` to its end, docstring not counted."""
    count = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        count -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return count


def parameters(node: reading.Function, method: bool) -> list[ast.arg]:
    """Parameters of a function without ``self`` or ``cls``; ``*args`` and ``**kwargs`` are one each."""
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args]
    if method and "staticmethod" not in map(_last_name, node.decorator_list):
        named = named[1:]
    rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*named, *arguments.kwonlyargs, *rest]


def public_methods(node: ast.ClassDef) -> int:
    """Methods of a class that users may call by name; properties are not methods."""
    return sum(
        isinstance(item, reading.Function)
        and not item.name.startswith("_")
        and not any(_last_name(decorator) in PROPERTIES for decorator in item.decorator_list)
        for item in node.body
    )


def fields(node: ast.ClassDef) -> int:
    """Fields that somebody has to pass to a dataclass, NamedTuple or TypedDict; 0 for any other class."""
    is_record = any(_last_name(item) == "dataclass" for item in node.decorator_list)
    if not is_record and not any(_last_name(base) in RECORDS for base in node.bases):
        return 0
    annotated = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    return sum("init=False" not in ast.unparse(item).replace(" ", "") for item in annotated)


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
    return {f"{module}.{name}": lines(node) for module, name, node, _ in _functions()}


def parameter_figures() -> Figures:
    """Parameters of every function and fields of every record."""
    counted = {f"{module}.{name}": len(parameters(node, method)) for module, name, node, method in _functions()}
    return counted | {f"{module}.{node.name}": fields(node) for module, node in _classes()}


def method_figures() -> Figures:
    """Public methods of every class."""
    return {f"{module}.{node.name}": public_methods(node) for module, node in _classes()}


def missing_annotations(name: str, tree: ast.AST) -> Iterator[str]:
    """Parameters and returns without a type."""
    for function, node, method in reading.functions(tree):
        for argument in parameters(node, method):
            if argument.annotation is None:
                yield f"{name}:{node.lineno} {function}: parameter {argument.arg}"
        if node.returns is None:
            yield f"{name}:{node.lineno} {function}: return"


def maxima() -> str:
    """The figures as they stand: total, then the five largest of each kind."""
    kinds = {
        f"lines of a file (at most {FILE_LINES})": file_figures(),
        f"lines of a function (at most {FUNCTION_LINES})": function_figures(),
        f"parameters (at most {PARAMETERS})": parameter_figures(),
        f"public methods of a class (at most {PUBLIC_METHODS})": method_figures(),
    }
    total = f"lines of code of the package (at most {CODE_LINES}): {sum(code_figures().values())}"
    return "\n".join([total, *(f"{kind}: {_largest(figures)}" for kind, figures in kinds.items())])


def over(figures: Figures, budget: int, allowed: dict[str, str] | None = None) -> Figures:
    """What exceeds a budget and is not on the list of those that may."""
    return {name: figure for name, figure in figures.items() if figure > budget and name not in (allowed or {})}


def test_the_package_is_small():
    """The code of the package fits in its budget."""
    assert sum(code_figures().values()) <= CODE_LINES, maxima()


def test_files_are_short():
    """No file has more than 500 lines."""
    too_much = over(file_figures(), FILE_LINES)
    assert not too_much, f"{too_much}\n{maxima()}"


def test_functions_are_short():
    """No function has more than 40 lines without its docstring."""
    too_much = over(function_figures(), FUNCTION_LINES)
    assert not too_much, f"{too_much}\n{maxima()}"


def test_functions_take_few_parameters():
    """No function takes more than 8 parameters and no record has more than 8 fields, except at the face."""
    too_much = over(parameter_figures(), PARAMETERS, MANY_PARAMETERS)
    assert not too_much, f"{too_much}\n{maxima()}"


def test_exceptions_are_needed():
    """Everything on the list of those with many parameters exists and has many."""
    figures = parameter_figures()
    assert {name: figures.get(name, 0) for name in MANY_PARAMETERS if figures.get(name, 0) <= PARAMETERS} == {}


def test_classes_have_few_public_methods():
    """No class has more than 8 public methods, properties not counted."""
    too_much = over(method_figures(), PUBLIC_METHODS, MANY_METHODS)
    assert not too_much, f"{too_much}\n{maxima()}"


def test_everything_is_annotated():
    """Every parameter and every return of every function has a type."""
    missing = [
        text for name, path in reading.modules().items() for text in missing_annotations(name, reading.parsed(path))
    ]
    assert not missing, "\n".join(missing)


def test_what_is_undone_has_a_link():
    """A note about unfinished work says where it is tracked."""
    undone = [
        f"{name}:{number} {line.strip()}"
        for name, path in reading.modules().items()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if UNDONE.search(line)
    ]
    assert not undone, "\n".join(undone)


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


def test_the_counting_is_right():
    """Lines, parameters, fields, methods and missing annotations of a made-up class are counted as a reader would."""
    tree = ast.parse(
        "@dataclass(frozen=True)\nclass A(Base):\n    x: int\n    y: int = 0\n    z: int = field(init=False)\n"
        "    def f(self, a, /, b: int, *c: int, d: int = 0, **e: int) -> int:\n"
        '        """One\n        two."""\n        def g() -> int:\n            return 1\n        return g()\n'
        "    @functools.cached_property\n    def p(self) -> int: ...\n    @staticmethod\n    def s(a: int): ...\n"
    )
    [record] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = {name: (lines(node), len(parameters(node, method))) for name, node, method in reading.functions(tree)}
    assert found == {"A.f": (4, 5), "A.f.g": (2, 0), "A.p": (1, 0), "A.s": (1, 1)}
    assert (fields(record), public_methods(record)) == (2, 2)
    assert list(missing_annotations("m", tree)) == ["m:6 A.f: parameter a", "m:15 A.s: return"]
    assert UNDONE.search("# TODO later")
    assert not UNDONE.search("# TODO see https://example.org/7")


def _functions() -> Iterator[tuple[str, str, reading.Function, bool]]:
    for module, path in reading.modules().items():
        for name, node, method in reading.functions(reading.parsed(path)):
            yield module, name, node, method


def _classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for module, path in reading.modules().items():
        for node in ast.walk(reading.parsed(path)):
            if isinstance(node, ast.ClassDef):
                yield module, node


def _last_name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _largest(figures: Figures) -> str:
    top = sorted(figures.items(), key=lambda item: -item[1])[:5]
    return ", ".join(f"{figure} {name}" for name, figure in top)
