"""What the documents show runs, links lead somewhere, and examples are short and run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import reading

DOCUMENTS = [reading.ROOT / "README.md", *sorted(reading.ROOT.glob("docs/*.md"))]
DECISIONS = sorted(reading.ROOT.glob("docs/decisions/*.md"))
DECISION_LINES = 15
RUN_ELSEWHERE = ("compare.py",)  # tests/manual runs it, and looks at what it prints
EXAMPLES = sorted(reading.ROOT.glob("examples/*.py"))
EXAMPLE_LINES = 60
SECONDS = 500
NEEDS = re.compile(r"# needs ([\w, ]+)")  # the first line of a block that runs where these packages are installed
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[\w+-]*).*$")

# Runs each block in a namespace of its own; a traceback shows the document's own line numbers.
RUN_BLOCKS = """
import json, sys
path, blocks = json.load(sys.stdin)
for line, text in blocks:
    try:
        exec(compile("\\n" * line + text, path, "exec", dont_inherit=True), {"__name__": "__main__"})
    except BaseException:
        print(f"the block that starts in line {line + 1} of {path} failed:", file=sys.stderr)
        raise
"""


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The code of a document that has to run, each with its lines before it.

    That is every block fenced as ``python``, and any whose first line is ``# runs``.
    """
    opened: re.Match[str] | None = None
    start, code = 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None and fence is not None:
            opened, start, code = fence, number, []
        elif opened is not None and line.strip() == opened["fence"]:
            if opened["language"] == "python" or (code and code[0].strip() == "# runs"):
                yield start, "\n".join(code) + "\n"
            opened = None
        elif opened is not None:
            code.append(line.removeprefix(opened["indent"]))


def needs(code: str) -> list[str]:
    """The packages that a block says it needs, beside those that every block may use."""
    said = NEEDS.match(code)
    return re.split(r"[, ]+", said[1].strip()) if said else []


BLOCKS = {path: list(blocks(path.read_text(encoding="utf-8"))) for path in DOCUMENTS}
NEEDY = [(path, block) for path, found in BLOCKS.items() for block in found if needs(block[1])]


def run(command: list[str], folder: Path, text: str = "") -> None:
    """Run a script in an empty folder with one thread and no screen; fail with all it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.long
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_run(document, tmp_path):
    """Every Python block of a document runs as it stands, in a namespace of its own."""
    found = [block for block in BLOCKS[document] if not needs(block[1])]
    if found:
        run(["-c", RUN_BLOCKS], tmp_path, json.dumps([str(document), found]))


@pytest.mark.long
@pytest.mark.parametrize(("document", "block"), NEEDY, ids=[f"{path.name}:{block[0] + 1}" for path, block in NEEDY])
def test_blocks_that_need_a_package_run(document, block, tmp_path, monkeypatch):
    """A block that begins with ``# needs NAME`` runs in a process of its own, where NAME is installed."""
    for name in needs(block[1]):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))  # Keras writes its settings when it is imported
    run(["-c", RUN_BLOCKS], tmp_path, json.dumps([str(document), [block]]))


@pytest.mark.house
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short(example):
    """An example fits on one screen: at most 60 lines."""
    assert len(example.read_text(encoding="utf-8").splitlines()) <= EXAMPLE_LINES


@pytest.mark.house
def test_decisions_are_short_and_numbered():
    """A decision has at most 15 lines, and a number of its own, in order."""
    assert [path.name[:3] for path in DECISIONS] == [f"{number:03}" for number in range(1, len(DECISIONS) + 1)]
    assert [path.name for path in DECISIONS if len(path.read_text().splitlines()) > DECISION_LINES] == []


@pytest.mark.long
@pytest.mark.parametrize(
    "example", [path for path in EXAMPLES if path.name not in RUN_ELSEWHERE], ids=lambda path: path.name
)
def test_examples_run(example, tmp_path):
    """Every example runs to its end from any folder, without arguments."""
    run([str(example)], tmp_path)


@pytest.mark.house
def test_blocks_are_found():
    """Blocks fenced as python and those that begin with ``# runs`` are found with their lines; others are not."""
    text = "```python\na\n```\n\n```text\nb\n```\n  ```py\n  # runs\n  c\n  ```\n````md\n```python\nd\n```\n````\n"
    assert list(blocks(text)) == [(1, "a\n"), (8, "# runs\nc\n")]


@pytest.mark.house
def test_what_a_block_needs_is_read():
    """Only the first line of a block says what it needs, and it may name several packages."""
    assert needs("# needs keras\nimport keras\n") == ["keras"]
    assert needs("# needs h5py, lmdb\n") == ["h5py", "lmdb"]
    assert needs("import torch\n# needs keras\n") == []


@pytest.mark.house
def test_a_block_that_fails_is_seen(tmp_path):
    """A failing block fails the test and names its line, and no block sees another's names."""
    with pytest.raises(AssertionError, match=r"line 5 of made_up.md(?s:.)*NameError"):
        run(["-c", RUN_BLOCKS], tmp_path, json.dumps(["made_up.md", [(1, "a = 1\n"), (4, "a\n")]]))


def headings(text):
    """What leads to the headings of a document, after the ``#`` of a link."""
    titles = re.findall(r"(?m)^#+ (.*)", re.sub(r"(?s)```.*?```", "", text))
    return {re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(document, text):
    """Relative links of a document that lead to no file, or to no heading of one."""
    links = re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", re.sub(r"(?s)```.*?```|`[^`]*`", "", text))
    broken = []
    for link, part in links:
        target = document.parent / link if link else document
        if link and not target.exists():
            broken.append(link)
        elif part and target.suffix == ".md":
            read = target.read_text(encoding="utf-8") if link else text
            broken += [] if part in headings(read) else [f"{link}#{part}"]
    return broken


@pytest.mark.house
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    """Every relative link of a document leads to a file, or to a heading of one."""
    assert broken_links(document, document.read_text(encoding="utf-8")) == []


@pytest.mark.house
def test_a_broken_link_is_seen():
    """A link to a file or a heading that is gone is noticed; one to the network, or in code, is not."""
    text = "# It is\n[a](gone.md) [b](README.md#top) [c](https://example.org/x) `[d](code.md)` [e](#it-is) [f](#no)"
    assert broken_links(reading.ROOT / "x.md", text) == ["gone.md", "README.md#top", "#no"]


@pytest.mark.house
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_code_in_tables_has_no_bars(document):
    """A bar in a table's code has to be escaped for some readers of Markdown, and others show the backslash."""
    assert re.findall(r"`[^`\n]*\\\|[^`\n]*`", document.read_text(encoding="utf-8")) == []


def missing_files(text):
    """Files that a document names and that are not there; a bare name is in the folder of the one before it."""
    found, folder = [], reading.ROOT / "src" / "phalanx"
    for name in re.findall(r"`([\w/]+\.(?:py|md|cpp|toml))`", text):
        places = [
            reading.ROOT / "src" / "phalanx" / name,
            reading.ROOT / name,
            folder / name,
            reading.ROOT / "tests" / name,
        ]
        there = next((place for place in places if place.exists()), None)
        if there is None:
            found.append(name)
        else:
            folder = there.parent
    return found


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/devices.md"])
def test_files_that_are_named_exist(document):
    """Whoever follows a document to a file finds it."""
    assert missing_files((reading.ROOT / document).read_text()) == []


def test_a_file_that_is_gone_is_seen():
    """The test above can fail."""
    assert missing_files("see `step.py`, `plan/fold.py`, `fold.py` and `plan/folding.py`") == ["plan/folding.py"]
