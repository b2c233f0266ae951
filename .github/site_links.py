"""What mkdocs calls for each page: links to files beside the documents lead to the repository, as the site lacks them."""

import pathlib
import posixpath
import re
import tomllib

URLS = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["urls"]
LINK = re.compile(r"\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """The text of a page of the site."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def there(link: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        if path.startswith("docs/"):
            return link[0]
        return f"]({URLS['Repository']}/{'raw' if path.endswith(('.png', '.svg')) else 'blob'}/main/{path})"

    return LINK.sub(there, markdown)
