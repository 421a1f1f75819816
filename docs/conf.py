"""How Sphinx builds the site: `make docs`."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tierd  # noqa: E402

project = "tierd"
author = "the tierd developers"
project_copyright = author
version = release = tierd.__version__

extensions = ["myst_parser"]
myst_heading_anchors = 4

highlight_language = "none"
exclude_patterns = ["_build"]

smartquotes = False  # it would make one dash of `--json`
html_theme = "furo"
html_title = f"tierd {version}"
html_show_sourcelink = False
html_copy_source = False

# A page outside of docs/ that the site shows has a page here with the line `<!-- page: PATH -->`.
_PAGE = re.compile(r"^<!-- page: (\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"\[([^]\n]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


@cache
def _pages() -> dict[Path, Path]:
    """Each page outside of docs/, and the page of the site that shows it."""
    found = {}
    for path in Path(__file__).parent.rglob("*.md"):
        if match := _PAGE.search(path.read_text()):
            found[ROOT / match[1]] = path
    return found


def _linked(text: str, written: Path, shown: Path) -> str:
    """Links of a page, written for where its file lies, as they have to be where it is shown."""

    def anew(match: re.Match[str]) -> str:
        target = (written.parent / match[2]).resolve()
        target = _pages().get(target, target)
        path = os.path.relpath(target, shown.parent)
        if target.suffix == ".md" and not target.is_relative_to(Path(__file__).parent):
            return f"{{download}}`{match[1]} <{path}>`"  # no page of the site
        return f"[{match[1]}]({path}{match[3] or ''})"

    return _LINK.sub(anew, text)


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(name))
    text = _linked(source[0], path, path)
    if match := _PAGE.search(text):
        origin = ROOT / match[1]
        app.env.note_dependency(str(origin))
        text = _linked(origin.read_text(), origin, path)
    source[0] = text


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)
