"""Links of the built site lead to files and anchors that exist; each other one is a warning.

Sphinx checks the links that it makes of names and pages, not those that extensions write.
"""

from __future__ import annotations

import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

logger = getLogger(__name__)


class _Page(HTMLParser):
    """The anchors of a page, and its links to others."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src"):
                self.links.add(value or "")


def check(app: Sphinx, failure: Exception | None) -> None:
    """Warn of each link that leads nowhere."""
    if failure is not None or app.builder.format != "html":
        return
    root = Path(app.outdir).resolve()
    pages = {path: _Page(path) for path in root.rglob("*.html")}
    for path, page in pages.items():
        for link in sorted(page.links):
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            anchor = unquote(to.fragment)
            if not target.is_file():
                logger.warning("%s links to %s: no such file", path.relative_to(root), link)
            elif anchor and target in pages and anchor not in pages[target].anchors:
                logger.warning("%s links to %s: no such anchor", path.relative_to(root), link)


def _forget_missing_sources(app: Sphinx, env: Any) -> None:
    """Let viewcode list no module that has no source, such as one that autodoc mocks."""
    env._viewcode_modules = {name: found for name, found in env._viewcode_modules.items() if found}


def _drop_wrong_way_back(
    app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any
) -> None:
    """Drop viewcode's links back to names that a module exports and another one documents."""
    if page.startswith("_modules/"):
        documented = app.env.domaindata["py"]["objects"]

        def kept(link: re.Match[str]) -> str:
            to = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[1]))
            one = documented.get(link[2])
            return link[0] if one and to == f"{one.docname}.html" else ""

        back = r'<a class="viewcode-back" href="([^"#]*)#([^"]*)">.*?</a>'
        context["body"] = re.sub(back, kept, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Let this file take part in the build."""
    app.connect("build-finished", check)
    app.connect("env-updated", _forget_missing_sources)
    app.connect("html-page-context", _drop_wrong_way_back)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
