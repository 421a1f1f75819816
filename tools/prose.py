"""Check the words of pages, docstrings, comments and tests' names, and that every public name has a docstring.

`make lint` runs it. The glossary (docs/glossary.md) has one word for each concept. `OLD` are words of early versions
that it replaces, `OLD_NAMES` those that say too little in a test's name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(str(it.relative_to(ROOT)) for it in (ROOT / "docs").rglob("*.md"))]
EXEMPT = {"docs/glossary.md", "tools/prose.py", "tests/test_prose.py"}  # they name the old words
CODE = [
    str(it.relative_to(ROOT))
    for folder in ("tierd", "tests", "tools", "benchmarks", "examples")
    for it in (ROOT / folder).rglob("*.py")
]
PUBLIC = ("tierd", "tierd.dcp", "tierd.check")

# What is written today -> what the glossary has. Code spans and blocks are not searched: names on tiers keep old words.
OLD = {
    r"\b[Ll]aws?:": "invariant",
    r"\bset(s|ting)? aside\b": "quarantine",
    r"\bput(s|ting)? (it |them )?right\b": "repair",
    r"\b(heal|mend)(s|ed|ing)?\b": "repair",
    r"\b(lender|borrower|lent|lends)s?\b": "shared chunk, base checkpoint, or handed-over snapshot",
    r"\buntold\b": "dropped",
    r"\blanes?\b": "tier worker, or writer",
    r"\bdoomed\b": "to be deleted",
    r"\b[Tt]ruth is what\b": "the actor and the verb",
    r"\b(if|where|while|until) nobody recorded\b": "the place without a record",
    r"\b[Ww]hoever\b": "the actor's name",
    r"\bthat which\b": "a noun",
    r"\bwhat \w+ of what\b": "a noun",
}
_ANY = re.compile("|".join(OLD))

# What a test's name has today -> what says who does it, or to what. `one` stands here for a noun; as a number it may.
OLD_NAMES = {
    r"what|whatever|whoever": "the noun",
    r"go|goes|went|comes?|came|stay(s|ed)?": "is deleted, is restored, is kept, or continues",
    r"told|tells?|telling|untold": "reports, names, warns, notifies, or distinguishes",
    r"seen|found": "observed, listed, detected, or the actor and the verb",
    r"aside": "quarantined",
    r"(heal|mend)(s|ed|ing)?": "repair",
    r"len[dt]s?": "shared chunk, or handed-over snapshot",
    r"ones|one$": "the noun",
    r"(a|an|another|last|lone|newer|new|next|no|older|other|right|same|slow|that|the|this|whole)_one": "the noun",
    r"one_(after|and|at|before|beside|by|for|from|had|has|in|is|on|or|that|was|who|whose|with|without)": "the noun",
}
_NAME = {re.compile(rf"(?<=_)({words})(?=_|$)"): better for words, better in OLD_NAMES.items()}


def prose(page: str) -> Iterator[tuple[int, str]]:
    """The lines of a page without its code, each with its number."""
    fenced = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "", line)


def remarks(source: str) -> Iterator[tuple[int, str]]:
    """The lines of a module's docstrings and comments without its code, each with its number."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], re.sub(r"`[^`]*`", "", token.string)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            for number, line in enumerate((text or "").splitlines(), node.body[0].lineno if text else 0):
                yield number, re.sub(r"`[^`]*`|^ +[a-z_]\w*(, \w+)*:", "", line)  # without arguments' names


def old_words(name: str, text: str) -> list[str]:
    """Where a page or a module uses a word that the glossary replaces: `page:line: 'word': write …`."""
    if not _ANY.search(text):  # most texts, and to parse all of them takes seconds
        return []
    return [
        f"{name}:{number}: {found[0]!r}: write {better}"
        for number, line in sorted(remarks(text) if name.endswith(".py") else prose(text))
        for pattern, better in OLD.items()
        if (found := re.search(pattern, line))
    ]


def old_names(name: str, source: str) -> list[str]:
    """Where a test's name has a word of `OLD_NAMES`: `module:line: test: 'word': write …`."""
    return [
        f"{name}:{number}: {test[1]}: {word[0]!r}: write {better}"
        for number, line in enumerate(source.splitlines(), 1)
        if (test := re.match(r" *(?:async )?def (test_\w+)\(", line))
        for pattern, better in _NAME.items()
        if (word := pattern.search(test[1]))
    ]


def undocumented(module: str) -> list[str]:
    """The public names of a module, and of its classes' members, that have no docstring of their own or inherited."""
    namespace = importlib.import_module(module)
    found = []
    for name in getattr(namespace, "__all__", ()):
        value = getattr(namespace, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        members = vars(value) if inspect.isclass(value) else {}
        public = {f"{name}.{key}": it for key, it in members.items() if not key.startswith("_") and callable(it)}
        found += [
            f"{module}.{key}: no docstring" for key, it in {name: value, **public}.items() if not inspect.getdoc(it)
        ]
    return found


def findings() -> list[str]:
    """All of each kind, of all pages and modules."""
    texts = {name: (ROOT / name).read_text() for name in (*PAGES, *sorted(CODE)) if name not in EXEMPT}
    words = [it for name, text in texts.items() for it in old_words(name, text)]
    tests = {name: text for name, text in texts.items() if name.startswith("tests/")}
    words += [it for name, text in tests.items() for it in old_names(name, text)]
    return words + [it for module in PUBLIC for it in undocumented(module)]


def main() -> None:
    """Print each finding; exit 1 if there is one."""
    sys.exit("\n".join(findings()) or None)


if __name__ == "__main__":
    main()
