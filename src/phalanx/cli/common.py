"""What the commands share: their options, recipes in Python files, and how they print and draw."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer

from phalanx.cli.jobs import Given, called
from phalanx.definition.generators import remembered
from phalanx.errors import UsageError
from phalanx.recipe import Recipe
from phalanx.surroundings.presence import printable

PICTURES = (".png", ".pdf", ".svg")
File = Annotated[str, typer.Argument(metavar="FILE[:NAME]", help="A Python file that defines `recipe`, or NAME.")]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="For `def recipe(lr=1e-3, seed=0)` in FILE.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def picture(path: str) -> str:
    """Refuse a picture of a kind that matplotlib cannot write, and any picture where matplotlib is missing."""
    if path and pathlib.Path(path).suffix not in PICTURES:
        raise UsageError(f"--plot is {path!r}; its ending must be one of {', '.join(PICTURES)}")
    if path and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"--plot is {path!r}, but matplotlib is missing; pip install 'phalanx[plot]', or give --plot ''"
        )
    return path


Plot = Annotated[str, typer.Option("--plot", metavar="PATH", help="Where to write the picture.", callback=picture)]


def located(file: str) -> tuple[str, str]:
    """The path and the name in ``PATH:NAME``; in ``PATH``, the name is ``recipe``."""
    path, colon, name = file.rpartition(":")
    return (path, name or "recipe") if colon and (not name or name.isidentifier()) else (file, "recipe")


def load_recipe(file: str, given: Given = ()) -> tuple[Recipe, Any, Any]:
    """The recipe of ``PATH`` or ``PATH:NAME``, with the evaluation and the callbacks beside it, if there are.

    Where NAME is a function, it is called with ``given``, and what it returns beside the recipe goes before those.

    Raises
    ------
    UsageError
        There is no such file, or it defines no recipe of that name. What the file itself raises comes through.
    """
    return load_recipes(file, [given])[0]


def load_recipes(file: str, several: Sequence[Given]) -> list[tuple[Recipe, Any, Any]]:
    """The same for each of several arguments; the file is executed once, so its data is shared.

    Each call finds the global random generators as the file left them, so that its recipe is the same alone.
    """
    path, name = located(file)
    module, source = _executed(path, name)
    found, as_left, recipes = getattr(module, name, None), remembered({}), list[tuple[Recipe, Any, Any]]()
    for given in several:
        for put_back in as_left:
            put_back()
        recipes.append(_beside(module, _made(found, module, path, name, source, given)))
    return recipes


def _executed(path: str, name: str) -> tuple[Any, pathlib.Path]:
    """The module of a file, and where that is."""
    source = pathlib.Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"phalanx_file_{source.stem}", source)
    if not source.is_file():
        raise UsageError(f"FILE is {path!r}, which does not exist or is no file; give FILE or FILE:NAME")
    if spec is None or spec.loader is None:
        raise UsageError(
            f"FILE is {path!r}, which is not a Python file; give one that defines `{name} = phalanx.Recipe(...)`"
        )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(source.parent))
    sys.argv = [path]  # the command's own arguments are none of the file's
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise UsageError(
            f"{path} ended itself with SystemExit({error}) while it was loaded; it gets no arguments (sys.argv is "
            f"{sys.argv}), so give those that it parses a default, and exit under `if __name__ == '__main__':` only"
        ) from error
    return module, source


def _made(found: Any, module: Any, path: str, name: str, source: pathlib.Path, given: Given) -> tuple[Any, Any, Any]:
    """The recipe that a file names, or that its function returns."""
    if inspect.isfunction(found):
        return called(found, f"{source}:{name}", given)
    if given:
        raise UsageError(
            f"{path} has no function {name}, and only such a one takes arguments, as in def {name}(lr=1e-3): return "
            "phalanx.Recipe(..., lr=lr)"
        )
    if not isinstance(found, Recipe):
        names = ", ".join(known for known, value in vars(module).items() if isinstance(value, Recipe)) or "NAME"
        raise UsageError(f"{path} has no recipe named {name!r}; add `{name} = phalanx.Recipe(...)` or try FILE:{names}")
    return found, None, None


def _beside(module: Any, made: tuple[Any, Any, Any]) -> tuple[Recipe, Any, Any]:
    """A recipe, with the evaluation and the callbacks of the file where it has none itself."""
    recipe, evaluation, callbacks = made
    evaluation = getattr(module, "evaluation", None) if evaluation is None else evaluation
    return recipe, evaluation, getattr(module, "callbacks", ()) if callbacks is None else callbacks


def plain(text: str) -> str:
    """Lines for a terminal, each as ``printable`` has it."""
    return "\n".join(map(printable, text.split("\n")))


def echo(text: str, *, err: bool = False) -> None:
    """Print lines. All that a command says goes through here, as there may be text of others in it."""
    typer.echo(plain(text), err=err)


def show(facts: Any, rows: Iterable[Sequence[Any]], *, json_: bool) -> None:
    """Print one JSON object for machines, or rows as a table for people; a row of one cell is a sentence."""
    if json_:
        from phalanx.checkpoint.chain import body_of

        echo(body_of(facts))  # NaN is a text, as in logs
        return
    cells = [[(printable if len(row) > 1 else plain)(str(cell)) for cell in row] for row in rows]
    table = [row for row in cells if len(row) > 1]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*table, fillvalue="")]
    for row in cells:
        aligned = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)]
        typer.echo("  ".join(aligned).rstrip() if len(row) > 1 else "".join(row))


def save(drawn: Any, path: str) -> pathlib.Path:
    """Write a picture, a figure or the axes of one, where --plot says; returns where."""
    with writing("--plot", path) as target:
        target.parent.mkdir(parents=True, exist_ok=True)
        getattr(drawn, "figure", drawn).savefig(target)
    return target


@contextlib.contextmanager
def writing(option: str, path: str) -> Iterator[pathlib.Path]:
    """The path that an option names; if it cannot be written, a UsageError says why."""
    try:
        yield pathlib.Path(path)
    except OSError as error:
        raise UsageError(f"{option} is {path!r}, which cannot be written: {error.strerror}; give another") from error
