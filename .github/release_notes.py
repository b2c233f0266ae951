"""Prints what the changelog says of a release; ends with 1 where its tag, the version and the changelog disagree.

python .github/release_notes.py v0.1.0
"""

import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def notes(tag: str, version: str, changelog: str) -> str:
    """The entry of a version.

    Raises
    ------
    SystemExit
        The tag is not v and the version, or the changelog has no entry with a date for it.
    """
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, but pyproject.toml has version {version}: tag v{version}, or change it")
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)"
    found = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"CHANGELOG.md has no entry '## [{version}] - YYYY-MM-DD': write when it was released")
    return found[1].strip()


def main() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    print(notes(sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text()))


if __name__ == "__main__":
    main()
