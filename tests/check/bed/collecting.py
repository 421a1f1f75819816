"""The loops of `collected`, and what is right to say of each, which its header has.

A `NAME.py` is a whole loop. A `.diff` has loops that are small edits of one: `===== NAME, from BASE`, the header, and
after each `@@` lines of the base that occur there once, with those to leave out and those to add.

The header of a loop has these lines; an edit that has no FRAMEWORK or CHECK has its base's:

- HALF: `first` if the rules were written with it, `second` if it was unseen until they were; or a later drawing's name.
- FRAMEWORK, and SOURCE: where the mistake was reported.
- EXPECTED: the cause in a user's words; without KEYWORDS the loop is correct.
- KEYWORDS: a pattern of which a cause, as `(kind): text`, has to have a match.
- WRONG: a pattern; a cause that matches it, and not KEYWORDS, accuses something that is right.
- CHECK: the options of the command. FRESH: whether a launch has to be a new process.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent / "collected"
_NEVER = "(?!)"
_PACKAGES: Mapping[str, tuple[str, ...]] = {"torch": (), "accelerate": ("accelerate", "transformers")}


@dataclass(frozen=True)
class Collected:
    """One collected loop."""

    name: str
    half: str
    framework: str
    keywords: str | None
    wrong: str
    options: Mapping[str, object]
    fresh: bool
    source: str

    @property
    def is_correct(self) -> bool:
        return self.keywords is None

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that its framework needs beyond torch."""
        return (*_PACKAGES.get(self.framework, (self.framework,)), *(() if self.is_plain else ("torchdata",)))

    @property
    def is_plain(self) -> bool:
        return self.framework == "torch"

    @property
    def can_run(self) -> bool:
        return all(find_spec(package) for package in self.packages)

    def verdict(self, causes: Sequence[tuple[str, str]]) -> str:
        """Judge what is said of the mistake: `right`, `unknown` or `wrong`; causes are kinds and texts."""
        named = [(f"({kind})", f"({kind}): {says}") for kind, says in causes if kind != "unknown"]
        if not named:
            return "unknown"
        keywords, wrong = (re.compile(one, re.I) for one in (self.keywords or _NEVER, self.wrong))
        right = [line for kind, line in named if keywords.search(line) and not wrong.search(kind)]
        accused = [line for _, line in named if line not in right and wrong.search(line)]
        return "right" if right and not accused else "wrong"


def _edited(base: str, edits: str) -> str:
    """Return the source `base` after edits, each of lines that occur there once."""
    for edit in edits.split("@@\n")[1:]:
        lines = edit.splitlines()
        old, new = ("".join(line[1:] + "\n" for line in lines if line[:1] != sign) for sign in "+-")
        assert ("\n" + base).count("\n" + old) == 1, old
        base = base.replace(old, new)
    return base


def _header(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# ([A-Z]+): (.*)$", text, re.M))


def _loops() -> dict[str, tuple[dict[str, str], str]]:
    """The header and the source of each loop."""
    texts = {file.stem: file.read_text() for file in FOLDER.glob("*.py")}
    loops = {name: (_header(text), text) for name, text in texts.items()}
    for file in FOLDER.glob("*.diff"):
        for name, base, edits in re.findall(
            r"^===== (\w+), from (\w+)\n(.*?)(?=^=====|\Z)", file.read_text(), re.M | re.S
        ):
            own = _header(edits)
            inherited = {key: loops[base][0][key] for key in ("FRAMEWORK", "CHECK")}
            loops[name] = inherited | own, _edited(loops[base][1], edits)
    return dict(sorted(loops.items()))


def _read(name: str, head: Mapping[str, str], source: str) -> Collected:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kill-at", type=lambda text: text.split(","))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ignore", action="append", default=[])
    options = vars(parser.parse_args(shlex.split(head["CHECK"])))
    wrong = head.get("WRONG") or _NEVER
    fresh = head.get("FRESH") == "yes"
    return Collected(name, head["HALF"], head["FRAMEWORK"], head.get("KEYWORDS"), wrong, options, fresh, source)


COLLECTED: Mapping[str, Collected] = {name: _read(name, *loop) for name, loop in _loops().items()}
