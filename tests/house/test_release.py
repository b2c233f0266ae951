"""What a release rests on: its notes, pinned actions, the reference, and numbers that the page on stability names."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib

import pytest
import reading

import phalanx
from phalanx.checkpoint import chain
from phalanx.definition import described
from phalanx.proof import verify

pytestmark = pytest.mark.house

PROJECT = tomllib.loads((reading.ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((reading.ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
CHANGELOG = "# Changelog\n\n## [0.2.0] - 2027-01-31\n\n### Added\n- this\n\n## [0.1.0] - unreleased\n- that\n"


def notes(*arguments):
    """What the script of the release says."""
    spec = importlib.util.spec_from_file_location("release_notes", reading.ROOT / ".github" / "release_notes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.notes(*arguments)


def test_notes_are_those_of_the_version():
    """They end where the next version begins; another tag, or an entry without a date, ends the release."""
    assert notes("v0.2.0", "0.2.0", CHANGELOG) == "### Added\n- this"
    with pytest.raises(SystemExit, match=r"tag v0\.2\.0"):
        notes("v0.1.9", "0.2.0", CHANGELOG)
    with pytest.raises(SystemExit, match="write when it was released"):
        notes("v0.1.0", "0.1.0", CHANGELOG)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(path):
    """By the hash of a commit, with its version beside it: a tag may be moved."""
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    assert [action for action in used if not PINNED.fullmatch(action)] == []
    assert not PINNED.fullmatch("actions/checkout@v4")


def test_one_version_is_written_everywhere():
    """In the package, the project's file, the citation and the changelog."""
    version = PROJECT["version"]
    assert phalanx.__version__ == version
    assert f"\nversion: {version}\n" in (reading.ROOT / "CITATION.cff").read_text()
    assert f"## [{version}]" in (reading.ROOT / "CHANGELOG.md").read_text()


def test_the_reference_has_every_public_name():
    """Each by itself, but for errors, which one entry has all of."""
    told = set(re.findall(r"^::: phalanx\.(\w+)$", (reading.ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    errors = {name for name in phalanx.__all__ if getattr(phalanx, name).__module__ == "phalanx.errors"}
    assert set(phalanx.__all__) - errors - told == set()
    assert told - set(phalanx.__all__) == {"callbacks", "testing", "errors"}


def test_formats_are_those_that_the_page_names():
    """The numbers in docs/stability.md are those in the code."""
    page = (reading.ROOT / "docs" / "stability.md").read_text()
    told = dict(re.findall(r"^\| ([\w ]+) \| (\d+) \|", page, re.MULTILINE))
    assert told.pop("digest") == "1"
    assert told == {
        "chain": str(chain.FORMAT), "certificate": str(verify.FORMAT), "description of a recipe": str(described.FORMAT),
    }  # fmt: skip


def test_golden_digests_are_as_many_as_the_page_says():
    """Each column has that many, and no two recipes of one have the same."""
    page = (reading.ROOT / "docs" / "stability.md").read_text()
    count = int(re.search(r"digests of (\d+) recipes", page)[1])
    for name, column in json.loads((reading.ROOT / "benchmarks" / "golden.json").read_text()).items():
        assert re.fullmatch(r"torch \d+\.\d+\.\d+, \w+ \w+", name)
        assert len(column) == count
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in column.values())
