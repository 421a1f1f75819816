"""The Python that the pages show: its blocks, its code spans, and blocks executed with the paths of a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def blocks(page: Path) -> list[str]:
    """The blocks of Python of a page; of a block that shows a change, the code after it."""
    return [
        code if kind == "python" else "".join(f"{line[1:]}\n" for line in code.splitlines() if line[:1] != "-")
        for kind, code in re.findall(r"^```(python|diff)\n(.*?)^```", page.read_text(), re.M | re.S)
    ]


def spans(text: str) -> list[str]:
    """The code spans of a text that may be Python, such as `retention=tierd.Retention(keep_last=10)`."""
    return [span for span in re.findall(r"`+([^`]+)`+", text) if "(" in span]


def calls(code: str) -> Iterator[ast.Call]:
    """The calls in a code; none if it is no Python. A keyword argument alone is the argument of a call."""
    for text in (code, f"_({code})"):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        return


def execute(code: str, home: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Execute a block with the spool and the tier of `home`. Returns `names` with what the block binds."""
    (home / "tier").mkdir(exist_ok=True)
    for shown, here in {
        '"/nvme/tierd"': repr(str(home / "spool")),
        "s3://bucket/checkpoints": (home / "tier").as_uri(),
    }.items():
        code = code.replace(shown, here)
    exec(compile(code, "page", "exec"), names)
    return names
