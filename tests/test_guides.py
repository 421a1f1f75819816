"""The how-to guides are short and grouped, every link leads to a page and a heading, and shown output is real."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tools.page_lists import listed_pages

ROOT = Path(__file__).parent.parent
HOWTO = ROOT / "docs" / "howto"
GROUPS = [HOWTO / f"{name}.md" for name in ("start", "frameworks", "clusters", "nodes", "sharing")]
MOST_WORDS = 900  # what `wc -w` counts; rules and exceptions belong into docs/explanation
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md"), ROOT / "tierd" / "FORMAT.md"]


def test_no_guide_has_more_words_than_people_read() -> None:
    words = {path.name: len(path.read_text().split()) for path in HOWTO.glob("*.md")}
    assert {name: count for name, count in words.items() if count > MOST_WORDS} == {}


def test_every_guide_is_in_one_group() -> None:
    assert listed_pages(HOWTO / "index.md") == GROUPS
    grouped = [page for group in GROUPS for page in listed_pages(group)]
    assert sorted(grouped) == sorted({*HOWTO.glob("*.md")} - {HOWTO / "index.md", *GROUPS})


def test_relative_links_lead_to_a_file_and_to_a_heading() -> None:
    """Sphinx checks those between pages of the site; this holds for readers of the files."""
    missing = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            path = (page.parent / target).resolve() if target else page
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                missing.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert missing == []


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = page.read_text()
    if match := re.search(r"^<!-- page: (\S+) -->$", text, re.M):  # the site shows that file here
        text += (ROOT / match[1]).read_text()
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head) for head in heads]
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in plain}
