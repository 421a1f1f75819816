"""The loops of `collected`, and what is right to say of each, which its header has.

The header of a loop has these lines:

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


def _read(file: Path) -> Collected:
    head = dict(re.findall(r"^# ([A-Z]+): (.*)$", file.read_text(), re.M))
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kill-at", type=lambda text: text.split(","))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ignore", action="append", default=[])
    options = vars(parser.parse_args(shlex.split(head["CHECK"])))
    wrong = head.get("WRONG") or _NEVER
    return Collected(
        file.stem, head["HALF"], head["FRAMEWORK"], head.get("KEYWORDS"), wrong, options, head.get("FRESH") == "yes"
    )


COLLECTED: Mapping[str, Collected] = {
    file.stem: _read(file) for file in sorted(FOLDER.glob("*.py")) if file.stem != "__init__"
}
