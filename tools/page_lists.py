"""The links to the pages of a toctree, which the source tree does not show by itself."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
_TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.M | re.S)
_PAGE = re.compile(r"^<!-- page: (\S+) -->$", re.M)


def links(name: str) -> str:
    """A link to each page that `docs/NAME.md` lists, by its title. A page that lists others is their heading."""
    page, lines = DOCS / f"{name}.md", []
    for listed in listed_pages(page):
        inner = listed_pages(listed)
        lines.append(f"\n## [{title(listed)}]({listed.name})\n\n" if inner else f"- [{title(listed)}]({listed.name})\n")
        lines += [f"- [{title(it)}]({it.name})\n" for it in inner]
    return "".join(lines).lstrip("\n")


def listed_pages(page: Path) -> list[Path]:
    """The pages that a page's toctrees list."""
    lines = [line for block in _TOCTREE.findall(page.read_text()) for line in block.splitlines()]
    return [page.parent / f"{line}.md" for line in lines if line and not line.startswith(":")]


def title(page: Path) -> str:
    """The text of a page's first heading; of a page outside of docs/, if this one shows it."""
    text = page.read_text()
    if match := _PAGE.search(text):
        text = (DOCS.parent / match[1]).read_text()
    heading = re.search(r"^# (.+)$", text, re.M)
    assert heading is not None, page
    return heading[1]
