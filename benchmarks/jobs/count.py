"""Count the lines of the three jobs: ``python benchmarks/jobs/count.py``. Blank lines and docstrings do not count."""

import ast
import pathlib

NAMES = ("phalanx", "lightning", "accelerate")


def counted(text: str) -> tuple[int, int]:
    """Lines of code, and without imports."""
    tree = ast.parse(text)
    lines = {
        number for number, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")
    }
    docstring = tree.body[0]
    lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    imports = {
        number
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for number in range(node.lineno, node.end_lineno + 1)
    }
    return len(lines), len(lines - imports)


def main() -> None:
    print("| | lines | without imports |\n| --- | --- | --- |")
    for name in NAMES:
        text = (pathlib.Path(__file__).parent / f"with_{name}.py").read_text()
        print("| {} | {} | {} |".format(name, *counted(text)))


if __name__ == "__main__":
    main()
